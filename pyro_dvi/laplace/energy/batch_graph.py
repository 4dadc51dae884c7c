# SPDX-License-Identifier: Apache-2.0
"""The graph of one batch's run, and the products through it."""

from collections.abc import Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyro_dvi.curvature.likelihood import ObservedSite
from pyro_dvi.curvature.products import LinearMap, hessian_product, information_outputs
from pyro_dvi.errors import ModelError
from pyro_dvi.handlers.log_joint import JointRun
from pyro_dvi.linalg.operator import gaussian_rows

if TYPE_CHECKING:
    from pyro_dvi.laplace.energy.energy import Energy

__all__ = ["BatchGraph", "sites_only"]


class BatchGraph:
    """The graph of one batch's run, and the products through it; arguments as of :class:`Energy`.

    ``batch`` is its position in the pass; the prior comes with the first one.
    """

    def __init__(
        self, energy: "Energy", values: list[Tensor], run: JointRun, vectors_at_once: int, *, batch: int
    ) -> None:
        self._owner, self.values, self.run = energy, values, run
        self.batch, self.with_prior = batch, batch == 0
        self._at_once = vectors_at_once

    @cached_property
    def energy(self) -> Tensor:
        return self._owner.part(self.run, with_prior=self.with_prior)

    def flat_gradient(self) -> Tensor:
        found = torch.autograd.grad(self.energy, self.values, retain_graph=True, allow_unused=True)
        filled = [torch.zeros_like(v) if g is None else g for v, g in zip(self.values, found, strict=True)]
        return self._owner.layout.flatten(filled)

    @cached_property
    def _gradients(self) -> list[Tensor]:
        return _differentiable(self.energy, self.values)

    @cached_property
    def prior_gradients(self) -> list[Tensor]:
        return _differentiable(self.run.log_prior, self.values)

    @cached_property
    def _information(self) -> tuple[LinearMap, Tensor]:
        outputs, weights = information_outputs(
            sites_only(self.run), partial(self._owner.labels, batch=self.batch)
        )
        jacobian = LinearMap(outputs, self.values, vectors_at_once=self._at_once)
        return jacobian, weights.square() / self._owner.kl_weight

    def hessian(self, vectors: list[Tensor]) -> list[Tensor]:
        return hessian_product(self._gradients, self.values, vectors, self._at_once)

    def prior_hessian(self, vectors: list[Tensor]) -> list[Tensor]:
        return [-p for p in hessian_product(self.prior_gradients, self.values, vectors, self._at_once)]

    def ggn(self, vectors: list[Tensor]) -> list[Tensor]:
        jacobian, weights = self._information
        if jacobian.outputs.requires_grad:
            total = jacobian.transposed(jacobian.forward(vectors) * weights)
        else:
            total = [torch.zeros_like(v) for v in vectors]
        if self.with_prior:
            total = [a + b for a, b in zip(total, self.prior_hessian(vectors), strict=True)]
        return total

    def ggn_noise(self, count: int, generator: torch.Generator) -> list[Tensor]:
        jacobian, weights = self._information
        if not jacobian.outputs.requires_grad:
            return [v.new_zeros((count, *v.shape)) for v in self.values]
        noise = gaussian_rows(count, len(weights), weights, generator)
        return jacobian.transposed(noise * weights.sqrt())


def sites_only(run: JointRun) -> list[ObservedSite]:
    """Return the observed sites of a run.

    Raises:
        ModelError: there are terms without a distribution.
    """
    if run.factors:
        raise ModelError(
            f"pyro.factor site {run.factors[0].name!r} has no distribution, so its Gauss-Newton matrix is not "
            "defined. Write it as an observed pyro.sample site, or use curvature=Hessian()."
        )
    return run.sites


def _differentiable(scalar: Tensor, values: Sequence[Tensor]) -> list[Tensor]:
    if not scalar.requires_grad:
        return [torch.zeros_like(v) for v in values]
    found = torch.autograd.grad(scalar, values, create_graph=True, allow_unused=True)
    return [torch.zeros_like(v) if g is None else g for v, g in zip(values, found, strict=True)]
