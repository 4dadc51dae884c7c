# SPDX-License-Identifier: Apache-2.0
"""Predict with a model and the posterior of its weights."""

import math
from collections.abc import Callable
from itertools import chain
from typing import Any

from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta
from torch import Tensor

from pyro_dvi.core.arguments import check_choice, with_missing
from pyro_dvi.core.progress import progress_bar
from pyro_dvi.core.undisturbed import device_of
from pyro_dvi.errors import GuideError, warn
from pyro_dvi.moment_propagation.multiplicative_noise import MultiplicativeNoiseGuide
from pyro_dvi.predictive.components import Components
from pyro_dvi.predictive.engine.inputs import Batch, batches, keeps_order
from pyro_dvi.predictive.engine.model_runs import check_observation, evaluation_mode, observed_run, seeded
from pyro_dvi.predictive.engine.posterior_values import check_posterior, example_latents, members_of
from pyro_dvi.predictive.prediction import Prediction
from pyro_dvi.predictive.predictive_mixture import Mixture, Part
from pyro_dvi.predictive.rules.analytic import Moments, Propagation
from pyro_dvi.predictive.rules.rule import AtMean, OfMembers, PredictionRule, Samples
from pyro_dvi.runs.explained import explained_errors
from pyro_dvi.runs.sites import responses
from pyro_dvi.runs.trained_for import trained_for

# Largest number of predicted values in all kept components together: 256 MiB of means and scales.
KEPT_COMPONENTS = 2**25


def predict(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    data: Any,
    method: PredictionRule | None = None,
    *,
    site: str | None = None,
    observed: str | None = None,
    batch_size: int = 1000,
    seed: int | None = None,
    keep_draws: bool = False,
    progress: bool = True,
) -> Prediction:
    r"""Return the predictive distribution of every example.

    .. math::
        p(y \mid x) \approx \frac1K \sum_k p(y \mid x, \theta_k)

    where ``method`` chooses the :math:`\theta_k`: the posterior mean alone (:class:`AtMean`) or draws
    (:class:`Samples`). Predictions are read from the distribution at the model's observed site, so any Pyro model
    works.

    Modules run in evaluation mode and without gradients. The call does not change their mode or the running statistics
    of normalisation layers, nor the global random state, except that the seed may be drawn from it. For classification,
    memory does not grow with the number of draws. For regression, the distribution of each draw is kept for quantiles,
    up to about 256 MiB in total. Plate scales are ignored, because they only weight the training objective. Values that
    the model masks are predicted but not scored.

    A latent site with one value per example belongs to the training data. A model with such a site can therefore
    predict only the complete training data, in one batch and in the same order. For an automatic guide, this is checked
    against the arguments of its first run; for a guide that is a function, it is not checked.

    Args:
        model: the Pyro model; its observation may be None, as in ``forward(x, y=None)``.
        guide: its trained guide: a guide of this library or of Pyro, or a function.
        data: inputs ``[N, ...]``; a tuple of the model's arguments, ``(x,)`` or ``(x, y)``; a mapping from argument
            names to values; or a loader of any of these. Observations are not passed to the model; they are kept for
            :meth:`Prediction.metrics`.
        method: prediction rule. If the guide has an attribute ``prediction_rule``, this is the default. Otherwise the
            default is ``Linearised()`` for a ``LaplaceGuide`` and ``AtMean()`` for an ``AutoDelta``. For other guides,
            it depends on the training objective: ``AtMean()`` after ``TaylorELBO``, ``Moments()`` after
            ``MomentPropagationELBO``, and ``Samples(30)`` after ``NaturalGradientELBO``, ``SampledELBO`` and Pyro's
            objectives. A guide that was not trained with an objective of this library predicts with samples, except for
            a ``MultiplicativeNoiseGuide``, which predicts with moments. Guides of this library keep the rule in their
            ``state_dict``; :func:`~pyro_dvi.load` restores it for all guides. For an
            :class:`~pyro_dvi.training.EnsembleGuide`, ``method`` is the rule of every member; by default, each member
            uses its own rule.
        site: observed site to predict, if the model has several.
        observed: name of the model's argument that is the observation. By default, it is the argument whose default
            value is None; if there are several, the one with the name of the site is used.
        batch_size: examples per batch; ignored for a loader, which has its own batch size.
        seed: seed of the draws; by default drawn from the global generator.
        keep_draws: True to keep the mean and variance (or the class probabilities) of every component in
            :attr:`Prediction.draws`. For regression, all distributions are then kept as well, however much memory they
            take. Both are always kept for an ensemble whose members predict with one distribution each.
        progress: show a progress bar over batches.

    Returns:
        The predictions, with ``mean``, ``variance`` and its parts ``aleatoric`` and ``epistemic``, ``probabilities``,
        ``entropy``, ``mutual_information``, ``quantiles(q)``, ``log_likelihood(y)``, ``metrics(y)``, and a table
        for pandas.

    Raises:
        ArgumentError: if an option is invalid, or several arguments may be the observation.
        DataError: if the data contain no examples, NaN, or tensors of different lengths; if the response does not have
            one row per example; if the value observed at the predicted site is not the observation in the data; or if a
            latent site has one value per example, but was trained on other data.
        GuideError: if the guide was never run, has no mean, or is not callable.
        ModelError: if the model has no observed site, or has several and ``site`` is not given.
        UnsupportedError: if a mask excludes only parts of an observation and the distribution does not support this; or
            if the predicted site depends on sites that are neither in the guide nor observed, and the rule does not
            average over draws of these sites.

    Example:
        >>> import pyro, pyro.distributions as dist, torch
        >>> from pyro.infer.autoguide import AutoNormal
        >>> from pyro_dvi import AtMean, Samples
        >>> def model(x, y=None):
        ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         return pyro.sample("obs", dist.Normal(slope * x, 0.5), obs=y)
        >>> guide = AutoNormal(model)
        >>> x = torch.linspace(-1, 1, 5)
        >>> _ = guide(x, x)
        >>> predict(model, guide, x, AtMean()).variance
        tensor([0.2500, 0.2500, 0.2500, 0.2500, 0.2500])
        >>> sorted(predict(model, guide, (x, x), Samples(20), seed=0).metrics())
        ['coverage_95', 'crps', 'nll', 'nll_standard_error', 'rmse', 'width_95']
        >>> low, high = predict(model, guide, x, Samples(20), seed=0).interval(0.9)
        >>> bool((low < high).all())
        True
    """
    if isinstance(guide, SVI) or not callable(guide):  # an SVI is callable too
        raise GuideError(
            f"the guide is of type {type(guide).__name__}: pass svi.guide, another guide, or a function that samples "
            "the latent sites. To predict from a mapping of draws, use pyro.infer.Predictive(model, posterior_samples)"
        )
    rule = rule_of(method, guide)
    device = device_of(model, guide)
    parts: list[Part] = []
    room = math.inf if keep_draws or rule.keeps_components else KEPT_COMPONENTS
    sites = names_of_sites(model, guide) if site is None else lambda _: [site]
    split = batches(model, data, observed=observed, batch_size=batch_size, device=device, sites=sites)
    with evaluation_mode(model, guide), seeded(seed, device) as seed:
        first = next(split)
        check_posterior(model, guide, first.inputs)
        components = Components(model, guide, rule, seed)
        varies = True  # until a run with the observations shows that the model uses them unchanged
        for batch in progress_bar(progress, unit="batch", label="predict", of=chain([first], split)):
            args, kwargs = batch.whole
            with explained_errors(model, with_missing(model, args), kwargs):
                if batch.observed is not None and (varies or _has_markers(batch.observed)):
                    latents = example_latents(guide, batch.inputs)
                    batch = check_observation(model, batch, latents, site)
                    varies = batch.varies
                mixture = Mixture(batch.observed, batch.num_rows, batch.mask, room=room)
                components.read(mixture, batch, site)
            room = mixture.room
            parts.append(mixture.finish())
    if isinstance(guide, AutoDelta) and isinstance(rule, Samples) and _without_spread(parts):
        warn(
            f"{rule} finds no epistemic uncertainty: the guide is a point estimate, so all draws are equal, and "
            "dropout is off in evaluation mode. Train a posterior, for example with Laplace(), or an ensemble"
        )
    return Prediction(rule, parts, ordered=keeps_order(data))


def _has_markers(observed: Tensor) -> bool:
    """Return True if labels or counts are negative, such as -100 for a label to ignore, which only the model knows."""
    return not observed.is_floating_point() and bool((observed < 0).any())


def _without_spread(parts: list[Part]) -> bool:
    """Return True if the components of each batch have the same mean, up to rounding."""
    found = [part.values for part in parts]
    return all("epistemic" in v and bool((v["epistemic"] <= 1e-10 * v["aleatoric"]).all()) for v in found)


def names_of_sites(model: Callable[..., Any], guide: Callable[..., Any]) -> Callable[[Batch], list[str]]:
    """Return a function that lists, for a batch, the names of the model's observed sites."""

    def names(batch: Batch) -> list[str]:
        latents = example_latents(guide, batch.inputs)
        return responses(observed_run(model, batch, latents), latents)

    return names


def rule_of(method: Any, guide: Any) -> PredictionRule:
    """Return ``method``, or the guide's default.

    Raises:
        ArgumentError: if ``method`` is not a prediction rule, for example if it is a class or string.
        DviWarning: if the rule uses the variance of a posterior that was trained to predict at its mean.
    """
    if method is None:
        return default_rule(guide)
    if (members := members_of(guide)) and not isinstance(method, OfMembers):
        return OfMembers(tuple(rule_of(method, member.guide) for member in members))
    check_choice("method", method, PredictionRule, "AtMean() or Samples(30)")
    # A Laplace approximation is exempt: its variance was fitted after training.
    fitted = hasattr(guide, "linearised")
    if trained_for(guide) in ("AtMean", AtMean()) and not fitted and isinstance(method, (Moments, Samples)):
        warn(
            f"TaylorELBO trains a posterior for predictions at the mean, but {method} also uses the variance. Use "
            "AtMean(), the default, unless the model is nearly linear in its weights."
        )
    return method


def default_rule(guide: Any) -> PredictionRule:
    """Return the default rule of a guide.

    The attribute ``prediction_rule`` of the guide has priority. It is a rule, or the name of a rule or of a
    propagation; for a :class:`~pyro_dvi.LaplaceGuide`, it is :class:`~pyro_dvi.Linearised`. An ``AutoDelta`` predicts
    with :class:`AtMean`. Other guides use the rule of their training objective: :class:`AtMean` after ``TaylorELBO``,
    :class:`Moments` after ``MomentPropagationELBO``, and 30 :class:`Samples` after ``NaturalGradientELBO`` and Pyro's
    objectives. A guide that was not trained with an objective of this library uses samples, except for a
    :class:`~pyro_dvi.MultiplicativeNoiseGuide`, which uses moments. Each member of an ensemble has its own rule.

    Example:
        >>> from pyro_dvi import MeanFieldGuide
        >>> default_rule(MeanFieldGuide(lambda: None))
        Samples(num_samples=30)
    """
    if members := members_of(guide):
        return OfMembers(tuple(default_rule(member.guide) for member in members))
    trained = "Moments" if isinstance(guide, MultiplicativeNoiseGuide) else "Samples"
    by_objective = "AtMean" if isinstance(guide, AutoDelta) else trained_for(guide)
    rule = getattr(guide, "prediction_rule", None) or by_objective or trained
    if isinstance(rule, PredictionRule):
        return rule
    from pyro_dvi import predictive  # here, because the package imports this module

    named = getattr(predictive, rule)
    if isinstance(named, type) and issubclass(named, Propagation):
        return Moments(propagation=named())
    return named()
