# SPDX-License-Identifier: Apache-2.0
r"""Export of a model with its posterior to ArviZ."""

import re
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from pyro.infer.autoguide import AutoLaplaceApproximation

from pyro_dvi.analysis.arviz_export.groups import Group, assemble, check_names, listed
from pyro_dvi.analysis.arviz_export.latent_draws import GivenSamples, LatentDraws, Selection, Summaries
from pyro_dvi.analysis.arviz_export.log_densities import log_posterior, sample_stats
from pyro_dvi.analysis.arviz_export.log_densities import log_prior as log_prior_of
from pyro_dvi.analysis.arviz_export.observed_draws import Predictions, choose_responses
from pyro_dvi.analysis.arviz_export.records import attributes, inputs_of, named_constants, training_group
from pyro_dvi.core.arguments import check_count
from pyro_dvi.core.progress import progress_bar
from pyro_dvi.core.undisturbed import device_of
from pyro_dvi.errors import ArgumentError, DviWarning, GuideError, UnsupportedError
from pyro_dvi.laplace.approximation import DRAWN_WEIGHTS
from pyro_dvi.predictive import PredictionRule
from pyro_dvi.predictive.components import Components
from pyro_dvi.predictive.engine.inputs import Batch, batches
from pyro_dvi.predictive.engine.model_runs import evaluation_mode, observed_run, seeded
from pyro_dvi.predictive.engine.posterior_values import check_posterior, example_latents, predicted_model
from pyro_dvi.predictive.predict import names_of_sites, rule_of
from pyro_dvi.predictive.rules.rule import PriorSamples, draws_weights, with_draws
from pyro_dvi.training import History


def to_arviz(
    model: Callable[..., Any],
    guide: Callable[..., Any] | Mapping[str, Any],
    data: Any,
    num_samples: int | None = None,
    *,
    sites: str | Sequence[str] | None = None,
    max_site_size: int = 1000,
    summarise: Summaries | None = None,
    method: PredictionRule | None = None,
    site: str | Sequence[str] | None = None,
    observed: str | Sequence[str] | None = None,
    prior: int | None = None,
    log_likelihood: bool | None = None,
    log_prior: bool = False,
    chains: int = 1,
    constant_data: Mapping[str, Any] | None = None,
    predictions: Any = None,
    history: History | None = None,
    elbo: Any = None,
    batch_size: int = 1000,
    seed: int | None = None,
    coords: Mapping[Any, Any] | None = None,
    dims: Mapping[Any, Sequence[Hashable]] | None = None,  # Any: the key of a Mapping is invariant
    pred_coords: Mapping[Any, Any] | None = None,
    progress: bool = False,
) -> Any:
    r"""Posterior draws, predictions and data as one ArviZ object.

    Groups, with dimensions ``chain`` (of length 1) and ``draw`` first where there are draws:

    ``posterior``
        draws of the latent sites from the guide, in their own (constrained) space. Of an ensemble those of one member
        follow those of the other; ``member`` says whose they are.
    ``posterior_predictive``
        draws of every observed site from the predictive distribution of ``method``.
    ``log_likelihood``
        log density of each observation, :math:`\log p(y_i \mid x_i, \theta_k)`; if the data hold observations, and
        ``method`` predicts by several distributions.
    ``log_prior``, ``sample_stats``
        with ``log_prior=True``: :math:`\log p(\theta_k)` by site; ``lp``, :math:`\log p(y, \theta_k)` up to terms
        of ``pyro.factor``, where there is a ``log_likelihood``; and ``log_q``, :math:`\log q(\theta_k)`, where the
        guide has a density. Both in the space of the sites, so that the Pareto k of ``lp - log_q`` judges the
        posterior (Yao et al., 2018, "Yes, but did it work?"). Data have to be those of the training, all of them.
    ``observed_data``, ``constant_data``
        the observations, and the inputs by the names that the model gives them.
    ``prior``, ``prior_predictive``
        with ``prior=n``: the same from the model's prior.
    ``predictions``, ``predictions_constant_data``
        with ``predictions=``: draws of the observed sites for other inputs, and these inputs.
    ``training_metadata``
        with ``history=``: loss, KL divergence, learning rate and the rest by ``epoch``. ArviZ has no such group and
        leaves it alone; ``sample_stats`` is for quantities of single draws.

    Plates become dimensions of their name. Observations that the model masks are NaN in ``observed_data`` (labels and
    counts then become real numbers, there and in their predictive groups). ``log_likelihood`` is without them: its
    values lie along one dimension ``<site>_observed``, with their places in the flattened predictions as coordinates.
    With several observed sites, each is predicted and scored with the others at their
    observed values, where the data hold these: :math:`p(b \mid a, x, \theta)` where a site b depends on a site a.

    With ``AtMean()``, the default after ``TaylorELBO``, every draw of ``posterior_predictive`` comes from
    :math:`p(y \mid x, \mathrm{E}_q\theta)`: draws of the weights of a Variational Laplace posterior are no good
    predictor. There is then no ``log_likelihood``, as with ``Moments()`` and ``Linearised()``: it would be the same for
    every draw, and leave-one-out cross-validation by importance sampling (``az.loo``) reweights draws that differ. For
    that, export with ``method=Samples(500)``, where the draws are those of ``posterior``, and judge the posterior that
    it then scores.
    Methods that predict by other rules are compared on held-out data, by
    :func:`~pyro_dvi.analysis.diagnostics.compare_held_out`.

    Args:
        model: the Pyro model.
        guide: its trained guide, of this library, of Pyro, or a function; or draws in its place, ``[num_samples, ...]``
            by site name, as ``MCMC.get_samples()`` gives them.
        data: as in :func:`~pyro_dvi.predict`: ``(x, y)``, inputs alone, or a loader of either.
        num_samples: draws; by default 500 (of an ensemble the next smaller multiple of its members), or as many as the
            given prediction rule has.
        sites: latent sites to export, and sites of ``pyro.deterministic``, which the model computes for each draw. By
            default all latent ones with at most ``max_site_size`` values; a warning names the rest.
            An empty list exports predictions alone: for methods of a LaplaceGuide that have no draws.
        max_site_size: values of one site above which it is left out by default.
        summarise: functions of one draw of a site that stand for the sites left out, by name:
            ``{"norm": torch.norm}`` gives a variable ``<site>_norm`` for each.
        method: prediction rule, by default that of the guide, as in :func:`~pyro_dvi.predict`.
        site: observed site or sites; by default all, if the data hold an observation of each.
        observed: the model's argument that holds the observation, or several; by default the one whose default is None,
            of several those that are called like observed sites.
        prior: draws from the prior.
        log_likelihood: True to insist on the group, False to leave it out; by default it is there where draws have
            different ones.
        log_prior: add the log densities of the draws.
        chains: number of chains that the draws are laid out in, one after the other: of MCMC, say. Draws of a guide are
            independent, and any split of them is right.
        constant_data: variables by name in place of the inputs of the model; one with a row for each example has the
            dimension of examples first.
        predictions: other inputs, in any form of ``data``; observations that come along are not used.
        history: what :func:`~pyro_dvi.fit` returned.
        elbo: the objective that trained the guide, to record its name and KL weight. Without it the KL weight is the
            guide's, if it has one, or the last of the history.
        batch_size: examples at a time; a loader has its own.
        seed: of all draws; by default one from the global generator, whose state is otherwise left as it was.
        coords: coordinate values by dimension, as in ArviZ.
        dims: names of the dimensions by variable, as in ArviZ.
        pred_coords: coordinate values for ``predictions``.
        progress: show a progress bar over batches.

    Returns:
        ``arviz.InferenceData`` or ``xarray.DataTree``; ``.to_netcdf(path)`` writes either. Its attributes hold the
        versions of the libraries, guide, method, objective, KL weight, seed, time, and the names of what was left out.

    Raises:
        ArgumentError: an unknown site (similar names are suggested), no draws, two numbers of draws, draws of unequal
            lengths, that do not fill the chains, or whose likelihoods are asked for and all the same, a summary that
            fails, names in ``coords`` or ``dims`` that fit nothing, or several arguments that may be the observation.
        DataError: data that cannot be right, as in :func:`~pyro_dvi.predict`; observations in some batches only;
            several batches with a guide whose posterior depends on its inputs.
        GuideError: the guide was never run, has no mean, or is an AutoLaplaceApproximation before its Gaussian.
        ModelError: no observed site, several without an observation and no ``site``, or one that is called like a
            dimension of ArviZ.
        UnsupportedError: a mask that depends on the draw, a prior that cannot be drawn from, a method of
            a LaplaceGuide without draws, or an observed site that depends on others that are neither in the guide nor
            observed, with a rule that does not average over their draws.

    Example:
        >>> import pyro, pyro.distributions as dist, torch
        >>> from pyro.infer.autoguide import AutoNormal
        >>> def model(x, y=None):
        ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         return pyro.sample("obs", dist.Normal(slope * x, 0.5), obs=y)
        >>> guide = AutoNormal(model)
        >>> x = torch.linspace(-1, 1, 5)
        >>> _ = guide(x, x)
        >>> posterior = to_arviz(
        ...     model, guide, data=(x, x), num_samples=100, predictions=torch.ones(2), seed=0
        ... )
        >>> dict(posterior["posterior_predictive"]["obs"].sizes)
        {'chain': 1, 'draw': 100, 'data': 5}
        >>> dict(posterior["predictions"]["obs"].sizes)
        {'chain': 1, 'draw': 100, 'data': 2}
        >>> draws = {"slope": torch.randn(30)}
        >>> to_arviz(model, draws, data=x, seed=0)["posterior"]["slope"].shape
        (1, 30)
    """
    device = device_of(model, guide)
    given: GivenSamples | None = None
    if isinstance(guide, Mapping):
        given = GivenSamples(guide, device)
        guide = given.guide
    rule, count = _rule_and_count(given, method, guide, num_samples)
    check_count("chains", chains)
    if count % chains:
        raise ArgumentError(
            f"{count} draws do not fill {chains} chains equally: num_samples must be a multiple"
        )
    _check_options(guide, prior, observed)
    groups: dict[str, Group] = {} if history is None else {"training_metadata": training_group(history)}
    options: Any = {"observed": observed, "batch_size": batch_size, "device": device}

    def split(of: Any) -> Iterator[Batch]:
        return batches(model, of, sites=names_of_sites(model, guide), **options)

    with evaluation_mode(model, guide), seeded(seed, device) as used_seed:
        remaining = split(data)
        first = next(remaining)
        check_posterior(model, guide, first.inputs)
        if given is not None:
            given.fit_to(_free_run(model, first, given), is_complete=first.observed is not None)
        latents = example_latents(guide, first.inputs)
        nodes = observed_run(model, first, latents)
        selection = Selection.of(latents, nodes, sites, max_site_size, summarise)
        tuned = predicted_model(guide, model)
        drawn = LatentDraws(tuned, guide, selection, first, nodes, used_seed)
        passes = _Passes(model, guide, choose_responses(site, nodes, latents), used_seed, progress)
        own = Components(model, guide, rule, used_seed)
        weights = own if draws_weights(rule) else Components(model, guide, with_draws(rule, count), used_seed)
        with _nothing_predicted():
            groups["posterior"] = drawn.group(weights.draws(first.inputs), count)
        predicted = [passes.predictions(own, count)]
        if prior is not None:
            of_prior = Components(
                model, guide, PriorSamples(prior, tuned, first.inputs, tuple(latents)), used_seed
            )
            groups["prior"] = drawn.group(of_prior.draws(first.inputs), prior)
            predicted.append(passes.predictions(of_prior, prior, 1, are_scored=False))
        every = drawn.unchanged(chain([first], remaining))
        inputs, inputs_left_out = passes.over(every, predicted)
        of_data = ("posterior_predictive", "log_likelihood", "observed_data")
        groups.update(zip(of_data, predicted[0].groups(), strict=True))
        groups["constant_data"] = inputs
        if constant_data is not None:
            drawn_rows = predicted[0].rows, groups["posterior_predictive"]
            groups["constant_data"], inputs_left_out = named_constants(constant_data, *drawn_rows), []
        if log_likelihood and not groups["log_likelihood"].arrays:
            raise ArgumentError(
                f"log_likelihood=True: {rule} predicts by one distribution, the same for every draw, or the data hold "
                "no observation. method=Samples(500) has a likelihood for each draw"
            )
        if log_prior:
            groups["log_prior"] = priors = log_prior_of(tuned, first, nodes, weights.draws(first.inputs))
            # A rule that does not draw weights scores other ones than those drawn.
            of_weights = groups["log_likelihood"] if own is weights else Group()
            log_q = log_posterior(guide, first, nodes, groups["posterior"], used_seed)
            groups["sample_stats"] = sample_stats(priors, of_weights, log_q)
        if log_likelihood is False:
            groups["log_likelihood"] = Group()
        if prior is not None:
            groups["prior_predictive"], *_ = predicted[1].groups()
        if predictions is not None:
            unobserved = (replace(batch, observed=None) for batch in split(predictions))
            of_others = passes.predictions(Components(model, guide, rule, used_seed), count, 2)
            inputs, left_out = passes.over(unobserved, [of_others])
            groups["predictions"], *_ = of_others.groups()
            groups["predictions_constant_data"] = inputs
            inputs_left_out += [f"{name} of predictions" for name in left_out]

    for name, group in groups.items():
        if group.sampled and not name.startswith("prior"):
            group.split(chains)
    recorded = attributes(guide, rule, elbo, history, used_seed)
    if log_likelihood is False:
        recorded["log_likelihood_left_out"] = "log_likelihood=False"
    recorded["sites_left_out"] = ", ".join(selection.left_out)
    recorded["inputs_left_out"] = ", ".join(inputs_left_out)
    names = {str(name).replace("/", "."): given for name, given in _by_name("dims", dims).items()}
    usual, ahead = _by_name("coords", coords), _by_name("pred_coords", pred_coords)
    check_names(groups, names, {**usual, **ahead}, selection.left_out)
    return assemble(
        groups, recorded, {n: ahead if n.startswith("predictions") else usual for n in groups}, names
    )


@dataclass(frozen=True)
class _Passes:
    """Passes over data with a model and its posterior.

    Every site and batch has the same draws of the weights; the noise has a seed for each site and pass.
    """

    model: Callable[..., Any]
    guide: Callable[..., Any]
    sites: Sequence[str]
    seed: int
    progress: bool

    def predictions(
        self, components: Components, count: int, number: int = 0, *, are_scored: bool = True
    ) -> Predictions:
        """Return predictions of no batch yet; ``number`` sets their noise apart from that of others."""
        # One further than that of the weights: else the noise of a draw would be made of the numbers of its weights.
        noise_seed = self.seed + 1 + number * len(self.sites)
        return Predictions(self.sites, components, count, noise_seed, are_scored=are_scored)

    def over(self, batches: Iterable[Batch], predicted: Sequence[Predictions]) -> tuple[Group, list[str]]:
        """Predict all batches; return their inputs, and the names of those that are too big to copy."""
        inputs = []
        for batch in progress_bar(self.progress, unit="batch", label="export", of=batches):
            latents = example_latents(self.guide, batch.inputs)
            nodes = observed_run(self.model, batch, latents)
            for own in predicted:
                own.add(batch, nodes, latents)
            inputs.append(batch.inputs)
        return inputs_of(self.model, inputs, predicted[0].rows)


@contextmanager
def _nothing_predicted() -> Iterator[None]:
    """Draw weights to export them alone: a LaplaceGuide need not warn of them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=re.escape(DRAWN_WEIGHTS), category=DviWarning)
        try:
            yield
        except UnsupportedError as error:  # of a LaplaceGuide
            reason = str(error).splitlines()[0]  # Pyro adds the shapes of its trace
            raise UnsupportedError(f"{reason}; sites=[] exports predictions alone") from error


def _rule_and_count(
    given: GivenSamples | None, method: Any, guide: Any, num_samples: int | None
) -> tuple[PredictionRule, int]:
    """Return the prediction rule, and how many draws there are of each site."""
    if num_samples is not None:
        check_count("num_samples", num_samples)
    if given is not None and method is not None:
        raise ArgumentError(
            f"draws that are given predict by themselves, each with its weights: leave out method={method!r}"
        )
    rule = rule_of(method, guide) if given is None else given
    of_weights = draws_weights(rule)
    if method is None and given is None and of_weights:  # with as many draws as were asked for
        rule = with_draws(rule, num_samples or 500)
    components = rule.num_components
    if num_samples is None:
        several = of_weights or not (components == 1 or rule.keeps_components)
        return rule, components if several else 500 // components * components
    if of_weights and components != num_samples:
        raise ArgumentError(
            f"num_samples={num_samples} and method={rule} disagree: the draws of the posterior are those of the "
            "predictions. Leave out num_samples."
        )
    if num_samples % components:
        raise ArgumentError(
            f"num_samples={num_samples} is no multiple of the {components} distributions of method={rule}, which "
            "give equal shares of the draws"
        )
    return rule, num_samples


def _free_run(model: Callable[..., Any], batch: Batch, given: GivenSamples) -> Mapping[str, Any]:
    """Return the sites of a run at values from the prior, of the right shapes, where it has any."""
    try:
        return observed_run(model, batch, {})
    except NotImplementedError:  # an improper prior
        return observed_run(model, batch, given.first())


def _check_options(guide: Any, prior: Any, observed: Any) -> None:
    if prior is not None:
        check_count("prior", prior)
    if observed is not None and not listed("observed", observed):
        raise ArgumentError("observed=[] names no argument: leave it out where the data hold no observation")
    if isinstance(guide, AutoLaplaceApproximation):
        raise GuideError(
            "this AutoLaplaceApproximation is still a point mass: export guide.laplace_approximation(*args) with the "
            "arguments of the training, or train an AutoDelta if a point mass is meant"
        )


def _by_name(option: str, given: Mapping[Any, Any] | None) -> Mapping[Any, Any]:
    if not isinstance(given or {}, Mapping):
        raise ArgumentError(f"{option} is a mapping by name, as in ArviZ, not {given!r}")
    return given or {}
