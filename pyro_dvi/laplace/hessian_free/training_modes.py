# SPDX-License-Identifier: Apache-2.0
"""One pair of fits that is tilted by the predictions for the training data, or trained on shifted labels."""

from dataclasses import dataclass
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch import distributions as td

from pyro_dvi.core.arguments import by_position
from pyro_dvi.core.distributions import untransformed
from pyro_dvi.errors import ModelError, UnsupportedError
from pyro_dvi.laplace.energy.energy import Energy, LocalEnergy, within
from pyro_dvi.laplace.energy.passes import Arguments
from pyro_dvi.laplace.energy.query import Query
from pyro_dvi.laplace.hessian_free.second_fits import PretrainedMode
from pyro_dvi.laplace.hessian_free.solvers import OutputTilt, Tilt
from pyro_dvi.runs.sites import example_axis


@dataclass(frozen=True)
class InSample(PretrainedMode):
    r"""Tilt by the mean of an output over the training data.

    .. math:: r_k(u) = \frac1N \sum_{i=1}^N f_k(x_i; u)

    No evaluation set is needed. With ``Adam`` or ``SGD`` a step takes a minibatch, as in training, at about twice the
    cost; ``NewtonCG`` goes through all data for each gradient.

    Status: gives :math:`\frac1N\sum_i \operatorname{Cov}(f_k(x), f_k(x_i))`, a row mean against the training data, not
    the variance. Away from the data it can fall where the variance rises, or be negative.

    Source: McInerney & Kallus (2024), the in-sample variant.
    """

    reusable = True

    def tilts(self, local: LocalEnergy, query: Query) -> list[Tilt]:
        """Return one tilt for each output."""
        energy, site = local.energy, query.site
        rows = sum(_query(energy, batch, site).num_rows for batch in energy.passes)
        return [_TrainingTilt(energy, site, k, query.size, rows) for k in range(query.size)]


@dataclass(frozen=True)
class _ColumnTilt(Tilt):
    """Mean of an output over the data, or of a column of the labels' predictions."""

    energy: Energy
    site: str | None
    output: int
    size: int
    rows: int


class _TrainingTilt(_ColumnTilt):
    """The mean, batch by batch."""

    def value_and_gradient(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and its gradient, a batch at a time."""
        value, gradient = point.new_zeros(()), torch.zeros_like(point)
        for batch in self.energy.passes:
            part, slope = self._part(batch, point)
            value, gradient = value + part, gradient + slope
        return value, gradient

    def batch_gradient(self, batch: Arguments, point: Tensor) -> Tensor:
        """Return the gradient of what the batch adds, times the number of batches."""
        return self.energy.passes.num_batches * self._part(batch, point)[1]

    def _part(self, batch: Arguments, point: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a batch adds to the mean, and its gradient."""
        query = _query(self.energy, batch, self.site)
        weights = point.new_zeros(query.num_rows, self.size)
        weights[:, self.output] = 1 / self.rows
        return OutputTilt(query, weights).value_and_gradient(point)


def _query(energy: Energy, batch: Arguments, site: str | None) -> Query:
    """Return a batch of the training data as a query."""
    inputs = by_position(energy.model, *batch)
    return Query(energy.model, inputs, energy.locs, energy.layout, site=site)


@dataclass(frozen=True)
class LabelShift(PretrainedMode):
    r"""Tilt by the training predictions, through the labels.

    For Gaussian noise with a known scale, completing the square shows that

    .. math:: \frac{(y_i - f_i)^2}{2\beta\sigma_i^2} - \frac\lambda N f_i =
        \frac{(y_i + \lambda\beta\sigma_i^2/N - f_i)^2}{2\beta\sigma_i^2} + \text{const},

    so that training on shifted labels is the tilted fit, and a training loop needs no change at all. The result is that
    of :class:`~pyro_dvi.laplace.hessian_free.training_modes.InSample`, at the cost of training.

    Status: as ``InSample()``, to which it is equal. Masked examples have no labels and take no part.

    Raises:
        ModelError: at fit: several observed sites, one that is not Normal, or a noise scale that is a latent.

    Source: McInerney & Kallus (2024), the variant by data augmentation.
    """

    reusable = True

    def check(self, local: LocalEnergy) -> None:
        """Require one observed site that is Normal with a known scale."""
        _, run = local.energy.first_run(local.point)
        if len(run.sites) != 1 or run.factors:
            raise ModelError(
                "LabelShift() needs one observed site; the model has "
                f"{[site.name for site in (*run.sites, *run.factors)]}. Use InSample() or Pointwise()."
            )
        normal_of(run.sites[0].fn, run.sites[0].name)

    def tilts(self, local: LocalEnergy, query: Query) -> list[Tilt]:
        """Return one tilt for each column of the labels."""
        _, run = local.energy.first_run(local.point)
        site, outputs = run.sites[0].name, query.outputs
        if outputs.site != site:
            raise UnsupportedError(
                f"LabelShift() tilts the mean of observed site {site!r}, which {outputs.site!r} is not: use InSample()"
            )
        with torch.no_grad():
            labels = sum(run.sites[0].value.numel() for _, run in local.energy.runs(local.point))
        rows = labels // query.size
        return [_LabelTilt(local.energy, site, k, query.size, rows) for k in range(query.size)]


class _LabelTilt(_ColumnTilt):
    """The mean, known by what a shift of its labels does to U."""

    def tilted(self, energy: Energy, point: Tensor, strength: float) -> tuple[Tensor, Tensor]:
        """Return U on shifted labels and its gradient."""
        shifted = self._shifted(energy, strength)
        found = shifted.at(point).value_and_gradient
        energy.work.done += shifted.work.done
        return found

    def tilted_batch_gradient(
        self, energy: Energy, batch: Arguments, point: Tensor, strength: float
    ) -> Tensor:
        """Return the gradient of U as the shifted labels of a batch estimate it."""
        return self._shifted(energy, strength).batch_gradient(batch, point)

    def value_and_gradient(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Return r, up to a constant, and its gradient: U is linear in the strength."""
        (below, falling), (above, rising) = (self.tilted(self.energy, point, s) for s in (-0.5, 0.5))
        return below - above, falling - rising

    def _shifted(self, energy: Energy, strength: float) -> Energy:
        shift = _Shift(self, strength * energy.kl_weight / self.rows)
        return energy.with_model(within(shift, energy.model))


class _Shift(Messenger):
    """Add ``strength * scale^2`` to a column of the labels of a Normal site."""

    def __init__(self, tilt: _ColumnTilt, strength: float) -> None:
        super().__init__()
        self.tilt, self.strength = tilt, strength

    def _pyro_sample(self, msg: Any) -> None:
        site, value = str(self.tilt.site), msg["value"]
        if msg["name"] != site or not msg["is_observed"]:
            return
        variance = normal_of(msg["fn"], site).scale.square()
        rows = value.numel() // self.tilt.size
        axis = example_axis(site, msg, rows) - len(msg["fn"].event_shape) + value.dim()
        others = [n for i, n in enumerate(value.shape) if i != axis]
        column = value.new_zeros(rows, self.tilt.size)  # one where the labels belong to the column
        column[:, self.tilt.output] = 1
        msg["value"] = value + self.strength * variance * column.reshape(rows, *others).movedim(0, axis)


def normal_of(fn: Any, name: str) -> Any:
    """Return the Normal distribution of a site.

    Raises:
        ModelError: it is another distribution, or its scale depends on the latents.
    """
    fn = untransformed(fn)
    if not isinstance(fn, td.Normal):
        raise ModelError(
            f"LabelShift() needs Gaussian noise, where a shift of the labels is a tilt; observed site {name!r} is "
            f"{type(fn).__name__}. Use InSample(), Sum(inputs) or Pointwise()."
        )
    if fn.scale.requires_grad:
        raise ModelError(
            f"LabelShift() needs a noise scale that does not depend on the latents, unlike that of site {name!r}: the "
            "shift is a multiple of its square. Use InSample(), Sum(inputs) or Pointwise()."
        )
    return fn
