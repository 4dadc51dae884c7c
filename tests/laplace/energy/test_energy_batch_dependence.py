# SPDX-License-Identifier: Apache-2.0
"""What may not depend on the batch: the prior, and how much a row counts."""

import warnings
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from torch import Tensor

from pyro_dvi.errors import DviWarning, ModelError
from pyro_dvi.laplace.energy.energy import Energy

X = torch.linspace(-1, 2, 10, dtype=torch.float64)
Y = X.cos()
LOCS = {"bias": torch.zeros((), dtype=torch.float64), "slope": torch.ones((), dtype=torch.float64)}


def batches(size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(X.split(size), Y.split(size), strict=True))


def regression(
    scale: Callable[[Tensor], float], prior_mean: Callable[[Tensor], Tensor] = torch.zeros_like
) -> Any:
    def model(x: Tensor, y: Tensor | None = None) -> Any:
        bias = pyro.sample("bias", dist.Normal(x.new_zeros(()), 1.0))
        slope = pyro.sample("slope", dist.Normal(prior_mean(x)[0], 1.0))
        with poutine.scale(scale=scale(x)), pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(bias + slope * x, 1.0), obs=y)

    return model


@pytest.mark.parametrize("size", [4, 5])
def test_a_prior_of_the_batch_is_refused(size: int) -> None:
    energy = Energy(regression(lambda x: 1.0, lambda x: x.mean().expand(1)), batches(size), LOCS)
    local = energy.at(energy.start)
    for what in (lambda: local.log_likelihood, lambda: local.value, lambda: list(local.examples())):
        with pytest.raises(
            ModelError, match="prior of 'slope' changes from batch to batch.*outside the model"
        ):
            what()
    whole = Energy(energy.model, [(X, Y)], LOCS)
    assert torch.isfinite(whole.at(whole.start).value)


@pytest.mark.parametrize("size", [4, 5])
def test_a_scale_that_makes_up_for_the_batch_is_noticed(size: int) -> None:
    energy = Energy(regression(lambda x: len(X) / len(x)), batches(size), LOCS)
    with pytest.warns(DviWarning, match=r"site 'y'.*all data count [23] times.*pyro.plate.*subsample_size"):
        energy.at(energy.start).value  # noqa: B018


@pytest.mark.parametrize("weight", [0.5, 2.5])
@pytest.mark.parametrize("size", [4, 5, 10])
def test_a_constant_weight_is_the_models_own(size: int, weight: float) -> None:
    energy = Energy(regression(lambda x: weight), batches(size), LOCS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = energy.at(energy.start).log_likelihood.to(X.dtype)
    expected = weight * dist.Normal(X, 1.0).log_prob(Y).sum()
    torch.testing.assert_close(found, expected)
