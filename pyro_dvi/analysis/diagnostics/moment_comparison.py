# SPDX-License-Identifier: Apache-2.0
"""Comparison of propagated moments with draws of the weights, at every layer of a model."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pyro_dvi.core.arguments import check_choice, check_count
from pyro_dvi.core.distributions import arguments_kept, given_to, innermost
from pyro_dvi.core.progress import progress_bar
from pyro_dvi.core.table import Table
from pyro_dvi.core.undisturbed import device_of
from pyro_dvi.errors import DataError, ModelError
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.predictive.engine.inputs import batches
from pyro_dvi.predictive.engine.model_runs import evaluation_mode, respond, seeded
from pyro_dvi.predictive.engine.posterior_values import posterior_gaussians
from pyro_dvi.predictive.rules.analytic import Independent, Propagation
from pyro_dvi.predictive.rules.rule import Samples
from pyro_dvi.runs.posterior_run import PosteriorMoments, median
from pyro_dvi.runs.uncertain import uncertain_likelihoods, uncertain_part

_MOST_RANKED = 200_000  # elements whose ranks are compared

# A module and the number of its call, or a parameter of the observed site.
Place = tuple[nn.Module, int] | str


@dataclass(frozen=True)
class Comparison(Table):
    r"""Propagated against sampled moments of every layer, in the order of the computation.

    A row for each module that returned moments, and for each uncertain parameter of the observed site, with the columns
    ``layer`` (the path of the module), ``class``, ``call`` (its number, from 0), ``elements``, ``mean_error`` (the
    average of :math:`|m - \hat m| / \hat\sigma` over elements), ``sd_ratio`` (the average propagated standard deviation
    over the average sampled one) and ``rank_correlation`` (Spearman's, of the standard deviations).

    Attributes:
        num_samples: draws of the weights.
        site: the observed site.
    """

    num_samples: int = 0
    site: str = ""

    @property
    def chance(self) -> float:
        """The error of a mean that the draws explain, for Gaussian values: the root of 2 / (pi n)."""
        return math.sqrt(2 / (math.pi * self.num_samples))


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
    progress: bool = False,
) -> Comparison:
    r"""Report where propagated moments deviate from draws of the weights.

    The model runs once with moments and ``num_samples`` times at draws from the guide. Compared are the outputs of
    every module that returns moments, and the uncertain parameters of the observed site. The first layer whose
    standard deviations are off is where covariances were lost, or where a rule approximates badly. Memory takes a few
    copies of all activations.

    Args:
        model: the Pyro model.
        guide: its trained guide, a factorised Gaussian.
        data: as in :func:`~pyro_dvi.predict`; used are the first ``batch_size`` examples, or the first batch of a
            loader.
        num_samples: draws of the weights. A standard deviation of n draws has a relative error of about
            :math:`1/\sqrt{2n}`.
        propagation: the way to look at, ``Independent()`` by default. ``ReverseDelta()`` changes the parameters of the
            observed site only.
        site: observed site, where the model has several.
        observed: the model's argument that holds the observation; by default the one whose default is None.
        batch_size: number of examples to use.
        seed: of the draws. The global random state is left as it was.
        progress: show a progress bar over draws.

    Returns:
        The report, to print; :func:`pyro_dvi.analysis.plots.moment_comparison` draws it.

    Raises:
        ArgumentError: fewer than two draws, or no propagation.
        GuideError: the guide is not a factorised Gaussian, or was never run.
        ModelError: nothing that the model computes is uncertain.
        UnsupportedError: a function of the model has no rule.

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
    with evaluation_mode(model, guide), seeded(seed, device) as seed, _layer_by_layer():
        centre, marginals = posterior_gaussians(guide, batch.inputs)
        run = partial(respond, model, batch, site=site)
        weights = PosteriorMoments(marginals, median)
        propagated: dict[Place, tuple[Tensor, Tensor]] = {}

        def keep(place: Place, output: Any) -> None:
            if isinstance(output, GaussianMoments):
                propagated[place] = output.loc.detach().clone(), output.variance.detach().clone()

        with uncertain_likelihoods(), weights, _watching(keep) as calls:
            response = propagation.respond(weights.given, partial(run, centre))
        part = uncertain_part(response.distribution)
        parameters = {} if part is None else {f"{response.site}.{n}": v for n, v in part.parameters.items()}
        for parameter, value in parameters.items():
            keep(parameter, value)
        if not propagated:
            raise ModelError(
                "nothing that the model computes is uncertain: no module returned moments, and the parameters of site "
                f"{response.site!r} are certain. Are the guide's Gaussians used by the model?"
            )
        sampled = {place: _RunningMoments() for place in propagated}

        def add(place: Place, output: Any) -> None:
            if isinstance(output, Tensor) and place in sampled and output.shape == propagated[place][0].shape:
                sampled[place].add(output.detach())

        torch.manual_seed(seed)
        draws = Samples(num_samples).draws(guide, batch.inputs)
        for draw in progress_bar(progress, num_samples, unit="draw", label="compare", of=draws):
            # Sites that did not enter as moments stay at their centre.
            values = {name: draw[name] if name in weights.given else value for name, value in centre.items()}
            with arguments_kept() as made, _watching(add):
                response = run(values)
            given = given_to(response.site, innermost(response.distribution), made) if parameters else {}
            for name, value in given.items():
                add(f"{response.site}.{name}", value)
    names = _names(model, calls)
    rows = []
    for place, (loc, variance) in propagated.items():
        if sampled[place].count != num_samples:
            continue
        if isinstance(place, str):
            layer, kind = place, "" if part is None else part.family.__name__
        else:
            module, call = place
            layer = names[id(module)] + (f" (call {call + 1})" if call else "")
            kind = type(module).__name__.removeprefix("Pyro")
        rows.append({"layer": layer, "class": kind, **_compared(layer, loc, variance, sampled[place])})
    chance = math.sqrt(2 / (math.pi * num_samples))
    heading = (
        f"Propagated moments against {num_samples:,} draws of the weights, {batch.num_rows:,} examples.\n"
        f"Mean error in sampled standard deviations, of which {chance:.3f} is chance. The ratio of standard deviations "
        "is propagated over sampled."
    )
    formats = {"layer": "", "class": "", "elements": ","}
    formats |= dict.fromkeys(("mean_error", "sd_ratio", "rank_correlation"), ".3f")
    return Comparison(heading, rows, formats, "", num_samples, response.site)


@contextmanager
def _watching(see: Callable[[Place, Any], None]) -> Iterator[Counter[nn.Module]]:
    """Pass the output of every module to ``see``, and count the calls of each."""
    calls: Counter[nn.Module] = Counter()

    def hook(module: nn.Module, _inputs: Any, output: Any) -> None:
        see((module, calls[module]), output)
        calls[module] += 1

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        yield calls
    finally:
        handle.remove()


class _RunningMoments:
    """Mean and variance of values that come one after the other, by Welford's recursion."""

    def __init__(self) -> None:
        self.count, self.mean, self._squares = 0, torch.zeros(()), torch.zeros(())

    def add(self, value: Tensor) -> None:
        """Add one value."""
        self.count += 1
        if self.count == 1:
            self.mean, self._squares = value.clone(), torch.zeros_like(value)
            return
        change = value - self.mean
        self.mean += change / self.count
        self._squares += change * (value - self.mean)

    @property
    def variance(self) -> Tensor:
        """Unbiased variance."""
        return self._squares / (self.count - 1)


def _compared(layer: str, loc: Tensor, variance: Tensor, sampled: _RunningMoments) -> dict[str, float]:
    """Return the numbers of one layer.

    Raises:
        DataError: a number is not finite.
    """
    moments = (loc, variance, sampled.mean, sampled.variance)
    if not all(bool(t.isfinite().all()) for t in moments):
        raise DataError(f"{layer} has moments or draws that are NaN or infinite: look at its input first")
    loc, variance, mean, truth = (t.cpu().double().flatten() for t in moments)
    sd, truth = variance.sqrt(), truth.sqrt()
    varying = truth > 0
    error = ((loc - mean).abs()[varying] / truth[varying]).mean() if bool(varying.any()) else sd.new_zeros(())
    ratio = 1.0 if torch.equal(sd.mean(), truth.mean()) else (sd.mean() / truth.mean()).item()
    return {
        "elements": len(loc),
        "mean_error": error.item(),
        "sd_ratio": ratio,
        "rank_correlation": _rank_correlation(sd, truth),
    }


def _rank_correlation(a: Tensor, b: Tensor) -> float:
    """Return Spearman's correlation; NaN where one of them is constant."""
    import pandas

    pairs = torch.stack([a, b], 1)[:: math.ceil(len(a) / _MOST_RANKED)]
    return float(pandas.DataFrame(pairs.numpy()).corr("spearman").iloc[0, 1])


@contextmanager
def _layer_by_layer() -> Iterator[None]:
    """Run attention layer by layer, instead of a fused kernel that calls no module."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _names(model: Any, modules: Iterable[nn.Module]) -> dict[int, str]:
    """Return paths of modules: inside the model or, if the model is a function, inside their outermost module."""
    names: dict[int, str] = {}
    if isinstance(model, nn.Module):
        names = {id(module): path or type(model).__name__ for path, module in model.named_modules()}
    for root in sorted(modules, key=lambda module: -sum(1 for _ in module.modules())):
        if id(root) in names:
            continue
        start = type(root).__name__.removeprefix("Pyro")
        number = sum(name.split(".")[0].split(" ")[0] == start and "." not in name for name in names.values())
        start = f"{start} {number + 1}" if number else start
        for path, module in root.named_modules():
            names.setdefault(id(module), f"{start}.{path}" if path else start)
    return names
