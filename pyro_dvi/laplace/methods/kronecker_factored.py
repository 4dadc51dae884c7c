# SPDX-License-Identifier: Apache-2.0
r"""Gaussians with independent layers (a Kronecker product each), or with independent latents.

The gradient of output k with respect to a layer's weight is :math:`J_k = \sum_t \delta_{kt} a_t^\top`, with a single
position t in a dense layer. Covariances of outputs are therefore computed from the inputs a and the output gradients
:math:`\delta` of a layer, without forming rows of the Jacobian.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.curvature.example_gradients import ExampleGradients, OuterGradients
from pyro_dvi.curvature.kronecker import KroneckerFactors, KroneckerLayer, nearest_product
from pyro_dvi.errors import UnsupportedError, warn
from pyro_dvi.laplace.energy.energy import LocalEnergy
from pyro_dvi.laplace.energy.precision import (
    GGN,
    PrecisionMatrix,
    common_ratio,
    independent_prior_precision,
    prior_diagonal,
)
from pyro_dvi.laplace.energy.query import Query
from pyro_dvi.laplace.methods.method import Method, RootPosterior, not_positive
from pyro_dvi.linalg.semidefinite import eigen


def products_at_layer(
    outer: OuterGradients,
    variances: Tensor,
    changed: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda a, delta: (a, delta),
) -> Tensor:
    r"""Return :math:`\sum_{pq} v_{pq}\,J_{kpq}\,J_{lpq}` for each example, ``[B, K, K]``.

    For a single position, this is :math:`\sum_p \delta_{kp}\,\delta_{lp} \sum_q v_{pq}\,a_q^2`.

    Args:
        outer: factors of the gradients J of a weight.
        variances: v, ``[p, q]``.
        changed: change of basis of a and :math:`\delta`.
    """
    found = []
    for part in outer.chunks(0 if outer.is_single else outer.num_outputs * variances.numel()):
        a, delta = changed(*outer.parts(part))
        if outer.is_single:
            spread = a.square() @ variances.mT  # [m, 1, p]
            delta = delta.squeeze(2).transpose(0, 1)
            found.append((delta * spread) @ delta.mT)  # without a square root, which has no gradient at zero
        else:
            half = ((delta.transpose(0, 1).mT @ a.unsqueeze(1)) * variances.sqrt()).flatten(2)
            found.append(half @ half.mT)
    return torch.cat(found)


def variances_at_last_layer(outer: OuterGradients, layer: "KroneckerBlock") -> Tensor:
    r"""Return :math:`\sum_{pq} v_{pq} J_{kpq}^2` for each example, ``[B, K]``, if all have the same :math:`\delta`."""
    a, delta = outer.inputs, outer.parts(slice(0, 1))[1]
    a, delta = layer.in_eigenbasis(a, delta)
    return (a.square() @ (1 / layer.values).mT).squeeze(1) @ delta[:, 0, 0].square().mT


def products_of_diagonal(
    examples: ExampleGradients, variances: Tensor, tensors: Iterable[int] | None = None
) -> Tensor:
    r"""Return :math:`J_i \operatorname{diag}(v) J_i^\top` for each example, ``[B, K, K]``.

    Args:
        examples: J.
        variances: v, ``[D]``.
        tensors: indices of the tensors to include; None means all.
    """
    spans, rest, total = examples.spans, [], variances.new_zeros(())
    for k in range(len(spans)) if tensors is None else tensors:
        outer = examples.outer(k)
        if outer is None or not outer.is_whole:
            rest.append(k)
        else:
            total = total + products_at_layer(outer, outer.by_unit(variances[spans[k]]))
    if rest:
        deviations = torch.cat([variances[spans[k]] for k in rest]).sqrt()
        halves = [examples.rows(part, rest) * deviations for part in examples.chunks()]
        total = total + torch.cat([half @ half.mT for half in halves])
    return total


@dataclass(eq=False)
class KroneckerBlock:
    r"""The precision of the weights W ``[p, q]`` of a layer, with its bias as last column if it has one.

    .. math::
        P = \Pi^{1/2} \Bigl(I + \hat B \otimes \hat A\Bigr) \Pi^{1/2}, \qquad \Pi = r c^\top, \quad
        \hat B = r^{-1/2} B\, r^{-1/2} = U D_B U^\top, \quad \hat A = c^{-1/2} A\, c^{-1/2} = V D_A V^\top,

    All computations use the basis :math:`U^\top W V`, in which P is diagonal.

    Args:
        tensors: the index of the weight, and of the bias if there is one, among the sites.
        places: positions of W in a flat vector, ``[p, q]``.
        prior: :math:`\Pi`, ``[p, q]``.
        left: U, ``[p, p]``.
        right: V, ``[q, q]``.
        values: eigenvalues :math:`1 + d_B d_A^\top`, ``[p, q]``.
    """

    tensors: tuple[int, ...]
    places: Tensor
    prior: Tensor
    left: Tensor
    right: Tensor
    values: Tensor

    def reweighted(self, likelihood: float, prior: float) -> "KroneckerBlock":
        """Return the block with the precisions of likelihood and prior multiplied by factors."""
        values = 1 + (self.values - 1) * (likelihood / prior)
        return replace(self, prior=self.prior * prior, values=values)

    def whitened(self, matrix: Tensor) -> Tensor:
        """Apply the square root of P⁻¹ that maps W to the eigenbasis."""
        return self.left.mT @ (matrix / self.prior.sqrt()) @ self.right / self.values.sqrt()

    def in_eigenbasis(self, inputs: Tensor, deltas: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and deltas in the eigenbasis; their product is :meth:`whitened` except for the eigenvalues."""
        if len(self.tensors) > 1:
            inputs = F.pad(inputs, (0, 1), value=1.0)
        c = self.prior[0] / self.prior[0, 0]  # the prior is an outer product
        return inputs / c.sqrt() @ self.right, deltas / self.prior[:, 0].sqrt() @ self.left

    def coloured(self, matrix: Tensor) -> Tensor:
        """Apply the transpose of :meth:`whitened`."""
        return self.left @ (matrix / self.values.sqrt()) @ self.right.mT / self.prior.sqrt()

    def variance(self) -> Tensor:
        """Return the diagonal of P⁻¹, ``[p, q]``."""
        return self.left.square() @ (1 / self.values) @ self.right.square().mT / self.prior

    def log_determinant(self) -> Tensor:
        """Return log det P."""
        return self.prior.log().sum() + self.values.log().sum()


def _block(layer: KroneckerLayer, prior: Tensor) -> KroneckerBlock:
    """Return the block of a layer, given its prior precision."""
    r, c = nearest_product(prior[layer.places])
    beta, left = eigen(layer.deltas / layer.positions / (r * r.mT).sqrt())
    alpha, right = eigen(layer.inputs / (c.unsqueeze(-1) * c).sqrt())
    values = 1 + beta.unsqueeze(-1) * alpha
    return KroneckerBlock(layer.tensors, layer.places, r * c, left, right, values)


@dataclass(frozen=True)
class KroneckerFactored(Method):
    r"""Approximate the precision of each dense or convolutional layer, with its bias, by a Kronecker product.

    With a layer's inputs a (and 1 for the bias) at T positions and the gradients :math:`\delta` with respect to its
    outputs, weighted by the Fisher information,

    .. math::
        P_{\text{layer}} \approx \Pi + B \otimes A, \qquad
        A = \sum_{i,t} a_{it} a_{it}^\top, \qquad
        B = \frac{1}{NT} \sum_{i,k,t} w_{ik}^2\, \delta_{ikt} \delta_{ikt}^\top .

    Status: approximate. Covariances between layers are dropped. Within layers, inputs and gradients are treated as
    independent, and positions of a convolution are treated as exchangeable. The result is exact for a single dense
    layer whose Fisher information is the same for all examples. The prior precision :math:`\Pi` is exact if it is
    :math:`r_i c_j` for a weight from unit j to unit i, for example with one scale per layer. Otherwise, it is replaced
    by the nearest such matrix in logarithms. Sites that are not a weight or bias of such a layer, or are used several
    times, get a diagonal precision, with a warning.

    Raises:
        UnsupportedError: the prior couples latents, observed sites have different numbers of rows, or ``subset`` has
            masks.

    Source: Martens & Grosse (2015); Grosse & Martens (2016), Eq. 25-27, for convolutions;
    Ritter, Botev & Barber (2018).

    Example:
        >>> import pyro_dvi as dvi
        >>> from pyro_dvi.laplace import KroneckerFactored
        >>> net = dvi.to_bayesian_(torch.nn.Linear(1, 1, bias=False))
        >>> guide = dvi.LaplaceGuide(dvi.regressor(net, num_data=3, noise_scale=1.0))
        >>> batches = [(torch.ones(3, 1), torch.zeros(3, 1))]
        >>> _ = guide.polish(batches, progress=False)
        >>> guide.fit(batches, KroneckerFactored()).marginal_variance()
        tensor([0.2500])
    """

    precision = GGN()  # not a field, because factors of gradients approximate no other matrix
    reweights = True

    def fit(self, local: LocalEnergy, *, seed: int = 0) -> "KroneckerPosterior":
        """Return the posterior."""
        if local.energy.layout.chosen:
            masked = ", ".join(local.energy.layout.chosen)
            raise UnsupportedError(
                f"KroneckerFactored() does not support masks, here of {masked}: use whole sites, Dense() or Diagonal()"
            )
        prior = independent_prior_precision(local, "KroneckerFactored()")
        factors: KroneckerFactors | None = None
        previous: Any = None
        for examples in local.examples():
            if examples.recorder is previous:
                raise UnsupportedError(
                    "KroneckerFactored() needs equally many rows in all observed sites: use Dense() or Diagonal()"
                )
            previous = examples.recorder
            factors = KroneckerFactors(examples) if factors is None else factors
            factors.add(examples)
        assert factors is not None
        names = [local.energy.layout.names[k] for k in factors.rest]
        if names:
            warn(
                f"KroneckerFactored() uses a diagonal precision for {len(names)} sites, which are not weights or "
                f"biases of a dense or convolutional layer that is used once: {names[:5]}"
            )
        blocks = [vars(_block(layer, prior)) for layer in factors.layers if layer.positions]
        return KroneckerPosterior(local.point, prior + factors.diagonal, blocks, prior)


class KroneckerPosterior(RootPosterior):
    """A Gaussian with independent layers.

    Attributes:
        diagonal: precision of the latents outside all blocks, [D]; the entries of blocks are not used.
        blocks: the layers; see :class:`KroneckerBlock`.
        prior: diagonal prior precision, [D]; blocks use the nearest outer product.
    """

    stored: ClassVar[tuple[str, ...]] = ("mode", "diagonal", "blocks")

    def __init__(
        self, mode: Tensor, diagonal: Tensor, blocks: list[Any], prior: Tensor | None = None
    ) -> None:
        self.mode, self.diagonal, self.blocks, self.prior = mode, diagonal, blocks, prior
        self._layers = [KroneckerBlock(**block) for block in blocks]
        self._outside = torch.ones_like(diagonal, dtype=torch.bool)
        for layer in self._layers:
            self._outside[layer.places] = False

    def whitened(self, rows: Tensor) -> Tensor:
        white = rows / self.diagonal.sqrt()
        for layer in self._layers:
            white[..., layer.places] = layer.whitened(rows[..., layer.places])
        return white

    def coloured(self, rows: Tensor) -> Tensor:
        found = rows / self.diagonal.sqrt()
        for layer in self._layers:
            found[..., layer.places] = layer.coloured(rows[..., layer.places])
        return found

    def covariance_of_examples(self, examples: ExampleGradients) -> Tensor:
        rest, total = set(range(len(examples.values))), self.mode.new_zeros(())
        for layer in self._layers:
            outer = examples.outer(layer.tensors[0])
            if outer is None or len(set(map(examples.call_of, layer.tensors))) > 1:
                return super().covariance_of_examples(examples)
            rest -= set(layer.tensors)
            total = total + products_at_layer(outer, 1 / layer.values, layer.in_eigenbasis)
        return total + products_of_diagonal(examples, 1 / self.diagonal, sorted(rest))

    def variances(self, query: Query) -> Tensor:
        examples = query.examples
        if len(self._layers) == 1 and not self._outside.any():
            outer = examples.shared(self._layers[0].tensors[0])
            if outer is not None and outer.is_single:
                return variances_at_last_layer(outer, self._layers[0])
        return super().variances(query)

    def marginal_variance(self) -> Tensor:
        found = 1 / self.diagonal
        for layer in self._layers:
            found[layer.places] = layer.variance()
        return found

    def reweighted(self, likelihood: float, prior: Tensor) -> "KroneckerPosterior | None":
        if self.prior is None:
            return None
        blocks = []
        for layer in self._layers:
            factor = common_ratio(prior[layer.places], self.prior[layer.places])
            if factor is None:  # the eigenvectors would change
                return None
            blocks.append(vars(layer.reweighted(likelihood, factor)))
        diagonal = likelihood * (self.diagonal - self.prior) + prior
        return KroneckerPosterior(self.mode, diagonal, blocks, prior)

    def log_determinant(self) -> Tensor:
        total = self.diagonal[self._outside].log().sum()
        return total + sum(layer.log_determinant() for layer in self._layers)


@dataclass(frozen=True)
class Diagonal(Method):
    r"""Keep only the diagonal of the precision, :math:`p_\lambda = \sum_{ik} (w_{ik} J_{ik\lambda})^2 + \text{prior}`.

    The GGN costs one backward pass per output of the network (ten for ten classes); the Hessian costs two gradients per
    latent.

    Status: the diagonal is exact; off-diagonal entries, which are not small in a network, are dropped.

    Args:
        precision: ``GGN()``, or ``Hessian()`` for small models.

    Raises:
        NotPositiveDefiniteError: an entry of the diagonal is not positive.
        UnsupportedError: the prior couples the elements of a site.

    Source: Ritter, Botev & Barber (2018), Section 3.

    Example:
        >>> import pyro_dvi as dvi
        >>> from pyro_dvi.laplace import Diagonal
        >>> net = dvi.to_bayesian_(torch.nn.Linear(1, 1, bias=False))
        >>> guide = dvi.LaplaceGuide(dvi.regressor(net, num_data=3, noise_scale=1.0))
        >>> batches = [(torch.ones(3, 1), torch.zeros(3, 1))]
        >>> _ = guide.polish(batches, progress=False)
        >>> guide.fit(batches, Diagonal()).marginal_variance()
        tensor([0.2500])
    """

    precision: PrecisionMatrix = field(default_factory=GGN)

    reweights = True

    def fit(self, local: LocalEnergy, *, seed: int = 0) -> "DiagonalPosterior":
        """Return the posterior."""
        prior = local.prior_diagonal
        if isinstance(self.precision, GGN):
            precision = prior_diagonal(local, "Diagonal()") + likelihood_diagonal(local)
        else:
            precision = self.precision.matrix(local).diagonal().clone()
        return DiagonalPosterior(local.point, precision, prior)


def likelihood_diagonal(local: LocalEnergy) -> Tensor:
    """Return the diagonal [D] of the Gauss-Newton matrix of the likelihood."""
    return sum((examples.squares() for examples in local.examples()), torch.zeros_like(local.point))


class DiagonalPosterior(KroneckerPosterior):
    """A Gaussian with independent latents.

    Attributes:
        precision: the diagonal of P, [D].
        prior: diagonal prior precision, [D]; None if it is not diagonal.
    """

    independent = True
    stored = ("mode", "precision")

    def __init__(self, mode: Tensor, precision: Tensor, prior: Tensor | None = None) -> None:
        super().__init__(mode, precision, [], prior)
        self.precision = precision
        if not bool((precision > 0).all()):
            raise not_positive(f"the diagonal of the precision has an entry {float(precision.min()):.3g}")

    def reweighted(self, likelihood: float, prior: Tensor) -> "DiagonalPosterior | None":
        if self.prior is None:
            return None
        return DiagonalPosterior(self.mode, likelihood * (self.precision - self.prior) + prior, prior)
