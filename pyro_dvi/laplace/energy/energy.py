# SPDX-License-Identifier: Apache-2.0
r"""The function that the MAP estimate minimises, with its derivatives over all data.

.. math:: U(u) = \frac1T\Bigl[-\frac{1}{\beta}\sum_i \log p(y_i \mid u) - \log p(u)\Bigr]

in the unconstrained space of the latents, where :math:`\log p(u)` includes the Jacobian of the transforms, and
:math:`\beta` and T are the ``kl_weight`` and ``temperature`` of training. The Gaussian approximates the (tempered)
posterior :math:`e^{-U}`. The temperature does not move minima.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from pyro_dvi.runs.observed import row_weights
from pyro_dvi.runs.posterior_run import Call
from pyro_dvi.runs.structure import check_gradients

_LABELS = 8  # labels drawn for each observation

Recorder = Callable[[list[Tensor]], AbstractContextManager[Any]]
Run = tuple[list[Tensor], JointRun]  # the latents that vary, and the run at these values


@dataclass
class Work:
    """Cost in full-data gradients: 1 for a gradient, 2 for a product with a vector.

    Attributes:
        done: the work so far.
        report: function that is called with each addition, or None.
    """

    done: float = 0
    report: Callable[[float], object] | None = None


class Energy:
    r"""U of a model on fixed batches.

    Sums over a pass are exact: every example counts once, independent of the batch sizes and the scale of the plate.
    Modules run in evaluation mode.

    Args:
        model: a Pyro model.
        batches: a loader or a list of batches of its arguments.
        locs: unconstrained value of every latent site.
        scale_factors: multipliers of the scales of sites. A run of the model serves all multipliers.
        layout: the latents that vary; all others are fixed at ``locs``. None means that all vary.
        kl_weight: :math:`\beta`.
        temperature: T.
        memory: maximum bytes of graphs to keep between products at one point; larger graphs are rebuilt for each
            product.
        differentiable: whether per-example gradients and the Hessian of the prior are differentiable functions of the
            model's tensors that require gradients, such as scales of priors. Products with the curvature then raise an
            error.

    Raises:
        UnsupportedError: a latent has half precision.

    Attributes:
        layout: order of the latents in the flat vector.
        work: the work so far.
    """

    def __init__(
        self,
        model: Callable,
        batches: Iterable[Any],
        locs: Mapping[str, Tensor],
        *,
        scale_factors: Mapping[str, float] | None = None,
        layout: Layout | None = None,
        kl_weight: float = 1.0,
        temperature: float = 1.0,
        memory: int = 2**30,
        differentiable: bool = False,
    ) -> None:
        self.model, self.scale_factors = model, scale_factors or {}
        self.locs = {name: loc.detach() for name, loc in locs.items()}
        self.layout = Layout({name: loc.shape for name, loc in locs.items()}) if layout is None else layout
        first = self.layout.names[0]
        reference = self.locs[first]
        if reference.dtype.itemsize < 4:
            lost = f"latent site {first!r} is {reference.dtype}, in which rounding hides the curvature around a mode"
            raise UnsupportedError(
                f"{lost}: convert the model and the data with .float(), and construct a new guide"
            )
        self.passes = Passes(batches, reference.device)
        self.likelihood_weight, self.prior_weight = 1 / (kl_weight * temperature), 1 / temperature
        self.memory, self.differentiable = memory, differentiable
        self.known: set[str] = set()  # checks and warnings that were already done; shared by copies
        self.work = Work()
        self._local: LocalEnergy | None = None
        self._latest: list[Runs] = []  # at most one; shared by copies

    @property
    def start(self) -> Tensor:
        """``locs`` as a flat vector."""
        return self.layout.flatten(self.layout.pieces(self.locs))

    def at(self, point: Tensor) -> "LocalEnergy":
        """Return U with its derivatives at a flat vector [D]; the last result is cached."""
        if self._local is None or not torch.equal(self._local.point, point):
            self._local = None  # first free its graphs
            if not self._latest or not torch.equal(self._latest[0].point, point):
                self._latest[:] = [Runs(point.detach().clone())]
            # A copy without this cache avoids a reference cycle, which would keep graphs until garbage collection.
            self._local = LocalEnergy(copy(self), self._latest[0])
        return self._local

    def with_factors(self, factors: Mapping[str, float]) -> "Energy":
        """Return U with other multipliers of scales, which shares the runs of the model."""
        other = copy(self)
        other.scale_factors, other._local = factors, None
        return other

    def count(self, work: float) -> None:
        """Add to the work done."""
        self.work.done += work
        if self.work.report is not None:
            self.work.report(work)

    def runs(self, point: Tensor, recorder: Recorder | None = None) -> Iterator[Run]:
        """Run the model on every batch, inside ``recorder(sites)``; yield the tensors that vary and the run.

        The scales of the runs are those in the model's code; see :meth:`JointRun.rescaled`.

        Raises:
            DataError: a pass does not contain every row exactly once, or has NaN that the likelihood does not mask.
            ModelError: the prior changes from batch to batch.
        """
        rows = Rows()
        for batch in self.passes:
            found = self.run(batch, point, recorder)
            rows.add(found[1])
            yield found
        rows.check()

    def run(self, batch: Arguments, point: Tensor, recorder: Recorder | None = None) -> Run:
        """Run the model on one batch; see :meth:`runs`."""
        args, kwargs = batch
        values = [v.detach().requires_grad_(torch.is_grad_enabled()) for v in self.layout.split(point)]
        sites = self.layout.place(values, self.locs)
        model = self.model if recorder is None else within(recorder(list(sites.values())), self.model)
        checked = explained_errors(self.model, args, kwargs)
        constant = nullcontext() if self.differentiable else constant_parameters(self.model)
        with checked, evaluating(self.model), constant:
            found = run_joint(model, args, kwargs, {**self.locs, **sites})
            if self.passes.bad is not None:
                # NaN stands for a missing value only in distributions that mask it.
                for term in (*(site.value for site in found.sites), found.log_likelihood()):
                    if not bool(torch.isfinite(term).all()):
                        raise self.passes.bad
            if torch.is_grad_enabled() and "gradients reach the latents" not in self.known:
                self.known.add("gradients reach the latents")
                check_gradients(Call(self.model, None, args, kwargs), found.trace, found.log_likelihood())
            return values, found

    def labels(self, site: ObservedSite, batch: int) -> list[Tensor]:
        """Draw labels of a site from its own distribution, with the same result in every pass over the data.

        Args:
            site: an observed site without a closed-form Fisher information.
            batch: position of the batch in its pass, which determines its labels.

        Raises:
            DataError: the order of rows changes between passes, so rows would get other labels.
        """
        kind = type(site.fn).__name__
        if self.passes.reordered:
            raise DataError(
                f"labels of site {site.name!r} ({kind}) are drawn by row, so rows need a fixed order: pass list(loader)"
            )
        if site.name not in self.known:
            self.known.add(site.name)
            warn(
                f"the Fisher information of {kind} at observed site {site.name!r} has no closed form here, so it is "
                f"estimated from {_LABELS} drawn labels per observation: use Hessian(), or add an information_rule"
            )
        with forked(*accelerators()):
            seeder()(crc32(f"0/{batch}/{site.name}".encode()))
            return [site.sample_labels() for _ in range(_LABELS)]

    def graph(self, values: list[Tensor], run: JointRun, **options: Any) -> BatchGraph:
        """Return the graph of a run, with options of :class:`BatchGraph`."""
        weights = {"likelihood_weight": self.likelihood_weight, "prior_weight": self.prior_weight}
        known = {**weights, "differentiable": self.differentiable}
        with torch.enable_grad():
            run = run.rescaled(self.scale_factors)
        return BatchGraph(self.layout, values, run, **{**known, **options})


@dataclass
class Runs:
    """Runs of the model at one point.

    Attributes:
        point: flat vector [D].
        kept: a run on each batch, with the recorder of its weights and the number of vectors that may pass through its
            graph together; None if there were no runs, or if their graphs need too much memory.
    """

    point: Tensor
    kept: list[tuple[Run, SquaredGradients, int]] | None = None


class LocalEnergy:
    """U and its derivatives at one point.

    Args:
        energy: U.
        runs: the point, and runs of the model there.

    Attributes:
        point: flat vector [D].
    """

    def __init__(self, energy: Energy, runs: Runs) -> None:
        self.energy, self.point = energy, runs.point
        self._runs = runs
        self._kept: list[BatchGraph] | None = None

    @cached_property
    def value_and_gradient(self) -> tuple[Tensor, Tensor]:
        """U, a scalar, and its gradient, [D].

        Raises:
            NonFiniteError: U is NaN or infinite.
        """
        total = torch.zeros((), dtype=widest(self.point.device), device=self.point.device)
        gradient = torch.zeros_like(self.point)
        for graph in self.graphs():
            total += graph.energy.detach()
            gradient += graph.gradient()
        self.energy.count(1)
        if not bool(torch.isfinite(total)):
            raise NonFiniteError(
                f"U, the negative log joint density, is {total.item()}: check noise scales and learning rate"
            )
        return total.to(self.point.dtype), gradient

    @cached_property
    def log_likelihood(self) -> Tensor:
        """Log-likelihood of all data, summed in the widest dtype; with a graph if U is differentiable."""
        terms = [graph.run.log_likelihood().to(widest(self.point.device)) for graph in self.graphs()]
        return torch.stack([term if self.energy.differentiable else term.detach() for term in terms]).sum()

    @property
    def first(self) -> BatchGraph:
        """The graph of the first batch, for quantities that do not depend on the data."""
        return next(iter(self.graphs()))

    @property
    def value(self) -> Tensor:
        """U, a scalar."""
        return self.value_and_gradient[0]

    @property
    def gradient(self) -> Tensor:
        """Gradient of U, [D]."""
        return self.value_and_gradient[1]

    def hessian(self, vectors: Tensor) -> Tensor:
        """Return products of the Hessian of U with vectors [S, D]."""
        return self._sum(lambda graph: graph.hessian(vectors), 2 * len(vectors))

    def ggn(self, vectors: Tensor) -> Tensor:
        """Return products of :class:`~pyro_dvi.laplace.energy.precision.GGN` with vectors [S, D].

        Raises:
            ModelError: the model has a ``pyro.factor`` term, which has no Gauss-Newton matrix.
        """
        return self._sum(lambda graph: graph.ggn(vectors), 2 * len(vectors))

    @cached_property
    def prior_diagonal(self) -> Tensor | None:
        """Diagonal [D] of the Hessian of minus the log prior; None unless this Hessian is diagonal and positive.

        The Hessian is diagonal for independent Normal priors, but not if the prior of one latent depends on another.
        """
        return diagonal_of(self.prior_hessian, self.point)

    @property
    def prior_scale(self) -> Tensor:
        """Inverse square root [D] of :attr:`prior_diagonal`; ones if it is None."""
        diagonal = self.prior_diagonal
        return torch.ones_like(self.point) if diagonal is None else diagonal.rsqrt()

    def prior_hessian(self, vectors: Tensor) -> Tensor:
        """Return products of vectors [S, D] with the Hessian of minus the log prior."""
        return self.first.prior_hessian(vectors)

    def ggn_noise(self, count: int, generator: torch.Generator) -> Tensor:
        r"""Draw :math:`J^\top \Lambda^{1/2} \xi` [S, D], whose covariance is :math:`J^\top \Lambda J`."""
        return self._sum(lambda graph: graph.ggn_noise(count, generator), count)

    def examples(self) -> Iterator[ExampleGradients]:
        r"""Yield the rows of :math:`\Lambda^{1/2} J`, which make up the Gauss-Newton matrix, batch by batch."""
        energy = self.energy
        with torch.enable_grad():
            for index, ((_, run), recorder, _) in enumerate(self._runs.kept or self._recorded()):
                labels = partial(energy.labels, batch=index)
                sites = sites_only(run.rescaled(energy.scale_factors))
                for outputs in by_examples(information_pairs(sites, labels, energy.differentiable)):
                    outputs = outputs * energy.likelihood_weight**0.5
                    if index == 0:  # counted once: a backward pass per output, through all batches
                        energy.count(outputs.shape[1])
                    given = recorder, outputs, energy.layout.entries, energy.layout.names
                    yield ExampleGradients(*given, weights=row_weights(sites, len(outputs)))

    def _recorded(self) -> Iterator[tuple[Run, SquaredGradients, SavedBytes]]:
        """Run the model on each batch; yield the run, the recorder of its weights, and the bytes of its graph."""
        latest: list[Any] = []

        @contextmanager
        def recorder(sites: list[Tensor]) -> Iterator[None]:
            latest[:] = SquaredGradients(sites, differentiable=self.energy.differentiable), SavedBytes()
            with latest[0], latest[1]:
                yield

        for run in self.energy.runs(self.point, recorder):
            yield run, *latest

    def _sum(self, part: Callable[[BatchGraph], Tensor], work: int) -> Tensor:
        if self.energy.differentiable:
            what = "products with the curvature have no gradient with respect to tensors of the model"
            raise UnsupportedError(
                f"{what}: use Dense(), Diagonal(), KroneckerFactored() or Functional(), of GGN()"
            )
        total = reduce(torch.add, map(part, self.graphs()))
        self.energy.count(work)
        return total

    def graphs(self) -> Iterator[BatchGraph]:
        """Yield the graph of each batch; they are kept if memory allows."""
        if self._kept is None and self._runs.kept is not None:
            self._kept = [self._graph(k, run, many) for k, (run, _, many) in enumerate(self._runs.kept)]
        if self._kept is not None:
            yield from self._kept
            return
        runs: list[tuple[Run, SquaredGradients, int]] | None = []
        kept, saved = list[BatchGraph](), 0
        with torch.enable_grad():
            for index, (run, recorder, bytes_of_run) in enumerate(self._recorded()):
                together = vectors_together(bytes_of_run.total, self.point.device)
                graph = self._graph(index, run, together)
                # Products differentiate twice, so their graphs need about three times the bytes that the run saved.
                saved += 4 * bytes_of_run.total
                if saved > self.energy.memory:
                    runs = None
                    kept.clear()
                if runs is not None:
                    runs.append((run, recorder, together))
                    kept.append(graph)
                yield graph
        self._runs.kept = runs
        self._kept = None if runs is None else kept

    def _graph(self, index: int, run: Run, vectors_at_once: int) -> BatchGraph:
        labels = partial(self.energy.labels, batch=index)
        return self.energy.graph(*run, with_prior=index == 0, labels=labels, vectors_at_once=vectors_at_once)


def diagonal_of(product: Callable[[Tensor], Tensor], like: Tensor) -> Tensor | None:
    """Return the diagonal [D] of a matrix from its products; None unless it is diagonal and positive."""
    # The row sums of a diagonal matrix are its diagonal; a product with a vector of distinct elements confirms this.
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
