# SPDX-License-Identifier: Apache-2.0
"""What every rule of one uncertain argument has to pass.

A test module lists its functions and runs them through all checks::

    CASES = [Case(F.relu, kinks=(0.0,)), Case(F.softplus, kwargs={"beta": 2.0})]


    @pytest.mark.parametrize("check", CHECKS, ids=name_of_check)
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_rule(case, check):
        check(case)

The oracle of a function of each element is quadrature in float64: Gauss-Legendre on panels that end at its kinks. Any
other rule, or one that claims no more than an approximation, brings its own oracle.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import gradcheck

from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.tensor_like import ENTRIES

SCALES = (1e-4, 1e-3, 1e-2, 0.1, 0.3, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 5.0, 10.0)
Oracle = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Case:
    """One call ``func(x, *args, **kwargs)`` of a function that has a rule, with uncertain x.

    Attributes:
        func: the torch function.
        shape: of x.
        args: after x; tensors follow its dtype.
        kwargs: by name.
        kinks: where the function or one of its derivatives jumps.
        jumps: the places among them where the function itself jumps: x has no derivative there.
        oracle: mean and variance from those of x; None: quadrature over each element.
        domain: where the means of x may lie.
        scales: standard deviations of x.
        reach: the largest |mean / deviation|.
        tolerance: relative error in float64 and float32.
        in_place: whether forms that work in place give the same; False for functions that change the shape.
        note: tells apart cases of one function.
    """

    func: Callable
    shape: tuple[int, ...] = (5,)
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    kinks: tuple[float, ...] = ()
    jumps: tuple[float, ...] = ()
    oracle: Oracle | None = None
    domain: tuple[float, float] = (-400.0, 400.0)
    scales: tuple[float, ...] = SCALES
    reach: float = 40.0
    tolerance: tuple[float, float] = (1e-8, 1e-4)
    in_place: bool = True
    note: str = ""

    def __str__(self) -> str:
        owner = getattr(self.func, "__module__", None) or "torch"
        name = getattr(self.func, "__name__", repr(self.func))
        options = ",".join([*map(str, self.args), *(f"{k}={v}" for k, v in self.kwargs.items())])
        return f"{owner.rsplit('.', 1)[-1]}.{name}({self.note or options})".replace("\n", "")[:70]

    def __call__(self, x: Any) -> Any:
        args = (a.to(x.dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in self.args)
        return self.func(x, *args, **self.kwargs)


# --- the oracle ----------------------------------------------------------------------------------------------


class Integrals(NamedTuple):
    """Mean and variance of f(x), and their slopes in the mean and variance of x."""

    mean: Tensor
    variance: Tensor
    mean_by_mu: Tensor
    mean_by_variance: Tensor
    variance_by_mu: Tensor
    variance_by_variance: Tensor


_NODES, _WEIGHTS = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(20))
_FEATURES = tuple(range(-24, 25))  # panels of length 1 around 0, where activations bend


def quadrature(f: Callable, mu: Tensor, variance: Tensor, kinks: tuple[float, ...] = ()) -> Integrals:
    """Integrate over each element by itself, in float64.

    The variance is centred on the mean, and slopes come from the score of the Gaussian, so that nothing of f but
    its values is used.
    """
    mu, sigma = mu.double()[..., None], variance.double().sqrt()[..., None]
    reach = 13.0
    cuts = torch.tensor(sorted({*_FEATURES, *kinks}), dtype=mu.dtype)
    edges = torch.cat([(cuts - mu) / sigma, torch.arange(-reach, reach + 1).expand(*mu.shape[:-1], -1)], -1)
    edges = edges.clamp(-reach, reach).sort(-1).values[..., None]
    half = edges.diff(dim=-2) / 2
    z = (edges[..., :-1, :] + half + half * _NODES).flatten(-2)
    weight = (half * _WEIGHTS).flatten(-2) * torch.exp(-z.square() / 2) / (2 * torch.pi) ** 0.5
    offset = f(mu)
    d = f(mu + sigma * z) - offset
    shift = (weight * d).sum(-1, keepdim=True)
    centred = d - shift
    square = centred.square()

    def integral(g: Tensor) -> Tensor:
        return (weight * g).sum(-1)

    s = sigma[..., 0]
    curvature = (z.square() - 1) / 2
    return Integrals(
        (offset + shift)[..., 0],
        integral(square),
        integral(d * z) / s,
        integral(d * curvature) / s**2,
        integral(square * z) / s,
        integral(square * curvature) / s**2,
    )


def grid(case: Case) -> tuple[Tensor, Tensor]:
    """Means and variances: far tails, the bend of the function, its kinks, for every scale."""
    points = []
    for sigma in case.scales:
        far = [
            sigma * r * case.reach for r in (-1, -0.5, -0.2, -0.1, -0.05, 0, 0.03, 0.07, 0.15, 0.3, 0.7, 1)
        ]
        near = [-6.0, -3.1, -2.0, -1.28, -0.7, -0.1, 0.0, 0.2, 1.0, 1.9, 3.3, 6.2, *case.kinks]
        near += [k + side * sigma for k in case.kinks for side in (-2, -0.5, 0.5, 2)]
        points += [(mu, sigma**2) for mu in (*far, *near) if case.domain[0] <= mu <= case.domain[1]]
        points = [(mu, v) for mu, v in points if abs(mu) <= 400 or case.reach * v**0.5 >= 400]
    table = torch.tensor(points, dtype=torch.float64)
    return table[:, 0], table[:, 1]


class Errors(NamedTuple):
    """Largest errors over the grid, relative to the value or to the scale of x, whichever fits."""

    mean: float
    variance: float
    slopes: float


_SLACK = (
    1e-2,
    1e-3,
)  # of the deviation and variance of x: what is below their product with the error is zero


def errors(case: Case, dtype: torch.dtype = torch.float64) -> Errors:
    """Compare a rule with quadrature on the grid.

    The mean is measured against |mean| + sd, plus a hundredth of the deviation of x; the variance against itself, plus
    a thousandth of that of x; slopes in units that make them comparable to the deviation and the variance.
    """
    mu, variance = (t.to(dtype) for t in grid(case))  # rounded first: both sides see the same Gaussian
    mu, variance = mu.requires_grad_(), variance.requires_grad_()
    y = case(GaussianMoments(mu, variance))
    by_mean = torch.autograd.grad(y.loc.sum(), (mu, variance), retain_graph=True)
    by_variance = torch.autograd.grad(y.variance.sum(), (mu, variance))
    with torch.no_grad():
        truth = quadrature(case, mu, variance, (*case.kinks, *case.jumps))
        v = variance.double()
        sigma = v.sqrt()
        spread = truth.variance + _SLACK[1] * v
        deviation = truth.variance.sqrt() + _SLACK[0] * sigma
        slopes = [
            (by_mean[0] - truth.mean_by_mu) * sigma / deviation,
            (by_mean[1] - truth.mean_by_variance) * v / deviation,
            (by_variance[0] - truth.variance_by_mu) * sigma / spread,
            (by_variance[1] - truth.variance_by_variance) * v / spread,
        ]
        return Errors(
            _largest((y.loc - truth.mean) / (truth.mean.abs() + deviation)),
            _largest((y.variance - truth.variance) / spread),
            max(map(_largest, slopes)),
        )


def _largest(error: Tensor) -> float:
    assert error.isfinite().all(), "not finite"
    return error.abs().max().item()


# --- the checks ----------------------------------------------------------------------------------------------


def check_accuracy(case: Case) -> None:
    """Mean, variance and their slopes meet the oracle, in both precisions."""
    for dtype, tolerance in zip((torch.float64, torch.float32), case.tolerance, strict=True):
        if case.oracle is None:
            found = errors(case, dtype)
            assert max(found.mean, found.variance) < tolerance, (dtype, found)
            assert found.slopes < 10 * tolerance, (dtype, found)
        else:
            x = _sample(case, dtype)
            y = case(x)
            mean, variance = case.oracle(x.loc.double(), x.variance.double())
            scale = mean.abs() + variance.sqrt()
            assert _largest((y.loc - mean) / (scale + 1e-30)) < tolerance
            assert _largest((y.variance - variance) / (variance + 1e-30)) < tolerance


def check_certain_limit(case: Case) -> None:
    """Without variance the rule is the function; its slopes are finite."""
    for dtype in (torch.float64, torch.float32):
        x = _sample(case, dtype)
        mu, variance = x.loc.requires_grad_(), torch.zeros_like(x.variance).requires_grad_()
        y = case(GaussianMoments(mu, variance))
        rounding = 64 * torch.finfo(dtype).eps
        torch.testing.assert_close(y.loc, case(mu), rtol=rounding, atol=rounding)
        assert y.variance.max() <= 1e-10
        assert y.variance.min() >= 0
        for slope in torch.autograd.grad(y.loc.sum() + y.variance.sum(), (mu, variance)):
            assert slope.isfinite().all()


def check_gradients(case: Case) -> None:
    """Slopes are those of the rule's own values."""
    x = _sample(case, torch.float64)

    def rule(mu: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        y = case(GaussianMoments(mu, variance))
        return y.loc, y.variance

    inputs = (x.loc.requires_grad_(), x.variance.requires_grad_())
    assert gradcheck(rule, inputs, eps=1e-5, atol=1e-6, rtol=1e-5)


def check_variance(case: Case) -> None:
    """No variance is negative, nothing overflows, wherever the Gaussian lies: from far below 0 to far above."""
    low, high = case.domain
    generator = torch.Generator().manual_seed(0)
    places = torch.cartesian_prod(
        torch.linspace(-6, 1, 8), torch.tensor([-1.0, -0.3, 0.0, 0.3, 1.0])
    ).double()
    if case.oracle is None:  # of each element: all places at once
        parts = [(*places[:, :, None].unbind(1), (len(places), 64))]
    else:
        parts = [(exponent, offset, case.shape) for exponent, offset in places]
    for exponent, offset, size in parts:
        noise = torch.randn(size, generator=generator, dtype=torch.float64)
        sigma = (10**exponent).clamp_max(max(case.scales))
        mu = (case.reach * sigma * (offset + 0.1 * noise)).clamp(low, high)
        for dtype in (torch.float32, torch.float64):
            loc = mu.to(dtype).requires_grad_()
            variance = sigma.square().to(dtype).expand(size).clone().requires_grad_()
            y = case(GaussianMoments(loc, variance))
            assert y.loc.isfinite().all()
            assert y.variance.isfinite().all()
            assert (y.variance >= 0).all()
            for slope in torch.autograd.grad(y.loc.sum() + y.variance.sum(), (loc, variance)):
                assert slope.isfinite().all()


def check_spellings(case: Case) -> None:
    """Methods and forms that work in place give the same."""
    x = _sample(case, torch.float64)
    expected = case(x)
    name = getattr(case.func, "__name__", "")
    rule = ENTRIES[case.func].rule
    for spelling in (name, f"{name}_"):
        for owner in (torch.Tensor, torch, torch.nn.functional):
            function = getattr(owner, spelling, None)
            entry = ENTRIES.get(function) if callable(function) else None
            if entry is None or entry.rule is not rule or (entry.in_place and not case.in_place):
                continue
            y = GaussianMoments(x.loc.clone(), x.variance.clone())
            if owner is torch.Tensor:
                result = getattr(y, spelling)(*case.args, **case.kwargs)
            else:
                result = function(y, *case.args, **case.kwargs)
            _assert_same(result, expected)
            assert (result is y) == entry.in_place
    if _has_option(case.func, "inplace"):
        y = GaussianMoments(x.loc.clone(), x.variance.clone())
        assert case.func(y, *case.args, **{**case.kwargs, "inplace": True}) is y
        _assert_same(y, expected)


def check_dtype(case: Case) -> None:
    """The result has the dtype, device and shape that the function gives, however the shape is split up."""
    for dtype in (torch.float32, torch.float64):
        x = _sample(case, dtype)
        y = case(x)
        assert y.loc.dtype is y.variance.dtype is dtype
        assert y.shape == case(x.loc).shape
        assert y.variance.shape == y.shape
    if case.oracle is None:
        x = GaussianMoments(x.loc.flatten(), x.variance.flatten())
        parts = [case(GaussianMoments(x.loc[k], x.variance[k])) for k in range(len(x.loc))]
        _assert_same(
            GaussianMoments(*(torch.stack([getattr(p, a) for p in parts]) for a in ("loc", "variance"))),
            case(x),
        )


CHECKS = [check_accuracy, check_certain_limit, check_gradients, check_variance, check_spellings, check_dtype]


def name_of_check(check: Callable) -> str:
    """Name a check in the list of tests."""
    return check.__name__.removeprefix("check_")


def _sample(case: Case, dtype: torch.dtype) -> GaussianMoments:
    """Gaussians about the bend of the function, none at a kink, with variances around a half."""
    low, high = (max(case.domain[0], -2.3), min(case.domain[1], 2.3))
    count = int(np.prod(case.shape, dtype=int))
    steps = torch.linspace(0, 1, count + 2, dtype=torch.float64)[1:-1]
    largest = min(0.8, max(case.scales))
    variance = (largest * (0.4 + 0.6 * steps.flip(0))).square()
    loc = low + (high - low) * steps + 0.0137
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    return GaussianMoments(*(t[order].reshape(case.shape).to(dtype) for t in (loc, variance)))


def _assert_same(first: GaussianMoments, second: GaussianMoments) -> None:
    torch.testing.assert_close(first.loc, second.loc, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(first.variance, second.variance, rtol=1e-12, atol=1e-14)


def _has_option(function: Callable, option: str) -> bool:
    try:
        return option in inspect.signature(function).parameters
    except (TypeError, ValueError):  # built into torch: no signature
        return False
