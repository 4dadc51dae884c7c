# SPDX-License-Identifier: Apache-2.0
"""Training and prediction with full covariances between activations (deterministic variational inference)."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import nn
from torch.distributions import Normal

import pyro_dvi as dvi
from pyro_dvi.errors import UnsupportedError
from pyro_dvi.expectations import TiltedBound
from pyro_dvi.expectations.points import gauss_hermite
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.full_covariance import full_covariances
from pyro_dvi.moments.shared_noise import covariance_of
from pyro_dvi.predictive.predict import default_rule

pytestmark = pytest.mark.usefixtures("double")

X = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.sin(2 * X[:, 0]) + 0.3 * X[:, 1]
LABELS = torch.arange(12) % 3


def dense(*sizes):
    torch.manual_seed(0)
    parts: list[nn.Module] = [nn.Flatten()]
    for m, n in zip(sizes, sizes[1:], strict=False):
        parts += [nn.Linear(m, n), nn.ReLU(inplace=True), nn.Dropout(0.0)]
    return dvi.to_bayesian_(nn.Sequential(*parts[:-2]).double(), prior_scale=dvi.bayesian.fan_in)


def heteroscedastic(*sizes):
    return dvi.regressor(dense(*sizes), num_data=12, noise_scale=dvi.bayesian.Heteroscedastic())


def wide(model, *args, make=dvi.MeanFieldGuide):
    """A guide whose weights are uncertain enough for covariances to matter."""
    guide = make(model)
    guide(*args)
    with torch.no_grad():
        for name, p in guide.named_parameters():
            p.mul_(2.0) if "loc" in name else p.add_(2.0)
    return guide


def outputs_of(model, guide, x):
    """Mean and covariance of the outputs of the network, with the weights of the guide as moments."""
    posterior = guide.get_posterior()
    given = {
        n.removeprefix("net."): GaussianMoments(q.mean.detach(), q.variance.detach())
        for n, q in posterior.items()
    }
    with full_covariances():
        for k in (1, 4, 7):
            if k > 1:
                x = x.relu()
            x = nn.functional.linear(x, given[f"{k}.weight"], given[f"{k}.bias"])
    return x.loc, covariance_of(x)


def test_the_likelihood_uses_the_covariance_of_mean_and_log_variance():
    """Against quadrature over both outputs, which are Gaussian with that covariance."""
    model = heteroscedastic(3, 8, 8, 2)
    guide = wide(model, X, Y)
    elbo = dvi.MomentPropagationELBO(full_covariance=True)
    elbo.loss(model, guide, X, Y)
    loc, covariance = outputs_of(model, guide, X)
    assert covariance[:, 0, 1].abs().max() > 0.1
    root = torch.linalg.cholesky(covariance)
    nodes, weights = gauss_hermite(60, loc)
    z = torch.cartesian_prod(nodes, nodes)
    mean, log_variance = (loc + torch.einsum("bij,sj->sbi", root, z)).unbind(-1)
    weights = torch.cartesian_prod(weights, weights).prod(-1)
    expected = (weights @ Normal(mean, (0.5 * log_variance).exp()).log_prob(Y)).sum()
    torch.testing.assert_close(elbo.terms["log_likelihood"], expected, rtol=1e-8, atol=0)
    without = dvi.MomentPropagationELBO()
    without.loss(model, guide, X, Y)
    assert abs(without.terms["log_likelihood"] / expected - 1) > 0.01


@pytest.mark.parametrize("case", ["noise", "classes"])
def test_predictions_have_the_moments_of_draws(case):
    if case == "noise":
        model, y = heteroscedastic(3, 8, 8, 2), Y
    else:
        model, y = dvi.classifier(dense(3, 8, 8, 3), num_data=12), LABELS
    guide = wide(model, X, y)
    rule = dvi.Moments(propagation=dvi.FullCovariance())
    found = dvi.predict(model, guide, X, method=rule)
    drawn = dvi.predict(model, guide, X, method=dvi.Samples(1500), seed=0)
    if case == "classes":
        torch.testing.assert_close(found.probabilities, drawn.probabilities, rtol=0, atol=0.06)
    else:
        torch.testing.assert_close(found.mean, drawn.mean, rtol=0, atol=0.08)
        torch.testing.assert_close(found.variance, drawn.variance, rtol=0.15, atol=0)


@pytest.mark.every(4)
@pytest.mark.parametrize("make", [dvi.MeanFieldGuide, dvi.MultiplicativeNoiseGuide])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_training_improves_the_loss_and_predicts_by_itself_in_the_same_way(dtype, make):
    model = heteroscedastic(3, 8, 8, 2).to(dtype)
    guide, x, y = make(model), X.to(dtype), Y.to(dtype)
    optimizer = dvi.optim.Adam(dvi.optim.learning_rates(0.02))
    svi = SVI(model, guide, optimizer, loss=dvi.MomentPropagationELBO(full_covariance=True))
    history = dvi.fit(svi, [(x, y)], 40, progress=False)
    assert history["loss"][-1] < history["loss"][0]
    rule = dvi.Moments(propagation=dvi.FullCovariance())
    assert torch.equal(dvi.predict(model, guide, x).variance, dvi.predict(model, guide, x, rule).variance)
    assert dvi.predict(model, guide, x).mean.dtype == dtype
    state = guide.state_dict()
    pyro.clear_param_store()
    again = make(model)
    again(x, y)
    again.load_state_dict(state)
    assert default_rule(again) == rule


def test_captured_steps_are_those_of_the_loop():
    losses = []
    for captured in (True, False):
        pyro.clear_param_store()
        model = heteroscedastic(3, 6, 6, 2)
        guide = dvi.MeanFieldGuide(model)
        svi = SVI(model, guide, dvi.optim.Adam({"lr": 0.01}), dvi.MomentPropagationELBO(full_covariance=True))
        if captured:
            losses.append(dvi.fit(svi, [(X, Y)], 12, progress=False)["loss"])
        else:
            losses.append([svi.step(X, Y) for _ in range(12)])
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-6, atol=0)


def test_gradients_of_the_loss_are_those_of_finite_differences():
    model = heteroscedastic(3, 4, 4, 2)
    guide = wide(model, X, Y)
    elbo = dvi.MomentPropagationELBO(full_covariance=True)
    elbo.differentiable_loss(model, guide, X, Y).backward()
    torch.manual_seed(0)
    for p in guide.parameters():
        direction = torch.randn_like(p)
        values = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                p.add_(direction, alpha=step)
            values.append(elbo.loss(model, guide, X, Y))
            with torch.no_grad():
                p.add_(direction, alpha=-step)
        slope = (values[0] - values[1]) / 2e-5
        assert math.isclose(slope, (p.grad * direction).sum().item(), rel_tol=1e-4, abs_tol=1e-5)


def test_one_hidden_layer_and_one_output_have_the_loss_of_the_default():
    model = dvi.regressor(dense(3, 8, 1), num_data=12, noise_scale=0.5)
    guide = wide(model, X, Y)
    losses = [
        dvi.MomentPropagationELBO(full_covariance=full).loss(model, guide, X, Y) for full in (True, False)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_networks_without_a_rule_are_refused_by_name():
    conv = dvi.to_bayesian_(
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)).double()
    )
    smooth = dvi.to_bayesian_(
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    )
    for net, x, name in ((conv, torch.randn(12, 1, 4, 4), "conv2d"), (smooth, X, "tanh")):
        pyro.clear_param_store()
        model = dvi.classifier(net, num_data=12)
        guide = dvi.MeanFieldGuide(model)
        with pytest.raises(UnsupportedError, match=f"{name}.* full covariances have no rule.*the default"):
            dvi.MomentPropagationELBO(full_covariance=True).loss(model, guide, x, LABELS)
        assert math.isfinite(dvi.MomentPropagationELBO().loss(model, guide, x, LABELS))


def test_a_last_layer_with_covariances_is_refused():
    model = dvi.classifier(dense(3, 8, 3), num_data=12)
    guide = dvi.LastLayerGuide(model, "net.4", rest=dvi.MeanFieldGuide)
    with pytest.raises(UnsupportedError, match=r"'net\.4\.weight' .* that have covariances"):
        dvi.MomentPropagationELBO(full_covariance=True).loss(model, guide, X, LABELS)


def test_what_no_closed_form_covers_says_where_the_covariances_come_from():
    net = dense(3, 8, 2)

    def noisy(x, y=None):
        f = net(x)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f[:, 0], nn.functional.softplus(f[:, 1])), obs=y)

    cases = (noisy, Y, None), (dvi.classifier(dense(3, 8, 3), num_data=12), LABELS, TiltedBound())
    for model, y, estimator in cases:
        pyro.clear_param_store()
        elbo = dvi.MomentPropagationELBO(full_covariance=True, estimator=estimator)
        with pytest.raises(UnsupportedError, match="eave out full_covariance=True"):
            elbo.loss(model, dvi.MeanFieldGuide(model), X, y)


def test_a_linear_model_whose_rows_are_outputs_is_refused():
    """The covariance of one density would be that of elements of different rows of the weights."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(3, 3), 1.0).to_event(2))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Categorical(logits=(w @ x.T).T), obs=y)

    elbo = dvi.MomentPropagationELBO(full_covariance=True)
    with pytest.raises(UnsupportedError, match=r"as in \(W @ x\.T\)\.T"):
        elbo.loss(model, dvi.MeanFieldGuide(model), X, LABELS)


def test_a_likelihood_of_outputs_from_two_networks_is_refused():
    first, second = dense(3, 8, 8, 1), dense(3, 8, 8, 1)

    class Two(pyro.nn.PyroModule):
        def __init__(self):
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x, y=None):
            mean, scale = self.first(x)[:, 0], torch.exp(self.second(x)[:, 0])
            with pyro.plate("data", len(x)):
                return pyro.sample("obs", dist.Normal(mean, scale), obs=y)

    model = Two()
    guide = dvi.MeanFieldGuide(model)
    with pytest.raises(UnsupportedError, match="come from different layers"):
        dvi.MomentPropagationELBO(full_covariance=True).loss(model, guide, X, Y)
