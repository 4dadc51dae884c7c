# SPDX-License-Identifier: Apache-2.0
"""Parts that do not go together, options and data that cannot be right: errors that name the way out."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import Tensor

import pyro_dvi as dvi
from pyro_dvi.errors import ArgumentError, DataError, GuideError, ModelError, NonFiniteError, UnsupportedError
from pyro_dvi.natural_gradients.ivon import IVON
from pyro_dvi.natural_gradients.updates import OGN, VOGN, VOGNOptimizer

N, M = 20, 6
X = torch.randn(M, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1).sin()


def model(x: Tensor, y: Tensor | None = None, size: int = N) -> Tensor:
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", size, subsample_size=len(x)):
        return pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)


def svi(
    guide: Any = dvi.NaturalGradientGuide, optimizer: Any = VOGN, elbo: Any = dvi.NaturalGradientELBO
) -> SVI:
    return SVI(model, guide(model), optimizer({}), loss=elbo())


def adam(options: Any) -> Any:
    return pyro.optim.Adam({"lr": 0.1})


# Parts that do not go together ---------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [VOGN, OGN, IVON])
@pytest.mark.parametrize(
    ("guide", "elbo"),
    [
        (dvi.MeanFieldGuide, dvi.TaylorELBO),
        (dvi.MultiplicativeNoiseGuide, dvi.MomentPropagationELBO),
        (AutoNormal, Trace_ELBO),
    ],
)
def test_the_optimizers_serve_no_other_guide(optimizer, guide, elbo):
    with pytest.raises(
        GuideError, match=rf"{optimizer.__name__} found no posterior means.*NaturalGradientGuide.*optim\.Adam"
    ):
        svi(guide, optimizer, elbo).step(X, Y)


@pytest.mark.parametrize("optimizer", [VOGN, adam])
@pytest.mark.parametrize("elbo", [dvi.TaylorELBO, dvi.MomentPropagationELBO])
def test_no_other_objective_trains_the_guide(optimizer, elbo):
    with pytest.raises(GuideError, match=r"cannot train a NaturalGradientGuide.*NaturalGradientELBO.*VOGN"):
        svi(optimizer=optimizer, elbo=elbo).step(X, Y)
    assert svi(elbo=elbo).evaluate_loss(X, Y) > 0  # which may still say how good it is


@pytest.mark.parametrize("elbo", [Trace_ELBO, TraceMeanField_ELBO])
def test_an_objective_of_pyro_would_train_the_means_only(elbo):
    pyro.clear_param_store()
    with pytest.raises(GuideError, match=rf"{elbo.__name__} cannot train a NaturalGradientGuide.*VOGN"):
        dvi.fit(svi(optimizer=adam, elbo=elbo), [(X, Y)], 1, progress=False)


def test_an_objective_of_pyro_is_found_out():
    with pytest.raises(GuideError, match=r"VOGN found no posterior means.*NaturalGradientELBO"):
        svi(elbo=Trace_ELBO).step(X, Y)


@pytest.mark.parametrize("guide", [dvi.MeanFieldGuide, dvi.MultiplicativeNoiseGuide, AutoNormal])
def test_the_objective_serves_no_other_guide(guide):
    with pytest.raises(GuideError, match=rf"needs a NaturalGradientGuide, got {guide.__name__}"):
        svi(guide).step(X, Y)


def test_a_torch_optimizer_without_means():
    with pyro.settings.context(module_local_params=True):
        guide = dvi.MeanFieldGuide(model)
        guide.initialize(X, Y)
        module = dvi.TaylorELBO()(model, guide)
        optimizer = VOGNOptimizer(module.parameters())
        module(X, Y).backward()
        with pytest.raises(GuideError, match="VOGN found no posterior means"):
            optimizer.step()


# Data ----------------------------------------------------------------------------------------------------------


def test_a_minibatch_larger_than_the_data_set():
    with pytest.raises(DataError, match=r"more rows than the size of its plate.*6 vs 4"):
        svi().step(X, Y, 4)


def test_a_minibatch_without_a_plate():
    def unsized(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)

    elbo = dvi.NaturalGradientELBO(num_data=N)
    with pytest.raises(DataError, match=r"'y' sees 6 of 20 examples.*pyro\.plate\('data', size=20"):
        SVI(unsized, dvi.NaturalGradientGuide(unsized), VOGN({}), loss=elbo).step(X, Y)


def test_labels_that_are_nan():
    training = svi()
    training.step(X, Y)
    with pytest.raises(DataError, match="'y' contains 6 NaN"):
        training.step(X, Y / 0 * 0)
    assert training.step(X, Y) > 0


@pytest.mark.parametrize("optimizer", [VOGN, IVON])
def test_an_infinite_loss_moves_nothing_and_training_may_go_on(optimizer):
    training = svi(optimizer=optimizer)
    for _ in range(2):
        training.step(X, Y)
    before = {name: value.clone() for name, value in training.guide.state_dict().items()}
    with pytest.raises(NonFiniteError, match="No update was made"):
        training.step(X, Y * 1e30)
    torch.testing.assert_close(dict(training.guide.state_dict()), before, rtol=0, atol=0)
    assert training.step(X, Y) > 0


def test_sparse_gradients():
    net = dvi.to_bayesian_(torch.nn.Sequential(torch.nn.Embedding(7, 2, sparse=True), torch.nn.Flatten()))
    classes = dvi.classifier(net, num_data=N)
    training = SVI(classes, dvi.NaturalGradientGuide(classes), VOGN({}), loss=dvi.NaturalGradientELBO())
    with pytest.raises(UnsupportedError, match="use sparse=False"):
        training.step(torch.randint(7, (M, 2)), torch.arange(M) % 4)


def test_data_parallelism_of_torch(monkeypatch):
    """Its forward pass leaves a mark, which is what is looked for: a process group is not needed to see it."""
    monkeypatch.setattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", object())
    with pytest.raises(UnsupportedError, match=r"training\.DataParallel\(NaturalGradientELBO"):
        svi().step(X, Y)


# Options -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), "one"])
def test_temperatures_out_of_range(weight):
    with pytest.raises(ArgumentError, match="kl_weight must be a finite number"):
        dvi.NaturalGradientELBO(kl_weight=weight)


def test_a_warm_up_from_zero():
    def elbo():
        return dvi.NaturalGradientELBO(kl_weight=dvi.schedules.LinearWarmup(10))

    with pytest.raises(ArgumentError, match=r"LinearWarmup\(steps, start=0\.1\)"):
        svi(elbo=elbo).step(X, Y)


def test_priors_of_several_variables():
    def dependent(x, y):
        w = pyro.sample("w", dist.MultivariateNormal(torch.zeros(3), torch.eye(3)))
        with pyro.plate("data", N, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)

    training = SVI(dependent, dvi.NaturalGradientGuide(dependent), VOGN({}), loss=dvi.NaturalGradientELBO())
    with pytest.raises(ModelError, match=r"'w' is MultivariateNormal.*TaylorELBO"):
        training.step(X, Y)
