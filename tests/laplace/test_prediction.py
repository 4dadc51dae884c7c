# SPDX-License-Identifier: Apache-2.0
"""Linearised predictions of every kind of observed distribution.

The oracle averages the model's own density over draws of the weights: where the outputs are linear in the weights,
linearisation changes nothing, and both must agree.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import AffineTransform, ExpTransform
from torch.utils.data import DataLoader, TensorDataset

from pyro_dvi import AtMean, Linearised, MeanFieldGuide, Moments, Samples, predict
from pyro_dvi.errors import ArgumentError, GuideError, ModelError, UnsupportedError
from pyro_dvi.guides.laplace import Accept, Dense, Hessian, LaplaceGuide
from pyro_dvi.links import LaplaceBridge, Probit, SobolSoftmax
from tests.laplace.problems import LinearRegression, guide_at, ragged

DRAWS = 40_000


@dataclass
class Head:
    """A model whose K outputs are linear in its weights.

    Attributes:
        distribution: the observed distribution for outputs ``[..., B, K]``.
        size: K.
        event_dim: of the distribution.
    """

    distribution: Callable[[Tensor], Any]
    size: int = 1
    event_dim: int = 0
    tolerance: float = 0.02
    weights: Tensor | None = None

    def model(self, x: Tensor, y: Tensor | None = None) -> Any:
        prior = dist.Normal(x.new_zeros(()), 1.0).expand([x.shape[1], self.size]).to_event(2)
        f = x @ pyro.sample("w", prior)
        with pyro.plate("data", 30, subsample_size=len(x)):
            return pyro.sample("y", self.distribution(f), obs=y)

    def data(self, num_rows: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(num_rows, 2, dtype=torch.float64, generator=generator)
        torch.manual_seed(seed)
        return x, self.distribution(x @ self.true()).sample()

    def true(self) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return 0.7 * torch.randn(2, self.size, dtype=torch.float64, generator=generator)

    def guide(self) -> LaplaceGuide:
        x, y = self.data(30, seed=2)
        guide = guide_at(self.model, (x[:4], y[:4]), {"w": self.true()})
        guide.fit(ragged(x, y, 12), Dense(), unconverged=Accept())
        return guide


def _scale_tril() -> Tensor:
    return torch.tensor([[0.5, 0.0], [0.3, 0.4]], dtype=torch.float64)


HEADS = {
    "normal": Head(lambda f: dist.Normal(f[..., 0], 0.5)),
    "normal, vectors": Head(lambda f: dist.Normal(f, 0.5).to_event(1), 2, 1),
    "normal, two heads": Head(lambda f: dist.Normal(f[..., 0], (0.5 * f[..., 1]).exp()), 2),
    "normal, softplus": Head(
        lambda f: dist.Normal(f[..., 0], nn.functional.softplus(f[..., 1]) + 0.1), 2, 0, 0.1
    ),
    "normal, vectors and scales": Head(
        lambda f: dist.Normal(f[..., :2], (0.3 * f[..., 2:]).exp()).to_event(1), 4, 1
    ),
    "normal, same output": Head(lambda f: dist.Normal(f[..., 0], (0.5 * f[..., 0]).exp()), 1),
    "normal, matrices": Head(lambda f: dist.Normal(f.unflatten(-1, (2, 2)), 0.5).to_event(2), 4, 2),
    "normal, expanded": Head(
        lambda f: dist.Normal(f[..., :1], 0.5).expand((*f.shape[:-1], 3)).to_event(1), 1, 1
    ),
    "normal, scale only": Head(lambda f: dist.Normal(f.new_zeros(()), f[..., 0].exp())),
    "multivariate normal": Head(lambda f: dist.MultivariateNormal(f, scale_tril=_scale_tril()), 2, 1),
    "log-normal": Head(lambda f: dist.LogNormal(f[..., 0], 0.5)),
    "log-normal, two heads": Head(lambda f: dist.LogNormal(f[..., 0], (0.3 * f[..., 1]).exp()), 2),
    "transformed": Head(
        lambda f: dist.TransformedDistribution(
            dist.Normal(f[..., 0], 0.5), [AffineTransform(1.0, 2.0), ExpTransform()]
        )
    ),
    "bernoulli": Head(lambda f: dist.Bernoulli(logits=f[..., 0])),
    "bernoulli, probs": Head(lambda f: dist.Bernoulli(probs=torch.sigmoid(f[..., 0]))),
    "categorical": Head(lambda f: dist.Categorical(logits=f), 3),
    "one-hot": Head(lambda f: dist.OneHotCategorical(logits=f), 3, 1),
    "categorical, probs": Head(lambda f: dist.Categorical(probs=torch.softmax(f, -1)), 3, 0, 0.1),
    "poisson": Head(lambda f: dist.Poisson(f[..., 0].exp())),
    "binomial": Head(lambda f: dist.Binomial(5, logits=f[..., 0])),
    "negative binomial": Head(lambda f: dist.NegativeBinomial(torch.tensor(3.0).double(), logits=f[..., 0])),
    "negative binomial, mean": Head(
        lambda f: dist.GammaPoisson(torch.tensor(3.0).double(), 3.0 / f[..., 0].exp())
    ),
    "multinomial": Head(lambda f: dist.Multinomial(4, logits=f), 3, 1, 0.05),
    "student": Head(lambda f: dist.StudentT(torch.tensor(4.0).double(), f[..., 0], 0.5)),
    "student, two heads": Head(
        lambda f: dist.StudentT(torch.tensor(4.0).double(), f[..., 0], (0.3 * f[..., 1]).exp()), 2
    ),
    "gamma": Head(lambda f: dist.Gamma(f[..., 0].exp(), f[..., 1].exp()), 2),
    "beta": Head(lambda f: dist.Beta(f[..., 0].exp(), f[..., 1].exp()), 2),
    "laplace": Head(lambda f: dist.Laplace(f[..., 0], 0.5)),
    "zero-inflated": Head(
        lambda f: dist.ZeroInflatedPoisson(gate=torch.sigmoid(f[..., 1]), rate=f[..., 0].exp()), 2
    ),
}


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
    posterior = guide.fit(many, Dense(), unconverged=Accept())
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
        guide.fit(self.problem.batches, Dense(), unconverged=Accept())
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
    for link in (Probit(), SobolSoftmax(64), LaplaceBridge()):
        found = predict(head.model, guide, x, Linearised(link)).probabilities
        torch.testing.assert_close(found, link.probabilities(gaussian.mean, gaussian.covariance))
    torch.testing.assert_close(
        predict(head.model, guide, x).probabilities,
        Probit().probabilities(gaussian.mean, gaussian.covariance),
    )


def test_rare_classes_keep_their_digits_in_float32():
    head = Head(lambda f: dist.Bernoulli(logits=20 * f[..., 0]))
    guide = guide_at(head.model, (torch.ones(2, 1), torch.ones(2)), {"w": torch.ones(1, 1)})
    guide.fit([(torch.ones(30, 1), torch.ones(30))], Dense(), unconverged=Accept())
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


def _plated(x: Tensor, y: Tensor | None = None) -> Any:
    """A plate of three measurements in each example, with a noise scale for each."""
    w = pyro.sample("w", dist.Normal(x.new_zeros(()), 1.0).expand([x.shape[1], 6]).to_event(2))
    f = (x @ w).T
    with pyro.plate("data", 30, subsample_size=len(x), dim=-1), pyro.plate("measurements", 3, dim=-2):
        return pyro.sample("y", dist.Normal(f[:3], (0.3 * f[3:]).exp()), obs=y)


def test_densities_of_an_inner_plate_are_integrated_one_by_one():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 2, dtype=torch.float64, generator=generator)
    y = torch.randn(3, 30, dtype=torch.float64, generator=generator)
    guide = guide_at(_plated, (x, y), {"w": 0.5 * torch.ones(2, 6, dtype=torch.float64)})
    guide.fit([(x, y)], Dense(), unconverged=Accept())
    prediction = predict(_plated, guide, x[:4])
    assert prediction.variance.shape == (4, 3)
    f = x[:4] @ guide.sample(50_000)["w"]
    scores = dist.Normal(f[..., :3], (0.3 * f[..., 3:]).exp()).log_prob(y[:, :4].T)
    expected = scores.logsumexp(0) - torch.tensor(50_000.0).log()
    torch.testing.assert_close(prediction.log_likelihood(y[:, :4].T), expected, rtol=0, atol=0.02)


def _uncertain_noise(x: Tensor, y: Tensor | None = None) -> Any:
    w = pyro.sample("w", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
    scale = pyro.sample("scale", dist.LogNormal(x.new_zeros(()), 1.0))
    f = pyro.deterministic("f", x @ w, event_dim=0)
    with pyro.plate("data", 12, subsample_size=len(x)):
        return pyro.sample("y", dist.Normal(f, scale), obs=y)


def test_latent_noise_scale_correlates_with_the_mean():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 2, dtype=torch.float64, generator=generator)
    y = x.sum(-1) + 0.5 * torch.randn(12, dtype=torch.float64, generator=generator)
    locs = {
        "w": torch.tensor([0.8, 1.1], dtype=torch.float64),
        "scale": torch.tensor(-0.4, dtype=torch.float64),
    }
    guide = guide_at(_uncertain_noise, (x, y), locs)
    guide.fit([(x, y)], Dense(curvature=Hessian()), unconverged=Accept())
    assert guide.posterior.precision[0, 2].abs() > 0.1
    draws = guide.sample(DRAWS)
    scores = dist.Normal(draws["w"] @ x.T, draws["scale"].unsqueeze(-1)).log_prob(y)
    expected = scores.logsumexp(0) - torch.tensor(float(DRAWS)).log()
    found = predict(_uncertain_noise, guide, (x, y))
    torch.testing.assert_close(found.log_likelihood(), expected, rtol=0, atol=0.02)
    # A deterministic site has no noise.
    named = guide.predictive(x, site="f")
    weights = torch.linalg.inv(guide.posterior.precision)[:2, :2]
    torch.testing.assert_close(named.variance, (x @ weights * x).sum(-1))
    torch.testing.assert_close(named.mean, x @ locs["w"])


def test_a_learned_parameter_is_certain():
    def model(x: Tensor, y: Tensor | None = None) -> Any:
        scale = pyro.param("noise", torch.tensor(0.5), constraint=dist.constraints.positive)
        w = pyro.sample("w", dist.Normal(x.new_zeros(()), 1.0))
        with pyro.plate("data", 4, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(x * w, scale), obs=y)

    x = torch.ones(4)
    guide = LaplaceGuide(model)
    guide.initialize(x, x)
    guide.fit([(x, x)], Dense(), unconverged=Accept())
    found = predict(model, guide, (x, x))
    torch.testing.assert_close(found.variance, torch.full((4,), 0.25 + 1 / (1 + 4 / 0.25)))
    assert type(found._parts[0].distribution) is dist.Normal


@pytest.mark.parametrize("loc", [5.0, torch.full((4,), 5.0)], ids=["number", "tensor"])
def test_a_certain_mean_stays_the_prediction(loc):
    def model(x: Tensor, y: Tensor | None = None) -> Any:
        scale = pyro.sample("scale", dist.LogNormal(x.new_zeros(()), 1.0))
        with pyro.plate("data", 4, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(loc, scale), obs=y)

    x = torch.tensor([3.0, 4.0, 6.0, 8.0])
    guide = guide_at(model, (x, x), {"scale": torch.tensor(0.5)})
    guide.fit([(x, x)], Dense(), unconverged=Accept())
    found = guide.predictive(x)
    torch.testing.assert_close(found.mean, torch.full((4,), 5.0))
    torch.testing.assert_close(found.variance, torch.zeros(4))
    torch.testing.assert_close(found.full_covariance[:, 1, 1], guide.posterior.marginal_variance().expand(4))
    scale = guide.sample(50_000)["scale"].unsqueeze(-1)
    expected = dist.Normal(5.0, scale).log_prob(x).logsumexp(0) - torch.tensor(50_000.0).log()
    torch.testing.assert_close(predict(model, guide, (x, x)).log_likelihood(), expected, rtol=0, atol=0.02)


@pytest.mark.parametrize(
    "rule", [Linearised(), AtMean(), Samples(2000)], ids=lambda rule: type(rule).__name__
)
@pytest.mark.filterwarnings("ignore:weights are drawn")
def test_a_tuned_noise_counts_for_every_rule(rule):
    def model(x: Tensor, y: Tensor | None = None) -> Any:
        w = pyro.sample("w", dist.Normal(x.new_zeros(()), 1.0))
        with pyro.plate("data", 4, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(x * w, 0.5), obs=y)

    x = torch.ones(4)
    guide = guide_at(model, (x, x), {"w": torch.tensor(0.9)})
    guide.scale_factors = {"y": 4.0}
    guide.fit([(x, x)], Dense(), unconverged=Accept())
    weights = 0.0 if isinstance(rule, AtMean) else 1 / (1 + 4 / 2.0**2)
    found = predict(model, guide, x, rule, seed=0).variance
    torch.testing.assert_close(found, torch.full((4,), 2.0**2 + weights), rtol=0, atol=0.06)


def test_one_of_several_observed_sites():
    def model(x: Tensor, y: Tensor | None = None, z: Tensor | None = None) -> None:
        w = pyro.sample("w", dist.Normal(x.new_zeros(()), 1.0))
        with pyro.plate("data", 4, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(x * w, 0.5), obs=y)
            pyro.sample("z", dist.Normal(x * w, 0.1), obs=z)  # of the same mean

    x = torch.ones(4)
    guide = LaplaceGuide(model)
    guide.initialize(x, x, x)
    guide.fit([(x, x, x)], Dense(), unconverged=Accept())
    spread = 1 / (1 + 4 / 0.25 + 4 / 0.01)
    for site, noise in (("y", 0.25), ("z", 0.01)):
        found = predict(model, guide, x, site=site)
        torch.testing.assert_close(found.variance, torch.full((4,), noise + spread))
    with pytest.raises(ModelError, match="site="):
        guide.predictive(x)


def test_masked_rows_are_predicted_and_do_not_count_in_the_fit():
    def model(x: Tensor, y: Tensor | None = None) -> Any:
        w = pyro.sample("w", dist.Normal(x.new_zeros(()), 1.0))
        with pyro.plate("data", 4, subsample_size=len(x)), pyro.poutine.mask(mask=x < 2):
            return pyro.sample("y", dist.Normal(x * w, 0.5).mask(x < 3), obs=y)

    x = torch.tensor([1.0, 1.0, 2.5, 4.0])
    guide = LaplaceGuide(model)
    guide.initialize(x, x)
    guide.fit([(x, x)], Dense(), unconverged=Accept())
    spread = 1 / (1 + 2 / 0.25)
    torch.testing.assert_close(guide.predictive(x).variance, spread * x**2)
    torch.testing.assert_close(predict(model, guide, x).variance, 0.25 + spread * x**2)


@pytest.mark.parametrize(
    "distribution",
    [
        lambda f: dist.MixtureSameFamily(
            dist.Categorical(logits=f), dist.Normal(torch.tensor([-1.0, 1.0]).double(), 0.5)
        ),
        lambda f: dist.Delta(f[..., 0]),
    ],
    ids=["mixture", "delta"],
)
def test_distributions_that_cannot_be_linearised(distribution):
    head = Head(distribution, 2)
    x = torch.zeros(3, 2, dtype=torch.float64)
    guide = guide_at(head.model, (x, torch.zeros(3).double()), {"w": head.true()})
    normal = HEADS["normal, two heads"].guide()
    guide._fitted = replace(normal.fitted, mode=guide.unconstrained_mode())
    with pytest.raises(UnsupportedError, match=r"pyro.deterministic"):
        guide.predictive(x)


def test_prediction_without_latents():
    def model(x: Tensor, y: Tensor | None = None) -> Any:
        pyro.sample("w", dist.Normal(x.new_zeros(()), 1.0))
        pyro.deterministic("twice", 2 * x)
        with pyro.plate("data", 4, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    x = torch.ones(4)
    guide = LaplaceGuide(model)
    guide.initialize(x, x)
    guide.fit([(x, x)], Dense(), unconverged=Accept())
    for site in ("y", "twice"):
        with pytest.raises(ModelError, match="no uncertainty"):
            guide.predictive(x, site=site)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["normal", "normal, two heads", "categorical", "poisson"])
def test_on_a_gpu(name):
    head = HEADS[name]
    guide = head.guide()
    x, y = head.data(5, seed=4)
    expected = predict(head.model, guide, (x, y))
    guide.to("cuda")
    found = predict(head.model, guide, (x.cuda(), y.cuda()))
    assert found.log_likelihood().is_cuda
    torch.testing.assert_close(found.log_likelihood().cpu(), expected.log_likelihood())
