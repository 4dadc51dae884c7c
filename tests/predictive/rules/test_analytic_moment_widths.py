# SPDX-License-Identifier: Apache-2.0
"""Ways of propagation in prediction: widths against closed forms and draws of the weights."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDiagonalNormal, AutoNormal
from torch import nn

from pyro_dvi import (
    MeanFieldGuide,
    MultiplicativeNoiseGuide,
    Samples,
    classifier,
    predict,
    regressor,
    to_bayesian_,
)
from pyro_dvi.errors import ArgumentError, UnsupportedError
from pyro_dvi.predictive import Independent, Moments, ReverseDelta

pytestmark = pytest.mark.usefixtures("double")


def set_up(model, make_guide, x, y, scale=0.1):
    guide = make_guide(model)
    guide(x, y)
    for name, p in guide.named_parameters():
        if "scale" in name:
            p.data.fill_(math.log(scale) if isinstance(guide, MeanFieldGuide) else scale)
    return guide


class Skip(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        h = self.linear(x)
        return torch.relu(h) + h


def skip_net():
    return nn.Sequential(nn.Linear(3, 8), Skip(8), Skip(8), nn.Linear(8, 1))


def linear_model(x, y=None):
    weight = pyro.sample("weight", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    bias = pyro.sample("bias", dist.Normal(torch.zeros(()), 1.0))
    noise = pyro.sample("noise", dist.LogNormal(torch.zeros(()), 0.1))
    h = x @ weight
    with pyro.plate("data", 100, subsample_size=len(x)):
        return pyro.sample("y", dist.Normal(0.3 * h + 0.7 * h + bias, noise), obs=y)


@pytest.mark.parametrize("make_guide", [AutoNormal, AutoDiagonalNormal, MeanFieldGuide])
def test_a_linear_model_is_exact(make_guide):
    x, y = torch.randn(6, 3), torch.randn(6)
    guide = make_guide(linear_model)
    guide(x, y)
    with torch.no_grad():
        draws = {name: guide(x, y)[name] for name in ("weight", "bias")}
    assert set(draws) == {"weight", "bias"}
    quantiles = guide.quantiles([0.15865525393145707, 0.8413447460685429], x, y)  # mean -+ one deviation
    scale = {name: (quantiles[name][1] - quantiles[name][0]) / 2 for name in ("weight", "bias")}
    low, high = quantiles["noise"].log()  # the posterior of the noise scale is log-normal
    noise_variance = torch.exp(low + high + (high - low).square() / 2)
    exact = x.square() @ scale["weight"].square() + scale["bias"].square() + noise_variance
    prediction = predict(linear_model, guide, x, Moments(propagation=ReverseDelta()))
    torch.testing.assert_close(prediction.variance, exact.detach(), atol=1e-6, rtol=1e-6)
    independent = predict(linear_model, guide, x, Moments())
    ratio = (independent.variance - noise_variance) / (exact - noise_variance)
    assert (ratio < 0.8).any()  # 0.3 h and 0.7 h count as two


def test_skip_connections_come_out_as_wide_as_draws():
    torch.manual_seed(0)
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    model = regressor(to_bayesian_(skip_net()), num_data=20)
    guide = set_up(model, MeanFieldGuide, x, y)
    truth = predict(model, guide, x, Samples(2000), seed=1).variance
    noise = predict(model, guide, x, Moments(propagation=ReverseDelta())).variance
    independent = predict(model, guide, x, Moments()).variance
    ratios = [((v - 1) / (truth - 1)).mean().item() for v in (independent, noise)]
    # Shared draws: the average ratio has the error of one variance at most, sqrt(2 / 2000) = 3 %.
    assert abs(ratios[1] - 1) < 0.1
    assert ratios[0] < 0.8


def test_links_survive_heteroscedastic_noise():
    """Mean and log-variance come from one layer; the pulled-back variance of an affine output is the forward one."""
    net = nn.Linear(3, 2)

    class Model(pyro.nn.PyroModule):
        def __init__(self):
            super().__init__()
            self.net = to_bayesian_(net)

        def forward(self, x, y=None):
            h = self.net(x)
            with pyro.plate("data", 10, subsample_size=len(x)):
                return pyro.sample("y", dist.Normal(h[..., 0], (0.5 * h[..., 1]).exp()), obs=y)

    x, model = torch.randn(5, 3), Model()
    guide = set_up(model, MeanFieldGuide, x, torch.randn(5))
    plain, pulled = (
        predict(model, guide, x, Moments(propagation=p)) for p in (Independent(), ReverseDelta())
    )
    torch.testing.assert_close(pulled.variance, plain.variance)
    torch.testing.assert_close(pulled.mean, plain.mean)


@pytest.mark.parametrize("make_guide", [AutoNormal, MeanFieldGuide, MultiplicativeNoiseGuide])
def test_one_layer_of_logits_is_what_it_was(make_guide):
    x, y = torch.randn(7, 3), torch.randint(4, (7,))
    model = classifier(to_bayesian_(nn.Linear(3, 4)), num_data=7)
    guide = make_guide(model)
    guide(x, y)
    plain, pulled = (
        predict(model, guide, x, Moments(propagation=p), seed=0) for p in (Independent(), ReverseDelta())
    )
    torch.testing.assert_close(pulled.probabilities, plain.probabilities)


def test_a_weight_that_is_used_twice_counts_once():
    """Without a warning: for a linear model the variance is exact."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", 10, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(x @ w + (2 * x) @ w, 0.5), obs=y)

    x, y = torch.randn(4, 3), torch.randn(4)
    guide = AutoNormal(model, init_scale=0.3)
    guide(x, y)
    found = predict(model, guide, x, Moments(propagation=ReverseDelta())).variance
    torch.testing.assert_close(found, 0.09 * (3 * x).square().sum(1) + 0.25)


def vision_transformer(models):
    return models.VisionTransformer(
        image_size=8, patch_size=4, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=8, num_classes=3
    )


def swin_transformer(models):
    return models.SwinTransformer(
        patch_size=[2, 2], embed_dim=4, depths=[1, 2], num_heads=[1, 2], window_size=[2, 2],
        stochastic_depth_prob=0.0, num_classes=3,
    )  # fmt: skip


@pytest.mark.parametrize("make", [vision_transformer, swin_transformer])
def test_tokens_and_windows_keep_the_covariances_of_their_weights(make):
    """Tiny noise of all parameters is multiplied with the squares of their gradients in the plain network."""
    tiny = 1e-6
    torch.manual_seed(0)
    net = make(pytest.importorskip("torchvision.models")).eval()
    for p in net.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    x = torch.randn(3, 3, 8, 8)
    expected = []
    outputs = net(x)
    for output in outputs.flatten():
        gradients = torch.autograd.grad(output, list(net.parameters()), retain_graph=True)
        expected.append(torch.stack([g.square().sum() for g in gradients]).sum())
    net = to_bayesian_(net, include=lambda name, module, parameter: True)
    model = regressor(net, num_data=3, noise_scale=tiny)
    guide = set_up(model, MeanFieldGuide, x, outputs.detach(), tiny)
    found = predict(model, guide, x, Moments(propagation=ReverseDelta())).variance / tiny**2 - 1
    torch.testing.assert_close(found, torch.stack(expected).reshape(outputs.shape), rtol=1e-5, atol=0)


def test_batches_and_gradient_modes_do_not_matter():
    x, y = torch.randn(9, 3), torch.randn(9, 1)
    model = regressor(to_bayesian_(skip_net()), num_data=9)
    guide = set_up(model, MeanFieldGuide, x, y)
    rule = Moments(propagation=ReverseDelta())
    whole = predict(model, guide, x, rule)
    parts = predict(model, guide, x, rule, batch_size=1)
    torch.testing.assert_close(whole.variance, parts.variance)
    assert not whole.variance.requires_grad
    assert all(p.grad is None for p in guide.parameters())


# Mistakes -----------------------------------------------------------------------------------------------------------


def test_a_family_whose_constraints_are_known_of_its_objects_only():
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", 10, subsample_size=len(x)):
            return pyro.sample("y", dist.Uniform(x @ w - 9, x @ w + 9), obs=y)

    x, y = torch.randn(4, 3), torch.randn(4)
    guide = AutoNormal(model, init_scale=0.3)
    guide(x, y)
    plain, pulled = (
        predict(model, guide, x, Moments(propagation=p)).variance for p in (Independent(), ReverseDelta())
    )
    torch.testing.assert_close(pulled, plain)


def test_outputs_without_a_row_for_each_example_are_refused():
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", 10, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal((x @ w).mean(), 1.0), obs=y)

    x, y = torch.randn(4, 3), torch.randn(4)
    guide = AutoNormal(model)
    guide(x, y)
    with pytest.raises(UnsupportedError, match="parameter 'loc' of Normal has the shape"):
        predict(model, guide, x, Moments(propagation=ReverseDelta()))


@pytest.mark.parametrize("propagation", ["reverse", ReverseDelta])
def test_propagation_is_an_object(propagation):
    with pytest.raises(ArgumentError, match=r"propagation must be an object such as Independent\(\)"):
        Moments(propagation=propagation)
