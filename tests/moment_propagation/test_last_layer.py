"""A last layer with covariances: parameters, starts, samples and mistakes."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.errors import ArgumentError
from pyro_dvi.gaussians.normals import RowsNormal, shared_factor, total_correlation
from pyro_dvi.guides import MeanField
from pyro_dvi.moment_propagation.last_layer import AllOutputs, LowRank, PerOutput

CHOICES = [PerOutput(), AllOutputs(), LowRank(3), MeanField()]


def classifier(num_data=6):
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return dvi.classifier(dvi.to_bayesian_(net, prior_scale=dvi.bayesian.fan_in), num_data=num_data)


def data():
    return torch.randn(6, 3), torch.arange(6) % 2


def rows_normal(num_rows=3, size=4):
    tril = torch.randn(num_rows, size, size).tril(-1) + torch.diag_embed(torch.rand(num_rows, size) + 0.5)
    return RowsNormal(torch.randn(num_rows * size), tril, torch.randperm(num_rows * size))


def as_dense(rows):
    """The same distribution as one of torch's, by a loop over rows and elements."""
    covariance = torch.zeros(len(rows.loc), len(rows.loc))
    size = rows.scale_tril.shape[-1]
    for i, p in enumerate(rows.order.tolist()):
        for j, q in enumerate(rows.order.tolist()):
            if p // size == q // size:
                row = rows.scale_tril[p // size] @ rows.scale_tril[p // size].T
                covariance[i, j] = row[p % size, q % size]
    return dist.MultivariateNormal(rows.loc, covariance)


def test_rows_normal_is_the_dense_gaussian():
    rows = rows_normal()
    dense, values = as_dense(rows), torch.randn(5, 12)
    torch.testing.assert_close(rows.variance, dense.variance)
    torch.testing.assert_close(rows.entropy(), dense.entropy())
    torch.testing.assert_close(rows.log_prob(values), dense.log_prob(values), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total_correlation(rows), total_correlation(dense))


def test_samples_of_rows_normal_have_its_covariance():
    """A z-test of 12 × 13 / 2 second moments at 4.5 deviations: false alarms of 1 in 2,000, with a fixed seed."""
    pyro.set_rng_seed(0)
    rows = rows_normal()
    draws = rows.rsample(torch.Size([20_000])) - rows.loc
    covariance = as_dense(rows).covariance_matrix
    spread = covariance.square() + covariance.diagonal()[:, None] * covariance.diagonal()
    z = (draws.T @ draws / len(draws) - covariance) / (spread / len(draws)).sqrt()
    assert z.abs().max() < 4.5


@pytest.mark.parametrize("make", [rows_normal, lambda: as_dense(rows_normal())])
def test_the_factor_gives_the_covariance(make):
    fn = make()
    factor, rest, between = shared_factor(fn)
    assert rest is None
    assert between is (not isinstance(fn, RowsNormal))
    torch.testing.assert_close(factor.square().sum(0), fn.variance)


@pytest.mark.parametrize("covariance", CHOICES, ids=repr)
def test_starts_from_the_weights_of_the_network_and_a_fraction_of_the_prior(covariance):
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    weight = net[2].weight.detach().clone()
    model = dvi.classifier(dvi.to_bayesian_(net, prior_scale=dvi.bayesian.fan_in), num_data=6)
    guide = dvi.LastLayerGuide(model, "net.2", covariance=covariance)
    guide.initialize(*data())
    at_median, above = guide.quantiles([0.5, 0.8413447])["net.2.weight"]
    torch.testing.assert_close(at_median, weight)
    if not isinstance(covariance, LowRank):  # which draws its directions
        expected = torch.full((2, 4), 0.5**0.5 * math.exp(-3))
        torch.testing.assert_close(above - at_median, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("covariance", CHOICES, ids=repr)
def test_draws_have_the_shapes_of_the_sites(covariance):
    model, (x, y) = classifier(), data()
    guide = dvi.LastLayerGuide(model, "net.2", covariance=covariance, rest=dvi.MeanFieldGuide)
    draw = guide(x, y)
    assert {name: tuple(v.shape) for name, v in draw.items()} == {
        "net.0.weight": (4, 3),
        "net.0.bias": (4,),
        "net.2.weight": (2, 4),
        "net.2.bias": (2,),
    }


def test_rows_are_outputs():
    """Draws of one output are correlated, those of two outputs are not."""
    pyro.set_rng_seed(0)
    model, (x, y) = classifier(), data()
    guide = dvi.LastLayerGuide(model, "net.2")
    guide.initialize(x, y)
    with torch.no_grad():
        guide[1].scale_tril_unconstrained.copy_(torch.randn(2, 5, 5))
    posterior = guide[1].get_posterior()
    covariance = as_dense(posterior).covariance_matrix
    weight, bias = torch.arange(8).reshape(2, 4), torch.arange(8, 10)
    assert (covariance[weight[0]][:, weight[1]] == 0).all()
    assert covariance[bias[0], weight[0]].abs().min() > 0
    assert (covariance[bias[0], weight[1]] == 0).all()


def test_running_statistics_are_left_alone():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model = dvi.classifier(dvi.to_bayesian_(net), num_data=6)
    before = net[1].running_mean.clone()
    dvi.LastLayerGuide(model, "net.2").initialize(*data())
    torch.testing.assert_close(net[1].running_mean, before)


def test_a_state_is_loaded_after_a_look():
    model, (x, y) = classifier(), data()
    first, second = (dvi.LastLayerGuide(model, "net.2") for _ in range(2))
    first.initialize(x, y)
    pyro.clear_param_store()
    second.initialize(x, y)
    with torch.no_grad():
        first[1].loc.add_(1)
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(second.median()["net.2.weight"], first.median()["net.2.weight"])


def test_mistakes():
    model, (x, y) = classifier(), data()
    with pytest.raises(ArgumentError, match=r"matches no site: the sites are .*net\.2\.weight"):
        dvi.LastLayerGuide(model, "net.7").initialize(x, y)
    with pytest.raises(ArgumentError, match=r"PerOutput\(\), AllOutputs\(\)"):
        dvi.LastLayerGuide(model, "net.2", covariance="dense")
    with pytest.raises(ArgumentError, match="first dimension indexes the outputs"):
        dvi.LastLayerGuide(model, ["net.0", "net.2"]).initialize(x, y)


@pytest.mark.parametrize("product", [
    lambda x, w: x @ w,
    lambda x, w: torch.einsum("ni,io->no", x, w),
    lambda x, w: nn.functional.linear(x, w.T),
])  # fmt: skip
def test_rows_that_are_inputs_are_refused(product):
    """As covariances of outputs they would give wrong variances."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3, 3]).to_event(2))
        with pyro.plate("data", len(x)):
            return pyro.sample("obs", dist.Normal(product(x, w), 1.0).to_event(1), obs=y)

    x = torch.ones(4, 3)
    with pytest.raises(ArgumentError, match=r"sums over the first dimension of \['w'\]"):
        dvi.LastLayerGuide(model, "w").initialize(x, x)
    dvi.LastLayerGuide(model, "w", covariance=AllOutputs()).initialize(x, x)
