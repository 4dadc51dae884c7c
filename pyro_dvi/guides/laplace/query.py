# SPDX-License-Identifier: Apache-2.0
"""Outputs of a model at query inputs, as a function of the flat vector of latents."""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.curvature.products import LinearMap
from pyro_dvi.errors import DataError
from pyro_dvi.guides.laplace.layout import Layout
from pyro_dvi.handlers.explained import explained_errors
from pyro_dvi.handlers.outputs import Outputs, run_outputs
from pyro_dvi.signatures import with_missing
from pyro_dvi.undisturbed import evaluating

__all__ = ["Query"]


class Query:
    r"""Outputs :math:`f(x; u)` for B inputs, and their Jacobian J at the mode.

    Args:
        model: a Pyro model.
        inputs: its positional arguments; observations may be left out.
        locs: unconstrained value of every latent site.
        layout: the sites that vary.
        site: which outputs; see :func:`~pyro_dvi.handlers.outputs.run_outputs`.
        vectors_at_once: how many vectors go through the graph together.

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
        vectors_at_once: int = 64,
    ) -> None:
        self.model, self.inputs, self.layout, self.site = model, inputs, layout, site
        self.vectors_at_once = vectors_at_once
        self._locs = {name: loc.detach() for name, loc in locs.items()}
        tensors = [v for v in inputs if torch.is_tensor(v) and v.dim() > 0]
        if not tensors:
            raise DataError("a query needs an input tensor with a row for each example")
        self.num_rows = len(tensors[0])
        if self.num_rows == 0:
            raise DataError("the query has no rows")

    @property
    def mode(self) -> Tensor:
        """The flat vector at which J is taken."""
        return self.layout.flatten([self._locs[name] for name in self.layout.names])

    @cached_property
    def outputs(self) -> Outputs:
        """The outputs at the mode, with their graph."""
        return self._run(self._values)

    @property
    def mean(self) -> Tensor:
        """Outputs at the mode, [B, K]."""
        return self.outputs.values.detach()

    @property
    def size(self) -> int:
        """K, the real numbers for each example."""
        return self.outputs.values.shape[1]

    def at(self, point: Tensor) -> Tensor:
        """Return the outputs [B, K] at another flat vector [D], as a node of its graph if it has one."""
        return self._run(self.layout.split(point)).values

    def forward(self, vectors: Tensor) -> Tensor:
        """Return J v as ``[S, B, K]`` for vectors ``[S, D]``."""
        return self._jacobian.forward(self.layout.split(vectors))

    def transposed(self, cotangents: Tensor) -> Tensor:
        """Return Jᵀ c as ``[S, D]`` for cotangents ``[S, B, K]``."""
        return self.layout.flatten(self._jacobian.transposed(cotangents))

    def rows(self, at_once: int = 64) -> Iterator[Tensor]:
        """Give the rows of J in order, example by example: tensors ``[n, D]``, n at most ``at_once``."""
        total = self.num_rows * self.size
        for start in range(0, total, at_once):
            count = min(at_once, total - start)
            cotangents = self.mean.new_zeros(count, total)
            cotangents[torch.arange(count), torch.arange(start, start + count)] = 1
            yield self.transposed(cotangents.reshape(count, self.num_rows, self.size))

    @cached_property
    def _values(self) -> list[Tensor]:
        return [self._locs[name].clone().requires_grad_() for name in self.layout.names]

    @cached_property
    def _jacobian(self) -> LinearMap:
        return LinearMap(self.outputs.values, self._values, vectors_at_once=self.vectors_at_once)

    def _run(self, values: list[Tensor]) -> Outputs:
        named = {**self._locs, **dict(zip(self.layout.names, values, strict=True))}
        args = with_missing(self.model, self.inputs)
        with torch.enable_grad(), explained_errors(self.model, values, args, {}), evaluating(self.model):
            return run_outputs(self.model, args, named, self.num_rows, self.site)
