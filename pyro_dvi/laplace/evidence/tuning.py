# SPDX-License-Identifier: Apache-2.0
"""Scales of prior and noise, chosen after training: what can be tuned, and the search."""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_dvi.errors import ArgumentError, DviWarning, ModelError, NotPositiveDefiniteError, UnsupportedError
from pyro_dvi.handlers.rescaled import RescaledModel, scale_names
from pyro_dvi.laplace.energy.energy import Energy
from pyro_dvi.laplace.methods.posterior import Method
from pyro_dvi.progress import progress_bar

__all__ = [
    "Criterion",
    "NoiseScale",
    "PriorPrecision",
    "Scale",
    "Tuning",
    "TuningCurve",
    "rescaled_model",
    "tune",
]


class Scale(ABC):
    """What is tuned: a positive number that multiplies something in the model.

    Attributes:
        exponent: of the number, in what multiplies the scale of the sites' distributions.
        of_prior: it changes the prior's part of P, not the likelihood's.
        decades: above and below 1, in which values are tried where the caller names none.
        num_values: how many.
    """

    exponent: ClassVar[float]
    of_prior: ClassVar[bool]
    decades: ClassVar[int]
    num_values: ClassVar[int]

    @abstractmethod
    def sites(self, energy: Energy) -> list[str]:
        """Return the sites whose distributions change."""

    def factor(self, value: float) -> float:
        """Return what multiplies the scale of these sites."""
        return value**self.exponent

    def grid(self) -> Tensor:
        """Return the values that are tried where the caller names none."""
        return torch.logspace(-self.decades, self.decades, self.num_values, dtype=torch.float64)

    def proportions(self, value: float) -> tuple[float, float]:
        """Return what multiplies the likelihood's part of P and the prior's, if all sites of a kind change."""
        precision = value ** (-2 * self.exponent)
        return (1.0, precision) if self.of_prior else (precision, 1.0)


@dataclass(frozen=True)
class PriorPrecision(Scale):
    """The precision of the prior, times one number for several sites.

    Args:
        names: the sites, by name or pattern (``"net.0.*"``); None: all that are uncertain and whose prior is Normal,
            MultivariateNormal, StudentT, Laplace or Cauchy.
    """

    names: str | None = None

    exponent, of_prior, decades, num_values = -0.5, True, 3, 25

    def sites(self, energy: Energy) -> list[str]:
        """Return the latent sites.

        Raises:
            ArgumentError: the pattern fits no site that is uncertain.
            UnsupportedError: the prior of a site has no scale to multiply.
        """
        nodes = _nodes(energy)
        scalable = [name for name in energy.layout.names if scale_names(nodes[name]["fn"]) is not None]
        if self.names is None:
            if not scalable:
                raise UnsupportedError(
                    "no uncertain site has a prior whose scale can be multiplied: Normal, MultivariateNormal, "
                    "StudentT, Laplace or Cauchy"
                )
            return scalable
        chosen = [name for name in energy.layout.names if fnmatchcase(name, self.names)]
        if not chosen:
            raise ArgumentError(
                f"PriorPrecision({self.names!r}) fits no uncertain site; there are {energy.layout.names}"
            )
        for name in chosen:
            if name not in scalable:
                raise UnsupportedError(
                    f"the prior of {name!r}, a {type(nodes[name]['fn']).__name__}, has no scale that can be multiplied"
                )
        return chosen


@dataclass(frozen=True)
class NoiseScale(Scale):
    """The scale of the observation noise, times a number.

    Args:
        site: the observed site, a Normal, MultivariateNormal, StudentT, Laplace or Cauchy; None for the one that the
            model has.
    """

    site: str | None = None

    exponent, of_prior, decades, num_values = 1.0, False, 1, 17

    def sites(self, energy: Energy) -> list[str]:
        """Return the observed site.

        Raises:
            ModelError: there is no such site, or several to choose from.
            UnsupportedError: it has no scale.
        """
        nodes = _nodes(energy)
        observed = [
            site.name for site in energy.first_run(energy.start)[1].sites if self.site in (None, site.name)
        ]
        if len(observed) != 1:
            raise ModelError(f"NoiseScale(site) needs one observed site; {observed or 'none'} would do")
        if scale_names(nodes[observed[0]]["fn"]) is None:
            raise UnsupportedError(
                f"observed site {observed[0]!r}, a {type(nodes[observed[0]]['fn']).__name__}, has no noise scale"
            )
        return observed


def rescaled_model(model: Callable[..., Any], factors: Mapping[str, float]) -> Callable[..., Any]:
    """Return the model with scales multiplied; the model itself where nothing changes."""
    changed = {name: factor for name, factor in factors.items() if factor != 1}
    return RescaledModel(model, changed) if changed else model


def _nodes(energy: Energy) -> Any:
    return energy.first_run(energy.start)[1].trace.nodes


_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Tuning:
    """A search for the best value, as a criterion sees it.

    Attributes:
        energy: U with value 1.
        scale: what is tuned.
        sites: the sites that change.
        method: how the Gaussian is represented.
        seed: of random numbers.
    """

    energy: Energy
    scale: Scale
    sites: Sequence[str]
    method: Method
    seed: int

    def candidate(self, value: float) -> Energy:
        """Return U with another value; the mode stays where it is."""
        factors = dict.fromkeys(self.sites, self.scale.factor(value))
        return self.energy.with_model(rescaled_model(self.energy.model, factors))


class Criterion(ABC):
    """What makes one value better than another."""

    @abstractmethod
    def score(self, tuning: Tuning) -> Callable[[float], float]:
        """Return the function of the value that is to be as large as possible.

        It raises ``NotPositiveDefiniteError`` for a value without a Gaussian.
        """


@dataclass(frozen=True)
class TuningCurve:
    """Values that were tried, and how good they are.

    Attributes:
        values: ascending.
        scores: larger is better; NaN where the precision is not positive definite.
        best: the value that was taken.
        at_edge: it is the smallest or largest that was tried.
        what: what was tuned, by which criterion.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> from pyro_dvi.laplace import LaplaceGuide
        >>> def model(x, y=None):
        ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         return pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)
        >>> x = torch.ones(3)
        >>> guide = LaplaceGuide(model)
        >>> guide.initialize(x, x)
        >>> _ = guide.polish([(x, x)], progress=False)
        >>> curve = guide.tune([(x, x)], progress=False)
        >>> round(curve.best, 1), guide.scale_factors["slope"] == curve.best**-0.5
        (1.3, True)
    """

    values: Tensor
    scores: Tensor
    best: float
    at_edge: bool
    what: str

    def __str__(self) -> str:
        rows = [
            f"  {v:<10.4g} {s:.6g}{'  <- best' if v == self.best else ''}"
            for v, s in zip(self.values.tolist(), self.scores.tolist(), strict=True)
        ]
        return "\n".join([self.what, *rows])


def tune(
    tuning: Tuning,
    criterion: Criterion,
    *,
    values: Sequence[float] | Tensor,
    refinements: int,
    progress: bool,
) -> TuningCurve:
    """Find the best value on a grid, then between its neighbours by golden sections of the logarithm.

    Args:
        tuning: what varies, and around which mode.
        criterion: what is best.
        values: the grid, positive.
        refinements: values to try between the neighbours of the best one; none where that is at the edge.
        progress: show a progress bar where there is a terminal or notebook.

    Raises:
        ArgumentError: values that are not positive, or none.
        NotPositiveDefiniteError: no value has a positive definite precision.
    """
    grid = sorted({float(v) for v in values})
    if not grid or not all(0 < v < math.inf for v in grid) or refinements < 0:
        raise ArgumentError(
            f"values must be positive numbers, and refinements not negative; got {values!r} and {refinements}"
        )
    what = f"{tuning.scale} by {criterion}"
    tried: dict[float, float] = {}
    with progress_bar(progress, len(grid) + refinements, unit="value") as bar:
        score = criterion.score(tuning)

        def attempt(value: float) -> float:
            try:
                tried[value] = score(value)
            except NotPositiveDefiniteError:
                tried[value] = math.nan
            bar.update()
            return -math.inf if math.isnan(tried[value]) else tried[value]

        for value in grid:
            attempt(value)
        if all(math.isnan(s) for s in tried.values()):
            raise NotPositiveDefiniteError(
                "the precision is not positive definite for any value: run guide.polish(batches), or use GGN()"
            )
        place = max(range(len(grid)), key=lambda i: _known(tried[grid[i]]))
        at_edge = place in (0, len(grid) - 1)
        if not at_edge:
            _golden(attempt, grid[place - 1], grid[place + 1], refinements)
    best = max(tried, key=lambda v: _known(tried[v]))
    if at_edge:
        warnings.warn(
            f"the best of {what} is {best:.4g}, the {'smallest' if place == 0 else 'largest'} value that was tried: "
            "pass values that reach further",
            DviWarning,
            stacklevel=3,
        )
    tried = dict(sorted(tried.items()))
    return TuningCurve(
        torch.tensor(list(tried), dtype=torch.float64),
        torch.tensor(list(tried.values()), dtype=torch.float64),
        best,
        at_edge,
        what,
    )


def _golden(attempt: Callable[[float], float], low: float, high: float, count: int) -> None:
    """Narrow a bracket of a maximum in the logarithm, by ``count`` evaluations."""
    if count < 2:
        return
    a, b = math.log(low), math.log(high)
    c, d = b - _GOLDEN * (b - a), a + _GOLDEN * (b - a)
    at_c, at_d = attempt(math.exp(c)), attempt(math.exp(d))
    for _ in range(count - 2):
        if at_c > at_d:
            b, d, at_d = d, c, at_c
            c = b - _GOLDEN * (b - a)
            at_c = attempt(math.exp(c))
        else:
            a, c, at_c = c, d, at_d
            d = a + _GOLDEN * (b - a)
            at_d = attempt(math.exp(d))


def _known(score: float) -> float:
    return -math.inf if math.isnan(score) else score
