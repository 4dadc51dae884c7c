# SPDX-License-Identifier: Apache-2.0
"""The contract of a curvature: a penalty for the spread of the posterior around its mean."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pyro_dvi.curvature.likelihood import Linearisation
from pyro_dvi.errors import CheckpointError, UnsupportedError
from pyro_dvi.gaussians.normal_divergence import row_norms


@contextmanager
def twice_differentiated() -> Iterator[None]:
    """Refuse functions of torch without a second (third) derivative, as ``embedding_bag``, with a way out.

    Torch reports a transposed convolution with ``output_padding`` in words of its own.
    """
    try:
        yield
    except RuntimeError as error:
        if not any(word in str(error) for word in ("derivative", "differentiat", "output_padding")):
            raise
        raise UnsupportedError(
            f"{str(error).rstrip('.')}. Variational Laplace and products with curvatures differentiate the model more "
            "than once. Write the model without this function (pyro_dvi.smooth_activations_ replaces nn.Hardsigmoid "
            "and nn.Hardswish; nn.Embedding with a sum or mean stands for nn.EmbeddingBag), take another curvature "
            "than HessianDiagonal, or train with MomentPropagationELBO or NaturalGradientELBO."
        ) from error


class Curvature(ABC):
    r"""A second-order model of the log-likelihood around the posterior mean.

    Expanding :math:`\log p(y \mid u)` around the mean of :math:`q = \mathcal N(\mu, \mathrm{diag}\,\sigma^2)` leaves

    .. math::
        \mathbb E_q[\log p(y \mid u)] \approx \log p(y \mid \mu) - \tfrac12 \sum_\lambda \sigma_\lambda^2 c_\lambda

    with a curvature :math:`c_\lambda \approx -\partial^2_\lambda \log p`. Subclasses say which.

    Adding one: subclass and implement :meth:`penalty`; override :meth:`recorder` if the run of the model has to be
    watched or its functions replaced. One that draws random numbers has its own ``generator``, or None.
    """

    generator: torch.Generator | None = None

    @abstractmethod
    def penalty(self, likelihood: Linearisation) -> Tensor:
        r"""Return the scalar :math:`\tfrac12\sum_\lambda\sigma_\lambda^2 c_\lambda`, scaled to the whole data set."""

    def recorder(self, used_values: Sequence[Tensor | None]) -> AbstractContextManager[Any]:
        """Return the context in which the model runs; it is handed back as ``likelihood.recorder``."""
        return nullcontext()

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def weight(self, step: int) -> float:
        """Factor of the penalty in training step ``step``; 0 skips its computation."""
        return 1.0

    def state_dict(self) -> dict[str, Any]:
        """State that a resumed run needs: that of the generator, where there is one."""
        return {} if self.generator is None else {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        unknown = sorted(state.keys() - ({"generator"} & vars(self).keys()))
        if unknown:
            raise CheckpointError(f"{type(self).__name__} has no state, but the checkpoint holds {unknown}")
        if self.generator is not None and state:
            self.generator.set_state(state["generator"].cpu())


def half_sum(scales: Sequence[Tensor], curvatures: Sequence[Tensor]) -> Tensor:
    r""":math:`\tfrac12 \sum \sigma^2 c` for explicit curvatures."""
    return 0.5 * sum_of([(s * s * c).sum() for s, c in zip(scales, curvatures, strict=True)])


def half_weighted_squares(scales: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    r""":math:`\tfrac12 \sum \sigma^2 g^2`, in as few passes over the weights as possible."""
    total: Tensor = _HalfWeightedSquares.apply(len(scales), *scales, *gradients)  # type: ignore[no-untyped-call]
    return total


def sum_of(terms: Sequence[Tensor]) -> Tensor:
    """Return the sum of scalars."""
    return torch.stack(list(terms)).sum() if len(terms) > 1 else terms[0]


class _HalfWeightedSquares(Function):
    """½ Σ σ² g² with ∂g = σ² g and ∂σ = σ g².

    Products are computed again in the backward pass: one more operation there takes less time than to store them.
    """

    @staticmethod
    def forward(ctx: Any, size: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        pairs = zip(tensors[:size], tensors[size:], strict=True)
        norms = [torch.linalg.vector_norm(row_norms(scale * g)) for scale, g in pairs]
        return torch.stack(norms).square().sum().mul_(0.5)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out: Tensor) -> tuple[Tensor | None, ...]:
        size = len(ctx.saved_tensors) // 2
        scales, gradients = ctx.saved_tensors[:size], ctx.saved_tensors[size:]
        weighted = torch._foreach_mul(scales, gradients)
        torch._foreach_mul_(weighted, out)
        d_scales = torch._foreach_mul(weighted, gradients)
        torch._foreach_mul_(weighted, scales)
        return None, *[d.sum_to_size(s.shape) for d, s in zip(d_scales, scales, strict=True)], *weighted
