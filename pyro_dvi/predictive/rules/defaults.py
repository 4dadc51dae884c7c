# SPDX-License-Identifier: Apache-2.0
"""Which rule predicts where none is given."""

import warnings
from typing import Any

from pyro.infer.autoguide import AutoDelta

from pyro_dvi.choice import check_choice
from pyro_dvi.errors import DviWarning, GuideError
from pyro_dvi.guides import MultiplicativeNoiseGuide
from pyro_dvi.handlers.trained_for import trained_for
from pyro_dvi.predictive.rules.linearised import Linearised
from pyro_dvi.predictive.rules.moments import Moments
from pyro_dvi.predictive.rules.rule import AtMean, PredictionRule, Samples

__all__ = ["default_rule", "rule_of"]

_RULES = {"AtMean": AtMean(), "Linearised": Linearised(), "Moments": Moments(), "Samples": Samples(30)}


def rule_of(method: Any, guide: Any) -> PredictionRule:
    """Return ``method``, or the guide's default.

    Raises:
        ArgumentError: a class or string instead of a rule.
        DviWarning: the width of a posterior that was trained to be predicted at its mean.
    """
    if method is None:
        return default_rule(guide)
    check_choice("method", method, PredictionRule, "AtMean() or Samples(30)")
    if trained_for(guide) == "AtMean" and isinstance(method, (Moments, Samples)):
        warnings.warn(
            f"{method} predicts with the width of a posterior that TaylorELBO trained for predictions at its mean. "
            "Draws of a network's weights leave the neighbourhood where its expansion holds, and predict worse: use "
            "AtMean(), the default, unless the model is nearly linear in its weights.",
            DviWarning,
            stacklevel=3,
        )
    return method


def default_rule(guide: Any) -> PredictionRule:
    """Return the rule that suits a guide.

    The attribute ``prediction_rule`` of the guide comes first, a rule or the name of one; a
    :class:`~pyro_dvi.LaplaceGuide` says :class:`~pyro_dvi.Linearised` there. An ``AutoDelta`` is predicted by
    :class:`AtMean`, others by the rule that their objective trained them for: :class:`AtMean` after ``TaylorELBO``,
    :class:`Moments` after ``MomentPropagationELBO``, 30 :class:`Samples` after ``NaturalGradientELBO`` and objectives
    of Pyro. What no objective of this library has trained counts as trained by samples, but a
    :class:`~pyro_dvi.MultiplicativeNoiseGuide` as trained by moments.

    Raises:
        GuideError: an attribute ``prediction_rule`` that is neither a rule nor the name of one.

    Example:
        >>> from pyro_dvi import MeanFieldGuide
        >>> default_rule(MeanFieldGuide(lambda: None))
        Samples(num_samples=30)
    """
    rule = getattr(guide, "prediction_rule", None)
    if isinstance(rule, PredictionRule):
        return rule
    if rule is not None and rule not in _RULES:
        raise GuideError(
            f"the prediction_rule of {type(guide).__name__} is {rule!r}: it must be a rule, such as AtMean(), or one "
            f"of the names {', '.join(_RULES)}"
        )
    trained = "Moments" if isinstance(guide, MultiplicativeNoiseGuide) else "Samples"
    name = rule or ("AtMean" if isinstance(guide, AutoDelta) else trained_for(guide)) or trained
    return _RULES[name]
