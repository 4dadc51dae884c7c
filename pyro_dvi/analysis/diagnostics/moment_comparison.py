# SPDX-License-Identifier: Apache-2.0
"""Comparison of propagated moments with draws of the weights at every layer of a model."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pyro_dvi.core.arguments import check_choice, check_count
from pyro_dvi.core.distributions import arguments_kept, given_to, innermost
from pyro_dvi.core.table import Table
from pyro_dvi.core.undisturbed import device_of, layer_by_layer
from pyro_dvi.errors import ModelError
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.predictive.engine.inputs import batches
from pyro_dvi.predictive.engine.model_runs import evaluation_mode, respond, seeded
from pyro_dvi.predictive.engine.posterior_values import posterior_gaussians
from pyro_dvi.predictive.rules.analytic import Independent, Propagation
from pyro_dvi.predictive.rules.rule import Samples
from pyro_dvi.runs.posterior_run import PosteriorMoments, median
from pyro_dvi.runs.uncertain import uncertain_likelihoods, uncertain_part

_MOST_RANKED = 200_000  # largest number of elements whose ranks are compared

# A module and the index of its call, or a parameter of the observed site.
Place = tuple[nn.Module, int] | str


def compare_with_sampling(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    data: Any,
    *,
    num_samples: int = 1000,
    propagation: Propagation | None = None,
    site: str | None = None,
    observed: str | None = None,
    batch_size: int = 100,
    seed: int | None = None,
) -> Table:
    r"""Report where propagated moments deviate from those computed with draws of the weights.

    The model runs once with moments and ``num_samples`` times with draws from the guide. The outputs of every module
    that returns moments, and the uncertain parameters of the observed site, are compared. The first layer with wrong
    standard deviations is where covariances were lost or a rule is inaccurate. The comparison holds a few copies of all
    activations in memory.

    The report has a row for each module that returned moments, in the order of computation, and for each uncertain
    parameter of the observed site. The columns are ``layer`` (the path of the module in ``model``), ``class``,
    ``elements``, ``mean_error`` (the average of :math:`|m - \hat m| / \hat\sigma` over elements), ``sd_ratio`` (the
    ratio of the average propagated standard deviation to the average sampled one) and ``rank_correlation`` (Spearman's
    correlation between propagated and sampled standard deviations).

    Args:
        model: the Pyro model.
        guide: its trained guide, a factorised Gaussian.
        data: as for :func:`~pyro_dvi.predict`. Only the first ``batch_size`` examples are used, or the first batch of a
            loader.
        num_samples: number of weight draws. A standard deviation from n draws has a relative error of about
            :math:`1/\sqrt{2n}`.
        propagation: the propagation to compare, ``Independent()`` by default. ``ReverseDelta()`` changes only the
            parameters of the observed site.
        site: observed site, if the model has several.
        observed: name of the model's argument for the observation; by default the argument whose default value is None.
        batch_size: number of examples to use.
        seed: seed of the draws. The global random state is not changed.

    Returns:
        A report to print.

    Raises:
        ArgumentError: if there are fewer than two draws, or ``propagation`` is not a propagation.
        GuideError: if the guide is not a factorised Gaussian, or was never run.
        ModelError: if the outputs of the model are deterministic.
        UnsupportedError: if a function of the model has no rule.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> from pyro.infer.autoguide import AutoNormal
        >>> def model(x, y=None):
        ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         return pyro.sample("obs", dist.Normal(slope * x, 0.5), obs=y)
        >>> guide = AutoNormal(model)
        >>> x = torch.linspace(1, 2, 5)
        >>> _ = guide(x, x)
        >>> report = compare_with_sampling(model, guide, x, num_samples=500, seed=0)
        >>> report.rows[0]["layer"], round(report.rows[0]["sd_ratio"], 1)
        ('obs.loc', 1.0)
    """
    check_count("num_samples", num_samples, least=2)
    propagation = Independent() if propagation is None else propagation
    check_choice("propagation", propagation, Propagation, "Independent()")
    device = device_of(model, guide)
    batch = next(iter(batches(model, data, observed=observed, batch_size=batch_size, device=device)))
    with evaluation_mode(model, guide), seeded(seed, device) as seed, layer_by_layer():
        centre, marginals = posterior_gaussians(guide, batch.inputs)
        run = partial(respond, model, batch, site=site)
        weights = PosteriorMoments(marginals, median)
        propagated: dict[Place, tuple[Tensor, Tensor]] = {}

        def keep(place: Place, output: Any) -> None:
            if isinstance(output, GaussianMoments):
                propagated[place] = output.loc.detach().clone(), output.variance.detach().clone()

        with uncertain_likelihoods(), weights, _watching(keep):
            response = propagation.respond(weights.given, partial(run, centre))
        part = uncertain_part(response.distribution)
        parameters = {} if part is None else {f"{response.site}.{n}": v for n, v in part.parameters.items()}
        for parameter, value in parameters.items():
            keep(parameter, value)
        if not propagated:
            raise ModelError(
                "the outputs of the model are deterministic: no module returned moments, and the parameters of site "
                f"{response.site!r} are plain tensors. Check that the model uses the latent sites of the guide"
            )
        sampled = {place: _RunningMoments() for place in propagated}

        def add(place: Place, output: Any) -> None:
            if isinstance(output, Tensor) and place in sampled and output.shape == propagated[place][0].shape:
                sampled[place].add(output.detach())

        torch.manual_seed(seed)
        for draw in Samples(num_samples).draws(guide, batch.inputs):
            # Sites that are not propagated as moments keep the value of the guide's centre.
            values = {name: draw[name] if name in weights.given else value for name, value in centre.items()}
            with arguments_kept() as made, _watching(add):
                response = run(values)
            given = given_to(response.site, innermost(response.distribution), made) if parameters else {}
            for name, value in given.items():
                add(f"{response.site}.{name}", value)
    paths = {module: path for path, module in model.named_modules()} if isinstance(model, nn.Module) else {}
    rows = []
    for place, moments in propagated.items():
        if sampled[place].count != num_samples:
            continue
        if isinstance(place, str):
            layer, kind = place, "" if part is None else part.family.__name__
        else:
            module, call = place
            kind = type(module).__name__.removeprefix("Pyro")
            layer = (paths.get(module) or kind) + (f" (call {call + 1})" if call else "")
        rows.append({"layer": layer, "class": kind, **_compared(*moments, sampled[place])})
    chance = math.sqrt(2 / (math.pi * num_samples))
    heading = (
        f"Propagated moments against {num_samples:,} draws of the weights, {batch.num_rows:,} examples.\n"
        f"Mean error in units of the sampled standard deviation, of which {chance:.3f} is Monte Carlo\n"
        "error. The ratio of standard deviations is propagated over sampled."
    )
    numbers = dict.fromkeys(("mean_error", "sd_ratio", "rank_correlation"), ".3f")
    return Table(heading, rows, {"layer": "", "class": "", "elements": ",", **numbers})


@contextmanager
def _watching(see: Callable[[Place, Any], None]) -> Iterator[None]:
    """Pass the output of every module to ``see``, with the index of its call."""
    calls: Counter[nn.Module] = Counter()

    def hook(module: nn.Module, _inputs: Any, output: Any) -> None:
        see((module, calls[module]), output)
        calls[module] += 1

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


class _RunningMoments:
    """Running mean and variance with Welford's recursion."""

    def __init__(self) -> None:
        self.count, self.mean, self._squares = 0, torch.zeros(()), torch.zeros(())

    def add(self, value: Tensor) -> None:
        """Add one value."""
        self.count += 1
        change = value - self.mean
        self.mean = self.mean + change / self.count
        self._squares = self._squares + change * (value - self.mean)

    @property
    def variance(self) -> Tensor:
        """Unbiased variance."""
        return self._squares / (self.count - 1)


def _compared(loc: Tensor, variance: Tensor, sampled: _RunningMoments) -> dict[str, float]:
    """Return the comparison for one layer."""
    import pandas

    numbers = torch.stack([loc, variance, sampled.mean, sampled.variance]).cpu().double().flatten(1)
    loc, sd, mean, truth = numbers[0], numbers[1].sqrt(), numbers[2], numbers[3].sqrt()
    varying = truth > 0
    errors = (loc - mean).abs()[varying] / truth[varying]
    deviations = torch.stack([sd, truth], 1)
    ranked = pandas.DataFrame(deviations[:: math.ceil(len(sd) / _MOST_RANKED)].numpy())
    return {
        "elements": len(sd),
        "mean_error": errors.mean().item() if len(errors) else 0.0,
        "sd_ratio": 1.0 if torch.equal(sd, truth) else (sd.mean() / truth.mean()).item(),
        "rank_correlation": float(ranked.corr("spearman").iloc[0, 1]),
    }
