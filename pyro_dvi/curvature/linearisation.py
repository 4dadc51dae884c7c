# SPDX-License-Identifier: Apache-2.0
"""The linearisation of a model around the posterior mean, and the base class of curvatures.

The ELBO constructs a :class:`Linearisation` from one run of guide and model. From this object, a curvature computes a
penalty for the spread of the posterior around its mean. This module does not depend on Pyro.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributions import Distribution

from pyro_dvi.core.densities import keeps, mask_of, untransformed, with_any
from pyro_dvi.core.undisturbed import widest
from pyro_dvi.errors import ModelError, UnsupportedError
from pyro_dvi.gaussians.normal_divergence import row_norms


@dataclass
class ObservedSite:
    """One observed sample site at the posterior mean.

    Attributes:
        name: the site's name.
        fn: its distribution, with parameters that depend on the latent means.
        value: the observed value.
        scale: the plate's scale, N/M for a minibatch with M of the N examples.
        mask: elements to include, or None.
        share: the fraction of the rows of the site's plates that are in this minibatch.
    """

    name: str
    fn: Distribution
    value: Tensor
    scale: float | Tensor = 1.0
    mask: Tensor | bool | None = None
    share: float = 1.0

    def log_prob(self, value: Tensor) -> Tensor:
        """Unscaled log-likelihood of ``value`` per independent observation; masked elements are 0."""
        log_prob = self.fn.log_prob(value)
        if self.mask is None or self.mask is True:
            return log_prob
        if self.mask is False:  # no graph, because masked elements would pass NaN gradients to the parameters
            return torch.zeros_like(log_prob)
        return torch.where(self.mask, log_prob, log_prob.new_zeros(()))

    @property
    def weights(self) -> Tensor:
        """The weight of each observation: its scale, or zero if it is masked; of the batch shape."""
        kept, mask = self.value.new_ones((), dtype=widest(self.value.device)), mask_of(self.fn, self.mask)
        if mask is not None:
            kept = with_any(mask, len(self.fn.event_shape)).to(kept)
        return (kept * self.scale).expand(self.fn.batch_shape)

    def log_likelihood(self) -> Tensor:
        """Scaled log-likelihood of the observed value, summed to a scalar."""
        return (self.log_prob(self.value) * self.scale).sum()

    def sample_labels(self) -> Tensor:
        """Draw labels from the observed distribution at the posterior mean.

        Raises:
            UnsupportedError: the distribution has no ``sample``, or inherits it from a class with another density.
        """
        try:
            if not keeps(self.fn, "sample"):
                raise NotImplementedError
            with torch.no_grad():
                return self.fn.sample()
        except NotImplementedError as error:
            kind = type(untransformed(self.fn)).__name__
            raise UnsupportedError(
                f"labels cannot be drawn at observed site {self.name!r}: {kind} has no sample() for its log_prob(). "
                "Use observed labels: EmpiricalFisher() in TaylorELBO, Hessian() in Laplace's methods, or "
                "LayerFisher(observed=True) in NoisyKFAC."
            ) from error


@dataclass
class Linearisation:
    """The log-likelihood around the posterior mean, from one run of the model.

    Attributes:
        names: names of the latent sites around whose means the log-likelihood is expanded.
        values: their unconstrained means u; ``values[k]`` is a node of the autograd graph of every site.
        scales: posterior standard deviations, broadcastable to the values.
        sites: the observed sites.
        precision_limits: function that returns, for each latent, the precision kl_weight / s² that its prior
            contributes to an optimal posterior, or None if the prior is not Normal.
        factors: ``pyro.factor`` terms, which have a log-density but no labels.
        recorder: the result of ``Curvature.recorder`` for this run.
        model: the model, which curvatures use as a key for cached checks.
    """

    names: list[str]
    values: list[Tensor]
    scales: list[Tensor]
    sites: list[ObservedSite]
    precision_limits: Callable[[], list[Tensor | None]] = list
    factors: list[ObservedSite] = field(default_factory=list)
    recorder: Any = None
    model: Any = None

    def require_labels(self, curvature: str) -> None:
        """Raise an error if labels cannot be drawn for all terms of the likelihood."""
        if self.factors:
            raise ModelError(
                f"pyro.factor site {self.factors[0].name!r} has no distribution from which {curvature} could draw "
                "labels: write it as an observed pyro.sample site, or use TaylorELBO(curvature=MinibatchGradient())"
            )

    def gradients(self, scalar: Tensor) -> list[Tensor]:
        """Return the differentiable gradient of ``scalar`` with respect to every latent mean."""
        if not scalar.requires_grad:  # everything is masked, or no latent affects the observed sites
            return [torch.zeros_like(u) for u in self.values]
        return list(torch.autograd.grad(scalar, self.values, create_graph=True, materialize_grads=True))


@contextmanager
def twice_differentiated() -> Iterator[None]:
    """Raise an error with a remedy for torch functions without a second (third) derivative, such as ``embedding_bag``.

    For a transposed convolution with ``output_padding``, torch has a message of its own.
    """
    try:
        yield
    except RuntimeError as error:
        if not any(
            word in str(error) for word in ("derivative", "differentiat", "double backward", "output_padding")
        ):
            raise
        raise UnsupportedError(
            f"{str(error).rstrip('.')}. Variational Laplace and curvatures differentiate the model more than once: "
            "write the model without this function (smooth_activations_ replaces nn.Hardsigmoid and nn.Hardswish; "
            "nn.Embedding and a sum replace nn.EmbeddingBag), use a curvature other than HessianDiagonal, or train "
            "with NaturalGradientELBO or SampledELBO"
        ) from error


class Curvature(ABC):
    r"""A second-order model of the log-likelihood around the posterior mean.

    Expanding :math:`\log p(y \mid u)` around the mean of :math:`q = \mathcal N(\mu, \mathrm{diag}\,\sigma^2)` gives

    .. math::
        \mathbb E_q[\log p(y \mid u)] \approx \log p(y \mid \mu) - \tfrac12 \sum_\lambda \sigma_\lambda^2 c_\lambda

    with a curvature :math:`c_\lambda \approx -\partial^2_\lambda \log p`, which subclasses define.

    To add a curvature, subclass this class and implement :meth:`penalty`. To observe the run of the model or replace
    its functions, also override :meth:`recorder`.
    """

    @abstractmethod
    def penalty(self, likelihood: Linearisation) -> Tensor:
        r"""Return the scalar :math:`\tfrac12\sum_\lambda\sigma_\lambda^2 c_\lambda`, scaled to the whole data set."""

    def recorder(self, used_values: Sequence[Tensor | None]) -> AbstractContextManager[Any]:
        """Return the context in which the model runs; it is passed back as ``likelihood.recorder``."""
        return nullcontext()

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def weight(self, step: int) -> float:
        """Return the factor of the penalty in training step ``step``; if it is 0, the penalty is not computed."""
        return 1.0


def half_sum(scales: Sequence[Tensor], curvatures: Sequence[Tensor]) -> Tensor:
    r"""Return :math:`\tfrac12 \sum \sigma^2 c` for explicit curvatures c."""
    return 0.5 * sum_of([(s * s * c).sum() for s, c in zip(scales, curvatures, strict=True)])


def half_weighted_squares(scales: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    r"""Return :math:`\tfrac12 \sum \sigma^2 g^2`, in as few passes over the weights as possible."""
    total: Tensor = _HalfWeightedSquares.apply(len(scales), *scales, *gradients)  # type: ignore[no-untyped-call]
    return total


def sum_of(terms: Sequence[Tensor]) -> Tensor:
    """Return the sum of scalars."""
    return torch.stack(list(terms)).sum() if len(terms) > 1 else terms[0]


class _HalfWeightedSquares(Function):
    """½ Σ σ² g² with ∂g = σ² g and ∂σ = σ g².

    Products are recomputed in the backward pass, which is faster than storing them.
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
