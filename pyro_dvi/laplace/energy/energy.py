# SPDX-License-Identifier: Apache-2.0
r"""The function that the MAP estimate minimises, over all data, with its derivatives.

.. math:: U(u) = \frac1T\Bigl[-\frac{1}{\beta}\sum_i \log p(y_i \mid u) - \log p(u)\Bigr]

in the unconstrained space of the latents, where :math:`\log p(u)` includes the Jacobian of the transforms and
:math:`\beta` and T are the ``kl_weight`` and ``temperature`` of training: :math:`e^{-U}` is the (tempered) posterior to
be approximated by a Gaussian. The temperature does not move minima.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from pyro_dvi.core.undisturbed import accelerators, constant_parameters, evaluating, forked, seeder, widest
from pyro_dvi.curvature.example_gradients import ExampleGradients, by_examples
from pyro_dvi.curvature.linearisation import ObservedSite
from pyro_dvi.curvature.products import SavedBytes, information_pairs, vectors_together
from pyro_dvi.curvature.squared_gradients import SquaredGradients
from pyro_dvi.errors import DataError, NonFiniteError, UnsupportedError, warn
from pyro_dvi.laplace.energy.batch_graph import BatchGraph, sites_only
from pyro_dvi.laplace.energy.passes import Arguments, Passes, Rows
from pyro_dvi.laplace.energy.query import Layout
from pyro_dvi.runs.explained import explained_errors
from pyro_dvi.runs.log_joint import JointRun, run_joint
from pyro_dvi.runs.posterior_run import Call
from pyro_dvi.runs.structure import check_gradients

_LABELS = 8  # for each observation

Recorder = Callable[[list[Tensor]], AbstractContextManager[Any]]
Run = tuple[list[Tensor], JointRun]  # the varying tensors, and the run at them


@dataclass
class Work:
    """Cost in full-data gradients: 1 for a gradient, 2 for a product with a vector.

    Attributes:
        done: the work so far.
        report: called with each addition to the work; may be None.
    """

    done: int = 0
    report: Callable[[int], object] | None = None


class Energy:
    r"""U of a model on fixed batches.

    Sums over a pass are exact: every example counts once, whatever the batch sizes and the scale of the plate.
    Modules run in evaluation mode.

    Args:
        model: a Pyro model.
        batches: a loader or a list of batches of its arguments.
        locs: unconstrained value of every latent site.
        layout: the latents that vary; the rest stays at ``locs``. None: all of every site.
        kl_weight: :math:`\beta`.
        temperature: T.
        memory: bytes of graphs to keep between products at one point; larger graphs are rebuilt for each product.

    Raises:
        UnsupportedError: latents in half precision.

    Attributes:
        layout: order of the latents that vary in the flat vector.
        work: the work so far.
    """

    def __init__(
        self,
        model: Callable,
        batches: Iterable[Any],
        locs: Mapping[str, Tensor],
        *,
        layout: Layout | None = None,
        kl_weight: float = 1.0,
        temperature: float = 1.0,
        memory: int = 2**30,
    ) -> None:
        self.model = model
        self.locs = {name: loc.detach() for name, loc in locs.items()}
        self.layout = Layout({name: loc.shape for name, loc in locs.items()}) if layout is None else layout
        first = self.layout.names[0]
        reference = self.locs[first]
        if reference.dtype.itemsize < 4:
            lost = f"latent site {first!r} is {reference.dtype}, where rounding hides the curvature around a mode"
            raise UnsupportedError(f"{lost}: convert model and data with .float(), and build a new guide")
        self.passes = Passes(batches, reference.device)
        self.likelihood_weight, self.prior_weight = 1 / (kl_weight * temperature), 1 / temperature
        self.memory = memory
        self.known: set[str] = set()  # what was checked, or said; copies share it
        self.work = Work()
        self._local: LocalEnergy | None = None

    @property
    def start(self) -> Tensor:
        """The flat vector of ``locs``."""
        return self.layout.flatten(self.layout.pieces(self.locs))

    def at(self, point: Tensor) -> "LocalEnergy":
        """Return U around a flat vector [D]; the last point is remembered."""
        if self._local is None or not torch.equal(self._local.point, point):
            self._local = None  # let its graphs go first
            # A copy, which does not remember it: graphs in a cycle live until the garbage collector comes.
            self._local = LocalEnergy(copy(self), point.detach().clone())
        return self._local

    def with_model(self, model: Callable) -> "Energy":
        """Return U of another model with the same sites on the same data."""
        if model is self.model:
            return self
        other = copy(self)
        other.model, other.work, other._local = model, Work(report=self.work.report), None
        return other

    def count(self, work: int) -> None:
        """Add to the work."""
        self.work.done += work
        if self.work.report is not None:
            self.work.report(work)

    def runs(self, point: Tensor, recorder: Recorder | None = None) -> Iterator[Run]:
        """Run the model on every batch, inside ``recorder(sites)``; yield the varying tensors and the run.

        Raises:
            DataError: if a pass over the batches does not contain every row once.
            ModelError: the prior changes from batch to batch.
        """
        rows = Rows()
        for batch in self.passes:
            found = self.run(batch, point, recorder)
            rows.add(found[1])
            yield found
        rows.check(self.passes.order)

    def run(self, batch: Arguments, point: Tensor, recorder: Recorder | None = None) -> Run:
        """Run the model on one batch; see :meth:`runs`."""
        args, kwargs = batch
        values = [v.detach().requires_grad_(torch.is_grad_enabled()) for v in self.layout.split(point)]
        sites = self.layout.place(values, self.locs)
        model = self.model if recorder is None else within(recorder(list(sites.values())), self.model)
        checked = explained_errors(self.model, values, args, kwargs)
        with checked, evaluating(self.model), constant_parameters(self.model):
            found = run_joint(model, args, kwargs, {**self.locs, **sites})
            if torch.is_grad_enabled() and "gradients reach the latents" not in self.known:
                self.known.add("gradients reach the latents")
                check_gradients(Call(self.model, None, args, kwargs), found.trace, found.log_likelihood())
            return values, found

    def labels(self, site: ObservedSite, batch: int) -> list[Tensor]:
        """Draw labels of a site from its own distribution, the same in every pass over the data.

        Args:
            site: an observed site without a closed-form Fisher information.
            batch: the position of the batch in its pass, each of which has labels of its own.

        Raises:
            DataError: the order of rows changes between passes, so that rows would get other labels.
        """
        kind = type(site.fn).__name__
        if self.passes.reordered:
            raise DataError(
                f"labels are drawn for each row of {site.name!r}, a {kind}, and batches are shuffled: pass list(loader)"
            )
        if site.name not in self.known:
            self.known.add(site.name)
            warn(
                f"the Fisher information of {kind} at observed site {site.name!r} has no closed form here: it is "
                f"estimated from {_LABELS} drawn labels for each observation. Use Hessian(), or add an information_rule"
            )
        with forked(*accelerators()):
            seeder()(crc32(f"0/{batch}/{site.name}".encode()))
            return [site.sample_labels() for _ in range(_LABELS)]

    def batch_gradient(self, batch: Arguments, point: Tensor) -> Tensor:
        """Gradient [D] of U estimated from one batch, whose likelihood is multiplied by the number of batches."""
        with torch.enable_grad():
            found = self.run(batch, point)
            weight = self.likelihood_weight * self.passes.num_batches
            return self.graph(*found, likelihood_weight=weight).gradient()

    def graph(self, values: list[Tensor], run: JointRun, **options: Any) -> BatchGraph:
        """Return the graph of a run, with options of :class:`BatchGraph`."""
        weights = {"likelihood_weight": self.likelihood_weight, "prior_weight": self.prior_weight}
        return BatchGraph(self.layout, values, run, **{**weights, **options})


class LocalEnergy:
    """U and its derivatives at one point.

    Attributes:
        point: flat vector [D].
    """

    def __init__(self, energy: Energy, point: Tensor) -> None:
        self.energy, self.point = energy, point
        self._kept: list[BatchGraph] | None = None

    @cached_property
    def value_and_gradient(self) -> tuple[Tensor, Tensor]:
        """U as a scalar and its gradient [D].

        Raises:
            NonFiniteError: U is NaN or infinite.
        """
        total = torch.zeros((), dtype=widest(self.point.device), device=self.point.device)
        gradient = torch.zeros_like(self.point)
        for graph in self._graphs():
            total += graph.energy.detach()
            gradient += graph.gradient()
        self.energy.count(1)
        if not bool(torch.isfinite(total)):
            raise NonFiniteError(
                f"the negative log joint density is {total.item()}: a noise scale is not positive, or training diverged"
            )
        return total.to(self.point.dtype), gradient

    @cached_property
    def log_likelihood(self) -> float:
        """Log-likelihood of all data, added up in the widest type."""
        return sum(float(graph.run.log_likelihood().detach()) for graph in self._graphs())

    @property
    def first(self) -> BatchGraph:
        """The graph of the first batch, for quantities that do not depend on the data."""
        return next(iter(self._graphs()))

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
        return self._sum(lambda graph: graph.hessian(vectors), 2 * len(vectors))

    def ggn(self, vectors: Tensor) -> Tensor:
        """Product of vectors [S, D] with the Gauss-Newton matrix of the likelihood plus the Hessian of the prior.

        Raises:
            ModelError: if the model has a ``pyro.factor`` term, which has no outputs for a Gauss-Newton matrix.
        """
        return self._sum(lambda graph: graph.ggn(vectors), 2 * len(vectors))

    @cached_property
    def prior_diagonal(self) -> Tensor | None:
        """Diagonal [D] of the Hessian of minus the log prior; None unless that is diagonal and positive.

        Independent Normal priors have one. A latent in the prior of another couples the two.
        """
        return diagonal_of(self.prior_hessian, self.point)

    @property
    def prior_scale(self) -> Tensor:
        """Root [D] of the inverse of :attr:`prior_diagonal`; ones where there is none."""
        diagonal = self.prior_diagonal
        return torch.ones_like(self.point) if diagonal is None else diagonal.rsqrt()

    def prior_hessian(self, vectors: Tensor) -> Tensor:
        """Product of vectors [S, D] with the Hessian of minus the log prior."""
        return self.first.prior_hessian(vectors)

    def ggn_noise(self, count: int, generator: torch.Generator) -> Tensor:
        r"""Draw :math:`J^\top \Lambda^{1/2} \xi` [S, D]: its covariance is the likelihood's Gauss-Newton matrix."""
        return self._sum(lambda graph: graph.ggn_noise(count, generator), count)

    def examples(self) -> Iterator[ExampleGradients]:
        r"""Give, batch by batch, the rows of :math:`\Lambda^{1/2} J`, of which the Gauss-Newton matrix is made."""
        energy, recorders = self.energy, list[SquaredGradients]()

        def recorder(sites: list[Tensor]) -> SquaredGradients:
            recorders.append(SquaredGradients(sites))
            return recorders[-1]

        with torch.enable_grad():
            for index, (_, run) in enumerate(energy.runs(self.point, recorder)):
                labels = partial(energy.labels, batch=index)
                for outputs in by_examples(information_pairs(sites_only(run), labels)):
                    outputs = outputs * energy.likelihood_weight**0.5
                    if index == 0:  # a backward pass for each output, through every batch
                        energy.count(outputs.shape[1])
                    yield ExampleGradients(recorders[-1], outputs, energy.layout.entries, energy.layout.names)
                recorders.clear()

    def _sum(self, part: Callable[[BatchGraph], Tensor], work: int) -> Tensor:
        total = reduce(torch.add, map(part, self._graphs()))
        self.energy.count(work)
        return total

    def _graphs(self) -> Iterator[BatchGraph]:
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[BatchGraph] | None = []
        saved, by_run = 0, list[SavedBytes]()

        def recorder(sites: list[Tensor]) -> SavedBytes:
            by_run.append(SavedBytes())
            return by_run[-1]

        with torch.enable_grad():
            for index, (values, run) in enumerate(self.energy.runs(self.point, recorder)):
                graph = self.energy.graph(
                    values,
                    run,
                    with_prior=index == 0,
                    labels=partial(self.energy.labels, batch=index),
                    vectors_at_once=vectors_together(by_run[-1].total, self.point.device),
                )
                # Products differentiate twice: their graphs hold about three times the bytes that the run saved.
                saved += 4 * by_run[-1].total
                if kept is not None:
                    kept = [*kept, graph] if saved <= self.energy.memory else None
                yield graph
        self._kept = kept


def diagonal_of(product: Callable[[Tensor], Tensor], like: Tensor) -> Tensor | None:
    """Return the diagonal [D] of a matrix known by its products; None unless it is diagonal and positive."""
    # Row sums are the diagonal of a diagonal matrix, as a product with a vector of distinct elements shows.
    probe = torch.randn(like.shape, generator=torch.Generator().manual_seed(0)).to(like)
    diagonal, check = product(torch.stack([torch.ones_like(probe), probe]))
    rounding = 100 * torch.finfo(probe.dtype).eps * diagonal.abs() * probe.abs().clamp(min=1)
    proper = ((check - probe * diagonal).abs() <= rounding) & (diagonal > 0)
    return diagonal if bool(proper.all()) else None


def within(context: AbstractContextManager[Any], model: Callable) -> Callable:
    """Return the model inside a context."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with context:
            return model(*args, **kwargs)

    return run
