# SPDX-License-Identifier: Apache-2.0
"""Flat vectors of the latents that vary, and the model's outputs at query inputs as functions of these vectors."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.core.arguments import with_missing
from pyro_dvi.core.batches import tensors_in
from pyro_dvi.core.recorder import structural
from pyro_dvi.core.undisturbed import constant_parameters, evaluating
from pyro_dvi.curvature.example_gradients import ExampleGradients
from pyro_dvi.curvature.products import LinearMap, SavedBytes, vectors_together
from pyro_dvi.curvature.squared_gradients import SquaredGradients
from pyro_dvi.errors import DataError, UnsupportedError
from pyro_dvi.linalg.operator import identity_rows
from pyro_dvi.runs.explained import explained_errors
from pyro_dvi.runs.outputs import Outputs, run_outputs


class Layout:
    """The order of the latents that vary in a flat vector.

    The vector has a piece for each site: the whole site, or a vector of the entries that vary.

    Args:
        shapes: shape of each site by name, in order.
        chosen: by site, indices ``[n]`` of the entries that vary in the flattened site. All entries of a missing site
            vary; None means that all entries of all sites vary.

    Attributes:
        chosen: these indices, only for sites of which some entries are fixed.
        size: D, the length of the vector.

    Example:
        >>> layout = Layout(
        ...     {"w": torch.Size([2, 2]), "b": torch.Size([2])}, {"w": torch.tensor([1, 2])}
        ... )
        >>> pieces = layout.split(torch.arange(4.0))
        >>> pieces
        [tensor([0., 1.]), tensor([2., 3.])]
        >>> layout.place(pieces, {"w": torch.full((2, 2), 9.0)})["w"]
        tensor([[9., 0.],
                [1., 9.]])
    """

    def __init__(self, shapes: Mapping[str, torch.Size], chosen: Mapping[str, Any] | None = None) -> None:
        self.shapes = dict(shapes)
        self.chosen = {name: places for name, places in (chosen or {}).items() if places is not None}
        sizes = {name: places.shape for name, places in self.chosen.items()}
        self._pieces = list({**self.shapes, **sizes}.values())
        self._sizes = [piece.numel() for piece in self._pieces]
        self.size = sum(self._sizes)

    @property
    def names(self) -> list[str]:
        """Names of the sites, in order."""
        return list(self.shapes)

    @property
    def entries(self) -> dict[int, Tensor]:
        """``chosen`` by position of the site."""
        return {k: self.chosen[name] for k, name in enumerate(self.shapes) if name in self.chosen}

    def flatten(self, pieces: Sequence[Tensor]) -> Tensor:
        """Join pieces ``[*lead, *piece]``, in order, to a vector ``[*lead, D]``."""
        lead = pieces[0].shape[: pieces[0].dim() - len(self._pieces[0])]
        return torch.cat([p.reshape((*lead, -1)) for p in pieces], -1)

    def split(self, vector: Tensor) -> list[Tensor]:
        """Split a vector ``[*lead, D]`` into its pieces ``[*lead, *piece]``, in order."""
        # The pieces are copies, because torch.view_as_complex, for example, rejects views with an odd offset.
        parts = [p.clone(memory_format=torch.contiguous_format) for p in vector.split(self._sizes, -1)]
        return [p.reshape((*vector.shape[:-1], *s)) for p, s in zip(parts, self._pieces, strict=True)]

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the pieces by site."""
        return dict(zip(self.shapes, self.split(vector), strict=True))

    def pieces(self, sites: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the pieces of whole sites, in order."""
        chosen = {name: sites[name].flatten()[places] for name, places in self.chosen.items()}
        return [chosen[name] if name in chosen else sites[name] for name in self.shapes]

    def place(self, pieces: Sequence[Tensor], elsewhere: Any = None) -> dict[str, Tensor]:
        """Return whole sites ``[*lead, *site]`` as functions of their pieces ``[*lead, *piece]``.

        Args:
            pieces: values of the latents that vary, in order.
            elsewhere: by site, a tensor ``[*site]`` with the values of the other entries; None means zero.
        """
        sites = dict(zip(self.shapes, pieces, strict=True))
        for name, places in self.chosen.items():
            piece, shape = sites[name], self.shapes[name]
            whole = piece.new_zeros(shape) if elsewhere is None else elsewhere[name]
            whole = whole.flatten().expand((*piece.shape[:-1], -1)).index_copy(-1, places, piece)
            sites[name] = whole.reshape((*piece.shape[:-1], *shape))
        return sites


Subset = str | Iterable[str] | Mapping[str, Tensor | bool] | Layout
"""Selection of the latents that vary: sites by name or pattern, or a mapping from these to masks of their entries."""


ReadOutputs = Callable[[Mapping[str, Tensor], int], Outputs]


class Query:
    r"""The outputs :math:`f(x; u)` for B inputs, and their Jacobian J at the mode.

    Args:
        model: a Pyro model.
        inputs: its positional arguments; observations may be omitted.
        locs: unconstrained value of every latent site.
        layout: order of the latents in flat vectors.
        site: name of the site of the outputs; see :func:`~pyro_dvi.runs.outputs.run_outputs`.
        read: function that returns the outputs, given unconstrained latents by name and the number of rows. By default,
            the model is run with :func:`~pyro_dvi.runs.outputs.run_outputs`.

    Attributes:
        num_rows: B.
        differentiable: whether an input requires gradients; outputs and J are then differentiable functions of it.
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
        self.num_rows = len(tensors[0]) if tensors else 0
        if self.num_rows == 0:
            raise DataError("the query has no rows: pass an input tensor with a row for each example")
        for tensor in tensors:
            if not structural(torch.isfinite(tensor).all()):
                raise DataError(f"the query of shape {tuple(tensor.shape)} contains NaN or infinite values")
        self.differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)

    @cached_property
    def outputs(self) -> Outputs:
        """The outputs at the mode, with their autograd graph."""
        with torch.enable_grad():
            self._values = [piece.clone().requires_grad_() for piece in self.layout.pieces(self._locs)]
            sites = self.layout.place(self._values, self._locs)
        self._saved = SavedBytes()
        self._recorder = SquaredGradients(list(sites.values()), differentiable=self.differentiable)
        with self._recorder, self._saved:
            return self._run(sites)

    @property
    def mean(self) -> Tensor:
        """Outputs at the mode, [B, K]."""
        values = self.outputs.values
        return values if self.differentiable else values.detach()

    @property
    def size(self) -> int:
        """K, the number of outputs of each example."""
        return self.outputs.values.shape[1]

    @property
    def bytes_held(self) -> int:
        """Bytes held by the graph and by the gradients of all outputs."""
        return (1 + self.size) * self._saved.total

    def at(self, point: Tensor) -> Tensor:
        """Return the outputs [B, K] at another flat vector [D], differentiable if the vector requires gradients."""
        with torch.enable_grad():  # the graph is needed to find which parameters are outputs
            start = point if point.requires_grad else point.detach().requires_grad_()
            found = self._run(self.layout.place(self.layout.split(start), self._locs)).values
        return found if point.requires_grad else found.detach()

    def forward(self, vectors: Tensor) -> Tensor:
        """Return J v as ``[S, B, K]`` for vectors ``[S, D]``."""
        if self.differentiable:  # torch has no third derivative of layer normalisation
            return (vectors @ torch.cat(list(self.rows())).mT).unflatten(1, self.mean.shape)
        return self._jacobian.forward(self.layout.split(vectors))

    def transposed(self, cotangents: Tensor) -> Tensor:
        """Return Jᵀ c as ``[S, D]`` for cotangents ``[S, B, K]``."""
        found = self._jacobian.transposed(cotangents, create_graph=self.differentiable)
        return self.layout.flatten(found)

    def rows(self, at_once: int = 64) -> Iterator[Tensor]:
        """Yield the rows of J in order, example by example, as tensors ``[n, D]`` with n at most ``at_once``."""
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
        """The rows of J, with their factors."""
        outputs = self.outputs.values
        return ExampleGradients(self._recorder, outputs, self.layout.entries, self.layout.names)

    @cached_property
    def _jacobian(self) -> LinearMap:
        outputs = self.outputs.values
        together = vectors_together(self._saved.total, outputs.device)
        return LinearMap(outputs, self._values, vectors_at_once=together)

    def _run(self, sites: Mapping[str, Tensor]) -> Outputs:
        args = with_missing(self.model, self.inputs)
        with torch.enable_grad(), explained_errors(self.model, args, {}):
            if self._read is not None:
                return self._read({**self._locs, **sites}, self.num_rows)
            with evaluating(self.model), constant_parameters(self.model):
                return run_outputs(self.model, args, {**self._locs, **sites}, self.num_rows, self.site)


def refuse_torch_modes(device: torch.device | None) -> None:
    """Raise an error in inference mode, and under autocast.

    Args:
        device: device of the model; None means the CPU.

    Raises:
        UnsupportedError: ``torch.inference_mode()`` or ``torch.autocast`` is active.
    """
    if torch.is_inference_mode_enabled() or torch.is_autocast_enabled(device.type if device else "cpu"):
        raise UnsupportedError(
            "a Laplace approximation differentiates the model, even for predictions: use torch.no_grad() instead of "
            "torch.inference_mode(), create inputs outside of inference mode, and use torch.autocast only in training"
        )
