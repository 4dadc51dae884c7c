# SPDX-License-Identifier: Apache-2.0
r"""Moments of dependent Gaussians: the weights of one layer, and the outputs that are linear in them.

.. math:: x_i = \bar x_i + \sum_r F_{ri}\,\epsilon_r + \sqrt{d_i}\,\delta_i, \qquad \epsilon_r, \delta_i \sim N(0, 1)

The weights of a posterior with a Cholesky factor or a low-rank factor have this form, and so does everything that is
linear in them. A function that moves or scales weights moves or scales the elements of each row of F. For a layer
:math:`y = Wh + b` with deterministic :math:`h`, covariances are exact. With uncertain :math:`h`, independent of the
weights, variances are exact; covariances between outputs that share the noise of :math:`h` are dropped, as in all other
layers. If a layer is used twice, both uses share :math:`\epsilon`, but the noise :math:`\delta` is treated as
independent in each use.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.dispatch import Kind, observed_by
from pyro_dvi.moments.tensor_like import ENTRIES, name_of
from pyro_dvi.moments.value import GaussianMoments, loc_of, second_moment_of, variance_of

NO_RULE = (
    "for which full covariances have no rule. They are supported for linear layers, matrix products, ReLU, and "
    "functions that shift, scale or move elements. For this model, propagate only variances (the default)"
)


@dataclass(frozen=True)
class SharedNoise:
    r"""The noise shared by dependent Gaussians.

    Attributes:
        factor: F, ``[R, *shape]``.
        sites: the sites that the noise belongs to, named in error messages.
        between_outputs: True if the outputs of the layer share the noise; False if every row of a weight has its own
            noise.
        dual: the covariance of :math:`\epsilon` times the factor; None if that covariance is the identity. For
            activations, each example has its own covariance.
        base: the means of the activations that :math:`\epsilon` belongs to; None for weights.
        in_rows: True if the last dimension indexes units of one example.
    """

    factor: Tensor
    sites: str
    between_outputs: bool = True
    dual: Tensor | None = None
    base: Tensor | None = None
    in_rows: bool = True

    @property
    def other(self) -> Tensor:
        """The dual, or the factor if the covariance of ε is the identity."""
        return self.factor if self.dual is None else self.dual

    @property
    def variance(self) -> Tensor:
        """Variance of the elements due to this noise."""
        if self.dual is None:
            return self.factor.square().sum(0)
        return (self.factor * self.dual).sum(0).clamp_min(0)

    def mapped(self, function: Callable[..., Any], *others: "SharedNoise") -> Any:
        """Apply a linear function to each row of the factor; return the noise of its result, or of each result."""
        noises = self, *others
        factors = torch.vmap(function)(*[n.factor for n in noises])
        duals = None if self.dual is None else torch.vmap(function)(*[n.dual for n in noises])
        if isinstance(factors, Tensor):
            return replace(self, factor=factors, dual=duals)
        return [replace(self, factor=f, dual=duals and duals[k]) for k, f in enumerate(factors)]


class JointMoments(GaussianMoments):
    """Moments of Gaussians that share noise.

    Args:
        loc: means.
        rest: variance that is not shared; None for zero.
        noise: the shared noise.
        of_weights: True for weights; False for outputs that are linear in weights.
        variance: the total variance, if known.
    """

    __slots__ = ("noise", "of_weights", "rest")

    def __init__(
        self,
        loc: Tensor,
        rest: Tensor | None,
        noise: SharedNoise,
        *,
        of_weights: bool = False,
        variance: Tensor | None = None,
    ) -> None:
        super().__init__(loc, loc if variance is None else variance)
        self.rest, self.noise, self.of_weights = rest, noise, of_weights

    @property
    def variance(self) -> Tensor:
        """Total variances, computed on first access."""
        if self._variance is self._loc:
            shared = self.noise.variance
            self._variance = shared if self.rest is None else self.rest + shared
        return self._variance

    def snapshot(self) -> GaussianMoments:
        """Return a new object with the same moments."""
        copy = JointMoments(
            self.loc, self.rest, self.noise, of_weights=self.of_weights, variance=self.variance
        )
        copy.origin = self.origin
        return copy

    def become(self, other: GaussianMoments) -> GaussianMoments:
        """Take the value of ``other``, which shares the same noise."""
        if self.of_weights or not isinstance(other, JointMoments):
            _refuse(self, "are changed in place")
        super().become(other)
        self.rest, self.noise = other.rest, other.noise
        return self


def has_covariances(*gaussians: GaussianMoments) -> bool:
    """Return True if any argument has noise shared between outputs."""
    return any(_noise_between_outputs(gaussian) is not None for gaussian in gaussians)


def covariance_between(first: JointMoments, second: JointMoments) -> Tensor:
    """Return the covariances between corresponding elements of two sets of moments that share the same noise."""
    _check_bases(first.noise, second.noise)
    return (first.noise.factor * second.noise.other).sum(0)


def covariance_of(*gaussians: GaussianMoments) -> Tensor:
    """Concatenate the arguments along the last dimension, and return their covariance ``[*batch, n, n]``.

    Args:
        gaussians: ``[*batch, n_k]``; all arguments that have shared noise must have the same noise.

    Raises:
        UnsupportedError: if the arguments are activations of different hidden layers, or if an argument is no longer in
            the rows of the examples, for instance after a transposition.
    """
    own = [g.rest if isinstance(g, JointMoments) and has_covariances(g) else g.variance for g in gaussians]
    rests = [torch.zeros_like(g.loc) if r is None else r for g, r in zip(gaussians, own, strict=True)]
    covariance = torch.diag_embed(torch.cat(rests, -1))
    noises = [_noise_between_outputs(g) for g in gaussians]
    shared = [noise for noise in noises if noise is not None]
    if not shared:
        return covariance
    _check_bases(*shared)
    if any(
        n and n.base is not None and not n.in_rows and g.shape[-1] > 1
        for n, g in zip(noises, gaussians, strict=True)
    ):
        raise UnsupportedError(
            f"the model has a density of activations that were moved to other rows, as in (W @ x.T).T, {NO_RULE}"
        )
    none = SharedNoise(torch.zeros_like(shared[0].factor[..., :1]), "")
    given = [(noise or none, (-1, *g.shape)) for noise, g in zip(noises, gaussians, strict=True)]
    factor = torch.cat([noise.factor.expand(shape) for noise, shape in given], -1).movedim(0, -1)
    dual = torch.cat([noise.other.expand(shape) for noise, shape in given], -1).movedim(0, -1)
    return covariance + factor @ dual.mT


def _check_bases(*noises: SharedNoise) -> None:
    if any(noise.base is not noises[0].base for noise in noises):
        raise UnsupportedError(
            "the parameters of one distribution come from different layers, whose covariances are not propagated. "
            "Compute them from one layer, as regressor(noise_scale=Heteroscedastic()), or omit full_covariance=True"
        )


def _noise_between_outputs(x: Any) -> SharedNoise | None:
    return x.noise if isinstance(x, JointMoments) and x.noise.between_outputs else None


def joint_product(product: Callable[..., Tensor], x: Any, weight: Any, bias: Any) -> JointMoments:
    r"""Moments of ``product(x, weight)`` or ``product(x, weight, bias)`` with weights that share noise.

    .. math::
        F'_r = F_r h, \qquad d' = d\,(\bar h^2 + v) + \Bigl(\bar W^2 + \sum_r F_r^2\Bigr) v

    Status: exact means and variances if :math:`h` is independent of the weights; covariances of outputs caused by the
    variance v of :math:`h` are dropped.

    Args:
        product: as for :func:`~pyro_dvi.moments.bilinear.bilinear_moments`.
        x: moments or a tensor.
        weight: likewise.
        bias: likewise, or None.

    Raises:
        UnsupportedError: if both factors have shared noise, if the bias has the noise of another layer, or if the
            outputs of the layer enter a further layer.
    """
    joint, other = (weight, x) if isinstance(weight, JointMoments) else (x, weight)
    if not isinstance(joint, JointMoments) or not joint.of_weights or isinstance(other, JointMoments):
        _refuse(next(a for a in (weight, x, bias) if isinstance(a, JointMoments)), "are used in a product")
    if isinstance(bias, JointMoments) and bias.noise.sites != joint.noise.sites:
        _refuse(bias, "are used with weights of another site")

    def of(factor: Tensor, by: Tensor, *shift: Tensor) -> Tensor:
        return product(by, factor, *shift) if joint is weight else product(factor, by, *shift)

    mean, spread = loc_of(other), variance_of(other)
    shifts = () if bias is None else (loc_of(bias),)
    lanes = (bias.noise,) if isinstance(bias, JointMoments) else ()
    noise = joint.noise.mapped(lambda f, *shift: of(f, mean, *shift), *lanes)
    rest = None if joint.rest is None else of(joint.rest, second_moment_of(other))
    if spread is not None:
        rest = _sum(rest, of(joint.loc.square() + joint.noise.factor.square().sum(0), spread))
    own = bias.rest if isinstance(bias, JointMoments) else variance_of(bias)
    if own is not None:  # added like a bias
        zeros = torch.zeros_like(joint.loc), torch.zeros_like(mean)
        rest = _sum(rest, of(*zeros, own))
    return outputs_with(of(joint.loc, mean, *shifts), rest, noise)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a + b


def outputs_with(loc: Tensor, rest: Tensor | None, noise: SharedNoise) -> JointMoments:
    """Return outputs of a layer with their total variance, computed once for all uses."""
    return JointMoments(loc, rest, noise, variance=_sum(noise.variance, rest))


# Through other functions --------------------------------------------------------------------------------------

_SUMS = frozenset("add sub subtract rsub radd".split())


@contextmanager
def joint_noise_followed() -> Iterator[None]:
    """Let functions that shift, scale or move dependent Gaussians keep their shared noise; others raise an error."""
    with observed_by(Followed()):
        yield


class Followed:
    """Give the results of functions of dependent Gaussians their shared noise."""

    outermost = True

    def __call__(self, func: Callable, args: tuple, kwargs: dict[str, Any], result: Any) -> Any:
        """Return the result with its shared noise, or raise an error for a function without a rule."""
        uncertain = [a for a in tree_leaves((args, kwargs)) if isinstance(a, GaussianMoments)]
        found = [a for a in uncertain if isinstance(gaussian_behind(a), JointMoments)]
        products = isinstance(result, JointMoments) and all(a.link is None for a in found)
        if not found or products or isinstance(result, Tensor):
            return result
        entry, first, alone = ENTRIES[func], found[0], len(uncertain) == 1
        moves = entry.kind in (Kind.REARRANGEMENT, Kind.CONVERSION)
        parts: list[Any] = [result] if isinstance(result, GaussianMoments) else list(result)
        if alone and first.link is not None and moves:
            inners: list[Any] = [part.link.inner for part in parts]
            if not isinstance(inners[0], JointMoments):  # already moved by the rule
                inners = _through(
                    entry.rule, [first.link.inner], _with(args, first, first.link.inner), kwargs, inners
                )
            return _as(
                result, [p.linked(replace(p.link, inner=i)) for p, i in zip(parts, inners, strict=True)]
            )
        if alone and isinstance(gaussian_behind(parts[0]), JointMoments):
            return result  # a function of the Gaussian, which likelihoods integrate over
        adds = entry.name.strip("_") in _SUMS and len({gaussian_behind(a).noise.sites for a in found}) == 1
        noises = [a.noise for a in map(gaussian_behind, found) if a.of_weights or a.noise.between_outputs]
        if len(found) > 1 and (not noises or noises[0].base is not None):
            adds = False  # they may belong to different rows or examples, which are independent
        if all(a.link is None for a in found) and (adds or (alone and (moves or entry.kind is Kind.AFFINE))):
            return _as(result, _through(entry.rule, found, args, kwargs, parts))
        return _refuse(gaussian_behind(first), f"are passed to {name_of(func)}")


def _through(
    rule: Callable, joint: list[Any], args: tuple, kwargs: dict[str, Any], parts: list[Any]
) -> list[JointMoments]:
    """Return the results of a rule that shifts, scales, adds or moves dependent Gaussians."""

    def lanes(*values: Tensor) -> tuple[Tensor, ...]:
        given = args
        for old, value in zip(joint, values, strict=True):
            given = _with(given, old, GaussianMoments(value, value))
        result = rule(*given, **kwargs)
        return tuple(p.loc for p in ([result] if isinstance(result, GaussianMoments) else result))

    zeros = lanes(*[torch.zeros_like(a.loc) for a in joint])
    first, *others = [a.noise for a in joint]
    noises = first.mapped(
        lambda *values: tuple(v - z for v, z in zip(lanes(*values), zeros, strict=True)), *others
    )
    given, owns = args, any(a.rest is not None for a in joint)
    for old in joint:
        rest = torch.zeros_like(old.loc) if old.rest is None else old.rest
        given = _with(given, old, GaussianMoments(old.loc, rest))
    owns = owns or any(
        isinstance(a, GaussianMoments) and not any(a is j for j in joint) for a in tree_leaves(args)
    )
    alone = rule(*given, **kwargs) if owns else [None] * len(parts)
    rests = [alone] if isinstance(alone, GaussianMoments) else alone
    results = []
    for part, noise, rest in zip(parts, noises, rests, strict=True):
        variance = part.variance if len(joint) == 1 else _sum(noise.variance, variance_of(rest))
        new = JointMoments(
            part.loc, variance_of(rest), noise, of_weights=joint[0].of_weights, variance=variance
        )
        new.origin = part.origin
        results.append(new)
    return results


def _with(args: tuple, old: Any, new: Any) -> tuple:
    return tuple(new if a is old else a for a in args)


def _as(like: Any, parts: list[Any]) -> Any:
    return parts[0] if isinstance(like, GaussianMoments) else type(like)(parts)


def gaussian_behind(x: Any) -> Any:
    """Return the Gaussian that x is a function of; return anything else unchanged."""
    link = getattr(x, "link", None)
    return x if link is None else link.inner


def _refuse(joint: JointMoments, what: str) -> NoReturn:
    if joint.noise.base is not None:
        raise UnsupportedError(f"activations {what}, {NO_RULE}")
    subject = "weights" if joint.of_weights else "outputs of the layer"
    raise UnsupportedError(
        f"the posterior of {joint.noise.sites} has covariances, but the {subject} {what}. Covariances are supported "
        "only for a last linear layer, followed by shifts, scaling and views: use LastLayerGuide, or Trace_ELBO."
    )
