# SPDX-License-Identifier: Apache-2.0
r"""The function that the MAP minimises, over all data, with its derivatives.

.. math:: U(u) = -\frac{1}{\kappa}\sum_i \log p(y_i \mid u) - \log p(u)

in the unconstrained space of the latents, where :math:`\log p(u)` includes the Jacobian of the transforms and
:math:`\kappa` is the ``kl_weight`` of training: :math:`e^{-U}` is the (tempered) posterior that a Gaussian is to
approximate, and the prior is part of it with its full weight.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.curvature.likelihood import ObservedSite, private_random_state
from pyro_dvi.curvature.products import LinearMap, SavedBytes, hessian_product, information_outputs
from pyro_dvi.errors import DataError, ModelError, NonFiniteError
from pyro_dvi.guides.laplace.layout import Layout
from pyro_dvi.guides.laplace.passes import Passes
from pyro_dvi.handlers.explained import explained_errors
from pyro_dvi.handlers.log_joint import JointRun, run_joint
from pyro_dvi.undisturbed import evaluating

__all__ = ["Energy", "LocalEnergy"]


class Energy:
    r"""U of a model on fixed batches.

    Sums are exact over a pass: every example counts once whatever the sizes of batches and the scale of the plate.
    Modules run in evaluation mode.

    Args:
        model: a Pyro model.
        batches: a loader or a list of batches of its arguments.
        locs: unconstrained value of every latent site.
        subset: sites that vary, in this order; the others stay at ``locs``. None: all of them.
        kl_weight: :math:`\kappa`.
        memory: bytes of graphs to keep between products at one point; what does not fit is run again each time.
        vectors_at_once: how many vectors one product pushes through the model together.
        num_labels: labels drawn for each observation of a distribution without a closed-form Fisher information.
        seed: of these labels.

    Attributes:
        layout: the sites in the flat vector.
        evaluations: work done so far in gradients of all data: 1 for a gradient, 2 for the product with a vector.
    """

    def __init__(
        self,
        model: Callable,
        batches: Iterable[Any],
        locs: Mapping[str, Tensor],
        *,
        subset: Sequence[str] | None = None,
        kl_weight: float = 1.0,
        memory: int = 2**30,
        vectors_at_once: int = 64,
        num_labels: int = 8,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.locs = {name: loc.detach() for name, loc in locs.items()}
        names = list(locs) if subset is None else list(subset)
        self.layout = Layout({name: self.locs[name].shape for name in names})
        reference = self.locs[names[0]]
        self.passes = Passes(batches, reference.device)
        self.kl_weight = kl_weight
        self.memory, self.vectors_at_once = memory, vectors_at_once
        self.num_labels, self.seed = num_labels, seed
        self.evaluations = 0
        self._local: LocalEnergy | None = None

    @property
    def start(self) -> Tensor:
        """The flat vector of ``locs``."""
        return self.layout.flatten([self.locs[name] for name in self.layout.names])

    def at(self, point: Tensor) -> "LocalEnergy":
        """Return U around a flat vector [D]; the last one is remembered."""
        if self._local is None or not torch.equal(self._local.point, point):
            self._local = None  # let its graphs go first
            self._local = LocalEnergy(self, point.detach().clone())
        return self._local

    def value(self, point: Tensor) -> Tensor:
        """Return U, a scalar, without graphs."""
        total = torch.zeros((), dtype=torch.float64, device=point.device)
        rows = _Rows()
        with torch.no_grad():
            for index, (_, run) in enumerate(self.runs(point)):
                rows.add(run)
                total += self.part(run, with_prior=index == 0)
        rows.check()
        return total.to(point.dtype)

    def runs(self, point: Tensor) -> Iterator[tuple[list[Tensor], JointRun]]:
        """Run the model on every batch; give the tensors of the sites with each run."""
        for args, kwargs in self.passes:
            values = [v.detach().requires_grad_(torch.is_grad_enabled()) for v in self.layout.split(point)]
            named = {**self.locs, **dict(zip(self.layout.names, values, strict=True))}
            with explained_errors(self.model, values, args, kwargs), evaluating(self.model):
                run = run_joint(self.model, args, kwargs, named)
            yield values, run

    def part(self, run: JointRun, *, with_prior: bool) -> Tensor:
        """What one batch adds to U; the prior comes with one of them."""
        energy = -run.log_likelihood() / self.kl_weight
        return energy - run.log_prior if with_prior else energy

    def labels(self, site: ObservedSite) -> list[Tensor]:
        """Labels of a site from its own distribution, the same in every pass."""
        generator = torch.Generator(device=site.value.device).manual_seed(self.seed)
        with private_random_state(generator, site.value.device):
            return [site.sample_labels() for _ in range(self.num_labels)]


class LocalEnergy:
    """U and its derivatives at one point.

    Attributes:
        point: flat vector [D].
    """

    def __init__(self, energy: Energy, point: Tensor) -> None:
        self.energy, self.point = energy, point
        self._kept: list[_BatchGraph] | None = None

    @cached_property
    def value_and_gradient(self) -> tuple[Tensor, Tensor]:
        """U as a scalar and its gradient [D].

        Raises:
            NonFiniteError: U is NaN or infinite.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.point.device)
        gradient = torch.zeros_like(self.point)
        for graph in self._graphs():
            total += graph.energy.detach()
            gradient += graph.flat_gradient()
        self.energy.evaluations += 1
        if not bool(torch.isfinite(total)):
            raise NonFiniteError(
                f"the negative log joint density is {total.item()} at these values: train further, or lower the "
                "learning rate; NaN in the data are named by guide.diagnose(batches)"
            )
        return total.to(self.point.dtype), gradient

    @property
    def value(self) -> Tensor:
        """U, a scalar."""
        return self.value_and_gradient[0]

    @property
    def gradient(self) -> Tensor:
        """Gradient of U, [D]."""
        return self.value_and_gradient[1]

    def hessian(self, vectors: Tensor) -> Tensor:
        """Product of the Hessian of U with vectors [S, D]."""
        return self._sum(vectors, lambda graph, v: graph.hessian(v))

    def ggn(self, vectors: Tensor) -> Tensor:
        """Product of vectors [S, D] with the Gauss-Newton matrix of the likelihood plus the Hessian of the prior.

        Raises:
            ModelError: the model has a ``pyro.factor`` term, which has no output to take the curvature of.
        """
        return self._sum(vectors, lambda graph, v: graph.ggn(v))

    def prior_hessian(self, vectors: Tensor) -> Tensor:
        """Product of vectors [S, D] with the Hessian of minus the log prior."""
        graph = next(iter(self._graphs()))
        split = self.energy.layout.split(vectors)
        return self.energy.layout.flatten(graph.prior_hessian(split))

    def _sum(self, vectors: Tensor, product: Callable[["_BatchGraph", list[Tensor]], list[Tensor]]) -> Tensor:
        split = self.energy.layout.split(vectors)
        total = torch.zeros_like(vectors)
        for graph in self._graphs():
            total += self.energy.layout.flatten(product(graph, split))
        self.energy.evaluations += 2 * len(vectors)
        return total

    def _graphs(self) -> Iterator["_BatchGraph"]:
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[_BatchGraph] | None = []
        saved, rows = 0, _Rows()
        with torch.enable_grad():
            runs = self.energy.runs(self.point)
            while True:
                saved_by_run = SavedBytes()
                with saved_by_run:
                    item = next(runs, None)
                if item is None:
                    break
                values, run = item
                rows.add(run)
                graph = _BatchGraph(self.energy, values, run, with_prior=rows.batches == 1)
                # Products differentiate twice: their graphs hold about three times what the run saved.
                saved += 4 * saved_by_run.total
                if kept is not None:
                    kept = [*kept, graph] if saved <= self.energy.memory else None
                yield graph
        rows.check()
        self._kept = kept


class _BatchGraph:
    """The graph of one batch's run, and the products through it."""

    def __init__(self, energy: Energy, values: list[Tensor], run: JointRun, *, with_prior: bool) -> None:
        self._owner, self.values, self.run, self.with_prior = energy, values, run, with_prior

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
    def _prior_gradients(self) -> list[Tensor]:
        return _differentiable(self.run.log_prior, self.values)

    @cached_property
    def _information(self) -> tuple[LinearMap, Tensor]:
        if self.run.factors:
            raise ModelError(
                f"pyro.factor site {self.run.factors[0].name!r} has no distribution, so its Gauss-Newton matrix is not "
                "defined. Write it as an observed pyro.sample site, or use curvature=Hessian()."
            )
        outputs, weights = information_outputs(self.run.sites, self._owner.labels)
        jacobian = LinearMap(outputs, self.values, vectors_at_once=self._owner.vectors_at_once)
        return jacobian, weights.square() / self._owner.kl_weight

    def hessian(self, vectors: list[Tensor]) -> list[Tensor]:
        return hessian_product(self._gradients, self.values, vectors, self._owner.vectors_at_once)

    def prior_hessian(self, vectors: list[Tensor]) -> list[Tensor]:
        chunk = self._owner.vectors_at_once
        return [-p for p in hessian_product(self._prior_gradients, self.values, vectors, chunk)]

    def ggn(self, vectors: list[Tensor]) -> list[Tensor]:
        jacobian, weights = self._information
        if jacobian.outputs.requires_grad:
            total = jacobian.transposed(jacobian.forward(vectors) * weights)
        else:
            total = [torch.zeros_like(v) for v in vectors]
        if self.with_prior:
            total = [a + b for a, b in zip(total, self.prior_hessian(vectors), strict=True)]
        return total


class _Rows:
    """Count the rows of plates over a pass."""

    def __init__(self) -> None:
        self.batches = 0
        self._seen: dict[str, int] = {}
        self._full: dict[str, set[int]] = {}
        self._subsampled: set[str] = set()

    def add(self, run: JointRun) -> None:
        self.batches += 1
        for name, (size, full) in run.rows.items():
            self._seen[name] = self._seen.get(name, 0) + size
            self._full.setdefault(name, set()).add(full)
            if size != full:
                self._subsampled.add(name)

    def check(self) -> None:
        """Compare what was seen with the size of each subsampled plate.

        Raises:
            DataError: rows are missing, or there are too many.
        """
        for name in sorted(self._subsampled):
            sizes = self._full[name]
            if sizes != {self._seen[name]}:
                raise DataError(
                    f"the batches hold {self._seen[name]} rows of plate {name!r}, whose size is {max(sizes)}. The "
                    "posterior needs all the data once: a loader with drop_last=False over the whole data set, and a "
                    "plate of its size"
                )


def _differentiable(scalar: Tensor, values: Sequence[Tensor]) -> list[Tensor]:
    if not scalar.requires_grad:
        return [torch.zeros_like(v) for v in values]
    found = torch.autograd.grad(scalar, values, create_graph=True, allow_unused=True)
    return [torch.zeros_like(v) if g is None else g for v, g in zip(values, found, strict=True)]
