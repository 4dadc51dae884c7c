# SPDX-License-Identifier: Apache-2.0
"""Modes with one pair of fits, which are tilted by the training predictions or trained on shifted labels."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor, distributions as td

from benchmarks.laplace.hessian_free.second_fits import Mode
from benchmarks.laplace.hessian_free.solvers import Tilt, gradient_of, num_batches
from pyro_dvi.core.arguments import by_position
from pyro_dvi.core.densities import untransformed
from pyro_dvi.errors import ModelError, UnsupportedError
from pyro_dvi.laplace.energy.energy import Energy, LocalEnergy, within
from pyro_dvi.laplace.energy.passes import Arguments
from pyro_dvi.laplace.energy.query import Query
from pyro_dvi.runs.sites import example_axis


@dataclass(frozen=True)
class _MeanTilt(Tilt):
    """The mean of an output over the data, batch by batch."""

    energy: Energy
    site: str | None
    output: int
    size: int
    rows: int

    def gradient(self, point: Tensor, batch: Arguments | None = None) -> Tensor:
        if batch is not None:
            return num_batches(self.energy) * self._part(batch, point)
        return torch.stack([self._part(batch, point) for batch in self.energy.passes]).sum(0)

    def _part(self, batch: Arguments, point: Tensor) -> Tensor:
        """Return the gradient of one batch's contribution to the mean."""
        query = _query(self.energy, batch, self.site)
        weights = point.new_zeros(query.num_rows, self.size)
        weights[:, self.output] = 1 / self.rows
        return Tilt(query, weights).gradient(point)


def _query(energy: Energy, batch: Arguments, site: str | None) -> Query:
    """Return a batch of the training data as a query."""
    inputs = by_position(energy.model, *batch)
    return Query(energy.model, inputs, energy.locs, energy.layout, site=site)


class _LabelTilt(_MeanTilt):
    """The mean of an output over the data, which is added to U by shifting the labels."""

    def tilted_gradient(
        self, energy: Energy, point: Tensor, strength: float, batch: Arguments | None = None
    ) -> Tensor:
        shift = _Shift(self, strength / energy.likelihood_weight / self.rows)
        shifted = energy.with_factors(energy.scale_factors)
        shifted.model, shifted._latest = within(shift, energy.model), []  # runs of the model are not shared
        return gradient_of(shifted, point, batch)


class _Shift(Messenger):
    """Add ``strength * scale^2`` to a column of the labels of a Normal site."""

    def __init__(self, tilt: _MeanTilt, strength: float) -> None:
        super().__init__()
        self.tilt, self.strength = tilt, strength

    def _pyro_sample(self, msg: Any) -> None:
        noise, value = untransformed(msg["fn"]), msg["value"]
        if not msg["is_observed"] or not isinstance(noise, td.Normal):
            return  # no label
        rows = value.numel() // self.tilt.size
        axis = example_axis(msg["name"], msg, rows) - len(msg["fn"].event_shape) + value.dim()
        others = [n for i, n in enumerate(value.shape) if i != axis]
        column = value.new_zeros(rows, self.tilt.size)  # 1 if the labels belong to the column
        column[:, self.tilt.output] = 1
        shift = self.strength * noise.scale.square()
        msg["value"] = value + shift * column.reshape(rows, *others).movedim(0, axis)


@dataclass(frozen=True)
class InSample(Mode):
    r"""Tilt U by the mean of an output over the training data.

    .. math:: r_k(u) = \frac1N \sum_{i=1}^N f_k(x_i; u)

    No evaluation set is needed. With ``Adam`` or ``SGD``, a step takes one minibatch, as in training, at about twice
    the cost; ``NewtonCG`` uses all data for each gradient.

    Status: gives :math:`\frac1N\sum_i \operatorname{Cov}(f_k(x), f_k(x_i))`, a row mean over the training data, not the
    variance. Far from the data, it can decrease although the variance increases, or be negative.

    Source: McInerney & Kallus (2024), the in-sample variant.
    """

    reusable = True
    _tilt: ClassVar[type[_MeanTilt]] = _MeanTilt

    def tilts(self, local: LocalEnergy, query: Query) -> list[Tilt]:
        """Return one tilt for each output."""
        energy, site = local.energy, query.site
        rows = sum(_query(energy, batch, site).num_rows for batch in energy.passes)
        return [self._tilt(energy, site, k, query.size, rows) for k in range(query.size)]


@dataclass(frozen=True)
class LabelShift(InSample):
    r"""Tilt U by the mean training prediction, by shifting the labels.

    For Gaussian noise with a known scale, completing the square shows that

    .. math:: \frac{(y_i - f_i)^2}{2\beta\sigma_i^2} - \frac\lambda N f_i =
        \frac{(y_i + \lambda\beta\sigma_i^2/N - f_i)^2}{2\beta\sigma_i^2} + \text{const},

    so training on shifted labels is equivalent to the tilted fit, and the training loop does not change. The result is
    the same as with ``InSample()``, at the cost of ordinary training.

    Status: the same as ``InSample()``, except that masked examples are ignored, because they have no labels.

    Raises:
        ModelError: in ``fit``, the model has several observed sites, its site is not Normal, or its noise scale is
            latent.

    Source: McInerney & Kallus (2024), the data-augmentation variant.
    """

    _tilt = _LabelTilt

    def check(self, local: LocalEnergy) -> None:
        """Raise an error unless the model has exactly one observed site, and this site is Normal with a known scale."""
        run = local.first.run
        if len(run.sites) != 1 or run.factors:
            names = [site.name for site in (*run.sites, *run.factors)]
            raise ModelError(f"LabelShift() needs one observed site, got {names}: use InSample()")
        noise = untransformed(run.sites[0].fn)
        if not isinstance(noise, td.Normal) or noise.scale.requires_grad:
            unlike = f"unlike that of {run.sites[0].name!r}, a {type(noise).__name__}: use InSample()"
            raise ModelError(f"LabelShift() needs Normal noise that does not depend on the latents, {unlike}")

    def tilts(self, local: LocalEnergy, query: Query) -> list[Tilt]:
        """Return one tilt for each column of the labels."""
        site = local.first.run.sites[0].name
        if query.outputs.site != site:
            raise UnsupportedError(
                f"LabelShift() supports only site {site!r}, not {query.outputs.site!r}: use InSample()"
            )
        return super().tilts(local, query)
