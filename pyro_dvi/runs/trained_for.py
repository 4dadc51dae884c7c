# SPDX-License-Identifier: Apache-2.0
"""What a guide can be trained by, and the rule of prediction that it was trained for, which objectives record on it."""

import inspect
from contextlib import suppress
from typing import Any

from pyro_dvi.errors import GuideError

# None: trained neither by an objective of this library nor by ``fit``.
RULES = (None, "AtMean", "Moments", "Samples")
_ATTRIBUTE = "_pyro_dvi_trained_for"


def check_trainable(guide: Any, objective: Any) -> None:
    """Refuse a guide of which an objective would train nothing, or only a part.

    Raises:
        GuideError: the guide is an ensemble, or stores precisions, which only natural gradients move.
    """
    name = "a loss function" if objective is None else type(objective).__name__
    if getattr(guide, "_is_trained", False):
        raise GuideError(
            f"{name} cannot train this {type(guide).__name__}, whose members have been trained: it is for predictions. "
            "To train other members, give pyro_dvi.train_ensemble a function that trains one and returns its model and "
            "guide."
        )
    if hasattr(guide, "precision_parameter") and not getattr(objective, "_moves_precisions", False):
        raise GuideError(
            f"{name} cannot train a {type(guide).__name__}, whose precisions get no gradients: train it with "
            "NaturalGradientELBO and pyro_dvi.natural_gradients.VOGN, OGN or IVON, or use MeanFieldGuide"
        )


def trained_for(guide: Any) -> str | None:
    """Return the name of the rule that the guide's objective trained it for, or None."""
    return getattr(_owner(guide), _ATTRIBUTE, None)


def note_trained_for(guide: Any, rule: str | None) -> None:
    """Record the name of a rule on a guide, below handlers around it."""
    if rule != trained_for(guide):
        with suppress(AttributeError):  # an object with slots
            setattr(_owner(guide), _ATTRIBUTE, rule)


def _owner(guide: Any) -> Any:
    inner = inspect.unwrap(guide)
    return getattr(inner, "__self__", inner)
