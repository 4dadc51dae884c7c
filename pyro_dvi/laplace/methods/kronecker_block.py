# SPDX-License-Identifier: Apache-2.0
"""The precision of one layer as a Kronecker product plus the prior's."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["KroneckerBlock"]

Span = tuple[int, int]


class KroneckerBlock:
    r"""The precision of the weights W ``[p, q]`` of a layer; the last column is its bias, if it has one.

    .. math::
        P = \Pi^{1/2} \Bigl(I + \hat B \otimes \hat A\Bigr) \Pi^{1/2}, \qquad \Pi = r c^\top, \quad
        \hat B = r^{-1/2} B\, r^{-1/2} = U \beta\, U^\top, \quad \hat A = c^{-1/2} A\, c^{-1/2} = V \alpha V^\top,

    so that everything happens in the basis :math:`U^\top W V`, where P is diagonal.

    Args:
        weight: where the weight lies in a flat vector.
        bias: where the bias lies; None without one.
        inputs_first: the weight is laid out as ``[q, p]``.
        prior: :math:`\Pi`, ``[p, q]``.
        left: U, ``[p, p]``.
        right: V, ``[q, q]``.
        values: :math:`1 + \beta \alpha^\top`, ``[p, q]``.
    """

    def __init__(
        self,
        weight: Span,
        bias: Span | None,
        inputs_first: bool,
        prior: Tensor,
        left: Tensor,
        right: Tensor,
        values: Tensor,
    ) -> None:
        self.weight, self.bias, self.inputs_first = tuple(weight), bias, inputs_first
        self.prior, self.left, self.right, self.values = prior, left, right, values

    @classmethod
    def fitted(
        cls,
        prior: Tensor,
        weight: Span,
        bias: Span | None,
        inputs_first: bool,
        inputs: Tensor,
        deltas: Tensor,
    ) -> "KroneckerBlock":
        """Make the block of a layer.

        Args:
            prior: prior precision of all latents, [D].
            weight: see the class.
            bias: see the class.
            inputs_first: see the class.
            inputs: A, ``[q, q]``.
            deltas: B, ``[p, p]``.
        """
        p, q = len(deltas), len(inputs)
        blank = prior.new_zeros(p, q)
        block = cls(weight, bias, inputs_first, blank, deltas, inputs, blank)
        logs = block.get(prior).log()
        r = (logs.mean(1) - logs.mean() / 2).exp()
        c = (logs.mean(0) - logs.mean() / 2).exp()
        block.prior = r.unsqueeze(-1) * c
        beta, block.left = _eigen(deltas / (r.unsqueeze(-1) * r).sqrt())
        alpha, block.right = _eigen(inputs / (c.unsqueeze(-1) * c).sqrt())
        block.values = 1 + beta.unsqueeze(-1) * alpha
        return block

    def reweighted(self, likelihood: float, prior: float) -> "KroneckerBlock":
        """Return the block with both parts of its precision multiplied by numbers."""
        changed = {"prior": self.prior * prior, "values": 1 + (self.values - 1) * (likelihood / prior)}
        return KroneckerBlock(**{**self.state(), **changed})

    def state(self) -> dict[str, Any]:
        """Return the arguments that make the block again."""
        return dict(vars(self))

    def get(self, vectors: Tensor) -> Tensor:
        """Return W ``[*lead, p, q]`` of flat vectors ``[*lead, D]``."""
        p, q = self.values.shape
        columns = q if self.bias is None else q - 1
        weight = vectors[..., slice(*self.weight)]
        lead = weight.shape[:-1]
        weight = (
            weight.reshape(*lead, columns, p).mT if self.inputs_first else weight.reshape(*lead, p, columns)
        )
        if self.bias is None:
            return weight
        return torch.cat([weight, vectors[..., slice(*self.bias)].unsqueeze(-1)], -1)

    def put(self, vectors: Tensor, matrix: Tensor) -> None:
        """Write W into flat vectors in place."""
        if self.bias is not None:
            vectors[..., slice(*self.bias)] = matrix[..., -1]
            matrix = matrix[..., :-1]
        if self.inputs_first:
            matrix = matrix.mT
        vectors[..., slice(*self.weight)] = matrix.flatten(-2)

    def whitened(self, matrix: Tensor) -> Tensor:
        """Return the half of P⁻¹ that takes W to the eigenbasis."""
        return self.left.mT @ (matrix / self.prior.sqrt()) @ self.right / self.values.sqrt()

    def coloured(self, matrix: Tensor) -> Tensor:
        """Return the other half, the transpose of :meth:`whitened`."""
        return self.left @ (matrix / self.values.sqrt()) @ self.right.mT / self.prior.sqrt()

    def variance(self) -> Tensor:
        """Return the diagonal of P⁻¹, ``[p, q]``."""
        return self.left.square() @ (1 / self.values) @ self.right.square().mT / self.prior

    def log_determinant(self) -> Tensor:
        """Return log det P."""
        return self.prior.log().sum() + self.values.log().sum()


def _eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, of which rounding may have made some negative, and eigenvectors."""
    values, vectors = torch.linalg.eigh(0.5 * (matrix + matrix.mT))
    return values.clamp_min(0), vectors
