# SPDX-License-Identifier: Apache-2.0
"""Which entries of which sites vary, and in what order they stand in a flat vector."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor


class Layout:
    """The order of sites, or of the entries of theirs that vary, in a flat vector.

    The vector has a piece for each site: the whole site, or a vector of those of its entries that vary.

    Args:
        shapes: shape of each site by name, in order.
        chosen: where the entries that vary are in a flattened site, ``[n]`` integers; None, as for sites that are left
            out: all of them vary.

    Attributes:
        chosen: of sites of which not all entries vary.
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

    def __init__(
        self, shapes: Mapping[str, torch.Size], chosen: Mapping[str, Tensor | None] | None = None
    ) -> None:
        self.shapes = dict(shapes)
        self.chosen = {name: places for name, places in (chosen or {}).items() if places is not None}
        sizes = {name: places.shape for name, places in self.chosen.items()}
        self._pieces = list({**self.shapes, **sizes}.values())
        self._sizes = [piece.numel() for piece in self._pieces]
        self.size = sum(self._sizes)

    @property
    def names(self) -> list[str]:
        """Sites in order."""
        return list(self.shapes)

    @property
    def entries(self) -> dict[int, Tensor]:
        """``chosen`` by the number of the site."""
        return {k: self.chosen[name] for k, name in enumerate(self.shapes) if name in self.chosen}

    def flatten(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return the vector ``[*lead, D]`` of pieces ``[*lead, *piece]``, which come in order."""
        lead = pieces[0].shape[: pieces[0].dim() - len(self._pieces[0])]
        return torch.cat([p.reshape((*lead, -1)) for p in pieces], -1)

    def split(self, vector: Tensor) -> list[Tensor]:
        """Return the pieces ``[*lead, *piece]`` in order of a vector ``[*lead, D]``."""
        # Copies: torch.view_as_complex, for one, takes no view that begins in an odd place.
        parts = [p.clone(memory_format=torch.contiguous_format) for p in vector.split(self._sizes, -1)]
        return [p.reshape((*vector.shape[:-1], *s)) for p, s in zip(parts, self._pieces, strict=True)]

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the pieces by site."""
        return dict(zip(self.shapes, self.split(vector), strict=True))

    def pieces(self, sites: Mapping[str, Tensor]) -> list[Tensor]:
        """Return what varies of whole sites, in order."""
        chosen = {name: sites[name].flatten()[places] for name, places in self.chosen.items()}
        return [chosen[name] if name in chosen else sites[name] for name in self.shapes]

    def place(
        self, pieces: Sequence[Tensor], elsewhere: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return whole sites ``[*lead, *site]`` of pieces ``[*lead, *piece]``, as functions of these.

        Args:
            pieces: what varies, in order.
            elsewhere: the values ``[*site]`` of entries that do not, by site; None: zero.
        """
        sites = dict(zip(self.shapes, pieces, strict=True))
        for name, places in self.chosen.items():
            piece, shape = sites[name], self.shapes[name]
            whole = piece.new_zeros(shape) if elsewhere is None else elsewhere[name]
            whole = whole.flatten().expand((*piece.shape[:-1], -1)).index_copy(-1, places, piece)
            sites[name] = whole.reshape((*piece.shape[:-1], *shape))
        return sites


Subset = str | Iterable[str] | Mapping[str, Tensor | bool] | Layout
"""What varies, as users say it: sites by name or pattern, or a mapping of these to masks of their entries."""
