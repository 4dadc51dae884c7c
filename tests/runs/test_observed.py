# SPDX-License-Identifier: Apache-2.0
"""Observed values need the shape of a draw, whatever the objective and whether or not Pyro validates."""

import math
from contextlib import ExitStack
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoMultivariateNormal
from torch import Tensor

import pyro_dvi as dvi
from pyro_dvi.errors import DataError
from pyro_dvi.laplace import Dense
from pyro_dvi.natural_gradients.ivon import IVON
from pyro_dvi.natural_gradients.updates import OGN, VOGN

N = 12
X = torch.linspace(-1, 1, N)
Y = 2 * X


def model(x: Tensor, y: Tensor, event: int = 0) -> None:
    """A column of means, as nn.Linear(1, 1) returns it."""
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(slope * x[:, None], 0.5).to_event(event), obs=y)


def step(method: Any, event: int = 0, y: Tensor = Y) -> Any:
    guide: Any
    if method is dvi.LaplaceGuide:
        guide = dvi.LaplaceGuide(model)
        guide(X, y, event)
        return guide.fit([(X, y, event)], Dense())
    natural = method in (VOGN, OGN, IVON)
    guide = (dvi.NaturalGradientGuide if natural else dvi.MeanFieldGuide)(model)
    optimizer, elbo = (method({}), dvi.NaturalGradientELBO()) if natural else (pyro.optim.Adam({}), method())
    return SVI(model, guide, optimizer, loss=elbo).step(X, y, event)


METHODS = [VOGN, OGN, IVON, dvi.TaylorELBO, dvi.MomentPropagationELBO, dvi.SampledELBO, dvi.LaplaceGuide]


@pytest.mark.parametrize("validate", [True, False], ids=["validated", "not validated"])
@pytest.mark.parametrize("event", [0, 1])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.__name__)
def test_values_are_not_broadcast_against_a_column(method, event, validate):
    with pyro.validation_enabled(validate):
        with pytest.raises(
            DataError, match=r"'y': values of shape \(12,\) would be broadcast.*squeeze\(-1\)"
        ):
            step(method, event)


@pytest.mark.parametrize("validate", [True, False], ids=["validated", "not validated"])
@pytest.mark.parametrize("method", [VOGN, dvi.TaylorELBO, dvi.MomentPropagationELBO])
def test_a_column_of_values_fits_a_column(method, validate):
    with pyro.validation_enabled(validate):
        assert step(method, 1, Y[:, None]) > 0


@pytest.mark.parametrize("method", [VOGN, dvi.TaylorELBO, dvi.MomentPropagationELBO])
def test_a_plate_may_repeat_values_and_one_value_may_stand_for_all(method):
    def several(x: Tensor, y: Tensor, _event: int) -> None:
        with pyro.plate("models", 3, dim=-2):
            slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
            with pyro.plate("data", len(x), dim=-1):
                pyro.sample("y", dist.Normal(slope * x, 0.5), obs=y)
                pyro.sample("constraint", dist.Normal(slope * x, 5.0), obs=torch.tensor(0.0))

    natural = method is VOGN
    guide = (dvi.NaturalGradientGuide if natural else dvi.MeanFieldGuide)(several)
    optimizer, elbo = (VOGN({}), dvi.NaturalGradientELBO()) if natural else (pyro.optim.Adam({}), method())
    assert SVI(several, guide, optimizer, loss=elbo).step(X, Y, 0) > 0


ALL = [*METHODS[:-1], "not factorised", dvi.LaplaceGuide]


def evaluate(method: Any, model: Any) -> Any:
    """One step of a method for a model without arguments, or the likelihood of its only batch."""
    guide: Any
    if method is dvi.LaplaceGuide:
        guide = dvi.LaplaceGuide(model)
        guide.initialize()
        return guide.energy([()]).at(torch.zeros(1)).first.run.log_likelihood().detach()
    natural = method in (VOGN, OGN, IVON)
    guide = (dvi.NaturalGradientGuide if natural else dvi.MeanFieldGuide)(model)
    elbo: Any = dvi.NaturalGradientELBO() if natural else None
    if method == "not factorised":
        guide, elbo = AutoMultivariateNormal(model), dvi.SampledELBO()
    optimizer = method({}) if natural else pyro.optim.Adam({})
    return SVI(model, guide, optimizer, loss=elbo or method()).step()


def observing(y: Tensor, *plates: Any, event: int = 0, shape: tuple = (N,)) -> Any:
    """A model that observes y around a slope, in plates given as (size, dim[, subsample_size])."""

    def model() -> None:
        slope = pyro.sample("slope", dist.Normal(torch.zeros(1), 1.0).to_event(1))
        with ExitStack() as stack:
            for k, (size, dim, *part) in enumerate(plates):
                rows = torch.arange(part[0]) if part else None
                stack.enter_context(pyro.plate(f"plate {k}", size, subsample=rows, dim=dim))
            pyro.sample("y", dist.Normal(slope + torch.zeros(shape), 0.5).to_event(event), obs=y)

    return model


ONE_ROW = {
    "a row": observing(Y[:1], (N, -1)),
    "a row of a minibatch": observing(Y[:1], (100, -1, N)),
    "a row of columns": observing(torch.ones(1, 2), (N, -1), event=1, shape=(N, 2)),
    "a row beside models": observing(Y[:1], (3, -2), (N, -1), shape=(3, N)),
    "a row of pixels for a minibatch": observing(torch.ones(1, 4), (100, -2, N), (4, -1), shape=(N, 4)),
    "a row for an event": observing(Y[:1], event=1),
}
VALID = {
    "a number": observing(Y[0], (N, -1)),
    "an event": observing(torch.ones(2), (N, -1), event=1, shape=(N, 2)),
    "expanded by its author": observing(Y[:1].expand(N), (N, -1)),
    "a minibatch of one row": observing(Y[:1], (100, -1, 1), shape=(1,)),
    "one row for several models": observing(Y[:1, None], (1, -2), (3, -1), shape=(1, 3)),
    "rows for several models": observing(Y[:, None], (100, -2, N), (3, -1), shape=(N, 3)),
    "a scalar outside of plates": observing(torch.ones(1), shape=(1,), event=1),
}


@pytest.mark.parametrize("method", ALL, ids=lambda m: getattr(m, "__name__", m))
@pytest.mark.parametrize("model", ONE_ROW.values(), ids=ONE_ROW)
def test_one_row_is_not_the_target_of_all(method, model):
    """It would count once for every row: the posterior of 12 equal targets."""
    with pyro.validation_enabled(False):
        with pytest.raises(DataError, match=r"'y': values of shape .* would be broadcast.*y\.squeeze\(\)"):
            evaluate(method, model)


@pytest.mark.parametrize("method", [VOGN, OGN, IVON, dvi.LaplaceGuide], ids=lambda m: m.__name__)
def test_a_number_stands_for_all_only_in_a_plate(method):
    """The other objectives leave dimensions without a plate to Pyro's own check."""
    with pytest.raises(DataError, match=r"'y': values of shape \(\) would be broadcast"):
        evaluate(method, observing(Y[0]))


@pytest.mark.parametrize("method", ALL, ids=lambda m: getattr(m, "__name__", m))
@pytest.mark.parametrize("model", VALID.values(), ids=VALID)
def test_values_that_a_plate_may_repeat(method, model):
    assert math.isfinite(evaluate(method, model))


def test_a_distribution_may_repeat_its_own_event():
    """A time-homogeneous hidden Markov model has one step in its event shape, and data have many."""
    one = torch.ones(1, 1)

    def series(y: Tensor) -> None:
        start = pyro.sample("start", dist.Normal(torch.zeros(1), 1.0).to_event(1))
        noise = dist.MultivariateNormal(torch.zeros(1), one)
        hmm = dist.GaussianHMM(dist.MultivariateNormal(start, one), one, noise, one, noise)
        pyro.sample("y", hmm, obs=y)

    guide = dvi.MeanFieldGuide(series)
    elbo = dvi.TaylorELBO(curvature=dvi.curvature.EmpiricalFisher())
    assert SVI(series, guide, pyro.optim.Adam({}), loss=elbo).step(Y[:, None]) > 0
