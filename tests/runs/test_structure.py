# SPDX-License-Identifier: Apache-2.0
"""Data that depend on latents by their values only, which no gradient of the likelihood shows."""

import math
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta, AutoMultivariateNormal
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import pyro_dvi as dvi
from pyro_dvi.errors import ModelError, UnsupportedError
from pyro_dvi.moments import GaussianMoments, moment_rule
from pyro_dvi.natural_gradients.ivon import IVON
from pyro_dvi.natural_gradients.updates import OGN, VOGN
from pyro_dvi.optim import Adam

N = 24
X = torch.linspace(-1, 1, N)
Y = 2 * X

METHODS = {
    "VOGN": (dvi.NaturalGradientGuide, dvi.NaturalGradientELBO, VOGN),
    "OGN": (dvi.NaturalGradientGuide, dvi.NaturalGradientELBO, OGN),
    "IVON": (dvi.NaturalGradientGuide, dvi.NaturalGradientELBO, IVON),
    "Taylor": (dvi.MeanFieldGuide, dvi.TaylorELBO, Adam),
    "moments": (dvi.MeanFieldGuide, dvi.MomentPropagationELBO, Adam),
    "MNVI, point": (dvi.MultiplicativeNoiseGuide, dvi.MomentPropagationELBO, Adam),
    "sampled": (dvi.MeanFieldGuide, dvi.SampledELBO, Adam),
    "point": (AutoDelta, dvi.SampledELBO, Adam),
    "not factorised": (AutoMultivariateNormal, dvi.SampledELBO, Adam),
    "Laplace": (dvi.LaplaceGuide, None, None),
}
EACH = pytest.mark.parametrize("method", METHODS)


def regression(through: Callable[[Tensor], Any], noise: Any = None, runs: list | None = None) -> Callable:
    """A slope, what is between it and the data, and a latent noise if there is one."""

    def model(x: Tensor, y: Tensor) -> None:
        slope = pyro.sample("slope", dist.Normal(torch.ones(N), 1.0).to_event(1))
        scale = 0.5 if noise is None else pyro.sample("noise", noise).exp()
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(through(3 * slope * x), scale), obs=y)
        if runs is not None:
            runs.append(slope)

    return model


def step(method: str, model: Callable) -> Any:
    guide_class, elbo, optimizer = METHODS[method]
    guide: Any = guide_class(model)
    if elbo is None:
        guide.initialize(X, Y)
        energy = guide.energy([(X, Y)])
        return energy.at(torch.ones_like(energy.start)).value
    return SVI(model, guide, optimizer({}), loss=elbo()).step(X, Y)


BLIND: dict[str, Callable[[Tensor], Any]] = {
    "detach": lambda f: f.detach(),
    "round": torch.round,
    "round to a decimal": lambda f: f.round(decimals=1),
    "floor": torch.floor,
    "sign": torch.sign,
    "comparison": lambda f: (f > 0).to(f),
    "argmax": lambda f: torch.stack([f, -f]).argmax(0).to(f.dtype),
}


@EACH
@pytest.mark.parametrize("through", BLIND.values(), ids=BLIND)
def test_a_likelihood_without_a_gradient_is_refused(method, through):
    message = r"'y' depends on latent site 'slope', but no gradient.*\.detach\(\)"
    kinds: tuple[type[Exception], ...] = (ModelError,)
    if method == "moments":  # most have no rule
        message, kinds = (
            rf"{message}|has no rule for means and variances",
            (ModelError, UnsupportedError),
        )
    with pytest.raises(kinds, match=message):
        step(method, regression(through))


@pytest.mark.parametrize("method", ["VOGN", "IVON", "Taylor", "not factorised"])
def test_another_latent_with_a_gradient_does_not_hide_it(method):
    with pytest.raises(ModelError, match="'slope', but no gradient"):
        step(method, regression(BLIND["detach"], dist.Normal(torch.zeros(()), 1.0)))


SEEN: dict[str, Callable[[Tensor], Any]] = {
    "straight through": lambda f: f + (f.round() - f).detach(),
    "fraction": lambda f: f - f.floor(),
    "dead units": lambda f: torch.where(f > 100.0, f, 0.0),
    "no slope at the start": lambda f: (f - f.detach()) ** 2,
}


@EACH
@pytest.mark.parametrize("through", SEEN.values(), ids=SEEN)
def test_a_gradient_that_is_zero_or_passes_by_another_way_is_none_of_these(method, through):
    if method == "moments":
        through = torch.tanh  # others have no rule
    assert torch.isfinite(torch.as_tensor(step(method, regression(through)))).all()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"moments", "Laplace"}))
def test_a_draw_that_is_rounded_to_the_same_number_hides_nothing(method, seed):
    def model(x: Tensor, y: Tensor) -> None:
        slope = pyro.sample("slope", dist.Normal(torch.zeros(()), 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(slope.round() * x, 0.5), obs=y)

    pyro.set_rng_seed(seed)
    with pytest.raises(ModelError, match="'slope', but no gradient"):
        step(method, model)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"moments", "Laplace"}))
def test_a_draw_with_the_same_sum_over_rows_hides_nothing(method, seed):
    """Beside the large residuals, a level changes the likelihood of all rows by less than a thousandth."""

    def model(x: Tensor, y: Tensor) -> None:
        slope = pyro.sample("slope", dist.Normal(torch.ones(N), 1.0).to_event(1))
        level = pyro.sample("level", dist.Normal(torch.ones(()), 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(slope * x + (level.detach() > 1), 0.5), obs=2 * x + 0.5)

    pyro.set_rng_seed(seed)
    with pytest.raises(ModelError, match="'level', but no gradient"):
        step(method, model)


@EACH
def test_a_latent_that_no_data_depend_on_is_left_alone(method):
    runs: list = []
    model = regression(
        lambda f: torch.zeros(N) * len(f) + pyro.sample("level", dist.Normal(torch.ones(()), 1.0)), runs=runs
    )
    guide_class, elbo, optimizer = METHODS[method]
    if elbo is None:
        guide: Any = guide_class(model)
        guide.initialize(X, Y)
        energy = guide.energy([(X, Y)])
        assert energy.at(energy.start).value > 0
        return
    svi = SVI(model, guide_class(model), optimizer({}), loss=elbo())
    svi.step(X, Y)
    seen = len(runs)
    svi.step(X, Y)
    assert len(runs) == seen + 1  # it was looked at once


@EACH
def test_a_latent_that_no_data_depend_on_is_refused_if_another_latent_sets_its_prior(method):
    """A factorised posterior gives the slope the precision of all rows; one with covariances is right."""

    def model(x: Tensor, y: Tensor) -> None:
        slope = pyro.sample("slope", dist.Normal(torch.ones(N), 1.0).to_event(1))
        later = pyro.sample("later", dist.Normal(slope.sum() * torch.ones(3), 0.5).to_event(1))
        pyro.sample("last", dist.Normal(later, 0.5).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(slope * x, 0.5), obs=y)

    if method == "not factorised":
        assert math.isfinite(step(method, model))
        return
    with pytest.raises(ModelError, match=r"'last'.*depends on 'later'.*too narrow.*poutine\.mask"):
        step(method, model)


def test_the_look_uses_no_random_numbers():
    """A training that goes on in another process looks again."""
    model = regression(lambda f: torch.zeros(N) + pyro.sample("level", dist.Normal(torch.ones(()), 1.0)))
    guide = dvi.NaturalGradientGuide(model)
    guide.initialize(X, Y)
    elbo, states = dvi.NaturalGradientELBO(), []
    for _ in range(2):
        torch.manual_seed(0)
        elbo.loss_and_grads(model, guide, X, Y)
        guide.natural_step.drop()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("method", ["Taylor", "moments", "sampled"])
def test_a_latent_that_sets_priors_costs_no_runs(method):
    """Data depend on it, by the latents below it, whose values stay as they are in a look."""
    guide_class, elbo, optimizer = METHODS[method]
    counts = []
    for prior in (dist.LogNormal(torch.zeros(()), 0.1), None):
        runs: list = []

        def model(x: Tensor, y: Tensor, prior: Any = prior, runs: list = runs) -> None:
            width = 1.0 if prior is None else pyro.sample("width", prior)
            slope = pyro.sample("slope", dist.Normal(torch.ones(N), width).to_event(1))
            with pyro.plate("data", len(x)):
                pyro.sample("y", dist.Normal(slope * x, 0.5), obs=y)
            runs.append(slope)

        pyro.clear_param_store()
        SVI(model, guide_class(model), optimizer({}), loss=elbo()).step(X, Y)
        counts.append(len(runs))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("error", [ValueError, RuntimeError, ZeroDivisionError, AssertionError, KeyError])
def test_a_model_need_not_take_draws(error):
    """Those of the prior of a latent that no data depend on."""
    values = []

    def model(x: Tensor, y: Tensor) -> None:
        slope = pyro.sample("slope", dist.Normal(torch.ones(N), 1.0).to_event(1))
        values.append(float(pyro.sample("unused", dist.Normal(0.0, 1.0)).detach()))
        if values[-1] != values[0]:
            raise error("another value")
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(slope * x, 0.5), obs=y)

    guide = dvi.MeanFieldGuide(model)
    guide.initialize(X, Y)
    values.clear()
    SVI(model, guide, Adam({}), loss=dvi.TaylorELBO()).step(X, Y)
    assert len(set(values)) > 1


def test_a_reentrant_checkpoint_keeps_its_own_message():
    """It hides from the graph what its function uses."""

    def hiding(x: Tensor, y: Tensor) -> None:
        slope = pyro.sample("slope", dist.Normal(torch.ones(1), 1.0).to_event(1))
        f = checkpoint(lambda x: x * slope, x.clone().requires_grad_(), use_reentrant=True)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, 0.5), obs=y)

    with pytest.raises(UnsupportedError, match="use_reentrant=False"):
        step("VOGN", hiding)


def test_a_moment_rule_may_have_the_gradient_that_a_function_lacks():
    """The expectation of a step is smooth in the mean."""

    @moment_rule(torch.fix)
    def step_of(x: GaussianMoments) -> GaussianMoments:
        mean = torch.erf(x.loc / (2 * x.variance).sqrt())
        return GaussianMoments(mean, 1 - mean.square())

    assert torch.isfinite(torch.as_tensor(step("moments", regression(torch.fix))))
    pyro.clear_param_store()
    with pytest.raises(ModelError, match="no gradient"):
        step("Taylor", regression(torch.fix))
