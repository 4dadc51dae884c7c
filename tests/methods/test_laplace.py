# SPDX-License-Identifier: Apache-2.0
"""Laplace's approximation in one call."""

from collections import OrderedDict
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi as dvi
from pyro_dvi.errors import ArgumentError, DataError, DviWarning
from pyro_dvi.laplace import ByTrainingLoss, ByValidation, ConjugateGradient, Diagonal, KroneckerFactored
from tests.methods.cases import EPOCHS, loader, network, rows, slope


def test_a_trained_network_gets_a_gaussian_around_its_weights():
    net = network(1)
    data = rows(60, 0, labels=False)
    adam = torch.optim.Adam(net.parameters(), 0.02)
    for _ in range(200):
        adam.zero_grad()
        nn.functional.mse_loss(net(data[0])[:, 0], data[1]).backward()
        adam.step()
    x = rows(20, 1)[0]
    everything = dvi.Laplace(
        layers=None, covariance=KroneckerFactored(), noise_scale=0.1, unconverged="accept"
    )
    posterior = everything.fit(net, loader(labels=False), progress=False)
    near, far = posterior.predict(x).epistemic, posterior.predict(10 * x).epistemic
    assert float(far.mean()) > 2 * float(near.mean()) > 0
    assert posterior.history.epoch == 0 and "KroneckerPosterior" in repr(posterior.guide)
    last = dvi.Laplace(noise_scale=0.1).fit(net, loader(labels=False), progress=False)
    assert all(torch.equal(last.guide.median()[f"net.{k}"], w) for k, w in net.named_parameters())


@pytest.mark.filterwarnings("ignore:the best value of PriorPrecision")
@pytest.mark.parametrize(
    "as_given", [tuple, lambda pair: [pair], lambda pair: DataLoader(TensorDataset(*pair), 40)]
)
def test_the_prior_is_tuned_on_validation_data(as_given):
    def gaussian(validation):
        return dvi.Laplace().fit(network(), loader(), EPOCHS, validation=validation, progress=False)

    held_out, test = rows(40, 2), rows(20, 1)
    plain, tuned = gaussian(None), gaussian(as_given(held_out))
    with plain.in_store():
        plain.guide.scale_factors = {}
        values = torch.logspace(-3, 6, 37, dtype=torch.float64)
        plain.guide.tune(loader(), criterion=ByValidation([held_out]), values=values, progress=False)
    assert plain.guide.scale_factors == pytest.approx(tuned.guide.scale_factors) != {}
    torch.testing.assert_close(plain.predict(test).probabilities, tuned.predict(test).probabilities)


def test_the_last_layer_of_a_model_that_is_a_function():
    """The weights of a linear model, whose Laplace approximation is exact."""
    with pytest.warns(
        DviWarning, match=r"latent sites \['w'\] have no trained values.* pass the number of epochs"
    ):
        posterior = dvi.Laplace().fit(slope, loader(labels=False), progress=False)
    x = rows(60, 0)[0]
    precision = (x.T @ x / 0.1**2 + torch.eye(3)).double()
    torch.testing.assert_close(posterior.guide.posterior.precision, precision, rtol=1e-5, atol=1e-5)


def test_a_data_set_is_no_loader():
    data = TensorDataset(*rows(60, 0))
    with pytest.raises(ArgumentError, match="loader must yield batches"):
        dvi.MAP().fit(network(), data, 1, progress=False)
    with pytest.raises(ArgumentError, match="validation must yield batches"):
        dvi.Laplace().fit(network(), loader(), validation=data, progress=False)


@pytest.mark.parametrize("named", [False, True])
def test_a_learned_noise_is_that_of_each_output_and_a_given_one_stays(named, tmp_path):
    """The evidence corrects the residuals of a linear model for the weights that were fitted to them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 1, generator=generator, dtype=torch.float64)
    noise = torch.tensor([0.1, 3.0], dtype=torch.float64)
    y = 2 * x + noise * torch.randn(2000, 2, generator=generator, dtype=torch.float64)
    net = nn.Linear(1, 2).double()
    with torch.no_grad():
        net.weight.fill_(2.0), net.bias.zero_()
    data: Any = TensorDataset(x, y)
    loader = DataLoader([{"input": a, "y": b} for a, b in data] if named else data, 50)
    posterior = dvi.Laplace().fit(net, loader, progress=False)
    residuals = (y - 2 * x).square().mean(0).sqrt()
    torch.testing.assert_close(posterior.model.noise_scale.detach(), residuals, rtol=0.01, atol=0.0)
    assert "obs" not in posterior.guide.scale_factors
    posterior.save(tmp_path / "posterior.pt")
    again = dvi.Laplace().load(tmp_path / "posterior.pt", net, loader)
    torch.testing.assert_close(again.predict(x).variance, posterior.predict(x).variance)
    given = dvi.Laplace(noise_scale=0.5).fit(net, loader, progress=False)
    assert given.model.noise_scale == 0.5


def moving(rows=600):
    """Standardised inputs that are nearly collinear, and smooth targets without noise, in float32."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(rows, 3, generator=generator)
    x = torch.tanh(z @ torch.randn(3, 14, generator=generator))
    x += 0.003 * torch.randn(rows, 14, generator=generator)
    y = z[:, :1] - z[:, 1:2].sin()
    return (x - x.mean(0)) / x.std(0), y / y.std()


def briefly_trained(data, steps):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(14, 20), nn.Tanh(), nn.Linear(20, 1))
    adam = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(steps):
        adam.zero_grad()
        nn.functional.mse_loss(net(data[0]), data[1]).backward()
        adam.step()
    return net


def test_predictions_of_a_network_from_early_stopping_stay():
    """At the minimum of its last layer, the same network fits the training data more closely."""
    data = moving()
    net = briefly_trained(data, 10)
    for layers in ("last", None):
        posterior = dvi.Laplace(layers=layers).fit(net, [data], progress=False)
        torch.testing.assert_close(posterior.predict(data[0]).mean, net(data[0])[:, 0])
        assert posterior.guide.diagnosis.newton_decrement > 1
    polished = dvi.Laplace(polish=True).fit(net, [data], progress=False)
    rmse = [method.predict(data).metrics()["rmse"] for method in (posterior, polished)]
    assert rmse[1] < 0.8 * rmse[0]
    assert polished.guide.diagnosis.newton_decrement < 1


@pytest.mark.parametrize(("count", "size"), [(400, 3), (30, 12)])
def test_prior_and_noise_of_a_linear_model_maximise_its_evidence(count, size):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, size, generator=generator, dtype=torch.float64)
    y = x[:, :2].sum(1, keepdim=True) + 0.3 * torch.randn(count, 1, generator=generator, dtype=torch.float64)
    net = nn.Linear(size, 1, bias=False).double()
    posterior = dvi.Laplace(polish=True).fit(net, [(x, y)], progress=False)
    scale, noise = posterior.guide.scale_factors["net.weight"], posterior.model.noise_scale.detach()

    def log_evidence(scale, noise):
        covariance = scale**2 * x @ x.T + noise**2 * torch.eye(count, dtype=torch.float64)
        return torch.distributions.MultivariateNormal(torch.zeros(count).double(), covariance).log_prob(
            y[:, 0]
        )

    best = max(log_evidence(scale * a, noise * b) for a in (0.8, 1.0, 1.25) for b in (0.9, 1.0, 1.1))
    assert float(best) == pytest.approx(float(log_evidence(scale, noise)), abs=0.01)
    assert float(noise) == pytest.approx(0.3, rel=0.3)


@pytest.mark.parametrize("covariance", [None, KroneckerFactored(), Diagonal()])
def test_a_classifier_without_validation_data_loses_a_hundredth_of_a_nat(covariance):
    net, data = network(), rows(60, 0)
    adam = torch.optim.Adam(net.parameters(), 0.05)
    for _ in range(100):
        adam.zero_grad()
        nn.functional.cross_entropy(net(data[0]), data[1]).backward()
        adam.step()
    posterior = dvi.Laplace(covariance=covariance).fit(net, loader(), progress=False)
    wide, mode = (posterior.predict(data, rule).metrics()["nll"] for rule in (dvi.Linearised(), dvi.AtMean()))
    assert wide - mode == pytest.approx(0.01, abs=0.001)
    assert torch.equal(posterior.guide.median()["net.2.weight"], net[2].weight)


def test_methods_that_are_fitted_for_each_value_are_not_tuned():
    with pytest.warns(DviWarning, match="the prior scale is not tuned, because ConjugateGradient would be"):
        posterior = dvi.Laplace(covariance=ConjugateGradient()).fit(network(), loader(), progress=False)
    assert not posterior.guide.scale_factors


@pytest.mark.parametrize("outputs", [1, 3])
def test_tuning_runs_the_network_at_most_twice_over_the_data(outputs):
    """Residuals; likelihoods, gradients and curvature together; single runs of a batch for checks and predictions."""
    calls = []
    net = network(outputs)
    x, y = rows(60, 0, labels=outputs > 1)
    data = x, (y if outputs > 1 else y[:, None])
    whole = dvi.Laplace().fit(net, [data], progress=False)
    net[0].register_forward_hook(lambda *_: calls.append(1))
    batches = list(zip(*(part.split(5) for part in data), strict=True))
    posterior = dvi.Laplace().fit(net, batches, progress=False)
    assert len(calls) <= (1 if outputs > 1 else 2) * len(batches) + 6
    assert posterior.guide.scale_factors == pytest.approx(whole.guide.scale_factors, rel=1e-3)


@pytest.mark.parametrize(
    "as_batch", [lambda x, y: (x, y), lambda x, y: {"x": x, "y": y}], ids=["tuple", "mapping"]
)
def test_the_fit_to_the_training_data_does_not_depend_on_batches(as_batch):
    guide = dvi.LaplaceGuide(dvi.classifier(dvi.to_bayesian_(network(3)), num_data=60))
    data = rows(60, 0, labels=True)
    options = {
        "criterion": ByTrainingLoss(),
        "values": [1.0, 10.0],
        "unconverged": "accept",
        "progress": False,
    }
    scores = []
    for size in (60, 7):
        batches = [as_batch(*parts) for parts in zip(*(tensor.split(size) for tensor in data), strict=True)]
        with pytest.warns(DviWarning, match="the best value"):
            scores.append(guide.tune(batches, **options).scores)
    torch.testing.assert_close(*scores, rtol=1e-5, atol=0)


def test_the_prior_of_a_classifier_is_searched_by_bisection(monkeypatch):
    """Of 37 values, as many are predicted as bisection needs, and the result is that of the whole grid."""
    tried = []
    once = ByValidation._mean_log_density

    def counted(self, candidates):
        density = once(self, candidates)

        def density_of(value):
            tried.append(value)
            return density(value)

        return density_of

    monkeypatch.setattr(ByValidation, "_mean_log_density", counted)
    net = network()
    with torch.no_grad():
        net[2].weight.mul_(10)
    posterior = dvi.Laplace().fit(net, loader(), progress=False)
    assert len(tried) <= 1 + 5 + 6
    monkeypatch.setattr(ByTrainingLoss, "has_threshold", False)
    whole = dvi.Laplace().fit(net, loader(), progress=False)
    assert posterior.guide.scale_factors == whole.guide.scale_factors != {}


@pytest.mark.parametrize("way", ["module", "name", "names", "pattern"])
def test_ways_to_name_a_layer(way):
    model = nn.Sequential(OrderedDict(body=nn.Linear(3, 4), act=nn.Tanh(), fc=nn.Linear(4, 3)))
    layers = {"module": model.fc, "name": "fc", "names": ["fc"], "pattern": "*.fc.*"}[way]
    posterior = dvi.Laplace(layers=layers).fit(model, loader(), progress=False)
    assert posterior.guide.fitted.layout.names == ["net.fc.weight", "net.fc.bias"]


def test_a_module_of_another_network_is_no_layer():
    with pytest.raises(ArgumentError, match="not a submodule"):
        dvi.Laplace(layers=nn.Linear(2, 2)).fit(network(), loader(), progress=False)


def test_many_classes_get_kronecker_factors():
    """Dense() would need 3,300 latents."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 100))
    x = torch.randn(40, 3)
    data = (x, net(x).argmax(1))
    with torch.no_grad():
        net[2].weight.mul_(20)  # sure of itself
    posterior = dvi.Laplace().fit(net, [data], progress=False)
    assert "KroneckerPosterior" in repr(posterior.guide)
    assert torch.isfinite(posterior.predict(data[0]).probabilities).all()


def test_a_model_with_a_noise_of_its_own_keeps_it():
    data = rows(60, 0, labels=False)
    model = dvi.regressor(dvi.to_bayesian_(nn.Linear(3, 1)), 60, 0.3)
    posterior = dvi.Laplace().fit(model, [(data[0], data[1][:, None])], progress=False)
    assert posterior.model.noise_scale == 0.3


def test_a_nearly_singular_precision_in_single_precision():
    """The Gauss-Newton matrix is that of the same network in double precision, although its condition is above 1e7."""
    data = moving()
    net = briefly_trained(data, 300)
    method = dvi.Laplace(layers=None, noise_scale=1e-4, unconverged="accept")
    model = method.svi(net, [data], 0).model
    guide = dvi.LaplaceGuide(model)
    guide.initialize(*data)
    single = guide.fit([data], unconverged="accept")
    wide = tuple(part.double() for part in data)
    guide = dvi.LaplaceGuide(method.svi(net.double(), [wide], 0).model)
    guide.initialize(*wide)
    double = guide.fit([wide], unconverged="accept")
    eigenvalues = torch.linalg.eigvalsh(double.precision)
    assert eigenvalues[-1] > 1e7 * eigenvalues[0]
    torch.testing.assert_close(
        single.precision, double.precision, rtol=1e-3, atol=1e-3 * float(eigenvalues[-1])
    )
    assert single.log_determinant() == pytest.approx(float(double.log_determinant()), rel=0.01)
    assert bool((single.marginal_variance() <= 1.001).all())


@pytest.mark.parametrize("known_noise", [True, False])
def test_missing_targets_that_are_nan_equal_masked_ones(known_noise):
    x, w = torch.randn(30, 2), torch.eye(2)
    y = x + 0.1 * torch.randn(30, 2)
    y[:10, 1], y[10:14, 0], y[29] = torch.nan, torch.nan, torch.nan

    def model(fn, x, y):
        mean = x @ pyro.sample("w", dist.Normal(w, 1.0).to_event(2)).mT
        noise = 0.1 if known_noise else pyro.sample("noise", dist.LogNormal(-2.0, 1.0))
        with pyro.plate("data", 30, subsample_size=len(x)):
            return pyro.sample("obs", fn(mean, noise).to_event(1), obs=y)

    def of_nan(x, y=None):
        return model(dist.NanMaskedNormal, x, y)

    def of_mask(x, known, y=None):
        return model(lambda *parameters: dist.Normal(*parameters).mask(known), x, y)

    scores = []
    for one, data in ((of_nan, (x, y)), (of_mask, (x, y.isfinite(), y.nan_to_num()))):
        batches = [tuple(part[rows] for part in data) for rows in (slice(0, 14), slice(14, 30))]
        posterior = dvi.Laplace(layers=None, polish=True).fit(one, batches, progress=False)
        prediction = posterior.predict(data)
        torch.testing.assert_close(prediction.epistemic, posterior.predict(data[:-1]).epistemic)
        scores.append([posterior.guide.posterior.precision, *prediction.metrics().values()])
    for found, expected in zip(*scores, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    x[3, 0] = torch.nan
    with pytest.raises(DataError, match=r"argument 1 \(1 of 60 elements\)"):
        dvi.Laplace(layers=None, polish=True).fit(of_nan, [(x, y)], progress=False)
