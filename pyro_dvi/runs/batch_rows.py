# SPDX-License-Identifier: Apache-2.0
"""The rows of a minibatch, in the plates of a model and of its guide."""

from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample

from pyro_dvi.core.batches import tensors_in
from pyro_dvi.core.recorder import is_recording
from pyro_dvi.errors import GuideError


class RowsOfBatch(Messenger):
    """Compare the rows that a model gives to its plates with those of a guide, whose run is replayed around this.

    Args:
        guide: the guide.
        arguments: the arguments of the model.

    Raises:
        GuideError: if latents of an automatic guide would be trained on the data of other rows (raised in a run).
    """

    def __init__(self, guide: Any, arguments: Any) -> None:
        super().__init__()
        self.guide, self.arguments = guide, arguments
        self._given: dict[str, Any] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if site_is_subsample(msg):
            self._given[msg["name"]] = msg["value"]

    def _pyro_post_sample(self, msg: Any) -> None:
        name, fn, guide = msg["name"], msg["fn"], self.guide
        # In other guides, latents may be computed from the batch, so that they do not depend on the rows of a plate.
        if name not in self._given or name not in getattr(guide, "plates", ()) or is_recording():
            return
        given, used = self._given[name], msg["value"]
        if given is not None:
            if len(used) == fn.size and not hasattr(guide.plates[name], "takes_any_order"):
                used = torch.arange(fn.size)  # Pyro takes the latents of a whole plate in their order
            other = given is not used and not torch.equal(torch.as_tensor(given).cpu(), used.cpu())
        else:  # the model may use the rows that the guide has drawn, unless its data have only as many
            lengths = {len(t) for t in tensors_in(self.arguments) if t.dim()}
            other = (
                not getattr(guide, "create_plates", None)
                and fn.subsample_size in lengths
                and fn.size not in lengths
            )
        if other:
            raise GuideError(
                f"latents in plate {name!r} would be trained on the data of other rows, because {type(guide).__name__} "
                f"does not know which of the {fn.size} rows are in a batch. Pass their numbers to the model's plate, "
                f"pyro.plate({name!r}, {fn.size}, subsample=rows), and use MeanFieldGuide, or AutoNormal or AutoDelta "
                "with create_plates=, a function that returns this plate, with batches of all rows in their order"
            )
