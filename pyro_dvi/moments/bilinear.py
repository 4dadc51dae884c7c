# SPDX-License-Identifier: Apache-2.0
r"""Moments of functions that are linear in an input and linear in a weight (linear layers, matrix products).

One formula serves all layers.

For independent factors :math:`y = \sum_j w_j x_j` has

.. math::
    \mathrm E[y] = \sum_j \mathrm E[w_j]\mathrm E[x_j], \qquad
    \mathrm{Var}[y] = \sum_j \mathrm E[w_j]^2 \mathrm{Var}[x_j]
        + \mathrm{Var}[w_j]\bigl(\mathrm E[x_j]^2 + \mathrm{Var}[x_j]\bigr).

Both lines apply the same linear map to different arguments; in a convolutional layer, this map is a convolution.
Weights with multiplicative noise, :math:`\mathrm{Var}[w_j] = \alpha_j \mathrm E[w_j]^2`, need only one more application
of the map:

.. math::
    \mathrm{Var}[y] = \sum_j \mathrm E[w_j]^2
        \bigl(\alpha_j(\mathrm E[x_j]^2 + \mathrm{Var}[x_j]) + \mathrm{Var}[x_j]\bigr).

Status: exact for independent inputs and weights. Inputs of deeper layers are not independent, because they are computed
with the same weights; the method assumes that they are independent.

Source: Schmitt & Roth (2021), Eq. 9; Wu et al. (2019), "Deterministic variational inference".
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.core.elementwise import Elementwise, fuses
from pyro_dvi.core.undisturbed import without_autocast
from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.full_covariance import are_followed, full_product
from pyro_dvi.moments.rules import moment_rule
from pyro_dvi.moments.shared_noise import JointMoments, joint_product
from pyro_dvi.moments.value import GaussianMoments, loc_of, second_moment_of, variance_of


class MultiplicativeMoments(GaussianMoments):
    r"""Gaussian weights with multiplicative noise: :math:`\mathcal N(m, \alpha m^2)`.

    With such weights, linear functions of deterministic or uncertain inputs need one additional product instead of two.
    All other functions use the variance.

    Args:
        loc: m.
        alpha: relative variance, broadcastable to ``loc``.

    Source: Schmitt & Roth (2021), Eq. 5.
    """

    __slots__ = ("alpha",)

    def __init__(self, loc: Tensor, alpha: Tensor) -> None:
        super().__init__(loc, loc)
        self.alpha = alpha

    @property
    def variance(self) -> Tensor:
        """Variances, computed on first access."""
        if self._variance is self._loc:
            self._variance = self.loc * self.alpha * self.loc
        return self._variance

    def become(self, other: GaussianMoments) -> GaussianMoments:
        """Raise an error: weights cannot be changed in place."""
        raise UnsupportedError(
            "weights cannot be changed in place: use a function that returns a new tensor, as in w = f(w)"
        )


# Called as product(x, weight) or, with a bias, product(x, weight, bias).
Map = Callable[..., Tensor]


def bilinear_moments(
    product: Map, x: Any, weight: Any, alpha: Tensor | None = None, bias: Any = None
) -> GaussianMoments:
    """Moments of ``product(x, weight)`` or ``product(x, weight, bias)``, which is linear in x and linear in weight.

    Args:
        product: the linear map, called with means, variances or second moments.
        x: moments or a deterministic tensor.
        weight: likewise; at least one of the two must be uncertain.
        alpha: relative variance of the weight, in a shape that multiplies ``x``; given only if the weight is
            :class:`~pyro_dvi.moments.bilinear.MultiplicativeMoments` and all weights of an input have the same relative
            variance.
        bias: added to the product, deterministic or uncertain.

    Raises:
        UnsupportedError: if x and the weight are the same object.
    """
    if x is weight:
        raise UnsupportedError(
            "the product of uncertain x with itself has no rule: write x.square().sum() for a sum of squares"
        )
    if are_followed() or any(isinstance(factor, JointMoments) for factor in (x, weight, bias)):
        dependent = full_product if are_followed() else joint_product
        with without_autocast(weight.device):  # which loses covariances, and skips vmap of a bias
            return dependent(product, *_widened(x, weight, bias))
    noisy = alpha is not None and isinstance(weight, MultiplicativeMoments) and isinstance(x, GaussianMoments)
    variance = None if noisy else variance_of(weight)
    shift, spread = (() if bias is None else (bias,) for bias in (loc_of(bias), variance_of(bias)))
    mean, w, x_variance = loc_of(x), loc_of(weight), variance_of(x)
    inputs = second = None
    if noisy and fuses(mean, x_variance, alpha):
        mean, inputs = _NOISY(mean, x_variance, alpha)
    elif x_variance is not None and variance is not None and fuses(mean, x_variance):
        mean, x_variance, second = _SECOND(mean, x_variance)
    loc = product(mean, w, *shift)
    if x_variance is None:
        return GaussianMoments(loc, product(_square(mean, loc), variance, *spread))
    if variance is None:
        if inputs is None:
            inputs = _NOISY.plain(mean, x_variance, alpha) if noisy else x_variance
        return GaussianMoments(loc, product(inputs, _square(w, loc), *spread))
    second = _SECOND.plain(mean, x_variance) if second is None else second
    of_weights = product(second, variance, *spread)
    return GaussianMoments(loc, of_weights + product(x_variance, w * w))


def _widened(*factors: Any) -> list[Any]:
    """Return the arguments of a product in the widest floating-point dtype among them."""
    kinds = [f.dtype for f in factors if f is not None and f.is_floating_point()]
    wide = reduce(torch.promote_types, kinds)
    return [f.to(wide) if f is not None and f.dtype in kinds and f.dtype is not wide else f for f in factors]


def _square(certain: Tensor, like: Tensor) -> Tensor:
    """Return the square, computed in floating point so that small integers do not overflow."""
    certain = certain if certain.is_floating_point() else certain.to(like.dtype)
    return certain * certain


# The variance of x multiplied by noise of mean 1 and relative variance α, and the second moment of x. On a GPU, x goes
# through the kernels, which add their gradients of x to the gradient of E[y].
_NOISY = Elementwise(
    "noisy",
    "y",
    "y = alpha * (x * x + variance) + variance;",
    lambda x, variance, alpha: torch.addcmul(variance, alpha, torch.addcmul(variance, x, x)),
    Elementwise(
        "noisy_backward",
        "g_x, g_variance, g_alpha",
        "T g = g_y * alpha; g_x = g_mean + 2 * x * g; g_variance = g_y + g; g_alpha = g_y * (x * x + variance);",
        lambda g_mean, g_y, x, variance, alpha: (
            g_mean + 2 * x * (g_y * alpha),
            g_y + g_y * alpha,
            g_y * (x * x + variance),
        ),
    ),
    unchanged=1,
)
_SECOND = Elementwise(
    "second_moment",
    "y",
    "y = x * x + variance;",
    lambda x, variance: torch.addcmul(variance, x, x),
    Elementwise(
        "second_moment_backward",
        "g_x, g_v",
        "g_x = g_mean + 2 * x * g_y; g_v = g_variance + g_y;",
        lambda g_mean, g_variance, g_y, x, variance: (g_mean + 2 * x * g_y, g_variance + g_y),
    ),
    unchanged=2,
)


@moment_rule(F.linear)
def linear(input: Any, weight: Any, bias: Any = None) -> GaussianMoments:
    r"""Moments of :math:`xW^\top + b`.

    Status: exact for independent inputs and weights (:mod:`pyro_dvi.moments.bilinear`).

    Args:
        input: ``[*, in]``.
        weight: ``[out, in]``.
        bias: ``[out]``.

    Source: Schmitt & Roth (2021), Eq. 9.

    Example:
        >>> x, weight = (
        ...     torch.ones(1, 4),
        ...     MultiplicativeMoments(torch.ones(1, 4), torch.full((1, 4), 0.1)),
        ... )
        >>> F.linear(x, weight)
        GaussianMoments(loc=tensor([[4.]]), variance=tensor([[0.4000]]))
    """
    if isinstance(weight, GaussianMoments) or isinstance(input, GaussianMoments):
        return bilinear_moments(F.linear, input, weight, _alpha_of_columns(weight), bias)
    return GaussianMoments(F.linear(input, weight, bias.loc), bias.variance)


@moment_rule(torch.matmul, torch.mm, torch.bmm, torch.mv)
def matmul(input: Any, *factor: Any, **named: Any) -> GaussianMoments:
    r"""Moments of the matrix product :math:`XW`, for all the shapes that :func:`torch.matmul` accepts.

    Status: exact for independent factors, one or both uncertain, batched or not.

    Args:
        input: ``[*, M, d]`` or ``[d]``.
        factor: ``[*, d, n]`` or ``[d]``.
        named: the second factor, if it is passed by keyword (``other``, ``mat2`` or ``vec``).

    Raises:
        UnsupportedError: for the product of a matrix with itself, whose factors are not independent.

    Example:
        >>> x = GaussianMoments(torch.tensor([1.0, 2.0]), torch.tensor([0.1, 0.1]))
        >>> x @ torch.ones(2, 1)
        GaussianMoments(loc=tensor([3.]), variance=tensor([0.2000]))
    """
    (other,) = (*factor, *named.values())
    if input is other and input.dim() == 1:
        return dot(input, other)
    return bilinear_moments(torch.matmul, input, other)


@moment_rule(torch.dot)
def dot(input: Any, tensor: Any) -> GaussianMoments:
    r"""Moments of :math:`\sum_i x_i y_i`.

    Status: exact for independent factors, and for ``dot(x, x)``: :math:`\sum_i 2 v_i^2 + 4 m_i^2 v_i`.
    """
    if input is tensor:
        loc, variance = input.loc, input.variance
        return GaussianMoments(
            second_moment_of(input).sum(), torch.dot(variance, 2 * variance + 4 * loc * loc)
        )
    return bilinear_moments(torch.dot, input, tensor)


@moment_rule(torch.addmm, torch.baddbmm, torch.addmv)
def add_product(input: Any, *factors: Any, beta: Any = 1, alpha: Any = 1, **named: Any) -> GaussianMoments:
    r"""Moments of :math:`\beta\,\mathrm{input} + \alpha\,AB`. Status: exact for independent arguments."""
    # mat1 and mat2, batch1 and batch2, mat and vec
    first, second = (*factors, *(named[name] for name in sorted(named)))
    is_uncertain = isinstance(first, GaussianMoments) or isinstance(second, GaussianMoments)
    product = matmul(first, second) if is_uncertain else torch.matmul(first, second)
    return input * beta + product * alpha


@moment_rule(torch.einsum)
def einsum(equation: str, *operands: Any) -> GaussianMoments:
    r"""Moments of sums of products of one or two operands.

    Status: exact for independent operands. An index that occurs in one operand only is summed first, so that no
    uncertain element occurs twice in a sum.

    Raises:
        UnsupportedError: for more than two operands, the same uncertain operand twice, or a sum over an ellipsis.

    Example:
        >>> x = GaussianMoments(torch.ones(2, 3), torch.ones(2, 3))
        >>> torch.einsum("ij,j->i", x, torch.tensor([1.0, 2.0, 3.0])).variance
        tensor([14., 14.])
    """
    terms, output = _subscripts(equation, operands)
    reduced = []
    for k, (term, operand) in enumerate(zip(terms, operands, strict=True)):
        others = output + "".join(terms[:k] + terms[k + 1 :])
        # Make each index unique: take diagonals, and sum over indices that occur nowhere else.
        kept = "".join(i for i in dict.fromkeys(term.replace("...", "")) if i in others)
        kept = "..." + kept if "..." in term else kept
        if kept != term:
            operand = _linear_in_one(partial(torch.einsum, f"{term}->{kept}"), operand)
        terms[k] = kept
        reduced.append(operand)
    product = partial(torch.einsum, f"{','.join(terms)}->{output}")
    if len(reduced) == 1:
        return _linear_in_one(product, reduced[0])
    return bilinear_moments(product, *reduced)


def _subscripts(equation: str, operands: tuple) -> tuple[list[str], str]:
    """Split an equation into its terms; raise an error if the rule does not cover it."""
    left, arrow, output = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    letters = left.replace("...", "").replace(",", "")
    if not arrow:
        output = "..." if "..." in left else ""
        output += "".join(sorted(i for i in set(letters) if letters.count(i) == 1))
    reason = None
    if len(operands) > 2:
        reason = "more than two operands: contract two at a time"
    elif len(operands) == 2 and operands[0] is operands[1]:
        reason = (
            "the same uncertain operand twice, which is not independent of itself: use x.square() and a sum"
        )
    elif "..." in left and "..." not in output:
        reason = "a sum over an ellipsis: name its indices"
    elif _sizes_differ(terms, operands):
        reason = "an index of size 1 in one operand and larger in another: expand the operand first"
    if reason is not None:
        raise UnsupportedError(f'torch.einsum("{equation}") of moments has no rule for {reason}.')
    return terms, output


def _sizes_differ(terms: list[str], operands: tuple) -> bool:
    """Return True if broadcasting an index would repeat an element; the rule would treat copies as independent."""
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, operands, strict=True):
        before, _, after = term.partition("...")
        pairs = [*zip(before, operand.shape, strict=False)]
        pairs += zip(reversed(after), reversed(operand.shape), strict=False)
        if any(sizes.setdefault(index, size) != size for index, size in pairs):
            return True
    return False


def _linear_in_one(function: Any, x: Any) -> Any:
    """Sum or rearrange elements, each of which enters an output at most once."""
    if not isinstance(x, GaussianMoments):
        return function(x)
    return GaussianMoments(function(x.loc), function(x.variance))


def _alpha_of_columns(weight: Any) -> Tensor | None:
    """Return the relative variances as one row, if all rows of a weight share them (``[1, in]``); otherwise None."""
    if not isinstance(weight, MultiplicativeMoments):
        return None
    alpha = weight.alpha
    if alpha.dim() < 2:
        return alpha if weight.dim() <= 2 else None
    return alpha.squeeze(-2) if alpha.shape[-2] == 1 and alpha.dim() == weight.dim() == 2 else None
