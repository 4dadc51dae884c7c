# SPDX-License-Identifier: Apache-2.0
"""A Gaussian serves the model, the data and the options that it was fitted with."""

import warnings
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import pyro_dvi as dvi
from pyro_dvi.core.progress import progress_bar
from pyro_dvi.errors import CheckpointError, DataError, DviWarning, GuideError
from pyro_dvi.laplace import Dense, Hessian, LaplaceGuide, PosteriorSamples
from pyro_dvi.predictive import AtMean, Samples, predict
from tests.laplace.problems import guide_at

X = torch.tensor([-1.0, 0.0, 0.5, 2.0], dtype=torch.float64)
Y = torch.sin(X)
LOCS = {"w": torch.tensor(0.7, dtype=torch.float64)}


def curve(x: Tensor, y: Tensor | None = None) -> Any:
    w = pyro.sample("w", dist.Normal(x.new_zeros(()), 1.0))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(torch.tanh(w * x), 0.3), obs=y)


def fitted(model: Any = curve, method: Any = None, **options: Any) -> LaplaceGuide:
    guide = guide_at(model, (X, Y), LOCS, **options)
    guide.fit([(X, Y)], method or Dense(), unconverged="accept")
    return guide


def refused(model: Any, guide: LaplaceGuide, what: str) -> None:
    for use in (lambda: guide.predictive(X), lambda: predict(model, guide, X)):
        with pytest.raises(GuideError, match=what):
            use()
    with pytest.raises(GuideError, match=r"guide\.fit.*[fF]it again|fit had"):
        guide.log_evidence([(X, Y)])
    guide.fit([(X, Y)], unconverged="accept")
    assert guide.predictive(X).variance.shape == predict(model, guide, X, AtMean()).mean.shape == (4,)


def refused_by_every_rule(model: Any, guide: LaplaceGuide, what: str) -> None:
    """The model is looked at whatever the rule is."""
    for rule in (AtMean(), Samples(2)):
        with pytest.raises(GuideError, match=what), warnings.catch_warnings():
            warnings.simplefilter("ignore", DviWarning)  # of drawn weights
            predict(model, guide, X, rule)
    refused(model, guide, what)


def test_a_learned_noise_that_changes():
    def model(x: Tensor, y: Tensor | None = None) -> Any:
        w = pyro.sample("w", dist.Normal(x.new_zeros(()), 1.0))
        noise = pyro.param("noise", lambda: x.new_ones(()), constraint=dist.constraints.positive)
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(w * x, noise), obs=y)

    guide = fitted(model)
    guide.predictive(X)
    pyro.get_param_store()["noise"] = torch.tensor(0.3, dtype=torch.float64)
    refused_by_every_rule(model, guide, "site 'y': scale 1 → 0.3")


@pytest.mark.parametrize("what", ["weight", "running_mean"])
def test_deterministic_weights_and_running_statistics_that_change(what):
    body = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)).double()

    def model(x: Tensor, y: Tensor | None = None) -> Any:
        w = pyro.sample("w", dist.Normal(x.new_zeros(()), 1.0))
        f = w * body(x[:, None])[:, 0]
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(f, 1.0), obs=y)

    guide = fitted(model)
    guide.predictive(X[:2])
    guide.log_evidence([(X, Y)])
    with torch.no_grad():
        getattr(body[what == "running_mean"], what).add_(0.01)
    refused_by_every_rule(model, guide, "site 'y': loc")


def test_evidence_of_the_same_rows_in_other_batches():
    guide = fitted()
    assert guide.log_evidence([(X[:3], Y[:3]), (X[3:], Y[3:])]).determinant == "DensePosterior"


@pytest.mark.parametrize("other", [(X[:2], Y[:2]), (X, Y.flip(0)), (X[[0, 0, 1, 2, 3]], Y[[0, 0, 1, 2, 3]])])
def test_evidence_of_other_data_is_refused(other):
    guide = fitted()
    with pytest.raises(GuideError, match=r"data or the model have changed .* U, .* was .*\. Fit again"):
        guide.log_evidence([other])
    guide.fit([other], unconverged="accept")
    fresh = guide_at(curve, other, guide.unconstrained_mode()).log_evidence([other])
    assert guide.log_evidence([other]).value == pytest.approx(fresh.value)


def test_another_kl_weight():
    tempered = fitted(kl_weight=0.1)
    other = guide_at(curve, (X, Y), LOCS)
    other.load_state_dict(tempered.state_dict())
    assert other.kl_weight == 0.1
    other = guide_at(curve, (X, Y), LOCS, kl_weight=1.0)
    other.load_state_dict(tempered.state_dict())
    refused(curve, other, r"kl_weight=0\.1")
    other.kl_weight = 2.0
    with pytest.raises(GuideError, match="kl_weight is 2"):
        other.sample(2)


def test_a_loaded_gaussian_brings_its_curvature():
    hessian = fitted(method=Dense(Hessian()))
    expected = hessian.log_evidence([(X, Y)])
    other = fitted(method=PosteriorSamples(4))
    of_ggn = other.log_evidence([(X, Y)]).value
    other.load_state_dict(hessian.state_dict())
    assert other.log_evidence([(X, Y)]).value == pytest.approx(expected.value)
    hessian.load_state_dict(fitted(method=PosteriorSamples(4)).state_dict())
    assert hessian.log_evidence([(X, Y)]).value == pytest.approx(of_ggn)
    assert of_ggn != pytest.approx(expected.value)


def test_files_of_other_versions_are_named():
    guide = fitted()
    state = guide.state_dict()
    del state["_extra_state"]["gaussian"]["model"]
    with pytest.raises(CheckpointError, match="KeyError: .model.*another version"):
        guide.load_state_dict(state)
    state = guide.state_dict()
    state["_extra_state"]["gaussian"]["posterior"]["covariance"] = torch.ones(1, 1)
    with pytest.raises(CheckpointError, match="TypeError.*covariance.*fit again"):
        guide.load_state_dict(state)
    state["_extra_state"] = None
    guide.load_state_dict(state)
    assert guide.posterior is None
    for entry, kind in (
        ("kind", "Thing"),
        ("precision", "Thing"),
    ):
        state = fitted().state_dict()
        state["_extra_state"]["gaussian"][entry] = kind
        with pytest.raises(CheckpointError, match=f"KeyError: .{kind}"):
            guide.load_state_dict(state)


def test_work_is_shown(monkeypatch):
    seen = []

    class Bar(progress_bar(False, None).__class__):
        def update(self, n=1):
            seen.append(n)

    monkeypatch.setattr("pyro_dvi.laplace.guide.progress_bar", lambda *_, **__: Bar(disable=True))
    guide = guide_at(curve, (X, Y), LOCS)
    for method in (Dense(), Dense(Hessian()), PosteriorSamples(4)):
        seen.clear()
        guide.fit([(X, Y)], method, unconverged="accept", progress=True)
        assert sum(seen) > 0


class Encoded(nn.Module):
    """A linear layer, and an encoder layer of which torch calls no parts where it need not differentiate."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(3, 8), nn.Linear(8, 2)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.first(x)).mean(1))


def test_a_fused_encoder_layer_is_the_same_model_with_and_without_gradients():
    net = Encoded()
    model = dvi.classifier(dvi.to_bayesian_(net, exclude=["first*", "encoder*"]), num_data=5)
    x, labels = torch.randn(5, 4, 3), torch.arange(5) % 2
    guide = LaplaceGuide(model)
    guide.initialize(x, labels)
    guide.fit([(x, labels)], Dense(), unconverged="accept")
    assert predict(model, guide, x).probabilities.shape == (5, 2)
    assert guide.predictive(x).variance.isfinite().all()
    with torch.no_grad():
        net.encoder.linear1.weight.mul_(3.0)
    with pytest.raises(GuideError, match="fit again"):
        predict(model, guide, x)


def test_predictions_need_neither_the_arguments_nor_the_shapes_and_plates_of_the_fit():
    size = 4

    def growing(x: Tensor, y: Tensor | None = None) -> Any:
        w = pyro.sample("w", dist.Normal(x.new_zeros(()), 1.0))
        with pyro.plate("data", size, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(torch.tanh(w * x), 0.3), obs=y)

    guide = fitted(growing)
    expected = predict(growing, guide, X).variance
    evidence = guide.log_evidence([(X, Y)])
    torch.testing.assert_close(predict(lambda x: growing(x), guide, X).variance, expected)
    size = 40
    torch.testing.assert_close(predict(growing, guide, X).variance, expected)
    with pytest.raises(DataError, match="4 rows of plate 'data', whose size is 40"):
        guide.log_evidence([(X, Y)])
    size = 4
    assert guide.log_evidence([(X, Y)]) == evidence


def test_a_model_conditioned_on_its_data_is_the_one_without():
    x, y = torch.cat([X, X + 0.1]), torch.cat([Y, Y])
    model = pyro.condition(curve, {"y": y})
    guide = guide_at(model, (x,), LOCS)
    guide.fit([(x,)], Dense(), unconverged="accept")
    assert predict(curve, guide, x).variance.shape == (8,)
