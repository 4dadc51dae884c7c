# SPDX-License-Identifier: Apache-2.0
"""The autograd graph of one batch, and curvature products through it."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.curvature.linearisation import ObservedSite
from pyro_dvi.curvature.products import LinearMap, batched_gradients, information_pairs
from pyro_dvi.errors import ModelError
from pyro_dvi.laplace.energy.query import Layout
from pyro_dvi.linalg.operator import gaussian_rows
from pyro_dvi.runs.log_joint import JointRun


@dataclass(eq=False)
class BatchGraph:
    r"""The autograd graph of one batch, and its curvature products with flat vectors ``[S, D]``.

    Args:
        layout: order of the latents in flat vectors.
        values: tensors of the sites, in the graph.
        run: the run of the model at these values.
        likelihood_weight: :math:`1/\beta T`.
        prior_weight: :math:`1/T`.
        with_prior: whether this batch contributes the prior, which counts once per pass.
        labels: function that draws labels for a site without a closed-form Fisher information; not needed for the
            prior.
        vectors_at_once: number of vectors per pass through the graph.
        differentiable: whether products with the Hessian of the prior are differentiable.
    """

    layout: Layout
    values: list[Tensor]
    run: JointRun
    likelihood_weight: float = 1.0
    prior_weight: float = 1.0
    with_prior: bool = True
    labels: Any = None
    vectors_at_once: int = 2
    differentiable: bool = False

    @cached_property
    @torch.enable_grad()  # even if the caller disabled gradients
    def energy(self) -> Tensor:
        """The contribution of the batch to U."""
        energy = -self.likelihood_weight * self.run.log_likelihood()
        return energy - self.prior_weight * self.run.log_prior if self.with_prior else energy

    def gradient(self) -> Tensor:
        """Return the gradient of :attr:`energy`."""
        flat = self.layout.flatten(_gradients(self.energy, self.values))
        return flat.detach()  # zeros of unused values require gradients in torch 2.8

    @cached_property
    def _gradients(self) -> list[Tensor]:
        return _gradients(self.energy, self.values, create_graph=True)

    @cached_property
    @torch.enable_grad()
    def prior_gradients(self) -> list[Tensor]:
        """The gradients of the log prior, with a graph."""
        return _gradients(self.prior_weight * self.run.log_prior, self.values, create_graph=True)

    @cached_property
    @torch.enable_grad()
    def information(self) -> tuple[LinearMap, Tensor]:
        """The Jacobian of the outputs, and the weights of their squares in the Gauss-Newton matrix."""
        nothing = torch.zeros(0)
        pairs = information_pairs(sites_only(self.run), self.labels) or [(nothing, nothing)]
        outputs, weights = (torch.cat([p.reshape(-1) for p in parts]) for parts in zip(*pairs, strict=True))
        jacobian = LinearMap(outputs, self.values, vectors_at_once=self.vectors_at_once)
        return jacobian, self.likelihood_weight * weights.square()

    def hessian(self, vectors: Tensor) -> Tensor:
        return self._products(self._gradients, vectors)

    def prior_hessian(self, vectors: Tensor) -> Tensor:
        return -self._products(self.prior_gradients, vectors)

    def _products(self, gradients: list[Tensor], vectors: Tensor) -> Tensor:
        options: Any = {"create_graph": self.differentiable}
        split, together = self.layout.split(vectors), self.vectors_at_once
        return self.layout.flatten(batched_gradients(gradients, self.values, split, together, **options))

    def ggn(self, vectors: Tensor) -> Tensor:
        jacobian, weights = self.information
        products = jacobian.forward(self.layout.split(vectors)) * weights
        total = self.layout.flatten(jacobian.transposed(products))
        return total + self.prior_hessian(vectors) if self.with_prior else total

    def ggn_noise(self, count: int, generator: torch.Generator) -> Tensor:
        jacobian, weights = self.information
        noise = gaussian_rows(count, len(weights), weights, generator)
        return self.layout.flatten(jacobian.transposed(noise * weights.sqrt()))


def sites_only(run: JointRun) -> list[ObservedSite]:
    """Return the observed sites of a run.

    Raises:
        ModelError: the model has a ``pyro.factor`` term.
    """
    if run.factors:
        which = f"pyro.factor site {run.factors[0].name!r} has no distribution and therefore no Gauss-Newton matrix"
        raise ModelError(f"{which}: write it as an observed pyro.sample site, or use precision=Hessian()")
    return run.sites


def _gradients(scalar: Tensor, values: list[Tensor], create_graph: bool = False) -> list[Tensor]:
    """Return the gradients with respect to each value (zero if it is not used), and keep the graph."""
    if not scalar.requires_grad:
        return [torch.zeros_like(v) for v in values]
    options: Any = {"retain_graph": True, "create_graph": create_graph, "materialize_grads": True}
    return list(torch.autograd.grad(scalar, values, **options))
