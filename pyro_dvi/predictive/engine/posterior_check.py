# SPDX-License-Identifier: Apache-2.0
"""Whether a guide is a posterior of this model, before anything is predicted with both."""

from collections.abc import Callable
from typing import Any

from torch import nn

from pyro_dvi.errors import NonFiniteError
from pyro_dvi.handlers.explained import non_finite
from pyro_dvi.predictive.rules.rule import check_is_set_up
from pyro_dvi.training.ownership import check_still_own

__all__ = ["check_posterior"]


def check_posterior(model: Callable[..., Any], guide: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
    """Look at model and guide once.

    Args:
        model: the Pyro model.
        guide: its guide; one that was loaded and has not seen its model yet sees it with these inputs.
        inputs: arguments of the model, of the first batch.

    Raises:
        GuideError: the guide was never run, or belongs to another model.
        NonFiniteError: parameters or running statistics hold NaN or infinities, or another buffer holds NaN.
    """
    check_is_set_up(guide, inputs)
    check_still_own(model, guide)
    for part in (guide, model):
        tensors = [*part.named_parameters(), *part.named_buffers()] if isinstance(part, nn.Module) else []
        bad = non_finite(dict(tensors))
        if bad:
            raise NonFiniteError(
                f"{', '.join(map(repr, bad[:5]))} of {type(part).__name__} {'is' if len(bad) == 1 else 'are'} not "
                "finite: training has diverged, or a file is damaged. Go back to an earlier checkpoint, and train with "
                "a lower learning rate (dvi.fit goes back by itself)."
            )
    if hasattr(guide, "check_model"):
        guide.check_model(model)
