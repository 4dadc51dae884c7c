# SPDX-License-Identifier: Apache-2.0
"""Every way of working, on the device of the data: nothing of the CPU takes part, and the numbers are the same.

The emulated device draws the numbers of the CPU, so that sampled methods compare as well. It refuses float64 here, as
Apple's does: all is in float32, and so has to be what the library computes there.
"""

from collections.abc import Iterator
from typing import Any

import pyro
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor, distributions as td, nn

import pyro_dvi as dvi
from pyro_dvi import metrics
from pyro_dvi.bayesian import HierarchicalScale, LearnedScale, OptimalScale
from pyro_dvi.curvature.information import expected_information
from pyro_dvi.laplace import ByEvidence, ByLanczos, Dense, HessianFree, PriorPrecision
from tests import emulated
from tests.laplace.cases import CASES as LAPLACE
from tests.whole_package.methods import (
    METHODS,
    NUM_DATA,
    classifier,
    images,
    laplace_guide,
    regression,
    small_net,
)


@pytest.fixture(autouse=True)
def _without_float64() -> Iterator[None]:
    with emulated.no_float64():
        yield


def trained(method: str, where: torch.device | str, prior: Any = 1.0) -> SVI:
    pyro.clear_param_store()
    norm = (
        nn.Identity if method == "Taylor, Hessian" else nn.BatchNorm2d
    )  # which torch does not derive thrice
    svi = METHODS[method](classifier(where, prior, norm))
    torch.manual_seed(2)
    dvi.fit(svi, [images(where)], 1, progress=False)
    return svi


def everything(prediction: Any, labels: Tensor) -> dict[str, Any]:
    """All that a prediction of classes can say."""
    found = {name: getattr(prediction, name) for name in ("probabilities", "entropy", "mean", "variance")}
    if isinstance(prediction.method, dvi.Samples):
        found["mutual_information"] = prediction.mutual_information
    found["log_likelihood"] = prediction.log_likelihood(labels)
    found["sample"] = prediction.sample(2, seed=0)
    return found


def check_device(
    found: dict[str, Any], expected: dict[str, Any], device: torch.device, **tolerance: float
) -> None:
    for name, value in expected.items():
        assert found[name].device == device, name
        if device.type != "cuda":  # whose random numbers are others
            there = found[name].detach().cpu().to(value.dtype)
            torch.testing.assert_close(there, value.detach(), msg=lambda m, n=name: f"{n}: {m}", **tolerance)


@pytest.mark.every(3)
@pytest.mark.filterwarnings("ignore:TaylorELBO trains a posterior for predictions at the mean, but Samples")
@pytest.mark.parametrize("method", METHODS)
def test_training_and_prediction(method, device):
    def results(where: torch.device | str) -> dict[str, Any]:
        svi = trained(method, where)
        x, y = images(where)
        found = {f"parameter {k}": v for k, v in svi.guide.named_parameters()}
        for rule in (dvi.AtMean(), dvi.Samples(3)) if method in ("VOGN", "multiplicative noise") else ():
            prediction = dvi.predict(svi.model, svi.guide, (x, y), rule, seed=4)
            found |= {f"{rule}, {k}": v for k, v in everything(prediction, y).items()}
            assert set(prediction.metrics()) >= {"nll", "accuracy"}
        return found

    expected = results("cpu")
    check_device(results(device), expected, device, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "distribution", [lambda u: td.Gamma(u.exp(), (2 * u).exp()), lambda u: td.Beta(u.exp(), (2 * u).exp())]
)
def test_fisher_information_of_shapes(distribution, device):
    def information(where: torch.device | str) -> dict[str, Tensor]:
        u = torch.linspace(-2, 2, 5).to(where).requires_grad_()
        pairs = expected_information(distribution(u), "y")
        return {f"{k} {part}": t for k, pair in enumerate(pairs) for part, t in zip("uw", pair, strict=True)}

    check_device(information(device), information("cpu"), device, rtol=1e-4, atol=1e-5)


@pytest.mark.every(4)
@pytest.mark.parametrize("prior", [LearnedScale(), OptimalScale(), HierarchicalScale()], ids=repr)
@pytest.mark.parametrize("method", ["Taylor, Gauss-Newton", "multiplicative noise"])
def test_priors(method, prior, device):
    def results(where: torch.device | str) -> dict[str, Any]:
        svi = trained(method, where, prior)
        return {**dict(svi.guide.named_parameters()), **dict(svi.model.named_parameters())}

    expected = results("cpu")
    check_device(results(device), expected, device, rtol=1e-4, atol=1e-5)


def test_moments_are_predicted_by_every_rule(device):
    def results(where: torch.device | str) -> dict[str, Any]:
        svi, data = trained("mean-field moments", where), images(where)
        found: dict[str, Any] = {}
        for propagation in (dvi.Moments().propagation, dvi.ReverseDelta()):
            rule = dvi.Moments(propagation=propagation)
            prediction = dvi.predict(svi.model, svi.guide, data, rule, seed=4)
            name = type(propagation).__name__
            found |= {f"{name}, {k}": v for k, v in everything(prediction, data[1]).items()}
        return found

    expected = results("cpu")
    check_device(results(device), expected, device, rtol=1e-3, atol=1e-4)


def test_predictions_of_numbers(device):
    def results(where: torch.device | str) -> dict[str, Any]:
        model, guide, data = regression(where)
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), dvi.MomentPropagationELBO())
        svi.step(*data)
        found: dict[str, Any] = {}
        for method in (dvi.Moments(), dvi.Samples(4)):
            prediction = dvi.predict(
                model, guide, data, method, seed=1, keep_draws=isinstance(method, dvi.Samples)
            )
            low, high = prediction.interval(0.9)
            found |= {
                f"{method} mean": prediction.mean,
                f"{method} variance": prediction.variance,
                f"{method} quantiles": prediction.quantiles([0.1, 0.5]),
                f"{method} low": low,
                f"{method} high": high,
                f"{method} crps": prediction.crps(),
            }
            assert set(prediction.metrics()) >= {"nll", "crps", "coverage_95"}
            assert len(prediction.to_dataframe()) == NUM_DATA
        return found

    expected = results("cpu")
    check_device(results(device), expected, device, rtol=1e-4, atol=1e-5)


QUANTILES = {
    "Poisson": lambda f: pyro.distributions.Poisson(f.exp()),
    "Gamma": lambda f: pyro.distributions.Gamma(2.0, f.exp()),
    "StudentT": lambda f: pyro.distributions.StudentT(4.0, f, 0.5),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("family", QUANTILES)
def test_quantiles(device, family):
    def model(x, y=None):
        w = pyro.sample("w", pyro.distributions.Normal(x.new_zeros(()), 1.0))
        with pyro.plate("data", len(x)):
            return pyro.sample("obs", QUANTILES[family](w * x), obs=y)

    def results(where: torch.device | str) -> dict[str, Any]:
        pyro.clear_param_store()
        torch.manual_seed(0)
        x = torch.linspace(-1, 1, 5).to(where)
        guide = dvi.MeanFieldGuide(model)
        guide.initialize(x, QUANTILES[family](x).sample())
        rules = (dvi.AtMean(), dvi.Moments(), dvi.Samples(4))
        return {f"{rule}": dvi.predict(model, guide, x, rule, seed=1).quantiles([0.1, 0.9]) for rule in rules}

    check_device(results(device), results("cpu"), device, rtol=1e-3, atol=1e-3)


def test_diagnostics_and_export(device):
    svi, (x, y) = trained("mean-field moments", device), images(device)
    assert dvi.diagnostics.scale_report(svi.guide, earlier=dvi.diagnostics.scale_snapshot(svi.guide)).rows
    assert dvi.diagnostics.signal_to_noise(svi.guide)
    assert str(dvi.diagnostics.compare_with_sampling(svi.model, svi.guide, (x, y), num_samples=5))
    assert str(dvi.summary(svi.model))
    posterior = dvi.to_arviz(
        svi.model, svi.guide, (x, y), method=dvi.Samples(3), prior=2, predictions=(x[:2],)
    )
    assert posterior["log_likelihood"]["obs"].shape == (1, 3, NUM_DATA)
    assert set(dict(dvi.bayesian.to_deterministic(svi.model, svi.guide).named_parameters()))


METRICS = [
    metrics.accuracy,
    metrics.aumrc,
    metrics.brier,
    metrics.expected_calibration_error,
    metrics.misclassification_auroc,
]


@pytest.mark.parametrize("metric", METRICS)
def test_metrics_of_tensors_on_the_device(metric, device):
    p, y = torch.softmax(torch.randn(20, 3), -1), torch.arange(20) % 3
    assert metric(p.to(device), y.to(device)) == pytest.approx(metric(p, y))


@pytest.mark.every(3)
@pytest.mark.filterwarnings("ignore:weights are drawn from a Laplace posterior")
@pytest.mark.parametrize("name", sorted(LAPLACE.keys() - {"cg"}))
def test_laplace(name, device):
    case = LAPLACE[name]

    def results(where: torch.device | str) -> dict[str, Any]:
        guide, batches, model = laplace_guide(where)
        guide.fit(batches, case.method, seed=3)
        x, y = batches[0]
        found = {"covariance": guide.predictive(x).covariance}
        if "draw" not in case.unsupported:
            torch.manual_seed(0)
            found |= guide.sample(2)
            found["mean"] = dvi.predict(model, guide, (x, y), dvi.Samples(2), seed=0).mean
        found["score"] = dvi.predict(model, guide, (x, y)).log_likelihood(y)
        return found

    expected = results("cpu")
    check_device(results(device), expected, device, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_evidence_and_tuning_of_laplace(device):
    guide, batches, _ = laplace_guide(device)
    assert str(guide.diagnose(batches))
    guide.fit(batches, Dense())
    exact = guide.log_evidence(batches).value
    assert guide.log_evidence(batches, determinant=ByLanczos(num_probes=20)).value == pytest.approx(
        exact, rel=0.2
    )
    guide.tune(batches, PriorPrecision(), ByEvidence(), progress=False)
    guide.fit(batches, Dense(), unconverged="accept")
    assert guide.predictive(batches[0][0]).variance.device == device


@pytest.mark.slow
def test_variances_from_second_fits(device):
    def variance(where: torch.device | str) -> dict[str, Tensor]:
        guide, batches, _ = laplace_guide(where)
        guide.fit(batches, HessianFree())
        return {"variance": guide.predictive(batches[0][0]).variance}

    check_device(variance(device), variance("cpu"), device, rtol=1e-2, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mean-field moments", "draws"])
def test_ensembles(method, device):
    """Trained where the data are, and moved there afterwards."""

    def ensemble(where: torch.device | str) -> tuple[Any, Any]:
        def train() -> tuple[Any, Any]:
            net = dvi.to_bayesian_(small_net())
            svi = METHODS[method](dvi.classifier(net, num_data=NUM_DATA).to(where))
            torch.manual_seed(2)  # the network is drawn on the CPU: only now both generators are the same
            dvi.fit(svi, [images(where)], 1, progress=False)
            return svi.model, svi.guide

        return dvi.train_ensemble(train, 2, progress=False)

    def results(model: Any, guide: Any, where: torch.device | str) -> dict[str, Any]:
        x, y = images(where)
        prediction = dvi.predict(model, guide, (x, y), seed=4)
        assert dvi.to_arviz(model, guide, (x, y), 20, seed=0)["posterior"]["member"].shape == (1, 20)
        served = dvi.predictor(model, guide, x, seed=4)(x).mean
        return everything(prediction, y) | {"served": served}

    on_cpu = ensemble("cpu")
    expected = results(*on_cpu, "cpu")
    check_device(results(*ensemble(device), device), expected, device, rtol=1e-4, atol=1e-5)
    moved = [part.to(device) for part in on_cpu]
    check_device(results(*moved, device), expected, device, rtol=1e-4, atol=1e-5)
