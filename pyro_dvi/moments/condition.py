# SPDX-License-Identifier: Apache-2.0
r"""Choices by a condition, which may compare moments with numbers: ``torch.where(x > c, f(x), g(x))``.

A comparison of something uncertain is true with some probability. It is not a tensor, but :func:`torch.where`,
``masked_fill`` and ``x[x < c] = ...`` accept it, for Gaussian x and branches that are certain or known to be functions
of x. With :math:`u = x - c`, a function that is straight on either side is

.. math:: h(x) = l + (r - l)\,[u > 0] + b\,u_+ - a\,(-u)_+,

with values l and r at the cut, slopes a and b, :math:`p = \mathrm P(u > 0)` and :math:`R_\pm = \mathrm E[(\pm u)_+]`.
Its variance is a sum over pairs of the three parts,

.. math::
    \mathrm{Var} = (r - l)^2 p (1 - p) + b^2\,\mathrm{Var}[u_+] + a^2\,\mathrm{Var}[(-u)_+] + 2ab\,R_+R_-
        + 2(r - l)\bigl(b R_+ (1 - p) + a R_- p\bigr).

Status: exact where both branches are certain, multiples or shifts of x; for all other functions by Gauss-Legendre on
either side of the cut, exact to 1e-8 (float64), 3e-4 (float32) for what is smooth there.

Functions that need a value, or whose moments would mislead, are refused with a remedy.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.dispatch import Composed, Kind, broadcast
from pyro_dvi.moments.quadrature import DENSITY, averaged, distribution, half_line
from pyro_dvi.moments.rectifiers import relu
from pyro_dvi.moments.rules import functions_of, moment_rule
from pyro_dvi.moments.tensor_like import Uncertain, call, name_of
from pyro_dvi.moments.value import GaussianMoments, Link, floored, loc_of

_CHOOSING = {torch.where, torch.Tensor.where}


class Condition(Uncertain):
    """The event that Gaussian x lies above a bound, or below it.

    Args:
        x: the Gaussian.
        bound: a number or tensor that is certain.
        above: whether the event is x above the bound.

    Example:
        >>> x = GaussianMoments(torch.zeros(1), torch.ones(1))
        >>> torch.where(x > 0, x, 0.1 * x)
        GaussianMoments(loc=tensor([0.3590]), variance=tensor([0.3761]))
    """

    __slots__ = ("above", "bound", "x")

    def __init__(self, x: GaussianMoments, bound: Any, above: bool) -> None:
        self.x, self.bound, self.above = x.snapshot(), bound, above

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return call(func, args, kwargs or {}) if func in _CHOOSING else cls._refuse()

    def __invert__(self) -> "Condition":
        return Condition(self.x, self.bound, not self.above)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and hasattr(torch.Tensor, name):
            self._refuse()
        raise AttributeError(f"a comparison of moments has no attribute {name!r}")

    @staticmethod
    def _refuse(*args: Any) -> NoReturn:
        raise UnsupportedError(
            "a comparison of something uncertain has no answer, only a probability, and only torch.where(x > c, a, b), "
            "masked_fill and x[x > c] = a take it. Write one of these, or compare x.loc if the mean may decide."
        )

    __and__ = __or__ = __xor__ = __mul__ = __rmul__ = __add__ = __radd__ = _refuse


def _comparing(function: Callable, above: bool) -> Callable:
    def compare(input: Any, other: Any) -> Condition:
        if isinstance(input, GaussianMoments) and isinstance(other, GaussianMoments):
            raise UnsupportedError(
                f"torch.{function.__name__} compares two uncertain things: use torch.maximum(x, y) or torch.minimum(x, "
                "y), or compare x.loc with y.loc if the means may decide"
            )
        if isinstance(input, GaussianMoments):
            return Condition(input, other, above)
        return Condition(other, input, not above)

    compare.__doc__ = f"Return the event ``{function.__name__}`` of moments and a bound."
    return compare


_ABOVE = functions_of(torch, "gt ge greater greater_equal") + functions_of(torch.Tensor, "__gt__ __ge__")
_BELOW = functions_of(torch, "lt le less less_equal") + functions_of(torch.Tensor, "__lt__ __le__")
for _function in (*_ABOVE, *_BELOW):
    moment_rule(_function)(_comparing(_function, _function in _ABOVE))


class _Branch(NamedTuple):
    """One of the two choices, as a function of x."""

    function: Callable[[Tensor], Any]
    is_affine: bool


def _chosen(condition: Condition, input: Any, other: Any) -> GaussianMoments:
    """Return moments of ``input`` where the condition holds, and of ``other`` elsewhere.

    Raises:
        UnsupportedError: the condition asks for something that is not Gaussian, or a branch is uncertain and not known
            to be a function of what the condition asks for.
    """
    x = condition.x
    bound = torch.as_tensor(condition.bound, dtype=x.dtype, device=x.device)
    if x.link is not None:
        raise UnsupportedError(
            "torch.where(x > c, a, b) needs Gaussian x, and this x is a nonlinear function of one: compare what "
            "went into that function, or x.loc if the mean may decide"
        )
    here, elsewhere = _as_function(input, x), _as_function(other, x)
    if here is None or elsewhere is None:
        raise UnsupportedError(
            "torch.where(x > c, a, b) of uncertain x needs branches that are certain or functions of each element of x "
            "(x, 0.1 * x, torch.exp(x)), and how this one depends on x is not known. Compare x.loc if the mean may "
            "decide, or use the activation that the comparison spells out."
        )
    upper, lower = (here, elsewhere) if condition.above else (elsewhere, here)
    moments = _straight if upper.is_affine and lower.is_affine else _by_quadrature
    result = moments(x, torch.zeros_like(x.loc) + bound, lower.function, upper.function)

    def function(value: Tensor) -> Tensor:
        return torch.where(value > bound, upper.function(value), lower.function(value))

    return result.linked(Link(broadcast(x, result), function, uniform=False))


def _as_function(branch: Any, x: GaussianMoments) -> _Branch | None:
    """Follow a branch back to x; None where the way does not lead there."""
    if not isinstance(branch, GaussianMoments):
        return _Branch(lambda value: torch.as_tensor(branch, dtype=value.dtype, device=value.device), True)
    step = branch.link or branch.origin
    if branch.loc is x.loc and branch.variance is x.variance and branch.link is None:
        return _Branch(lambda value: value, True)
    if step is None or not step.elementwise:
        return None
    inner = _as_function(step.inner, x)
    return inner and _Branch(Composed(inner.function, step.function), inner.is_affine and branch.link is None)


Function = Callable[[Tensor], Tensor]


def _straight(x: GaussianMoments, cut: Tensor, lower: Function, upper: Function) -> GaussianMoments:
    left, right = lower(cut), upper(cut)
    a, b, jump = lower(cut + 1) - left, upper(cut + 1) - right, right - left
    u = GaussianMoments(x.loc - cut, x.variance)
    above, below = relu(u), relu(-u)
    z = u.loc * floored(u.variance).rsqrt()
    p, rest = distribution(z), distribution(-z)
    across = b * above.loc * rest + a * below.loc * p
    variance = (
        jump * jump * p * rest
        + b * b * above.variance
        + a * a * below.variance
        + 2 * a * b * above.loc * below.loc
        + 2 * jump * across
    )
    return GaussianMoments(left + jump * p + b * above.loc - a * below.loc, variance.clamp_min(0))


def _by_quadrature(x: GaussianMoments, cut: Tensor, lower: Function, upper: Function) -> GaussianMoments:
    reach, nodes = half_line(x.dtype)
    scale = floored(x.variance).sqrt()
    z = ((cut - x.loc) / scale).clamp(-reach, reach)

    def values() -> Iterator[tuple[Tensor, Tensor]]:
        for function, start, length in ((lower, -reach, z + reach), (upper, z, reach - z)):
            for (node,), (weight,) in zip(*nodes, strict=True):
                place = start + node * length
                density = torch.exp(-0.5 * place.square()) * length * (weight * DENSITY)
                yield function(x.loc + place * scale), density

    return averaged(torch.where(z < 0, upper(x.loc), lower(x.loc)), values())


@moment_rule(torch.masked_fill, kind=Kind.AFFINE)
def masked_fill(input: Any, mask: Tensor, value: Any) -> GaussianMoments:
    """Moments where the mask is False, and a certain value where it is True. Status: as :func:`where`."""
    if isinstance(mask, Condition) and isinstance(input, GaussianMoments):
        return _chosen(mask, value, input)
    if isinstance(mask, GaussianMoments) or isinstance(value, GaussianMoments):
        raise UnsupportedError(
            "masked_fill takes a mask and a value that are certain: pass tensors, such as x.loc"
        )
    return GaussianMoments(input.loc.masked_fill(mask, value), input.variance.masked_fill(mask, 0))


@moment_rule(torch.where, kind=Kind.AFFINE)
def where(condition: Any, input: Any = None, other: Any = None) -> GaussianMoments:
    """Moments chosen element by element.

    Status: exact for a condition that is certain. One that compares x with a bound: see the module.
    """
    if isinstance(condition, Condition) and input is not None and other is not None:
        return _chosen(condition, input, other)
    if isinstance(condition, GaussianMoments) or input is None or other is None:
        raise UnsupportedError(
            "torch.where takes a condition that is certain or compares x with a bound (x > 0), and two things to choose"
            " from"
        )
    loc = torch.where(condition, loc_of(input), loc_of(other))
    zero = loc.new_zeros(())
    first, second = (
        x.variance.to(loc.dtype) if isinstance(x, GaussianMoments) else zero for x in (input, other)
    )
    return GaussianMoments(loc, torch.where(condition, first, second))


@moment_rule(torch.Tensor.where, kind=Kind.AFFINE)
def where_method(input: Any, condition: Any, other: Any) -> GaussianMoments:
    """Moments of ``x.where(condition, other)``, whose arguments come in another order."""
    return where(condition, input, other)


def _refusing(function: Callable, instead: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"{name_of(function)} of moments is refused. {instead}.")

    refuse.__doc__ = f"Refuse ``{function.__name__}``."
    return refuse


_WITH_INDICES = [f"{kind}max_pool{dims}d_with_indices" for kind in ("", "adaptive_") for dims in (1, 2, 3)]
for _instead, _functions in {
    "A comparison of something uncertain has no answer, only a probability. Compare x.loc if the mean may decide (as "
    "in torch.where(x.loc > 0, x, y)), or use the activation that the comparison spells out": (
        functions_of(torch, "eq ne not_equal isclose allclose equal bitwise_not logical_not")
        + functions_of(torch.Tensor, "__eq__ __ne__")
    ),
    "Which element is largest is itself uncertain. Choose by the mean (x.loc.argmax(-1), then x.gather), use "
    "x.amax(-1) or pooling without indices for the element with the largest mean, and torch.logsumexp or softmax for a "
    "smooth maximum": functions_of(
        torch,
        "aminmax argmax argmin cummax cummin topk sort argsort kthvalue median quantile mode nonzero unique bernoulli "
        "multinomial max_pool1d_with_indices",
    )
    + functions_of(F, " ".join(_WITH_INDICES)),
    "The variance over elements is a sum of squares of correlated differences. Use F.layer_norm, F.batch_norm or "
    "F.group_norm, which have rules, or ((x - x.loc.mean()) ** 2).mean()": functions_of(
        torch, "var std var_mean std_mean"
    ),
    "A loss of something uncertain is its expectation over the Gaussian, not its value at one place: let the model "
    "sample the data (pyro.sample('obs', dist.Categorical(logits=logits), obs=y)), or take the loss of x.loc": [
        *functions_of(
            F,
            "cross_entropy nll_loss binary_cross_entropy binary_cross_entropy_with_logits mse_loss l1_loss "
            "smooth_l1_loss huber_loss gaussian_nll_loss poisson_nll_loss kl_div",
        ),
        torch.Tensor.backward,
    ],
    "Steps have no rule: round x.loc, or leave the function out of the model": (
        functions_of(torch, "sign sgn round floor ceil trunc frac fmod remainder floor_divide heaviside")
        + functions_of(torch.Tensor, "__mod__ __rmod__ __floordiv__ __rfloordiv__")
    ),
    "It draws samples, which moments replace: use F.softmax": [F.gumbel_softmax],
    "Call the function of this name in torch.nn.functional": functions_of(torch, "batch_norm instance_norm"),
}.items():
    for _function in dict.fromkeys(_functions):
        moment_rule(_function)(_refusing(_function, _instead))
