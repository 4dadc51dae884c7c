# SPDX-License-Identifier: Apache-2.0
"""Optimizers, guides, objectives and priors that do not go together say so, whatever loop trains them."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import Tensor

import pyro_dvi as dvi
from pyro_dvi.errors import ArgumentError, GuideError, ModelError
from pyro_dvi.natural_gradients.ivon import IVON, IVONOptimizer
from pyro_dvi.natural_gradients.updates import OGN, VOGN, VOGNOptimizer

X = torch.linspace(-1, 1, 8)


def model(x: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    s = pyro.param("s", torch.tensor(1.0), constraint=dist.constraints.positive)
    with pyro.plate("data", 8, subsample_size=len(x)):
        pyro.sample("y", dist.Normal(w * x, s), obs=2 * x)


def scheduled(constructor: Any = VOGNOptimizer, **options: Any) -> Any:
    return pyro.optim.ExponentialLR({"optimizer": constructor, "optim_args": options, "gamma": 0.1})


PAIRS = [
    (dvi.MeanFieldGuide, dvi.TaylorELBO),
    (AutoNormal, Trace_ELBO),
    (dvi.NaturalGradientGuide, Trace_ELBO),
]


@pytest.mark.parametrize(("guide", "loss"), PAIRS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("optimizer", [scheduled, lambda: VOGN({})], ids=["scheduler", "plain"])
@pytest.mark.parametrize("by_fit", [True, False], ids=["fit", "loop"])
def test_another_guide_or_objective(guide, loss, optimizer, by_fit):
    svi = SVI(model, guide(model), optimizer(), loss=loss())
    with pytest.raises(
        GuideError, match=r"NaturalGradientGuide with NaturalGradientELBO|train it with NaturalGradientELBO"
    ):
        dvi.fit(svi, [X], 1, progress=False) if by_fit else svi.step(X)
    assert all(value.item() == 1.0 for name, value in pyro.get_param_store().items() if name == "s")


@pytest.mark.parametrize("constructor", [VOGNOptimizer, IVONOptimizer])
def test_a_scheduler_steers_both_learning_rates(constructor):
    optimizer = scheduled(constructor, deterministic_lr=0.01)
    svi = SVI(model, dvi.NaturalGradientGuide(model), optimizer, loss=dvi.NaturalGradientELBO())
    moved: list[float] = []
    for _ in range(3):
        before = pyro.param("s").log().item() if moved else 0.0
        svi.step(X)
        optimizer.step()
        moved.append(abs(pyro.param("s").log().item() - before))
    assert moved[0] == pytest.approx(0.01, rel=1e-3)
    assert moved[1] < 0.0015 and moved[2] < 0.00015


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"damping": float("nan")}, "damping must be a finite, nonnegative number"),
        ({"betas": 0.9}, r"betas must be two numbers.*got 0\.9"),
        ({"betas": (0.9,)}, "betas must be two numbers"),
        ({"betas": (0.9, None)}, "betas must be two numbers"),  # only IVON has a memory that grows
        ({"total_steps": 2.5}, r"total_steps must be a positive whole number.*2\.5"),
        ({"warmup_steps": 2.5}, "warmup_steps must be a whole number"),
        ({"lr": "0.1"}, "lr must be a positive number"),
        ({"weight_decay": 0.1}, r"no option 'weight_decay'.*betas.*choose a Normal prior"),
        ({"learning_rate": 0.1}, r"no option 'learning_rate'.*damping.*\blr\b.*formulation"),
    ],
    ids=str,
)
def test_options_that_cannot_be(options, words):
    with pytest.raises(ArgumentError, match=words):
        VOGN(options)


def test_ivon_has_one_formulation():
    with pytest.raises(ArgumentError, match=r"IVONOptimizer has no option 'formulation'"):
        IVON({"formulation": "printed"})


@pytest.mark.parametrize("function", [VOGN, OGN, IVON], ids=lambda f: f.__name__)
@pytest.mark.parametrize("options", [{}, {"lr": 0.1}], ids=str)
def test_functions_of_pyro_are_no_classes_of_torch(function, options):
    svi = SVI(
        model, dvi.NaturalGradientGuide(model), scheduled(function, **options), dvi.NaturalGradientELBO()
    )
    with pytest.raises(ArgumentError, match=f"use pyro_dvi.natural_gradients.{function.__name__}Optimizer"):
        svi.step(X)


@pytest.mark.parametrize(
    ("prior", "name"),
    [(dist.Laplace(0.0, 1.0).expand([2]).to_event(1), "Laplace"), (dist.Gamma(2.0, 1.0), "Gamma")],
    ids=["Laplace", "Gamma"],
)
def test_a_prior_that_is_no_normal_is_named_when_the_guide_is_made(prior, name):
    def with_prior(x: Tensor) -> None:
        w = pyro.sample("w", prior).sum()
        pyro.sample("y", dist.Normal(w * x, 1.0).to_event(1), obs=x)

    with pytest.raises(ModelError, match=f"prior of site 'w' is {name}, but.*MeanFieldGuide"):
        dvi.NaturalGradientGuide(with_prior)(X)


def test_a_normal_in_unconstrained_space_will_do():
    def with_scale(x: Tensor) -> None:
        s = pyro.sample("s", dist.LogNormal(0.0, 1.0).expand([2]).to_event(1)).sum()
        pyro.sample("y", dist.Normal(x, s).to_event(1), obs=x)

    guide = dvi.NaturalGradientGuide(with_scale)
    SVI(with_scale, guide, VOGN({}), loss=dvi.NaturalGradientELBO()).step(X)
