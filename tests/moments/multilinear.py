# SPDX-License-Identifier: Apache-2.0
r"""Brute force for functions that are linear in each of several independent Gaussians.

A polynomial y in which no element occurs squared has

.. math:: \mathrm E[y] = y(m), \qquad
    \mathrm{Var}[y] = \sum_S \sum_{i_1, i_2, \dots} \Bigl(\frac{\partial^{|S|} y}{\prod_k\partial u^{(k)}_{i_k}}\Bigr)^2
        \prod_k v^{(k)}_{i_k}

over the nonempty sets S of arguments, with dense derivatives from autograd in float64.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.func import jacrev

from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.bilinear import MultiplicativeMoments

FLOAT64 = torch.float64


@dataclass(frozen=True)
class Case:
    """A call ``func(*arguments, **kwargs)`` in which some arguments are uncertain.

    Attributes:
        func: the torch function.
        shapes: of the uncertain arguments, in order.
        kwargs: further arguments.
        first: arguments that come before them.
        weight: which argument has multiplicative noise,
        noise: of this shape; None: none has.
        cheap: whether that noise has to go the way with one product.
        plain: the function in terms that torch.func can differentiate, where it cannot the function itself.
        note: tells apart cases of one function.
    """

    func: Callable
    shapes: tuple[tuple[int, ...], ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    first: tuple = ()
    weight: int = 1
    noise: tuple[int, ...] | None = None
    cheap: bool = False
    plain: Callable | None = None
    note: str = ""

    def __str__(self) -> str:
        options = ",".join(f"{k}={v}" for k, v in self.kwargs.items())
        noise = "" if self.noise is None else f",alpha={list(self.noise)}"
        shapes = " ".join("x".join(map(str, s)) for s in self.shapes)
        return f"{self.func.__name__}({self.note}{shapes}{noise} {options})".replace(" )", ")")[:90]

    def __call__(self, *arguments: Any) -> Any:
        return self.func(*self.first, *arguments, **self.kwargs)

    def arguments(self, dtype: torch.dtype = FLOAT64) -> list[GaussianMoments]:
        """Uncertain arguments."""
        generator = torch.Generator().manual_seed(3)
        result: list[GaussianMoments] = []
        for k, shape in enumerate(self.shapes):
            loc = torch.randn(shape, generator=generator, dtype=FLOAT64).to(dtype)
            if self.noise is not None and k == self.weight:
                alpha = 0.1 + torch.rand(self.noise, generator=generator, dtype=FLOAT64).to(dtype)
                result.append(MultiplicativeMoments(loc, alpha))
            else:
                result.append(
                    GaussianMoments(
                        loc, 0.1 + torch.rand(shape, generator=generator, dtype=FLOAT64).to(dtype)
                    )
                )
        return result


def subsets(n: int) -> list[tuple[int, ...]]:
    """Every nonempty set of arguments."""
    return [s for size in range(1, n + 1) for s in combinations(range(n), size)]


def exact(
    function: Callable, arguments: list[GaussianMoments], uncertain: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Mean and variance by dense derivatives."""
    locs = [a.loc for a in arguments]
    y = function(*locs)
    variance = torch.zeros_like(y)
    for chosen in subsets(len(uncertain)):
        derivative = function
        for k in chosen:
            derivative = jacrev(derivative, argnums=uncertain[k])
        square = derivative(*locs).square()
        for k in reversed(chosen):  # the last derivative has the last dimensions
            v = arguments[uncertain[k]].variance
            square = torch.tensordot(square, v, dims=v.dim())
        variance = variance + square
    return y, variance


def check_exact(case: Case) -> None:
    """Every choice of uncertain arguments meets brute force to 1e-10."""
    arguments = case.arguments()
    for uncertain in subsets(len(arguments)):
        mixed = [a if k in uncertain else a.loc for k, a in enumerate(arguments)]
        y = case(*mixed)
        loc, variance = exact(case.plain or case, arguments, uncertain)
        assert y.shape == loc.shape
        torch.testing.assert_close(y.loc, loc, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(y.variance, variance, rtol=1e-10, atol=1e-12)


def check_gradients(case: Case) -> None:
    """Slopes in means, variances and noise, with everything uncertain and with certain inputs."""
    arguments = case.arguments()
    spreads = [a.alpha if isinstance(a, MultiplicativeMoments) else a.variance for a in arguments]
    leaves = [t.clone().requires_grad_() for a, s in zip(arguments, spreads, strict=True) for t in (a.loc, s)]
    for certain in (None, 0):

        def rule(*leaves: Tensor, certain: Any = certain) -> tuple[Tensor, Tensor]:
            given = [
                leaves[2 * k] if k == certain else type(a)(leaves[2 * k], leaves[2 * k + 1])
                for k, a in enumerate(arguments)
            ]
            y = case(*given)
            return y.loc, y.variance

        if certain is None or len(arguments) > 1:
            assert gradcheck(rule, leaves, fast_mode=True)


def check_dtype(case: Case) -> None:
    """The rule keeps float32, close to float64."""
    y, reference = (case(*case.arguments(d)) for d in (torch.float32, FLOAT64))
    assert y.loc.dtype is y.variance.dtype is torch.float32
    torch.testing.assert_close(y.variance.double(), reference.variance, rtol=1e-4, atol=1e-5)


def check_certain_limit(case: Case) -> None:
    """Without variance the rule is the function."""
    arguments = case.arguments()
    y = case(*(GaussianMoments(a.loc, torch.zeros_like(a.loc)) for a in arguments))
    torch.testing.assert_close(y.loc, case(*(a.loc for a in arguments)), rtol=1e-12, atol=1e-12)
    assert y.variance.abs().max() == 0


CHECKS = [check_exact, check_gradients, check_dtype, check_certain_limit]
