# SPDX-License-Identifier: Apache-2.0
"""A guide that starts at zero leaves the hidden units of a network alike; training starts from its weights instead."""

import warnings
from collections.abc import Callable
from typing import Any

import pyro
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDiagonalNormal, AutoNormal
from pyro.infer.autoguide.initialization import (
    init_to_feasible,
    init_to_sample,
    init_to_value,
)
from torch import Tensor, nn

import pyro_dvi as dvi
from pyro_dvi.errors import DviWarning, NonFiniteError

X = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] * X[:, 1] > 0).long()


def network(hidden: bool = True) -> tuple[Any, dict[str, Tensor]]:
    layers = [nn.Linear(4, 5), nn.Softplus(), nn.Linear(5, 2)] if hidden else [nn.Linear(4, 2)]
    net = nn.Sequential(*layers)
    weights = {f"net.{name}": value.detach().clone() for name, value in net.named_parameters()}
    return dvi.classifier(dvi.to_bayesian_(net), num_data=30), weights


def still(model: Any, guide: Any, elbo: Any) -> SVI:
    return SVI(model, guide, pyro.optim.SGD({"lr": 0.0}), loss=elbo)


ELBOS = pytest.mark.parametrize("elbo", [dvi.TaylorELBO, dvi.MomentPropagationELBO])
ZERO: dict[str, Callable[[Any], Any]] = {
    "AutoNormal": AutoNormal,
    "AutoDiagonalNormal": lambda model: AutoDiagonalNormal(model, init_loc_fn=init_to_feasible),
}


@ELBOS
@pytest.mark.parametrize("guide", ZERO.values(), ids=ZERO)
def test_training_starts_from_the_weights_of_the_network_and_says_so_once(elbo, guide):
    model, weights = network()
    guide = guide(model)
    svi = still(model, guide, elbo())
    at_zero = svi.evaluate_loss(X, Y)
    assert svi.evaluate_loss(X, Y) == pytest.approx(at_zero, rel=0.2)  # labels of the penalty are drawn
    assert not any(value.any() for value in guide.median().values())
    with pytest.warns(
        DviWarning, match=r"means of the guide are all zero.*'net.0.weight' and 3 more.*init_to_module"
    ):
        svi.step(X, Y)
    torch.testing.assert_close({**guide.median()}, weights)
    svi.step(X, Y)


@ELBOS
def test_nothing_is_moved_that_has_a_start_of_its_own_or_no_hidden_units(elbo):
    def unmoved(model: Any, guide: Any) -> None:
        guide(X, Y)
        before = {name: value.clone() for name, value in guide.median().items()}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            still(model, guide, elbo()).step(X, Y)
        torch.testing.assert_close(dict(guide.median()), before, rtol=0, atol=0)
        pyro.clear_param_store()

    model, weights = network(hidden=False)
    unmoved(model, AutoNormal(model))
    model, weights = network()
    unmoved(model, AutoDiagonalNormal(model))
    zero_head = weights | {"net.2.weight": torch.zeros(2, 5), "net.2.bias": torch.zeros(2)}
    unmoved(model, AutoNormal(model, init_loc_fn=init_to_value(values=zero_head)))


def written_by_hand() -> Any:
    """A network whose module keeps no weights: its priors took their place."""
    net: Any = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    pyro.nn.module.to_pyro_module_(net)
    for layer in (net[0], net[2]):
        shape = layer.weight.shape
        layer.weight = pyro.nn.PyroSample(pyro.distributions.Normal(0.0, 1.0).expand(shape).to_event(2))
    return dvi.classifier(net, num_data=30)


@ELBOS
def test_without_weights_to_start_from_the_way_out_is_named(elbo):
    model = written_by_hand()
    with pytest.warns(DviWarning, match="for other latents, pass init_loc_fn=init_to_sample"):
        still(model, AutoNormal(model), elbo()).step(X, Y)
    pyro.clear_param_store()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        still(model, AutoNormal(model, init_loc_fn=init_to_sample), elbo()).step(X, Y)


@ELBOS
def test_a_hierarchical_model_that_starts_at_zero_is_left_alone(elbo):
    def model(x: Tensor, y: Tensor) -> None:
        mu = pyro.sample("mu", pyro.distributions.Normal(0.0, 1.0))
        log_tau = pyro.sample("log_tau", pyro.distributions.Normal(0.0, 1.0))
        eta = pyro.sample("eta", pyro.distributions.Normal(torch.zeros(4), 1.0).to_event(1))
        with pyro.plate("data", 30):
            pyro.sample("y", pyro.distributions.Normal(mu + log_tau.exp() * (x @ eta), 1.0), obs=y.float())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        still(model, AutoNormal(model), elbo()).step(X, Y)


def test_means_that_were_loaded_after_a_look_stay():
    model, _ = network()
    guide, elbo = AutoNormal(model), dvi.TaylorELBO()
    svi = still(model, guide, elbo)
    svi.evaluate_loss(X, Y)
    guide.load_state_dict({name: value + 1 for name, value in guide.state_dict().items()})
    svi.step(X, Y)
    assert all((value == 1).all() for value in guide.median().values())


def test_training_that_diverged_and_went_back_to_the_start_starts_apart_again():
    model, weights = network()
    guide, elbo = AutoNormal(model), dvi.TaylorELBO()
    far = SVI(model, guide, pyro.optim.SGD({"lr": 1e30}), loss=elbo)
    with pytest.warns(DviWarning, match="means of the guide are all zero"), pytest.raises(NonFiniteError):
        dvi.fit(far, [(X, Y)], 5, progress=False)
    assert not any(value.any() for value in guide.median().values())
    with pytest.warns(DviWarning, match="means of the guide are all zero"):
        dvi.fit(still(model, guide, elbo), [(X, Y)], 2, progress=False)
    torch.testing.assert_close({**guide.median()}, weights)


@pytest.mark.slow
def test_a_guide_of_pyro_learns_what_its_hidden_units_are_for():
    """Exclusive or: a network whose units are alike is no better than chance."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 2))
    model = dvi.classifier(dvi.to_bayesian_(net, prior_scale=1.0), num_data=30)
    guide = AutoNormal(model, init_scale=0.05)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.03}), loss=dvi.MomentPropagationELBO(kl_weight=0.01))
    with pytest.warns(DviWarning, match="means of the guide are all zero"):
        svi.step(X, Y)
    for _ in range(100):
        svi.step(X, Y)
    assert dvi.predict(model, guide, (X, Y), dvi.AtMean()).metrics()["accuracy"] > 0.95
