# SPDX-License-Identifier: Apache-2.0
"""What people do with an export: the functions of ArviZ, on whichever version is installed."""

import math
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_dvi as dvi
from pyro_dvi import MeanFieldGuide, Samples, to_arviz
from pyro_dvi.errors import DviWarning
from tests.analysis.arviz_export.reading import ARVIZ_1, az, reopened

X = torch.linspace(-1, 1, 40)


def model(x, y=None):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    noise = pyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    with pyro.plate("data", len(x)):
        return pyro.sample("obs", dist.Normal(slope * x, noise), obs=y)


def guide(x, y=None):
    pyro.sample("slope", dist.Normal(2.0, 0.1))
    pyro.sample("noise", dist.LogNormal(-1.2, 0.1))


@pytest.fixture(autouse=True)
def _arviz_remarks():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one chain has no r-hat, and matplotlib's deprecations: not ours
        yield


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """An export that the functions of ArviZ only read."""
    generator = torch.Generator().manual_seed(1)
    y = 2 * X + 0.3 * torch.randn(40, generator=generator)
    options = {"prior": 50, "predictions": X[:7] + 2, "seed": 0}
    posterior = to_arviz(model, guide, (X, y), method=Samples(200), **options)
    return reopened(posterior, tmp_path_factory.mktemp("exported"))


def test_summary(exported):
    summary = az.summary(exported, var_names=["slope", "noise"])
    assert list(summary.index) == ["slope", "noise"]
    mean = float(summary["mean"].astype(float)["slope"])
    assert mean == pytest.approx(float(exported["posterior"]["slope"].mean()), abs=0.01)


def test_leave_one_out_and_compare(exported, tmp_path):
    loo = az.loo(exported, pointwise=True)
    total = float(loo.elpd if ARVIZ_1 else loo.elpd_loo)
    assert loo.n_data_points == 40
    # For two parameters and 40 observations, importance sampling comes within a nat of the log score of the draws.
    log_likelihood = exported["log_likelihood"]["obs"].values[0].astype(float)
    lppd = np.log(np.exp(log_likelihood).mean(0)).sum()
    assert lppd - 4 < total < lppd

    def flat(x, y=None):
        pyro.sample("slope", dist.Normal(0.0, 0.1))
        pyro.sample("noise", dist.LogNormal(0.1, 0.1))

    y = torch.as_tensor(exported["observed_data"]["obs"].values)
    other = to_arviz(model, flat, (X, y), method=Samples(200), seed=0)
    table = az.compare({"flat": other, "steep": exported})
    assert list(table.index) == ["steep", "flat"]


PLOTS = {
    "forest": lambda e: az.plot_forest(e, var_names=["slope", "noise"]),
    "pair": lambda e: az.plot_pair(e, var_names=["slope", "noise"]),
    "dist": lambda e: (
        az.plot_dist(e, var_names=["slope"]) if ARVIZ_1 else az.plot_dist(e["posterior"]["slope"])
    ),
    "posterior": lambda e: az.plot_dist(e, var_names=["noise"]) if ARVIZ_1 else az.plot_posterior(e),
    "predictive": lambda e: az.plot_ppc_dist(e) if ARVIZ_1 else az.plot_ppc(e, num_pp_samples=20),
    "prior predictive": lambda e: (
        az.plot_ppc_dist(e, group="prior_predictive") if ARVIZ_1 else az.plot_ppc(e, group="prior")
    ),
    "trace": lambda e: az.plot_trace(e, var_names=["slope"]),
}


@pytest.mark.parametrize("name", PLOTS)
def test_plots(exported, name):
    assert PLOTS[name](exported) is not None


@pytest.mark.parametrize("labels", [False, True], ids=["numbers", "labels"])
def test_missing_outputs_have_a_predictive_plot(labels):
    kept = X > -0.6

    def missing(x, y=None):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        f = slope * x
        with pyro.plate("data", len(x)), pyro.poutine.mask(mask=kept):
            fn = dist.Categorical(logits=torch.stack([f, -f], -1)) if labels else dist.Normal(f, 0.3)
            return pyro.sample("obs", fn, obs=y)

    def slopes(x, y=None):
        pyro.sample("slope", dist.Normal(2.0, 0.1))

    y = (X > 0).long() if labels else 2 * X
    exported = to_arviz(missing, slopes, (X, y), method=Samples(60), seed=0, prior=20)
    assert exported["observed_data"]["obs"].shape == (40,)
    for name in ("predictive", "prior predictive"):
        assert PLOTS[name](exported) is not None
    assert az.loo(exported).n_data_points == int(kept.sum())


def test_classes_have_a_predictive_plot():
    net = dvi.to_bayesian_(torch.nn.Linear(2, 3))
    classes = dvi.classifier(net, num_data=20)
    x, y = torch.randn(20, 2), torch.randint(3, (20,))
    posterior = MeanFieldGuide(classes)
    posterior.initialize(x, y)
    exported = to_arviz(classes, posterior, (x, y), method=Samples(60), seed=0)
    plot = az.plot_ppc_dist(exported) if ARVIZ_1 else az.plot_ppc(exported, num_pp_samples=10)
    assert plot is not None
    assert az.loo(exported).n_data_points == 20


METHODS = {
    "MomentPropagation": (dvi.MomentPropagation(), {}),
    "NaturalGradients": (dvi.NaturalGradients(), {}),
    "Ensemble": (dvi.Ensemble(dvi.NaturalGradients(), 2), {}),
    "Ensemble of moments": (dvi.Ensemble(dvi.MomentPropagation(), 2), {}),
    "Laplace": (dvi.Laplace(), {}),
    "Ensemble of Laplace": (dvi.Ensemble(dvi.Laplace(), 2), {}),
    "VariationalLaplace": (dvi.VariationalLaplace(), {"method": Samples(200)}),
}


@pytest.mark.parametrize("name", METHODS)
def test_the_methods_of_the_first_page_have_a_leave_one_out_score(name):
    torch.manual_seed(0)
    x = torch.randn(60, 2)
    y = x[:, :1] + 0.3 * torch.randn(60, 1)
    method, options = METHODS[name]
    net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    posterior = method.fit(net, [(x, y)], 5, progress=False)
    export = posterior.to_arviz((x, y), seed=0, **options)
    loo = az.loo(export, pointwise=True)
    total = float(loo.elpd if ARVIZ_1 else loo.elpd_loo)
    predicted = posterior.predict((x, y), options.get("method"), seed=0).log_likelihood().sum()
    # Importance sampling with few observations comes within a few nats of the score of the posterior itself.
    assert total == pytest.approx(float(predicted), abs=6)
    assert export.attrs["temperature"] == (
        1.0 if "Laplace" in name and name != "VariationalLaplace" else 0.02
    )


@pytest.mark.parametrize(
    "method, count", [(dvi.MAP(), 1), (dvi.Ensemble(dvi.MAP(), 3), 3), (dvi.VariationalLaplace(), 1)]
)
def test_point_estimates_are_scored_and_said_to_mislead_leave_one_out_once(method, count):
    x = torch.linspace(-1, 1, 20)[:, None]
    y = torch.cat([x, -x], 1)
    posterior = method.fit(torch.nn.Linear(1, 2), [(x, y)], 5, progress=False)
    with pytest.warns(DviWarning, match="point estimate.*only the training log-likelihood") as caught:
        export = posterior.to_arviz((x, y), seed=0)
    assert len(caught) == 1
    found = torch.as_tensor(export["log_likelihood"]["obs"].values[0])
    assert len(found.unique(dim=0)) == count
    mixed = found.logsumexp(0) - math.log(len(found))
    torch.testing.assert_close(mixed, posterior.predict((x, y)).log_likelihood(), rtol=1e-4, atol=1e-4)
    posterior.to_arviz(x, seed=0)  # scores nothing, so that there is nothing to say


def linearised():
    def line(x, y=None):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            return pyro.sample("obs", dist.Normal(slope * x, 0.3), obs=y)

    y = 2 * X + 0.3 * torch.randn(40, generator=torch.Generator().manual_seed(1))
    guide = dvi.LaplaceGuide(line, temperature=0.5)
    guide.polish([(X, y)], progress=False)
    guide.fit([(X, y)])
    return line, guide, y


def test_linearised_scores_are_those_of_drawn_weights_in_a_linear_model():
    line, guide, y = linearised()
    export = to_arviz(line, guide, (X, y), 1500, seed=0)
    slopes = export["posterior"]["slope"].values[0][:, None]
    expected = dist.Normal(torch.as_tensor(slopes) * X, 0.3).log_prob(y).numpy()
    found = export["log_likelihood"]["obs"].values[0]
    np.testing.assert_allclose(found.mean(0), expected.mean(0), atol=0.03)
    np.testing.assert_allclose(found.std(0), expected.std(0), rtol=0.15, atol=0.01)
    assert export.attrs["temperature"] == 0.5


def test_drawn_weights_of_laplace_are_said_to_mislead_leave_one_out_once():
    line, guide, y = linearised()
    to_arviz(line, guide, (X, y), 10, seed=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        to_arviz(line, guide, (X, y), method=Samples(10), seed=0)
    assert sum("az.loo and az.compare would misread" in str(each.message) for each in caught) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*az.loo")
        to_arviz(line, guide, X, method=Samples(10), seed=0)  # nothing is scored
