# SPDX-License-Identifier: Apache-2.0
"""What the ready models share: a network, the size of its data set, and the plate over a minibatch."""

from typing import Any

import pyro
import torch
from pyro.nn.module import PyroModule
from torch import Tensor, nn

from pyro_dvi.errors import ArgumentError, DataError

__all__ = ["LikelihoodModule"]


class LikelihoodModule(PyroModule):
    """A network followed by a likelihood, as a Pyro model ``model(x, y=None)``.

    Args:
        net: the network. It may have been called before; Pyro would refuse that otherwise.
        num_data: size of the data set that minibatches come from.
    """

    def __init__(self, net: nn.Module, num_data: int) -> None:
        super().__init__()
        if not isinstance(net, nn.Module):
            raise ArgumentError(f"net is a {type(net).__name__}; pass a torch.nn.Module.")
        if isinstance(num_data, bool) or not isinstance(num_data, int) or num_data < 1:
            raise ArgumentError(
                f"num_data is {num_data!r}; pass the number of examples in the data set, len(loader.dataset)."
            )
        for module in net.modules():
            # A network that was tried out before is not bound to the names of that run.
            if isinstance(module, PyroModule) and not module._pyro_context.active:
                module._pyro_context.used = False
        self.net = net
        self.num_data = num_data

    def outputs(self, x: Any) -> Any:
        """Call the network: tuples and mappings of inputs are unpacked, outputs in half precision are widened.

        A log-likelihood is a sum over many examples, for which three digits are too few.
        """
        if isinstance(x, tuple | list):
            outputs = self.net(*x)
        else:
            outputs = self.net(**x) if isinstance(x, dict) else self.net(x)
        return (
            outputs.float() if getattr(outputs, "dtype", None) in (torch.bfloat16, torch.float16) else outputs
        )

    def data_plate(self, size: int, observed: bool) -> Any:
        """Return the plate over a minibatch, which scales its likelihood to the whole data set.

        Raises:
            DataError: if the model is trained on a minibatch that is larger than the data set.
        """
        if size > self.num_data and observed and self.training:
            raise DataError(
                f"The batch has {size} examples and num_data is {self.num_data}. Pass the number of examples "
                "in the whole data set as num_data, len(loader.dataset) and not len(loader)."
            )
        # The indices are not used. Given, they spare Pyro a random permutation of the data set in every step.
        return pyro.plate("data", max(self.num_data, size), subsample=torch.arange(size))


def check_target(y: object, shape: torch.Size, outputs: torch.Size, meaning: str) -> Tensor:
    """Return ``y`` if it has the shape that the likelihood needs.

    Raises:
        DataError: otherwise; the wrong shape would be broadcast to a batch by batch table without a word.
    """
    if not isinstance(y, Tensor):
        raise DataError(f"y is a {type(y).__name__}; pass a tensor of {meaning} of shape {tuple(shape)}.")
    if y.shape != shape:
        raise DataError(
            f"y has the shape {tuple(y.shape)}; for outputs of shape {tuple(outputs)} the {meaning} need "
            f"{tuple(shape)}."
        )
    return y
