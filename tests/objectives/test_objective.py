# SPDX-License-Identifier: Apache-2.0
"""What every objective of the library does: count steps, keep its terms, resume, and train by either interface."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoNormal
from pyro.poutine.messenger import Messenger
from torch import Tensor

import pyro_dvi as dvi
from pyro_dvi.bayesian import init_to_module
from pyro_dvi.curvature import Fisher, GGNDiagonal
from pyro_dvi.guides import MeanFieldGuide
from pyro_dvi.moment_propagation.elbo import MomentPropagationELBO
from pyro_dvi.moment_propagation.multiplicative_noise import MultiplicativeNoiseGuide
from pyro_dvi.natural_gradients.ivon import IVON
from pyro_dvi.natural_gradients.natural_elbo import NaturalGradientELBO
from pyro_dvi.natural_gradients.precision_guide import NaturalGradientGuide
from pyro_dvi.natural_gradients.updates import VOGN
from pyro_dvi.objectives.objective import Objective
from pyro_dvi.objectives.sampled import SampledELBO
from pyro_dvi.predictive.predict import default_rule
from pyro_dvi.runs.divergences import kl_to_priors
from pyro_dvi.runs.posterior_run import Call, run_at_means
from pyro_dvi.variational_laplace.taylor import TaylorELBO
from tests.objectives.networks import Classifier, images, small_net


def test_torch_optimizers_take_the_same_steps_as_svi():
    """`elbo(model, guide)` with torch.optim.Adam, against SVI with Pyro's Adam, from the same start."""
    x, y = images(size=8, pixels=8)

    def start() -> tuple[Classifier, MeanFieldGuide, TaylorELBO]:
        pyro.clear_param_store()
        model = small_net()
        guide = MeanFieldGuide(model)
        guide.initialize(x, y)
        return model, guide, TaylorELBO()

    model, guide, elbo = start()
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), loss=elbo)
    by_svi = [svi.step(x, y) for _ in range(5)]
    weights = guide.median()

    with pyro.settings.context(module_local_params=True):
        model, guide, elbo = start()
        module = elbo(model, guide)
        parameters = [p for p in module.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(parameters, lr=0.01)
        by_torch = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = module(x, y)
            loss.backward()
            optimizer.step()
            by_torch.append(loss.item())
        assert by_torch == pytest.approx(by_svi, rel=1e-5)
        torch.testing.assert_close(guide.median(), weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("evaluate", ["svi", "no_grad", "loss"])
def test_evaluation_counts_no_step_and_leaves_no_gradient(evaluate):
    x, y = images(pixels=8)
    model = small_net()
    guide = MeanFieldGuide(model)
    elbo = TaylorELBO(kl_weight=lambda step: 0.1 * (step + 1), curvature=Fisher(every=2))
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), loss=elbo)
    svi.step(x, y)
    assert elbo.step == 1 and elbo.terms["kl_weight"] == pytest.approx(0.1) and elbo.terms["penalty"] > 0
    calls: dict[str, Callable[[], Any]] = {
        "svi": lambda: svi.evaluate_loss(x, y),
        "loss": lambda: elbo.loss(model, guide, x, y),
        "no_grad": lambda: no_grad(elbo.differentiable_loss, model, guide, x, y).item(),
    }
    for _ in range(2):
        assert calls[evaluate]() > 0
    assert elbo.step == 1
    assert elbo.terms["penalty"] > 0, (
        "an evaluation sees the whole penalty, even between the steps that compute it"
    )
    assert all(p.grad is None or not p.grad.any() for p in guide.parameters())
    svi.step(x, y)
    assert elbo.step == 2 and elbo.terms["kl_weight"] == pytest.approx(0.2) and elbo.terms["penalty"] == 0


def no_grad(function: Callable, *args: Any) -> Tensor:
    with torch.no_grad():
        return function(*args)


def test_terms_add_up():
    x, y = images(pixels=8)
    model = small_net()
    elbo = TaylorELBO(kl_weight=0.3)
    loss = elbo.loss(model, MeanFieldGuide(model), x, y)
    t = elbo.terms
    assert set(t) == {"loss", "log_likelihood", "penalty", "kl", "kl_weight"}
    assert all(v.shape == () and not v.requires_grad for v in t.values())
    assert loss == pytest.approx((t["penalty"] - t["log_likelihood"] + 0.3 * t["kl"]).item(), rel=1e-5)


def test_a_resumed_elbo_continues_its_schedule():
    x, y = images(pixels=8)
    model = small_net()
    guide = MeanFieldGuide(model)

    def make() -> TaylorELBO:
        return TaylorELBO(kl_weight=lambda step: 0.1 * (step + 1), curvature=GGNDiagonal())

    elbo = make()
    for _ in range(3):
        elbo.loss_and_grads(model, guide, x, y)
    resumed = make()
    resumed.load_state_dict(elbo.state_dict())
    expected = elbo.loss_and_grads(model, guide, x, y)
    model.net[1].reset_running_stats()
    assert resumed.loss_and_grads(model, guide, x, y) == pytest.approx(expected)
    assert resumed.step == elbo.step == 4


class AtMeans(Objective):
    """The log-likelihood at the mean, without a penalty, as a user would write it."""

    prediction_rule = "AtMean"

    def evaluate(self, call: Call, kl_weight: float, training: bool) -> dict[str, Tensor]:
        run = run_at_means(call)
        log_likelihood = self.observed(run.model_trace).log_likelihood()
        kl = kl_to_priors(run.latents)
        return {"loss": kl_weight * kl - log_likelihood, "log_likelihood": log_likelihood, "kl": kl}


@pytest.mark.parametrize(
    ("rule", "restored"),
    [("AtMean", dvi.AtMean()), ("Samples", dvi.Samples(30)), (dvi.Samples(7), dvi.Samples(30))],
    ids=str,
)
def test_an_objective_of_a_user_trains_and_says_how_to_predict(rule, restored):
    x, y = images(pixels=8)
    model = small_net()
    guide, elbo = MeanFieldGuide(model), AtMeans(kl_weight=0.1, num_data=40)
    elbo.prediction_rule = rule
    losses = dvi.fit(SVI(model, guide, dvi.optim.Adam({"lr": 0.01}), loss=elbo), [(x, y)], 5, progress=False)
    assert losses["loss"][-1] < losses["loss"][0] and elbo.step == 5
    assert default_rule(guide) == (rule if isinstance(rule, dvi.Samples) else restored)
    fresh = MeanFieldGuide(model)
    fresh.load_state_dict(guide.state_dict())
    assert default_rule(fresh) == restored  # files keep the name


class Statements(Messenger):
    """Count the statements of runs inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter = Counter()

    def _process_message(self, msg: Any) -> None:
        self.counts[msg["type"], msg["name"]] += 1


@pytest.mark.parametrize(
    "elbo, guide_of, optimizer",
    [
        (TaylorELBO, MeanFieldGuide, pyro.optim.Adam),
        (TaylorELBO, partial(AutoNormal, init_loc_fn=init_to_module), pyro.optim.Adam),
        (MomentPropagationELBO, MultiplicativeNoiseGuide, pyro.optim.Adam),
        (MomentPropagationELBO, MeanFieldGuide, pyro.optim.Adam),
        (SampledELBO, MeanFieldGuide, pyro.optim.Adam),
        (NaturalGradientELBO, NaturalGradientGuide, VOGN),
        (NaturalGradientELBO, NaturalGradientGuide, IVON),
    ],
)
def test_a_step_is_one_run_of_the_guide_and_one_of_the_model(elbo, guide_of, optimizer):
    """Every parameter is read by one statement, every latent sampled once on either side. No look is due in step 5."""
    x, y = images(pixels=8)
    model = small_net()
    guide = guide_of(model)
    svi = SVI(model, guide, optimizer({"lr": 1e-3}), loss=elbo())
    for _ in range(4):
        svi.step(x, y)
    with Statements() as statements:
        svi.step(x, y)
    latents = guide.median().keys()
    parameters = [name for name in pyro.get_param_store() if name.startswith(type(guide).__name__)]
    assert len(latents) > 2 and len(parameters) >= len(latents)
    assert all(statements.counts["param", name] == 1 for name in parameters)
    assert all(statements.counts["sample", name] == 2 for name in latents)
    assert statements.counts["sample", "y"] == 1
