# SPDX-License-Identifier: Apache-2.0
"""Which rule predicts where none is given."""

from typing import Any

from pyro.infer.autoguide import AutoDelta

from pyro_dvi.guides import MultiplicativeNoiseGuide
from pyro_dvi.handlers.trained_for import trained_for
from pyro_dvi.laplace import LaplaceGuide
from pyro_dvi.predictive.rules.linearised import Linearised
from pyro_dvi.predictive.rules.moments import Moments
from pyro_dvi.predictive.rules.rule import AtMean, PredictionRule, Samples

__all__ = ["default_rule"]


def default_rule(guide: Any) -> PredictionRule:
    """Return the rule that suits a guide.

    A rule in the attribute ``prediction_rule`` of the guide comes first. A :class:`~pyro_dvi.LaplaceGuide` is
    predicted by :class:`~pyro_dvi.Linearised`, an ``AutoDelta`` by :class:`AtMean`, and others by the rule that their
    objective trained them for: :class:`AtMean` after ``TaylorELBO``, :class:`Moments` after
    ``MomentPropagationELBO``, 30 :class:`Samples` after ``NaturalGradientELBO`` and objectives of Pyro. What no
    objective of this library has trained counts as trained by samples, but a
    :class:`~pyro_dvi.MultiplicativeNoiseGuide` as trained by moments.

    Example:
        >>> from pyro_dvi import MeanFieldGuide
        >>> default_rule(MeanFieldGuide(lambda: None))
        Samples(num_samples=30)
    """
    rule = getattr(guide, "prediction_rule", None)
    if isinstance(rule, PredictionRule):
        return rule
    if isinstance(guide, LaplaceGuide):
        return Linearised()
    if isinstance(guide, AutoDelta):
        return AtMean()
    name = trained_for(guide) or ("Moments" if isinstance(guide, MultiplicativeNoiseGuide) else "Samples")
    rules = {"AtMean": AtMean(), "Moments": Moments(), "Samples": Samples(30)}
    return rules[name]
