# SPDX-License-Identifier: Apache-2.0
"""Latents with one value per example: y_i ~ N(z_i, 0.5) and z_i ~ N(0, 1), so that z_i | y_i ~ N(0.8 y_i, 0.2)."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoDiagonalNormal, AutoNormal
from torch import Tensor

import pyro_dvi as dvi
from pyro_dvi.curvature import GGNDiagonal
from pyro_dvi.errors import GuideError
from pyro_dvi.methods.trained import PointEstimate
from pyro_dvi.objectives import Captured

N = 12
Y = torch.linspace(-3, 3, N)
SHUFFLED = torch.randperm(N, generator=torch.Generator().manual_seed(0))
BATCHES = [(rows, Y[rows]) for rows in SHUFFLED.split(5)]  # of 5, 5 and 2 rows


def given(rows: Tensor, y: Tensor | None = None) -> None:
    with pyro.plate("data", N, subsample=rows):
        pyro.sample("y", dist.Normal(pyro.sample("z", dist.Normal(0.0, 1.0)), 0.5), obs=y)


def drawn(rows: Tensor, y: Tensor | None = None) -> None:
    with pyro.plate("data", N, subsample_size=len(rows)):
        pyro.sample("y", dist.Normal(pyro.sample("z", dist.Normal(0.0, 1.0)), 0.5), obs=y)


def read(y: Tensor) -> None:
    with pyro.plate("data", N, subsample_size=5) as rows:
        pyro.sample("y", dist.Normal(pyro.sample("z", dist.Normal(0.0, 1.0)), 0.5), obs=y[rows])


def plates(rows: Tensor, y: Tensor | None = None) -> Any:
    return pyro.plate("data", N, subsample=rows)


def trained(model: Any, guide: Any, elbo: Any, batches: Any = BATCHES, epochs: int = 150) -> Tensor:
    svi = SVI(model, guide, dvi.optim.Adam(dvi.optim.learning_rates(0.1)), loss=elbo)
    dvi.fit(svi, batches, epochs, progress=False)
    return guide.median(torch.arange(N))["z"]


@pytest.mark.every(8)
@pytest.mark.parametrize(
    "make, elbo, tolerance",
    [
        (dvi.MeanFieldGuide, dvi.MomentPropagationELBO, 0.01),
        (dvi.MultiplicativeNoiseGuide, dvi.MomentPropagationELBO, 0.01),
        (dvi.MeanFieldGuide, lambda: Captured(dvi.MomentPropagationELBO()), 0.01),
        (dvi.MeanFieldGuide, lambda: dvi.TaylorELBO(curvature=GGNDiagonal()), 0.01),
        (dvi.MeanFieldGuide, dvi.SampledELBO, 0.6),
        (dvi.MeanFieldGuide, Trace_ELBO, 0.6),
        (PointEstimate, dvi.SampledELBO, 0.01),
        (lambda model: AutoDelta(model, create_plates=plates), dvi.SampledELBO, 0.01),
        (lambda model: AutoDelta(model, create_plates=plates), Trace_ELBO, 0.01),
    ],
)
def test_minibatches_train_the_latents_of_their_rows(make, elbo, tolerance):
    guide = make(given)
    torch.testing.assert_close(trained(given, guide, elbo()), 0.8 * Y, atol=tolerance, rtol=0)
    if make is dvi.MeanFieldGuide and tolerance < 0.1:
        torch.testing.assert_close(guide.scales.z, torch.full((N,), 0.2**0.5), atol=0.01, rtol=0)


@pytest.mark.slow
def test_a_model_may_read_the_rows_that_the_guide_draws():
    z = trained(read, dvi.MeanFieldGuide(read), dvi.MomentPropagationELBO(), [(Y,)] * 3, 200)
    torch.testing.assert_close(z, 0.8 * Y, atol=0.02, rtol=0)


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("make", [dvi.MeanFieldGuide, PointEstimate])
@pytest.mark.parametrize("elbo", [dvi.SampledELBO, Trace_ELBO])
def test_all_rows_may_come_in_any_order(make, elbo, capture):
    guide = make(given)
    orders = [torch.arange(N), SHUFFLED, SHUFFLED.flip(0)]
    svi = SVI(given, guide, dvi.optim.Adam(dvi.optim.learning_rates(0.1)), loss=elbo())
    dvi.fit(svi, [(rows, Y[rows]) for rows in orders], 60, progress=False, capture=capture)
    tolerance = 0.01 if make is PointEstimate else 0.6
    torch.testing.assert_close(guide.median()["z"], 0.8 * Y, atol=tolerance, rtol=0)


def test_a_point_estimate_returns_all_rows_or_those_of_a_batch():
    posterior = dvi.MAP(lr=0.1).fit(given, BATCHES, epochs=150, progress=False)
    torch.testing.assert_close(posterior.guide.median()["z"], 0.8 * Y, atol=0.01, rtol=0)
    rows = torch.tensor([3, 1])
    assert torch.equal(posterior.guide.median(rows)["z"], posterior.guide.median()["z"][rows])


@pytest.mark.parametrize("elbo", [dvi.SampledELBO, Trace_ELBO])
@pytest.mark.parametrize(
    "model, make, batches",
    [
        (given, AutoNormal, BATCHES),
        (given, AutoNormal, [(SHUFFLED, Y[SHUFFLED])]),
        (given, AutoDelta, [(torch.arange(N), Y), *BATCHES]),
        (given, AutoDiagonalNormal, BATCHES),
        (drawn, AutoDelta, BATCHES),
        (drawn, PointEstimate, BATCHES),
        (drawn, dvi.MeanFieldGuide, BATCHES),
        (drawn, dvi.MeanFieldGuide, BATCHES[::-1]),
    ],
)
def test_latents_of_other_rows_are_refused(model, make, batches, elbo):
    with pytest.raises(GuideError, match=r"plate 'data'.*of other rows.*'data', 12, subsample=rows"):
        trained(model, make(model), elbo(), batches, 2)


@pytest.mark.parametrize("model", [given, drawn])
def test_training_of_an_elbo_module_refuses_them_too(model):
    class Model(pyro.nn.PyroModule):
        def forward(self, rows, y):
            return model(rows, y)

    net = Model()
    guide = AutoNormal(net)
    guide(*BATCHES[0])
    module = Trace_ELBO()(net, guide)
    optimizer = torch.optim.Adam(module.parameters())
    with pytest.raises(GuideError, match="plate 'data'.*of other rows"):
        dvi.fit(module, BATCHES, 2, optimizer=optimizer, progress=False)


def test_a_guide_without_latents_in_given_rows_needs_no_arguments():
    def model(rows: Tensor) -> None:
        with pyro.plate("groups", 3):
            shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
        with pyro.plate("data", N, subsample=rows):
            pyro.sample("y", dist.Normal(shift.sum(), 0.5), obs=Y[rows])

    guide = dvi.MeanFieldGuide(model)
    guide.initialize(torch.arange(5))
    assert guide()["shift"].shape == (3,)
