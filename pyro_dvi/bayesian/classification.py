# SPDX-License-Identifier: Apache-2.0
"""A ready Pyro model for classification."""

from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.util import is_validation_enabled
from torch import Tensor, nn

from pyro_dvi.bayesian.likelihood_module import LikelihoodModule, check_target
from pyro_dvi.errors import DataError, ModelError

__all__ = ["Classifier", "classifier"]


class Classifier(LikelihoodModule):
    """The model of :func:`classifier`: ``model(x, y=None)`` samples the site ``obs``."""

    def forward(self, x: Any, y: Tensor | None = None) -> Tensor:
        """Run the network on ``x`` and observe the labels ``y``, or draw them."""
        outputs = self.outputs(x)
        if outputs.dim() < 2 or outputs.shape[1] < 2:
            raise ModelError(
                f"The network's output has the shape {tuple(outputs.shape)}; classification needs logits of "
                "shape [batch, classes] with two classes or more (or [batch, classes, *positions]). Give "
                "the last layer one output for each class, also for two classes."
            )
        logits = outputs if outputs.dim() == 2 else outputs.movedim(1, -1)
        if y is not None:
            y = self._checked_labels(y, logits)
        with self.data_plate(logits.shape[0], observed=y is not None):
            labels = dist.Categorical(logits=logits).to_event(logits.dim() - 2)
            drawn: Tensor = pyro.sample("obs", labels, obs=y)
        return drawn

    @staticmethod
    def _checked_labels(y: Tensor, logits: Tensor) -> Tensor:
        if not is_validation_enabled():
            return y
        y = check_target(y, logits.shape[:-1], logits.shape, "class indices")
        if y.is_floating_point() or y.is_complex() or y.dtype is torch.bool:
            raise DataError(f"y has the dtype {y.dtype}; class indices are integers: pass y.long().")
        lowest, highest, classes = int(y.min()), int(y.max()), logits.shape[-1]
        if lowest < 0 or highest >= classes:
            raise DataError(
                f"y has labels from {lowest} to {highest}, and the network {classes} outputs; labels must "
                f"lie in 0..{classes - 1}. Shift them to start at 0, or give the last layer more outputs."
            )
        return y


def classifier(net: nn.Module, num_data: int) -> Classifier:
    r"""Wrap a network of logits into a Pyro model for classification.

    .. math::
        y_i \sim \operatorname{Categorical}(\operatorname{softmax} f_w(x_i)), \qquad i = 1, \dots, N

    Status: exact.

    Args:
        net: maps ``[batch, ...]`` to logits ``[batch, classes]``, or to ``[batch, classes, *positions]`` (a
            label for each pixel or token, as in ``F.cross_entropy``). Its weights are Bayesian after
            ``to_bayesian_``.
        num_data: :math:`N`, the number of examples in the data set, not of batches.

    Returns:
        A model ``model(x, y=None)`` with the observed site ``obs`` in the plate ``data``. ``x`` may be a
        tuple or mapping of inputs; ``y`` holds class indices ``[batch, *positions]``.

    Raises:
        ArgumentError: if ``num_data`` is not a positive integer.
        ModelError: when run, if the network has fewer than two outputs.
        DataError: when run, if labels have the wrong shape or lie out of range.

    Example:
        >>> import pyro
        >>> from pyro_dvi.bayesian import to_bayesian_
        >>> model = classifier(to_bayesian_(nn.Linear(4, 3)), num_data=100)
        >>> trace = pyro.poutine.trace(model).get_trace(torch.zeros(5, 4), torch.tensor([0, 1, 2, 0, 1]))
        >>> trace.nodes["obs"]["scale"]
        20.0
    """
    return Classifier(net, num_data)
