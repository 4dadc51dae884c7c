# SPDX-License-Identifier: Apache-2.0
"""Outputs of a model at query inputs, as a function of the flat vector of latents."""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.core.arguments import with_missing
from pyro_dvi.core.batches import tensors_in
from pyro_dvi.core.undisturbed import constant_parameters, evaluating
from pyro_dvi.curvature.example_gradients import ExampleGradients
from pyro_dvi.curvature.products import LinearMap, SavedBytes, vectors_together
from pyro_dvi.curvature.squared_gradients import SquaredGradients
from pyro_dvi.errors import DataError
from pyro_dvi.laplace.energy.batch_graph import refuse_torch_modes
from pyro_dvi.laplace.energy.layout import Layout
from pyro_dvi.linalg.operator import identity_rows
from pyro_dvi.runs.explained import explained_errors
from pyro_dvi.runs.outputs import Outputs, run_outputs

ReadOutputs = Callable[[Mapping[str, Tensor], int], Outputs]


class Query:
    r"""Outputs :math:`f(x; u)` for B inputs, and their Jacobian J at the mode.

    Args:
        model: a Pyro model.
        inputs: its positional arguments; observations may be left out.
        locs: unconstrained value of every latent site.
        layout: what varies.
        site: which outputs; see :func:`~pyro_dvi.runs.outputs.run_outputs`.
        read: returns the outputs, given unconstrained values of the latents by name and the number of rows; None: the
            model is run by :func:`~pyro_dvi.runs.outputs.run_outputs`.

    Attributes:
        num_rows: B.
    """

    def __init__(
        self,
        model: Callable,
        inputs: tuple[Any, ...],
        locs: Mapping[str, Tensor],
        layout: Layout,
        *,
        site: str | None = None,
        read: ReadOutputs | None = None,
    ) -> None:
        refuse_torch_modes(next((loc.device for loc in locs.values()), None))
        self.model, self.inputs, self.layout, self.site = model, inputs, layout, site
        self._read = read
        self._locs = {name: loc.detach() for name, loc in locs.items()}
        tensors = [v for v in tensors_in(inputs) if v.dim() > 0]
        if not tensors:
            raise DataError("a query needs an input tensor with a row for each example")
        self.num_rows = len(tensors[0])
        if self.num_rows == 0:
            raise DataError("the query has no rows")
        for tensor in tensors:
            if not bool(torch.isfinite(tensor).all()):
                raise DataError(f"the query of shape {tuple(tensor.shape)} holds NaN or infinite values")

    @cached_property
    def outputs(self) -> Outputs:
        """The outputs at the mode, with their graph."""
        with torch.enable_grad():
            self._values = [piece.clone().requires_grad_() for piece in self.layout.pieces(self._locs)]
            sites = self.layout.place(self._values, self._locs)
        self._recorder, self._saved = SquaredGradients(list(sites.values())), SavedBytes()
        with self._recorder, self._saved:
            return self._run(sites)

    @property
    def mean(self) -> Tensor:
        """Outputs at the mode, [B, K]."""
        return self.outputs.values.detach()

    @property
    def size(self) -> int:
        """K, the real numbers for each example."""
        return self.outputs.values.shape[1]

    @property
    def bytes_held(self) -> int:
        """Bytes of the graph, and of the gradients of all outputs at layers that covariances make of it."""
        return (1 + self.size) * self._saved.total

    def at(self, point: Tensor) -> Tensor:
        """Return the outputs [B, K] at another flat vector [D], as a node of its graph if it has one."""
        with torch.enable_grad():  # which parameters are outputs shows in their graph
            start = point if point.requires_grad else point.detach().requires_grad_()
            found = self._run(self.layout.place(self.layout.split(start), self._locs)).values
        return found if point.requires_grad else found.detach()

    def forward(self, vectors: Tensor) -> Tensor:
        """Return J v as ``[S, B, K]`` for vectors ``[S, D]``."""
        return self._jacobian.forward(self.layout.split(vectors))

    def transposed(self, cotangents: Tensor) -> Tensor:
        """Return Jᵀ c as ``[S, D]`` for cotangents ``[S, B, K]``."""
        return self.layout.flatten(self._jacobian.transposed(cotangents))

    def rows(self, at_once: int = 64) -> Iterator[Tensor]:
        """Give the rows of J in order, example by example: tensors ``[n, D]``, n at most ``at_once``."""
        if not self.examples.cheap:
            for units in identity_rows(self.mean.flatten(), at_once):
                yield self.transposed(units.unflatten(1, self.mean.shape))
            return
        together = max(1, at_once // self.size)
        for start in range(0, self.num_rows, together):
            rows = self.examples.rows(slice(start, start + together))
            yield from rows.flatten(0, 1).split(at_once)

    @cached_property
    def examples(self) -> ExampleGradients:
        """The rows of J, and what they are made of."""
        outputs = self.outputs.values
        return ExampleGradients(self._recorder, outputs, self.layout.entries, self.layout.names)

    @cached_property
    def _jacobian(self) -> LinearMap:
        outputs = self.outputs.values
        together = vectors_together(self._saved.total, outputs.device)
        return LinearMap(outputs, self._values, vectors_at_once=together)

    def _run(self, sites: Mapping[str, Tensor]) -> Outputs:
        args = with_missing(self.model, self.inputs)
        with torch.enable_grad(), explained_errors(self.model, sites.values(), args, {}):
            return (self._read or self._run_model)({**self._locs, **sites}, self.num_rows)

    def _run_model(self, named: Mapping[str, Tensor], num_rows: int) -> Outputs:
        """Run the model at unconstrained values and read its outputs."""
        args = with_missing(self.model, self.inputs)
        with evaluating(self.model), constant_parameters(self.model):
            return run_outputs(self.model, args, named, num_rows, self.site)
