# SPDX-License-Identifier: Apache-2.0
"""Run a model on the rows that it is given, whatever its plates subsample."""

from typing import Any

import torch
from pyro.poutine.messenger import Messenger

__all__ = ["AllRows"]


class AllRows(Messenger):
    """Let a plate of ``subsample_size=n`` mean the n rows that are there.

    The training plate's size then limits nothing: 1,000 test images go through a model of 500 training images.
    """

    def _pyro_sample(self, msg: Any) -> None:
        fn = msg["fn"]
        if type(fn).__name__ == "_Subsample" and msg["value"] is None and fn.subsample_size is not None:
            msg["value"] = torch.arange(fn.subsample_size, device=fn.device)
            msg["done"] = True
