# SPDX-License-Identifier: Apache-2.0
r"""What a comparison of propagated and sampled moments found, layer by layer.

Propagated moments against draws of the weights, at every layer of a model.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pyro_dvi.core.arguments import check_choice, check_count
from pyro_dvi.core.distributions import Built, arguments_kept, given_to, innermost
from pyro_dvi.core.progress import progress_bar
from pyro_dvi.core.table import Columns, Report
from pyro_dvi.core.undisturbed import device_of
from pyro_dvi.errors import DataError, ModelError
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.predictive.engine.inputs import batches
from pyro_dvi.predictive.engine.model_runs import evaluation_mode, respond, seeded
from pyro_dvi.predictive.engine.posterior_values import posterior_gaussians
from pyro_dvi.predictive.rules.propagated import Independent, Propagation
from pyro_dvi.predictive.rules.rule import Samples
from pyro_dvi.runs.posterior_run import PosteriorMoments, median
from pyro_dvi.runs.uncertain import uncertain_likelihoods, uncertain_part

_MOST_RANKED = 200_000  # elements whose ranks are compared


@dataclass(frozen=True)
class LayerComparison:
    r"""Propagated against sampled moments of one tensor.

    Attributes:
        layer: path of the module, or the parameter of the observed site.
        kind: class of the module or of the distribution.
        call: which call of the module it is, from 0.
        num_elements: size of the tensor.
        mean_error: average of :math:`|m - \hat m| / \hat\sigma` over elements. Draws alone explain
            :attr:`Comparison.chance`.
        sd_ratio: average propagated standard deviation over the average sampled one.
        rms_ratio: the same of root mean squares, in which wide elements count more.
        rank_correlation: Spearman's, of the standard deviations: are the wide elements the wide ones?
    """

    layer: str
    kind: str
    call: int
    num_elements: int
    mean_error: float
    sd_ratio: float
    rms_ratio: float
    rank_correlation: float


@dataclass(frozen=True)
class Comparison(Report):
    """Propagated against sampled moments of every layer, in the order of the computation.

    ``print(report)`` shows a table; ``pandas.DataFrame(report.rows)`` makes a frame of it.

    Attributes:
        rows: one for each module that returned moments, in the order in which they finish; then the
            uncertain parameters of the observed site.
        num_samples: draws of the weights.
        num_examples: inputs.
        site: the observed site.
    """

    rows: tuple[LayerComparison, ...]
    num_samples: int
    num_examples: int
    site: str

    @property
    def chance(self) -> float:
        """The error of a mean that the draws explain, for Gaussian values: the root of 2 / (pi n)."""
        return math.sqrt(2 / (math.pi * self.num_samples))

    def worst(self) -> LayerComparison:
        """Return the layer whose standard deviations are off by the largest factor, up or down."""
        return max(self.rows, key=lambda row: abs(math.log(row.sd_ratio)) if row.sd_ratio > 0 else math.inf)

    def _shown(self) -> list[Any]:
        titles = ("layer", "class", "elements", "mean error", "sd ratio", "rms ratio", "rank corr.")
        lines = []
        for row in self.rows:
            layer = row.layer + (f" (call {row.call + 1})" if row.call else "")
            numbers = (row.mean_error, row.sd_ratio, row.rms_ratio, row.rank_correlation)
            lines.append((layer, row.kind, f"{row.num_elements:,}", *(f"{number:.3f}" for number in numbers)))
        return [
            f"Propagated moments against {self.num_samples:,} draws of the weights, {self.num_examples:,} examples.\n"
            f"Mean error in sampled standard deviations; {self.chance:.3f} of it is chance. Ratios are propagated over "
            "sampled.",
            Columns(titles, lines, names=2),
        ]


def compared(
    layer: str, kind: str, call: int, loc: Tensor, variance: Tensor, mean: Tensor, sampled: Tensor
) -> LayerComparison:
    """Compare the moments of one tensor.

    Args:
        layer: name.
        kind: class.
        call: number of the call.
        loc: propagated means.
        variance: propagated variances.
        mean: means of the draws.
        sampled: variances of the draws.

    Raises:
        DataError: a number is not finite.
    """
    if not all(bool(t.isfinite().all()) for t in (loc, variance, mean, sampled)):
        raise DataError(
            f"{layer} ({kind}) has moments or draws that are NaN or infinite: look at its input first"
        )
    loc, variance, mean, sampled = (t.cpu().double() for t in (loc, variance, mean, sampled))
    sd, truth = variance.sqrt().flatten(), sampled.sqrt().flatten()
    varying = truth > 0
    error = ((loc - mean).abs().flatten()[varying] / truth[varying]).mean()
    return LayerComparison(
        layer,
        kind,
        call,
        loc.numel(),
        error.item() if bool(varying.any()) else 0.0,
        _ratio(sd.mean(), truth.mean()),
        _ratio(variance.mean().sqrt(), sampled.mean().sqrt()),
        _rank_correlation(sd, truth),
    )


def _ratio(ours: Tensor, truth: Tensor) -> float:
    """Their ratio; 1 if both are zero."""
    return 1.0 if ours.item() == truth.item() else (ours / truth).item()


def _rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's; NaN where one of them is constant."""
    import pandas

    pairs = torch.stack([a, b], 1)[:: math.ceil(len(a) / _MOST_RANKED)]
    return float(pandas.DataFrame(pairs.detach().numpy()).corr("spearman").iloc[0, 1])


# A module and the number of its call, or a parameter of the observed site.
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
        The report, to print; with :attr:`~pyro_dvi.analysis.diagnostics.Comparison.rows` and
        :meth:`~pyro_dvi.analysis.diagnostics.Comparison.worst`. :func:`pyro_dvi.analysis.plots.moment_comparison` draws it.

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
        >>> print(report.worst().layer, round(report.worst().sd_ratio, 1))
        obs.loc 1.0
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
        propagated = _Propagated()
        with uncertain_likelihoods(), weights, _watching(propagated.see) as calls:
            response = propagation.respond(weights.given, partial(run, centre))
        propagated.read(response)
        if not propagated.moments:
            raise ModelError(
                "nothing that the model computes is uncertain: no module returned moments, and the parameters of site "
                f"{response.site!r} are certain. Are the guide's Gaussians used by the model?"
            )
        sampled = _Sampled({place: loc.shape for place, (loc, _) in propagated.moments.items()})
        torch.manual_seed(seed)
        draws = Samples(num_samples).draws(guide, batch.inputs)
        for draw in progress_bar(progress, num_samples, unit="draw", label="compare", of=draws):
            # What did not enter as moments stays where it was.
            values = {name: draw[name] if name in weights.given else value for name, value in centre.items()}
            with arguments_kept() as made, _watching(sampled.see):
                response = run(values)
            sampled.read(response, made)
    names = _names(model, calls)
    rows = []
    for place, (loc, variance) in propagated.moments.items():
        found = sampled.moments.get(place)
        if found is not None and found.count == num_samples:
            if isinstance(place, str):
                title = place, propagated.family, 0
            else:
                module, call = place
                title = names[id(module)], type(module).__name__.removeprefix("Pyro"), call
            rows.append(compared(*title, loc, variance, found.mean, found.variance))
    return Comparison(tuple(rows), num_samples, batch.num_rows, response.site)


@contextmanager
def _watching(see: Callable[[Place, Any], None]) -> Iterator[Counter[nn.Module]]:
    """Show what every module returns to ``see``; gives the number of calls of each."""
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


class _Propagated:
    """Moments of one run."""

    def __init__(self) -> None:
        self.moments: dict[Place, tuple[Tensor, Tensor]] = {}
        self.family = ""

    def see(self, place: Place, output: Any) -> None:
        if isinstance(output, GaussianMoments):
            self.moments[place] = output.loc.detach().clone(), output.variance.detach().clone()

    def read(self, response: Any) -> None:
        part = uncertain_part(response.distribution)
        if part is not None:
            self.family = part.family.__name__
            for name, value in part.parameters.items():
                self.see(f"{response.site}.{name}", value)


class _Sampled:
    """Moments over runs."""

    def __init__(self, shapes: Mapping[Place, torch.Size]) -> None:
        self.shapes = shapes
        self.moments: dict[Place, _RunningMoments] = {}

    def see(self, place: Place, output: Any) -> None:
        if isinstance(output, Tensor) and self.shapes.get(place) == output.shape:
            self.moments.setdefault(place, _RunningMoments()).add(output.detach())

    def read(self, response: Any, made: list[Built]) -> None:
        names = [place.removeprefix(f"{response.site}.") for place in self.shapes if isinstance(place, str)]
        if names:
            given = given_to(response.site, innermost(response.distribution), made)
            for name in names:
                self.see(f"{response.site}.{name}", given.get(name))


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
    """Paths of modules: inside the model or, for models that are functions, inside the largest module around."""
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
