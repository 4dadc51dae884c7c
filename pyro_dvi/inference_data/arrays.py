# SPDX-License-Identifier: Apache-2.0
"""Tensors as the NumPy arrays that ArviZ and netCDF can hold."""

import numpy as np
import torch
from torch import Tensor

__all__ = ["as_array", "joined"]


def as_array(value: Tensor) -> np.ndarray:
    """Return the values on the CPU, half precision as single, truth values as 0 and 1."""
    value = value.detach().cpu()
    if value.dtype in (torch.bfloat16, torch.float16):  # NumPy has no bfloat16, netCDF no half precision
        value = value.float()
    if value.dtype == torch.bool:
        value = value.to(torch.int8)
    return value.numpy()


def joined(pieces: list[np.ndarray], axis: int) -> np.ndarray:
    """Concatenate along ``axis`` and empty the list on the way, so that nothing is held twice."""
    if len(pieces) == 1:
        return pieces.pop()
    shape = list(pieces[0].shape)
    shape[axis] = sum(piece.shape[axis] for piece in pieces)
    whole = np.empty(shape, np.result_type(*pieces))
    end = shape[axis]
    along = np.moveaxis(whole, axis, 0)
    while pieces:
        piece = np.moveaxis(pieces.pop(), axis, 0)
        along[end - len(piece) : end] = piece
        end -= len(piece)
    return whole
