# SPDX-License-Identifier: Apache-2.0
"""Which rule predicts where none is given."""

from typing import Any

from pyro_dvi.guides import LaplaceGuide, MultiplicativeNoiseGuide, NaturalGradientGuide
from pyro_dvi.predictive.linearised import Linearised
from pyro_dvi.predictive.moments import Moments
from pyro_dvi.predictive.rules import AtMean, PredictionRule, Samples

__all__ = ["default_rule"]


def default_rule(guide: Any) -> PredictionRule:
    """Return the rule that suits a guide.

    A rule in the attribute ``prediction_rule`` of the guide comes first. A
    :class:`~pyro_dvi.MultiplicativeNoiseGuide` is predicted by :class:`Moments`, a
    :class:`~pyro_dvi.NaturalGradientGuide` by 30 :class:`Samples`, as it was trained, a
    :class:`~pyro_dvi.LaplaceGuide` by :class:`~pyro_dvi.Linearised`, and anything else by :class:`AtMean`: such a
    guide may have been trained in many ways, and only the user knows which.

    Example:
        >>> from pyro_dvi import MeanFieldGuide
        >>> default_rule(MeanFieldGuide(lambda: None))
        AtMean()
    """
    rule = getattr(guide, "prediction_rule", None)
    if isinstance(rule, PredictionRule):
        return rule
    if isinstance(guide, MultiplicativeNoiseGuide):
        return Moments()
    if isinstance(guide, LaplaceGuide):
        return Linearised()
    return Samples(30) if isinstance(guide, NaturalGradientGuide) else AtMean()
