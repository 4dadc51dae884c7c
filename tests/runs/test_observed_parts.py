# SPDX-License-Identifier: Apache-2.0
"""The penalty on part of the rows: which arguments are cut, and what must not change."""

from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import pyro_dvi as dvi
from pyro_dvi.curvature import Fisher
from pyro_dvi.errors import ModelError
from pyro_dvi.guides import MeanFieldGuide
from pyro_dvi.variational_laplace.taylor import TaylorELBO

X, Y = torch.randn(8, 2, generator=torch.Generator().manual_seed(0)), torch.linspace(-1, 1, 8)


def evaluate(model: Any, *args: Any, **options: Any) -> list[int]:
    """Number of rows of every run of the model but the first look."""
    seen: list[int] = []

    def watched(*a: Any, **k: Any) -> Any:
        seen.append(model(*a, **k))

    keywords = options.pop("keywords", {})
    guide = MeanFieldGuide(watched)
    guide.initialize(*args, **keywords)
    elbo = TaylorELBO(curvature=Fisher(**options))
    elbo.loss(watched, guide, *args, **keywords)
    return seen[2:]


def regression(x: Tensor, y: Tensor, flags: dict | None = None, size: int = 80) -> int:
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", size, subsample_size=len(x)):
        pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)
    return len(x)


def test_tensors_as_long_as_the_first_are_cut():
    def model(batch: tuple, extra: dict, table: Tensor) -> int:
        assert len(extra["weights"]) == len(batch[0]) and table.shape == (3,)
        return regression(*batch)

    def first(x: Tensor, batch: tuple, extra: dict, table: Tensor) -> int:
        return model(batch, extra, table)

    assert evaluate(first, X, (X, Y), {"weights": Y}, torch.zeros(3), fraction=0.25) == [8, 2]
    pyro.clear_param_store()
    assert evaluate(regression, X, Y, fraction=0.3) == [8, 3]
    pyro.clear_param_store()
    assert evaluate(regression, keywords={"x": X, "y": Y}, fraction=0.01) == [8, 1]


class Batch(NamedTuple):
    x: Tensor
    y: Tensor


def test_tensors_inside_other_arguments_are_cut():
    assert evaluate(lambda batch: regression(**batch), {"x": X, "y": Y}, fraction=0.5) == [8, 4]
    pyro.clear_param_store()
    assert evaluate(lambda batch: regression(batch.x, batch.y), Batch(X, Y), fraction=0.5) == [8, 4]


def test_a_plate_that_does_not_follow_is_refused():
    """The observed part would weigh less than the whole, silently."""

    def model(x: Tensor, y: Tensor) -> int:
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)
        return len(x)

    with pytest.raises(
        ModelError, match=r"'y' does not weigh the same on 4 of 8.*biased.*subsample_size=len"
    ):
        evaluate(model, X, Y, fraction=0.5)


def test_latents_of_groups_stay_whole():
    """Their plate has nothing to do with the rows; rows only say to which group they belong."""

    def model(group: Tensor, y: Tensor) -> int:
        with pyro.plate("groups", 3):
            level = pyro.sample("level", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 80, subsample_size=len(y)):
            pyro.sample("y", dist.Normal(level[group], 0.5), obs=y)
        return len(y)

    assert evaluate(model, torch.arange(8) % 3, Y, fraction=0.5) == [8, 4]


def test_running_statistics_see_the_whole_minibatch_only():
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Softplus(), nn.Linear(4, 1))
    dvi.to_bayesian_(net)

    def model(x: Tensor, y: Tensor) -> None:
        f = net(x)[:, 0]
        with pyro.plate("data", 80, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(f, 0.5), obs=y)

    guide = MeanFieldGuide(model)
    elbo = TaylorELBO(curvature=Fisher(fraction=0.5))
    elbo.loss_and_grads(model, guide, X, Y)
    assert net[1].num_batches_tracked == 1
    statistics = net[1].running_mean.clone()
    net[1].reset_running_stats()
    TaylorELBO().loss_and_grads(model, guide, X, Y)
    torch.testing.assert_close(net[1].running_mean, statistics)
