# SPDX-License-Identifier: Apache-2.0
"""Propagated moments against draws of the weights, at every layer of a model."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from pyro_dvi.choice import check_choice, check_count
from pyro_dvi.diagnostics.comparison import Comparison, compared
from pyro_dvi.errors import ModelError
from pyro_dvi.handlers.distributions import Built, arguments_kept, innermost
from pyro_dvi.handlers.moment_run import PosteriorMoments, median
from pyro_dvi.handlers.uncertain import uncertain_likelihoods, uncertain_part
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.predictive.engine.batches import batches
from pyro_dvi.predictive.engine.run import evaluation_mode, respond, seeded
from pyro_dvi.predictive.posterior import device_of, posterior_gaussians
from pyro_dvi.predictive.rules.propagation import Independent, Propagation
from pyro_dvi.predictive.rules.rule import Samples

__all__ = ["compare_with_sampling"]

# A module by identity and number of its call, or a parameter of the observed site.
Place = tuple[int, int] | str


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
        The report, to print; with :attr:`~pyro_dvi.diagnostics.Comparison.rows` and
        :meth:`~pyro_dvi.diagnostics.Comparison.worst`. :func:`pyro_dvi.plots.moment_comparison` draws it.

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
        centre, gaussians = posterior_gaussians(guide, batch.inputs)
        run = partial(respond, model, batch, site=site)
        weights = PosteriorMoments(gaussians, guide, {}, median)
        propagated = _Propagated()
        with uncertain_likelihoods(), weights, propagated.watching():
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
        for draw in tqdm(draws, total=num_samples, desc="compare", unit="draw", disable=not progress):
            # What did not enter as moments stays where it was.
            values = {name: draw[name] if name in weights.given else value for name, value in centre.items()}
            with arguments_kept() as given, sampled.watching():
                response = run(values)
            sampled.read(response, given)
    names = _names(model, propagated.modules)
    rows = []
    for place, (loc, variance) in propagated.moments.items():
        if place in sampled.count:
            name, kind, call = _title(place, names, propagated)
            n, mean, squares = sampled.count[place], sampled.mean[place], sampled.squares[place]
            if n == num_samples:
                rows.append(compared(name, kind, call, loc, variance, mean, squares / (n - 1)))
    return Comparison(tuple(rows), num_samples, batch.num_rows, response.site)


class _Watching:
    """See what every module returns during one run."""

    def __init__(self) -> None:
        self.modules: dict[int, nn.Module] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        calls: dict[int, int] = {}

        def hook(module: nn.Module, _inputs: Any, output: Any) -> None:
            call = calls[id(module)] = calls.get(id(module), -1) + 1
            self.modules[id(module)] = module
            self.see((id(module), call), output)

        handle = nn.modules.module.register_module_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    def see(self, place: Place, output: Any) -> None:
        raise NotImplementedError


class _Propagated(_Watching):
    def __init__(self) -> None:
        super().__init__()
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


class _Sampled(_Watching):
    """Means and sums of squares over runs, by Welford's recursion."""

    def __init__(self, shapes: Mapping[Place, torch.Size]) -> None:
        super().__init__()
        self.shapes = shapes
        self.count: dict[Place, int] = {}
        self.mean: dict[Place, Tensor] = {}
        self.squares: dict[Place, Tensor] = {}

    def see(self, place: Place, output: Any) -> None:
        if not isinstance(output, Tensor) or self.shapes.get(place) != output.shape:
            return
        value = output.detach()
        n = self.count[place] = self.count.get(place, 0) + 1
        if n == 1:
            self.mean[place], self.squares[place] = value.clone(), torch.zeros_like(value)
            return
        change = value - self.mean[place]
        self.mean[place] += change / n
        self.squares[place] += change * (value - self.mean[place])

    def read(self, response: Any, given: list[Built]) -> None:
        fn = innermost(response.distribution)
        names = [place.removeprefix(f"{response.site}.") for place in self.shapes if isinstance(place, str)]
        for built in reversed(given):
            if _same(built.distribution, fn, names):
                for name in names:
                    self.see(f"{response.site}.{name}", built.given.get(name))
                return


def _same(made: Any, fn: Any, names: list[str]) -> bool:
    """Whether a plate made one distribution of the other, by expanding it."""
    if type(made) is not type(fn):
        return False
    for name in names:
        ours, theirs = getattr(made, name, None), getattr(fn, name, None)
        if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
            return made is fn
        if ours.dim() > theirs.dim() or not bool((ours == theirs).all()):
            return False
    return True


@contextmanager
def _layer_by_layer() -> Iterator[None]:
    """Run attention layer by layer, instead of a fused kernel that calls no module."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _title(place: Place, names: dict[int, str], propagated: _Propagated) -> tuple[str, str, int]:
    if isinstance(place, str):
        return place, propagated.family, 0
    key, call = place
    kind = type(propagated.modules[key]).__name__
    return names[key], kind.removeprefix("Pyro"), call


def _names(model: Any, modules: dict[int, nn.Module]) -> dict[int, str]:
    """Paths of modules: inside the model or, for models that are functions, inside the largest module around."""
    names: dict[int, str] = {}
    if isinstance(model, nn.Module):
        names = {id(module): path or type(model).__name__ for path, module in model.named_modules()}
    for root in sorted(modules.values(), key=lambda module: -sum(1 for _ in module.modules())):
        if id(root) in names:
            continue
        start = type(root).__name__.removeprefix("Pyro")
        number = sum(name.split(".")[0].split(" ")[0] == start and "." not in name for name in names.values())
        start = f"{start} {number + 1}" if number else start
        for path, module in root.named_modules():
            names.setdefault(id(module), f"{start}.{path}" if path else start)
    return names
