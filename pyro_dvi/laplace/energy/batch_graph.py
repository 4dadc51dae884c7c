# SPDX-License-Identifier: Apache-2.0
"""The graph of one batch's run, and the products through it."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from pyro_dvi.core.undisturbed import forked, seeder
from pyro_dvi.curvature.linearisation import ObservedSite
from pyro_dvi.curvature.products import LinearMap, batched_gradients, information_pairs
from pyro_dvi.errors import DataError, ModelError, UnsupportedError, warn
from pyro_dvi.laplace.energy.passes import Passes
from pyro_dvi.linalg.operator import gaussian_rows
from pyro_dvi.runs.log_joint import JointRun

_LABELS = 8  # for each observation


@dataclass(eq=False)
class BatchGraph:
    r"""The graph of one batch's run, and the products through it; vectors and products are tensors ``[S, *site]``.

    Args:
        values: the sites' tensors, in the graph.
        run: the model at them.
        kl_weight: :math:`\beta`.
        with_prior: this batch, of all of a pass, brings the prior.
        labels: gives labels of a site without a closed-form Fisher information; products of the prior need none.
        vectors_at_once: how many vectors go through the graph together.
    """

    values: list[Tensor]
    run: JointRun
    kl_weight: float = 1.0
    with_prior: bool = True
    labels: Any = None
    vectors_at_once: int = 2

    @cached_property
    @torch.enable_grad()  # whoever asks
    def energy(self) -> Tensor:
        """Contribution of the batch to U."""
        energy = -self.run.log_likelihood() / self.kl_weight
        return energy - self.run.log_prior if self.with_prior else energy

    def gradient(self) -> list[Tensor]:
        """Return the gradient of :attr:`energy`."""
        return _gradients(self.energy, self.values)

    @cached_property
    def _gradients(self) -> list[Tensor]:
        return _gradients(self.energy, self.values, create_graph=True)

    @cached_property
    @torch.enable_grad()
    def prior_gradients(self) -> list[Tensor]:
        return _gradients(self.run.log_prior, self.values, create_graph=True)

    @cached_property
    @torch.enable_grad()
    def _information(self) -> tuple[LinearMap, Tensor]:
        nothing = torch.zeros(0)
        pairs = information_pairs(sites_only(self.run), self.labels) or [(nothing, nothing)]
        outputs, weights = (
            torch.cat([part.reshape(-1) for part in parts]) for parts in zip(*pairs, strict=True)
        )
        jacobian = LinearMap(outputs, self.values, vectors_at_once=self.vectors_at_once)
        return jacobian, weights.square() / self.kl_weight

    def hessian(self, vectors: list[Tensor]) -> list[Tensor]:
        return batched_gradients(self._gradients, self.values, vectors, self.vectors_at_once)

    def prior_hessian(self, vectors: list[Tensor]) -> list[Tensor]:
        found = batched_gradients(self.prior_gradients, self.values, vectors, self.vectors_at_once)
        return [-product for product in found]

    def ggn(self, vectors: list[Tensor]) -> list[Tensor]:
        jacobian, weights = self._information
        total = jacobian.transposed(jacobian.forward(vectors) * weights)
        if self.with_prior:
            total = [a + b for a, b in zip(total, self.prior_hessian(vectors), strict=True)]
        return total

    def ggn_noise(self, count: int, generator: torch.Generator) -> list[Tensor]:
        jacobian, weights = self._information
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
            "defined. Write it as an observed pyro.sample site, or use precision=Hessian()."
        )
    return run.sites


def refuse_torch_modes(device: torch.device | None) -> None:
    """Refuse to differentiate where nothing can be, and to solve equations in half precision.

    Args:
        device: of the model; None: not known, so the CPU.

    Raises:
        UnsupportedError: ``torch.inference_mode()`` or ``torch.autocast`` is on.
    """
    if torch.is_inference_mode_enabled():
        raise UnsupportedError(
            "a Laplace approximation differentiates the model, in predictions too: use torch.no_grad() in place of "
            "torch.inference_mode(), and make the inputs outside of it"
        )
    if torch.is_autocast_enabled("cpu" if device is None else device.type):
        raise UnsupportedError(
            "a Laplace approximation solves equations, in predictions too, for which the precision of torch.autocast "
            "is too low: use it in training only"
        )


class DrawnLabels:
    """Labels for the Fisher information where it has no closed form, the same in every pass over the data.

    Args:
        passes: over the data.
    """

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        self._announced: set[str] = set()

    def __call__(self, site: ObservedSite, batch: int) -> list[Tensor]:
        """Draw labels of a site from its own distribution, others for each batch.

        Args:
            site: an observed site without a closed-form Fisher information.
            batch: the position of the batch in its pass.

        Raises:
            DataError: the rows come in another order each time, and would have other labels.
        """
        kind = type(site.fn).__name__
        if self.passes.reordered:
            raise DataError(
                f"the Gauss-Newton matrix of observed site {site.name!r}, a {kind}, is estimated from labels drawn for "
                "each row, which shuffled batches would change: give list(loader), or a loader with shuffle=False"
            )
        if site.name not in self._announced:
            self._announced.add(site.name)
            warn(
                f"the Fisher information of {kind} at observed site {site.name!r} has no closed form here: the "
                f"Gauss-Newton matrix is estimated from {_LABELS} drawn labels for each observation. Use "
                "precision=Hessian(), or register it with pyro_dvi.curvature.information.information_rule"
            )
        with forked(site.value.device):
            seeder()(crc32(f"0/{batch}/{site.name}".encode()))
            return [site.sample_labels() for _ in range(_LABELS)]


def _gradients(scalar: Tensor, values: list[Tensor], create_graph: bool = False) -> list[Tensor]:
    """Gradients by each value, zero where there are none; the graph is kept."""
    if not scalar.requires_grad:
        return [torch.zeros_like(v) for v in values]
    found = torch.autograd.grad(
        scalar, values, retain_graph=True, create_graph=create_graph, allow_unused=True
    )
    return [torch.zeros_like(v) if g is None else g for v, g in zip(values, found, strict=True)]
