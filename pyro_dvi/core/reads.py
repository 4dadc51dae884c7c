# SPDX-License-Identifier: Apache-2.0
"""Detection of tensor values that Python or C++ reads without an operator that a recorder could see."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyro_dvi.core.recorder import Recorder

_SPLITS = {torch.tensor_split, Tensor.tensor_split}  # at positions that a tensor may contain
_READS = _SPLITS | {
    *(Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__, Tensor.new_tensor),
    *(torch.tensor, torch.as_tensor, torch.asarray),  # called with lists that contain tensors
}


class Reads(TorchFunctionMode):
    """Report to a recorder that tensor values are read without an operator."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and not (func in _TENSORS and isinstance(args[0], Tensor)):
            self._recorder.look((args[1:] if func in _SPLITS else args, kwargs))
        return func(*args, **(kwargs or {}))


_TENSORS = {torch.tensor, torch.as_tensor, torch.asarray}  # called with a tensor, they are operators
