# SPDX-License-Identifier: Apache-2.0
"""Linearised predictions of every kind of observed distribution.

The oracle averages the model's own density over draws of the weights: where the outputs are linear in the weights,
linearisation changes nothing, and both must agree.
"""

from dataclasses import replace

import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pyro_dvi import AtMean, Linearised, MeanFieldGuide, Moments, predict
from pyro_dvi.errors import ArgumentError, GuideError
from pyro_dvi.laplace import Dense
from pyro_dvi.links import Probit, SobolSoftmax
from tests.laplace.heads import DRAWS, HEADS, Head
from tests.laplace.problems import LinearRegression, guide_at


@pytest.mark.every(2)
@pytest.mark.filterwarnings("ignore:the Fisher information of")  # some labels are drawn
@pytest.mark.parametrize("name", HEADS)
def test_density_is_the_average_over_the_weights(name):
    head = HEADS[name]
    guide = head.guide()
    x, y = head.data(5, seed=4)
    prediction = predict(head.model, guide, (x, y), Linearised(SobolSoftmax(2048), num_points=2048))
    weights = guide.sample(DRAWS)["w"]
    draws = head.distribution(x @ weights).log_prob(y)
    expected = draws.logsumexp(0) - torch.tensor(float(DRAWS)).log()
    torch.testing.assert_close(prediction.log_likelihood(), expected, rtol=0, atol=head.tolerance)


@pytest.mark.filterwarnings("ignore:the Fisher information of")  # some labels are drawn
@pytest.mark.parametrize("name", HEADS)
def test_without_uncertainty_it_is_the_model_itself(name):
    head = HEADS[name]
    x, y = head.data(30, seed=2)
    guide = guide_at(head.model, (x, y), {"w": head.true()})
    many = [(x, y)] * 1
    posterior = guide.fit(many, Dense(), unconverged="accept")
    guide._fitted = replace(
        guide.fitted, posterior=type(posterior)(posterior.mode, 1e12 * posterior.precision)
    )
    narrow = predict(head.model, guide, (x, y)).log_likelihood()
    at_mode = predict(head.model, guide, (x, y), AtMean()).log_likelihood()
    torch.testing.assert_close(narrow, at_mode, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["normal", "poisson", "gamma", "normal, two heads", "categorical", "log-normal"]
)
def test_moments_and_draws_belong_to_the_density(name):
    head = HEADS[name]
    guide = head.guide()
    x, _ = head.data(3, seed=4)
    prediction = predict(head.model, guide, x, Linearised(SobolSoftmax(2048), num_points=2048))
    distribution = prediction._parts[0].distribution
    torch.manual_seed(0)
    drawn = distribution.sample((20_000,))
    assert drawn.shape == (20_000, *distribution.batch_shape, *distribution.event_shape)
    if name == "categorical":
        drawn = nn.functional.one_hot(drawn, 3).double()
    error = 5 * (prediction.variance / len(drawn)).sqrt() + 0.01
    assert ((drawn.mean(0) - prediction.mean).abs() < error).all()  # a false alarm in 1e6 runs
    torch.testing.assert_close(drawn.var(0), prediction.variance, rtol=0.25, atol=0.02)


class TestLinearRegression:
    """Everything has a closed form."""

    problem = LinearRegression()

    def fitted(self):
        guide = self.problem.guide()
        guide.fit(self.problem.batches, Dense(), unconverged="accept")
        return guide

    def test_predictive_is_exact(self):
        x, y = self.problem.x, self.problem.y
        covariance = torch.linalg.inv(self.problem.precision())
        prediction = predict(self.problem.model, self.fitted(), (x, y))
        assert prediction.method == Linearised()
        torch.testing.assert_close(prediction.mean, x @ self.problem.mode())
        expected = (x @ covariance * x).sum(-1) + self.problem.noise**2
        torch.testing.assert_close(prediction.variance, expected)
        log_prob = dist.Normal(x @ self.problem.mode(), expected.sqrt()).log_prob(y)
        torch.testing.assert_close(prediction.log_likelihood(), log_prob)
        torch.testing.assert_close(prediction.log_likelihood(y), log_prob)
        assert prediction.metrics()["nll"] == pytest.approx(-log_prob.mean().item())

    def test_batches_do_not_matter(self):
        guide, x, y = self.fitted(), self.problem.x, self.problem.y
        whole = predict(self.problem.model, guide, (x, y))
        loader = DataLoader(TensorDataset(x, y), batch_size=4)
        for data, options in (((x, y), {"batch_size": 5}), (loader, {})):
            parts = predict(self.problem.model, guide, data, **options)
            torch.testing.assert_close(parts.variance, whole.variance)
            torch.testing.assert_close(parts.log_likelihood(), whole.log_likelihood())

    def test_nothing_holds_the_graph_of_a_batch(self):
        prediction = predict(self.problem.model, self.fitted(), (self.problem.x, self.problem.y))
        fn = prediction._parts[0].distribution
        assert not fn.loc.requires_grad and not fn.scale.requires_grad
        outputs = self.fitted().predictive(self.problem.x)
        assert not outputs.mean.requires_grad and not outputs.variance.requires_grad

    def test_joint_covariance(self):
        x = self.problem.x[:4]
        found = self.fitted().predictive(x, joint=True)
        expected = x @ torch.linalg.solve(self.problem.precision(), x.T)
        torch.testing.assert_close(found.joint_covariance, expected)
        torch.testing.assert_close(found.variance, expected.diagonal())
        with pytest.raises(ArgumentError, match="joint=True"):
            _ = self.fitted().predictive(x).joint_covariance

    def test_other_data_of_any_size(self):
        x = torch.randn(50, 3, dtype=torch.float64)
        assert predict(self.problem.model, self.fitted(), x).variance.shape == (50,)

    def test_options_are_checked(self):
        with pytest.raises(ArgumentError, match=r"Probit\(\)"):
            Linearised(link="probit")
        with pytest.raises(ArgumentError, match="num_points"):
            Linearised(num_points=0)

    def test_other_guides_are_refused(self):
        guide = MeanFieldGuide(self.problem.model)
        guide.initialize(self.problem.x, self.problem.y)
        with pytest.raises(GuideError, match="LaplaceGuide"):
            predict(self.problem.model, guide, self.problem.x, Linearised())
        with pytest.raises(GuideError, match="Linearised"):
            predict(self.problem.model, self.fitted(), self.problem.x, Moments())

    def test_before_fit(self):
        guide = self.problem.guide()
        with pytest.raises(GuideError, match="AtMean"):
            predict(self.problem.model, guide, self.problem.x)
        found = predict(self.problem.model, guide, self.problem.x, AtMean())
        torch.testing.assert_close(found.mean, self.problem.x @ self.problem.mode())


def test_links_of_classes():
    head = HEADS["categorical"]
    guide = head.guide()
    x, _ = head.data(6, seed=4)
    gaussian = guide.predictive(x)
    for link in (Probit(), SobolSoftmax(64)):
        found = predict(head.model, guide, x, Linearised(link)).probabilities
        torch.testing.assert_close(found, link.probabilities(gaussian.mean, gaussian.covariance))
    torch.testing.assert_close(
        predict(head.model, guide, x).probabilities,
        Probit().probabilities(gaussian.mean, gaussian.covariance),
    )


def test_rare_classes_keep_their_digits_in_float32():
    head = Head(lambda f: dist.Bernoulli(logits=20 * f[..., 0]))
    guide = guide_at(head.model, (torch.ones(2, 1), torch.ones(2)), {"w": torch.ones(1, 1)})
    guide.fit([(torch.ones(30, 1), torch.ones(30))], Dense(), unconverged="accept")
    found = predict(head.model, guide, (torch.ones(2, 1), torch.zeros(2))).log_likelihood()
    variance = 400 / guide.posterior.precision.item()
    z = torch.linspace(-12, 12, 20001, dtype=torch.float64)
    f, density = 20 + variance**0.5 * z, torch.exp(-0.5 * z**2)
    expected = ((torch.sigmoid(-f) * density).sum() / density.sum()).log()
    torch.testing.assert_close(found.double(), expected.expand(2), rtol=1e-3, atol=0)


def test_several_labels_of_one_example():
    head = Head(lambda f: dist.Categorical(logits=f.unflatten(-1, (2, 3))).to_event(1), 6, 1)
    guide = head.guide()
    x, y = head.data(4, seed=4)
    prediction = predict(head.model, guide, (x, y), Linearised(SobolSoftmax(1024)))
    assert prediction.probabilities.shape == (4, 2, 3)
    logits = (x @ guide.sample(20_000)["w"]).unflatten(-1, (2, 3))
    torch.testing.assert_close(prediction.probabilities, logits.softmax(-1).mean(0), rtol=0, atol=0.01)


@pytest.mark.parametrize("name", ["normal", "normal, two heads", "categorical", "poisson"])
def test_on_a_device(name, device):
    head = HEADS[name]
    guide = head.guide()
    x, y = head.data(5, seed=4)
    expected = predict(head.model, guide, (x, y))
    guide.to(device)
    found = predict(head.model, guide, (x.to(device), y.to(device)))
    assert found.log_likelihood().device == device
    torch.testing.assert_close(found.log_likelihood().cpu(), expected.log_likelihood())
