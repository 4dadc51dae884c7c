# SPDX-License-Identifier: Apache-2.0
"""A mixture over values of a model's outputs, for any observed distribution."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch import distributions as td

from pyro_dvi.handlers.outputs import Outputs
from pyro_dvi.links.mixture import distribution_function

__all__ = ["PointMixture"]


class PointMixture(td.Distribution):
    r"""The mixture :math:`\sum_s w_s\,p(y \mid f_s)`.

    Status: exact for what it says.

    Args:
        outputs: the observed distribution, as a function of its real outputs.
        values: outputs :math:`f_s`, ``[S, B, K]``.
        weights: :math:`w_s`, ``[S]``, which sum to one.
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012 (as in torch)

    def __init__(self, outputs: Outputs, values: Tensor, weights: Tensor) -> None:
        self._outputs, self._values, self._weights = outputs, values, weights
        fn = outputs.distribution
        super().__init__(fn.batch_shape, fn.event_shape, validate_args=False)

    @cached_property
    def components(self) -> Any:
        """The distributions at the points, batch shape ``[S, *batch]``."""
        return self._outputs.with_values(self._values)

    @property
    def support(self) -> Any:
        """Where observations may lie."""
        return self._outputs.distribution.support

    @property
    def mean(self) -> Tensor:
        """The average of the components' means."""
        return torch.tensordot(self._weights, self.components.mean, 1)

    @property
    def variance(self) -> Tensor:
        """Variance within the components and between their means."""
        between = self.components.mean - self.mean
        return torch.tensordot(self._weights, self.components.variance + between.square(), 1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density, of the batch shape."""
        log_prob: Tensor = self.components.log_prob(value)
        log_weights = self._weights.log().reshape(-1, *(1,) * (log_prob.dim() - 1))
        return torch.logsumexp(log_prob + log_weights, 0)

    def cdf(self, value: Tensor) -> Tensor:
        """Return the distribution function."""
        return torch.tensordot(self._weights, distribution_function(self.components, value), 1)

    @torch.no_grad()
    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw a point for each example, then an observation."""
        shape = torch.Size(sample_shape)
        num_rows = self._values.shape[1]
        chosen = torch.multinomial(self._weights, shape.numel() * num_rows, replacement=True)
        rows = torch.arange(num_rows, device=chosen.device)
        values = self._values[chosen.reshape(*shape, num_rows), rows]
        drawn: Tensor = self._outputs.with_values(values).sample()
        return drawn
