# SPDX-License-Identifier: Apache-2.0
"""A posterior is predicted by the rule that its objective trained it for, after saving and loading as well."""

import warnings
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoDelta, AutoDiagonalNormal, AutoNormal
from torch import Tensor

import pyro_dvi as dvi
from pyro_dvi.errors import DviWarning
from pyro_dvi.natural_gradients.updates import VOGN
from tests.analysis.arviz_export.reading import values

X = torch.linspace(-1, 1, 12)
Y = 2 * X


def model(x: Tensor, y: Tensor | None = None) -> Any:
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(X), subsample_size=len(x)):
        return pyro.sample("obs", dist.Normal(slope * x, 0.1), obs=y)


def by_hand(x: Tensor, y: Tensor | None = None) -> None:
    pyro.sample("slope", dist.Normal(pyro.param("loc", torch.zeros(())), 0.5))


def training(guide: Any, elbo: Any) -> SVI:
    natural = isinstance(elbo, dvi.NaturalGradientELBO)
    return SVI(model, guide, VOGN({}) if natural else pyro.optim.Adam({"lr": 0.01}), loss=elbo)


def in_a_loop(svi: SVI) -> None:
    svi.step(X, Y)


def by_fit(svi: SVI) -> None:
    dvi.fit(svi, [(X, Y)], 1, progress=False)


def rule(guide: Any) -> dvi.predictive.PredictionRule:
    return dvi.predict(model, guide, X).method


RULES = {dvi.TaylorELBO: dvi.AtMean(), dvi.MomentPropagationELBO: dvi.Moments(), Trace_ELBO: dvi.Samples(30)}
GUIDES = [dvi.MeanFieldGuide, AutoNormal, AutoDiagonalNormal, lambda _: by_hand]


@pytest.mark.parametrize("train", [in_a_loop, by_fit])
@pytest.mark.parametrize(
    "guide", GUIDES, ids=["MeanFieldGuide", "AutoNormal", "AutoDiagonalNormal", "by hand"]
)
@pytest.mark.parametrize("elbo", RULES, ids=lambda elbo: elbo.__name__)
def test_the_objective_decides(guide, elbo, train):
    guide = guide(model)
    train(training(guide, elbo()))
    assert rule(guide) == RULES[elbo]
    vars(guide).pop("_pyro_dvi_trained_for", None)  # of the function, for other tests


@pytest.mark.parametrize("elbo", [dvi.NaturalGradientELBO, dvi.TaylorELBO, Trace_ELBO])
def test_special_guides(elbo):
    guide: Any = dvi.NaturalGradientGuide if elbo is dvi.NaturalGradientELBO else AutoDelta
    guide = guide(model)
    in_a_loop(training(guide, elbo()))
    assert rule(guide) == (dvi.AtMean() if isinstance(guide, AutoDelta) else dvi.Samples(30))


def test_handlers_around_a_guide_do_not_hide_it():
    guide = AutoNormal(model)
    in_a_loop(training(pyro.poutine.scale(guide, scale=0.5), dvi.TaylorELBO()))
    assert rule(guide) == dvi.AtMean()


def test_the_last_objective_decides_and_evaluation_does_not():
    guide = dvi.MeanFieldGuide(model)
    in_a_loop(training(guide, dvi.TaylorELBO()))
    training(guide, dvi.MomentPropagationELBO()).evaluate_loss(X, Y)
    assert rule(guide) == dvi.AtMean()
    by_fit(training(guide, TraceMeanField_ELBO()))
    assert rule(guide) == dvi.Samples(30)
    in_a_loop(training(guide, dvi.MomentPropagationELBO()))
    assert rule(guide) == dvi.Moments()


@pytest.mark.parametrize("guide", [dvi.MeanFieldGuide, AutoNormal])
@pytest.mark.parametrize("elbo", RULES, ids=lambda elbo: elbo.__name__)
def test_checkpoints_keep_the_rule(guide, elbo, tmp_path):
    svi = training(guide(model), elbo())
    by_fit(svi)
    dvi.save(tmp_path / "run.pt", svi)
    pyro.clear_param_store()
    again = training(guide(model), elbo())
    dvi.load(tmp_path / "run.pt", again, example=(X, Y))
    assert rule(again.guide) == RULES[elbo]


def test_a_state_dict_keeps_the_rule_and_one_without_it_changes_nothing():
    guide = dvi.MeanFieldGuide(model)
    in_a_loop(training(guide, dvi.TaylorELBO()))
    state = guide.state_dict()
    pyro.clear_param_store()
    fresh = dvi.MeanFieldGuide(model)
    fresh.load_state_dict(state)
    fresh.initialize(X, Y)
    assert rule(fresh) == dvi.AtMean()
    fresh.load_state_dict({name: value for name, value in state.items() if "extra" not in name})
    assert rule(fresh) == dvi.AtMean()


def test_an_export_has_draws_that_differ():
    guide = AutoNormal(model)
    in_a_loop(training(guide, Trace_ELBO()))
    exported = dvi.to_arviz(model, guide, (X, Y), seed=0)
    assert values(exported, "posterior", "slope").shape == (1, 500)
    assert values(exported, "log_likelihood", "obs").std(1).min() > 0


@pytest.mark.parametrize("method", [dvi.Samples(5), dvi.Moments()], ids=repr)
def test_the_width_of_a_posterior_that_is_predicted_at_its_mean(method):
    guide = dvi.MeanFieldGuide(model)
    in_a_loop(training(guide, dvi.TaylorELBO()))
    with pytest.warns(
        DviWarning, match=r"TaylorELBO trains a posterior for predictions at the mean.*AtMean\(\)"
    ):
        dvi.predict(model, guide, X, method)
    pyro.clear_param_store()
    in_a_loop(training(guide := dvi.MeanFieldGuide(model), dvi.MomentPropagationELBO()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dvi.predict(model, guide, X, method)


def test_samples_of_a_point_estimate_are_named_as_equal():
    x = torch.randn(20, 3)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    posterior = dvi.MAP().fit(net, [(x, x.sum(1))], 2, progress=False)
    with pytest.warns(DviWarning, match="no epistemic uncertainty.*point estimate.*dropout is off"):
        posterior.predict(x, dvi.Samples(5), seed=0)
    posterior.predict(x)
    ensemble = dvi.Ensemble(dvi.MAP(), 2).fit(net, [(x, x.sum(1))], 2, progress=False)
    assert ensemble.predict(x, dvi.Samples(1), seed=0).epistemic.min() > 0
