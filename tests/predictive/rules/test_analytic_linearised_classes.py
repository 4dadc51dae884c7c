# SPDX-License-Identifier: Apache-2.0
"""The parts of the uncertainty about a label under Gaussian logits, against quadrature and a large number of draws."""

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import pyro_dvi as dvi
from pyro_dvi.errors import MissingQuantityError
from pyro_dvi.laplace import Diagonal, KroneckerFactored
from pyro_dvi.laplace.methods.kronecker_factored import KroneckerPosterior
from pyro_dvi.links import Probit, SobolSoftmax

EXACT = dvi.Linearised(SobolSoftmax(4096), num_points=4096)
KINDS = {
    "Bernoulli": (1, lambda f: dist.Bernoulli(logits=f.squeeze(-1))),
    "two classes": (2, lambda f: dist.Categorical(logits=f)),
    "four classes": (4, lambda f: dist.Categorical(logits=f)),
    "one-hot": (4, lambda f: dist.OneHotCategorical(logits=f)),
    "several labels": (3, lambda f: dist.Bernoulli(logits=f).to_event(1)),
    "70 classes": (70, lambda f: dist.Categorical(logits=f)),
}


def fitted(name: str, seed: int = 0) -> tuple[Any, Any, Tensor]:
    """A linear network, whose logits are Gaussian without approximation."""
    torch.manual_seed(0)
    width, kind = KINDS[name]
    num_rows = 12 if width < 70 else 3  # as many draws of many classes take long
    x = torch.randn(num_rows, 2, dtype=torch.float64)
    torch.manual_seed(seed)
    net = dvi.to_bayesian_(nn.Linear(2, width).double())

    def model(x: Tensor, y: Tensor | None = None) -> Any:
        f = net(x)
        with pyro.plate("data", num_rows, subsample_size=len(x)):
            return pyro.sample("y", kind(f), obs=y)

    guide = dvi.LaplaceGuide(model)
    labels = kind(torch.randn(num_rows, width, dtype=torch.float64)).sample()
    guide.fit([(x, labels)], Diagonal(), unconverged="accept")
    return model, guide, x


@pytest.mark.parametrize("name", ["Bernoulli", "two classes"])
def test_two_classes_agree_with_quadrature(name: str) -> None:
    model, guide, x = fitted(name)
    found, gaussian = dvi.predict(model, guide, x), guide.predictive(x)
    side = torch.tensor([1.0] if name == "Bernoulli" else [-1.0, 1.0], dtype=torch.float64)
    mean, deviation = gaussian.mean.reshape(12, -1) @ side, (gaussian.covariance @ side @ side).sqrt()
    nodes, weights = (torch.as_tensor(each) for each in np.polynomial.hermite_e.hermegauss(80))
    p = torch.sigmoid(mean + deviation * nodes.unsqueeze(-1))
    average = weights / weights.sum()
    expected_entropy = average @ (torch.special.entr(p) + torch.special.entr(1 - p))
    variance = average @ (p - average @ p).square()
    entropy = torch.special.entr(average @ p) + torch.special.entr(1 - average @ p)
    close = {"rtol": 0.0, "atol": 1e-6}
    torch.testing.assert_close(found.mutual_information, entropy - expected_entropy, **close)
    torch.testing.assert_close(found.expected_entropy, expected_entropy, **close)
    epistemic = found.epistemic if name == "Bernoulli" else found.epistemic[:, 1]
    torch.testing.assert_close(epistemic, variance, **close)
    torch.testing.assert_close(found.aleatoric + found.epistemic, found.variance)


@pytest.mark.parametrize("name", ["four classes", "one-hot", "several labels", "70 classes"])
def test_many_points_agree_with_draws_of_the_logits(name: str) -> None:
    model, guide, x = fitted(name)
    found, gaussian = dvi.predict(model, guide, x, EXACT), guide.predictive(x)
    logits = dist.MultivariateNormal(gaussian.mean.flatten(1), gaussian.covariance).sample((8000,))
    p = logits.softmax(-1)
    if name == "several labels":
        p = torch.stack([logits.sigmoid(), (-logits).sigmoid()], -1)
    expected_entropy = torch.special.entr(p).sum(-1).mean(0)
    information = torch.special.entr(p.mean(0)).sum(-1) - expected_entropy
    variance = p.var(0)[..., 0] if name == "several labels" else p.var(0)
    close = {"rtol": 0.04, "atol": 5e-3}
    torch.testing.assert_close(found.mutual_information, information, **close)
    torch.testing.assert_close(found.expected_entropy, expected_entropy, **close)
    torch.testing.assert_close(found.epistemic, variance, **close)
    torch.testing.assert_close(found.aleatoric, found.mean * (1 - found.mean) - variance, **close)


def test_the_default_rule_repeats_its_values_in_batches_metrics_and_tables() -> None:
    model, guide, x = fitted("four classes")
    whole = dvi.predict(model, guide, (x, torch.zeros(12, dtype=torch.long)))
    parts = dvi.predict(model, guide, x, batch_size=5)
    torch.testing.assert_close(parts.mutual_information, whole.mutual_information)
    torch.testing.assert_close(parts.epistemic, whole.epistemic)
    exact = dvi.predict(model, guide, x, EXACT).mutual_information
    torch.testing.assert_close(whole.mutual_information, exact, rtol=0.03, atol=3e-3)
    assert whole.metrics()["mutual_information"] == pytest.approx(float(whole.mutual_information.mean()))
    assert "mutual_information" in whole.to_dataframe()


@pytest.mark.filterwarnings("ignore:the variances of a Laplace posterior")
def test_the_information_vanishes_with_the_variance_and_other_rules_still_lack_it() -> None:
    model, guide, x = fitted("four classes")
    guide.scale_factors = {name: 1e-4 for name in guide.unconstrained_mode()}
    guide.fit([(x, torch.zeros(12, dtype=torch.long))], Diagonal(), unconverged="accept")
    found = dvi.predict(model, guide, x)
    assert float(found.mutual_information.max()) < 1e-6 and float(found.epistemic.max()) < 1e-6
    with pytest.raises(MissingQuantityError, match=r"Moments\(\) cannot separate"):
        _ = dvi.predict(model, guide, x, dvi.Moments()).mutual_information


@pytest.mark.parametrize("name", KINDS)
def test_an_ensemble_has_the_information_within_and_between_its_members(name: str) -> None:
    pairs = [fitted(name, seed=seed) for seed in (1, 2, 3)]
    x = pairs[0][2]
    ensemble = dvi.training.EnsembleGuide([(model, guide) for model, guide, _ in pairs])
    found = dvi.predict(ensemble.model, ensemble, x, EXACT)
    gaussians = [guide.predictive(x) for _, guide, _ in pairs]
    drawn = [
        dist.MultivariateNormal(g.mean.reshape(len(x), -1), g.covariance).sample((8000,)) for g in gaussians
    ]
    logits = torch.cat(drawn)
    p = logits.softmax(-1)
    if name in ("several labels", "Bernoulli"):
        p = torch.stack([(-logits).sigmoid(), logits.sigmoid()], -1)
    expected_entropy = torch.special.entr(p).sum(-1).mean(0).reshape(found.mutual_information.shape)
    information = torch.special.entr(p.mean(0)).sum(-1).reshape(expected_entropy.shape) - expected_entropy
    variance = p.var(0)[..., 1].reshape(found.mean.shape) if p.dim() > logits.dim() else p.var(0)
    close = {"rtol": 0.04, "atol": 5e-3}
    torch.testing.assert_close(found.mutual_information, information, **close)
    torch.testing.assert_close(found.expected_entropy, expected_entropy, **close)
    torch.testing.assert_close(found.epistemic, variance, **close)
    torch.testing.assert_close(found.aleatoric + found.epistemic, found.variance)


@pytest.mark.filterwarnings("ignore:the variances of a Laplace posterior")
def test_an_ensemble_with_a_member_that_lacks_its_information_has_none() -> None:
    pairs = [fitted("four classes", seed=seed) for seed in (1, 2)]
    pairs[1][1].prediction_rule = dvi.Moments()
    ensemble = dvi.training.EnsembleGuide([(model, guide) for model, guide, _ in pairs])
    with pytest.raises(MissingQuantityError, match=r"cannot separate"):
        _ = dvi.predict(ensemble.model, ensemble, pairs[0][2]).mutual_information


@pytest.mark.parametrize("method", [KroneckerFactored(), Diagonal()])
def test_many_classes_need_no_covariances(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Probit shrinks each logit by its variance, which for a last layer takes no products of all pairs of classes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 300)).double()
    x, y = torch.randn(5, 2, dtype=torch.float64), torch.randint(300, (5,))
    posterior = dvi.Laplace(covariance=method, prior_scale=0.5).fit(net, [(x, y)], progress=False)
    with posterior.in_store():
        gaussian = posterior.guide.predictive(x)
    variance = torch.diagonal(gaussian.covariance, dim1=-2, dim2=-1)
    expected = (gaussian.mean / (1 + torch.pi / 8 * variance).sqrt()).softmax(-1)
    if isinstance(method, KroneckerFactored):
        monkeypatch.setattr(KroneckerPosterior, "covariance_of_examples", None)
    found = posterior.predict(x)
    torch.testing.assert_close(found.probabilities, expected)
    with pytest.raises(MissingQuantityError, match="Samples"):
        found.mutual_information  # noqa: B018


def test_two_classes_at_many_positions_keep_their_covariances() -> None:
    """Two logits of one label are dependent, however many labels an example has."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 300), nn.Unflatten(1, (2, 150))).double()
    x, y = torch.randn(5, 2, dtype=torch.float64), torch.randint(2, (5, 150))
    method = dvi.Laplace(covariance=KroneckerFactored(), prior_scale=0.5, layers="2.*")
    posterior = method.fit(net, [(x, y)], progress=False)
    with posterior.in_store():
        gaussian = posterior.guide.predictive(x)
    spread = gaussian.full_covariance.unflatten(2, (150, 2)).unflatten(1, (150, 2))
    spread = spread.diagonal(dim1=1, dim2=3).movedim(-1, 1)
    loc = gaussian.outputs.values.unflatten(1, (150, 2))
    expected = Probit().log_probabilities(loc, spread).exp()
    found = posterior.predict(x)
    torch.testing.assert_close(found.probabilities, expected)
    assert found.mutual_information.shape == (5, 150)
