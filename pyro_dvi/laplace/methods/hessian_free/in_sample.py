# SPDX-License-Identifier: Apache-2.0
"""One pair of fits, tilted by the predictions for the training data."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.laplace.energy.energy import Energy, LocalEnergy
from pyro_dvi.laplace.energy.query import Query
from pyro_dvi.laplace.methods.hessian_free.mode import PretrainedMode
from pyro_dvi.laplace.methods.hessian_free.tilted_energy import OutputTilt, Tilt

__all__ = ["InSample"]


@dataclass(frozen=True)
class InSample(PretrainedMode):
    r"""Tilt by the mean of an output over the training data.

    .. math:: r_k(u) = \frac1N \sum_{i=1}^N f_k(x_i; u)

    No evaluation set is needed, and minibatches will do: a step costs about twice that of training.

    Status: gives :math:`\frac1N\sum_i \operatorname{Cov}(f_k(x), f_k(x_i))`, a row mean against the training data, not
    the variance. Away from the data it can fall where the variance rises, or be negative.

    Source: McInerney & Kallus (2024), the in-sample variant.
    """

    reusable = True

    def tilts(self, local: LocalEnergy, query: Query) -> list[Tilt]:
        """Return one tilt for each output."""
        rows = sum(batch.num_rows for batch in _queries(local.energy, query.site))
        return [_TrainingTilt(local.energy, query.site, k, query.size, rows) for k in range(query.size)]


class _TrainingTilt(Tilt):
    """Mean of an output over the batches."""

    def __init__(self, energy: Energy, site: str | None, output: int, size: int, rows: int) -> None:
        self.energy, self.site, self.rows = energy, site, rows
        self.only = torch.eye(size, dtype=energy.start.dtype, device=energy.start.device)[output]

    def value_and_gradient(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and its gradient, a batch at a time."""
        value, gradient = point.new_zeros(()), torch.zeros_like(point)
        for batch in _queries(self.energy, self.site):
            weights = self.only.expand(batch.num_rows, -1) / self.rows
            part, slope = OutputTilt(batch, weights).value_and_gradient(point)
            value, gradient = value + part, gradient + slope
        return value, gradient


def _queries(energy: Energy, site: str | None) -> Iterator[Query]:
    """The training data as queries."""
    for args, kwargs in energy.passes:
        inputs = _positional(energy.model, args, kwargs) if kwargs else args
        yield Query(energy.model, inputs, energy.locs, energy.layout, site=site)


def _positional(model: object, args: tuple, kwargs: dict) -> tuple:
    """Bind named arguments of a batch to their positions."""
    function = model.forward if isinstance(model, nn.Module) else model
    bound = inspect.signature(function).bind(*args, **kwargs)  # type: ignore[arg-type]
    if bound.kwargs:
        raise UnsupportedError(
            f"InSample() passes batches by position, but the model takes {sorted(bound.kwargs)} by name only: use "
            "Sum(inputs) with an evaluation set"
        )
    return bound.args
