# SPDX-License-Identifier: Apache-2.0
"""The guide of noisy K-FAC: its draws, its layers, states and mistakes."""

import copy

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro.infer import SVI
from torch import Tensor, nn

import pyro_dvi as dvi
from pyro_dvi.analysis.diagnostics import scale_report
from pyro_dvi.errors import ArgumentError, DviWarning, GuideError, ModelError, UnsupportedError
from pyro_dvi.natural_gradients import NoisyKFAC, NoisyKFACOptimizer
from tests.natural_gradients.layers import NOISE, N, covariance, design, matrix, regression, trained

pytestmark = pytest.mark.usefixtures("double")


# Draws ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["sample", "forward"])
def test_draws_have_the_covariance_of_the_matrix_normal(by):
    """A z-test of each entry; 4.5 standard errors let one of 10 000 fixed seeds fail."""
    x, y = torch.randn(N, 2), torch.randn(N, 2)
    guide, _ = trained(regression(nn.Linear(2, 2), N), x, y)
    count = 40_000 if by == "sample" else 1_500
    torch.manual_seed(1)
    if by == "sample":
        drawn = guide.sample(count)
    else:
        with torch.no_grad():
            each = [guide(x, y) for _ in range(count)]
        drawn = {name: torch.stack([one[name] for one in each]) for name in each[0]}
    w = matrix(drawn, "net").flatten(1) - matrix(guide.median(), "net").flatten()
    exact = covariance(guide, "net.weight").detach()
    found = w.mT @ w / count
    variances = exact.diagonal()
    error = ((torch.outer(variances, variances) + exact.square()) / count).sqrt()
    assert ((found - exact).abs() < 4.5 * error).all()
    correlations = exact / torch.outer(variances, variances).sqrt()
    assert (correlations - torch.eye(6)).abs().max() > 0.1  # there is something to test
    spread = matrix(guide.quantiles([0.8413447460685429]), "net")[0] - matrix(guide.median(), "net")
    torch.testing.assert_close(spread.flatten(), variances.sqrt())


def test_predictions_by_draws_at_the_mean_and_what_is_refused():
    x, y = torch.randn(N, 2), torch.randn(N, 2)
    model = regression(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)), N)
    guide, _ = trained(model, x, y)
    mean = dvi.predict(model, guide, x, dvi.AtMean()).mean
    drawn = dvi.predict(model, guide, x, dvi.Samples(500), seed=0)
    assert drawn.mean.shape == mean.shape
    w = guide.sample(500)
    hidden = torch.tanh(design(x) @ matrix(w, "net.0").mT)
    f = torch.cat([hidden, torch.ones(500, N, 1)], -1) @ matrix(w, "net.2").mT
    variance = drawn.variance - NOISE**2
    assert ((variance / f.var(0)).log().abs() < 5 * (2 / 500 + 2 / 500) ** 0.5).all()
    with pytest.raises(GuideError, match="KroneckerGuide is not a factorised Gaussian"):
        dvi.predict(model, guide, x, dvi.Moments())
    with pytest.raises(UnsupportedError, match=r"'net\.0\.weight' is not.*MatrixNormal.*exclude"):
        guide.as_prior()


# Layers ---------------------------------------------------------------------------------------------------------


class Unfolded(nn.Module):
    """A convolution as a dense layer of its patches."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.layer = nn.Linear(18, 3)
        with torch.no_grad():
            self.layer.weight.copy_(conv.weight.flatten(1))
            self.layer.bias.copy_(conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.unfold(x, 3).mT).mT.flatten(1)


@pytest.mark.parametrize("size", [3, 5], ids=["one position", "nine positions"])
def test_a_convolution_is_the_dense_layer_of_its_patches(size):
    x, y = torch.randn(8, 2, size, size), torch.randn(8, 3 * (size - 2) ** 2)
    conv = nn.Conv2d(2, 3, 3)
    found = []
    for net, name in ((Unfolded(conv), "net.layer"), (nn.Sequential(conv, nn.Flatten()), "net.0")):
        pyro.clear_param_store()
        torch.manual_seed(4)
        guide, _ = trained(regression(net, 8, 0.6), x, y, 3)
        assert guide.layers == {f"{name}.weight": f"{name}.bias"}
        means = guide.median()
        found.append(
            (means[f"{name}.weight"].flatten(1), means[f"{name}.bias"], guide.roots(f"{name}.weight"))
        )
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


class Mixed(nn.Module):
    """A table, a layer that is used twice, one that is used once, and batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.twice = nn.Embedding(5, 3), nn.Linear(3, 3)
        self.norm, self.last = nn.BatchNorm1d(3), nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.twice(torch.tanh(self.twice(self.table(x))))
        return self.last(torch.tanh(self.norm(h)))


def test_what_is_no_layer_used_once_takes_the_diagonal():
    x, y = torch.arange(N) % 5, torch.randn(N, 2)
    guide, svi = trained(regression(Mixed(), N), x, y)
    assert guide.layers == {"net.last.weight": None}
    assert {name.partition(".")[2] for name, _ in guide.precisions.named_parameters()} == {
        "table.weight_unconstrained",
        "twice.weight_unconstrained",
        "twice.bias_unconstrained",
    }
    assert np.isfinite(svi.step(x[:7], y[:7]))  # a shorter batch


def test_without_layers_it_is_vogn():
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", N):
            return pyro.sample("y", dist.Normal(w * x, 0.5), obs=y)

    x, found = torch.linspace(-1, 1, N), []
    for guide, optimizer in (
        (dvi.KroneckerGuide(model), NoisyKFAC({"lr": 0.2})),
        (dvi.NaturalGradientGuide(model), dvi.VOGN({"lr": 0.2})),
    ):
        pyro.clear_param_store()
        torch.manual_seed(0)
        svi = SVI(model, guide, optimizer, loss=dvi.NaturalGradientELBO())
        found.append([svi.step(x, 2 * x) for _ in range(5)] + [guide.precisions.w.item()])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "turned", [lambda w: w.T, lambda w: w.mT, lambda w: w.t(), lambda w: w.transpose(0, 1)]
)
def test_a_product_with_a_transpose_is_a_linear_layer(turned):
    def model(x, y, multiply):
        w = pyro.sample("w", dist.Normal(torch.zeros(3, 2), 1.0).to_event(2))
        with pyro.plate("data", N):
            pyro.sample("y", dist.Normal(multiply(x, w), 0.5).to_event(1), obs=y)

    x, y, found = torch.randn(N, 2), torch.randn(N, 3), []
    for multiply in (F.linear, lambda x, w: x @ turned(w)):
        pyro.clear_param_store()
        torch.manual_seed(0)
        guide = dvi.KroneckerGuide(model)
        svi = SVI(model, guide, NoisyKFAC({}), loss=dvi.NaturalGradientELBO())
        losses = [svi.step(x, y, multiply) for _ in range(4)]
        found.append((losses, guide.median()["w"], guide.roots("w")))
        assert guide.layers == {"w": None}
    torch.testing.assert_close(*found, rtol=1e-12, atol=0)


def test_a_model_without_layers_warns():
    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(2, 2), 1.0).to_event(2))
        with pyro.plate("data", N):
            pyro.sample("y", dist.Normal(F.linear(torch.tanh(F.linear(x, w)), w), 0.5).to_event(1), obs=y)

    guide = dvi.KroneckerGuide(model)
    with pytest.warns(DviWarning, match="found no layers"):
        guide(torch.randn(N, 2), torch.randn(N, 2))
    assert not guide.layers


def test_initial_scales_of_weights_and_biases():
    guide = dvi.KroneckerGuide(regression(nn.Linear(2, 3), N, scale=0.7), initial_scale=0.1)
    guide(torch.randn(N, 2), torch.randn(N, 3))
    for name, scales in guide.initial_scales().items():
        torch.testing.assert_close(scales, torch.full_like(guide.median()[name], 0.07))
    assert scale_report(guide)["to_start"] == pytest.approx([1.0, 1.0])
    pyro.clear_param_store()
    trained_one, _ = trained(regression(nn.Linear(2, 3), N), torch.randn(N, 2), torch.randn(N, 3))
    assert max(scale_report(trained_one)["to_start"]) < 0.95


@pytest.mark.slow
def test_several_observed_sites_and_an_unused_layer():
    """Labels of sites are independent, so that their Fisher informations add up."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.idle = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor, use: bool) -> Tensor:
            unused = self.idle.weight, self.idle.bias
            return self.first(x) + (F.linear(x, *unused) if use else 0.0)

    net = dvi.to_bayesian_(Heads())

    def model(x, y=None, use=True):
        f = net(x, use)
        with pyro.plate("data", N, subsample_size=len(x)):
            pyro.sample("a", dist.Normal(f, 0.5).to_event(1), obs=y)
            pyro.sample("b", dist.Normal(f, 0.1).to_event(1), obs=y)

    x, y = torch.randn(N, 2), torch.randn(N, 2)
    guide = dvi.KroneckerGuide(model)
    elbo = dvi.NaturalGradientELBO(num_particles=400)
    guide.initialize(x, y)
    assert set(guide.layers) == {"first.weight", "idle.weight"}
    elbo.differentiable_loss(model, guide, x, y, False).backward()
    measured = guide.precision_parameter("first.weight").grad[:4].reshape(2, 2)
    exact = (0.5**-2 + 0.1**-2) * torch.eye(2)
    torch.testing.assert_close(measured, exact, rtol=0.05, atol=5.0)
    assert not guide.precision_parameter("idle.weight").grad.any()


# States ---------------------------------------------------------------------------------------------------------


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "dtype, intervals", [(torch.float32, (1, 1)), (torch.float64, (1, 1)), (torch.float32, (4, 5))], ids=str
)
def test_training_goes_on_from_a_file_to_the_last_bit(tmp_path, dtype, intervals):
    """Six steps before it, so that the next one measures no factors where they come every fourth."""
    torch.set_default_dtype(dtype)
    x, y = torch.randn(20, 1, 4, 4), torch.randn(20, 2)
    loader = [(x[:8], y[:8]), (x[8:16], y[8:16]), (x[16:], y[16:])]

    def made():
        pyro.clear_param_store()
        torch.manual_seed(1)
        net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))
        model = regression(net, 20)
        options = dict(zip(("factor_interval", "inverse_interval"), intervals, strict=True))
        optimizer = NoisyKFAC({"total_steps": 12, **options})
        return SVI(model, dvi.KroneckerGuide(model), optimizer, loss=dvi.NaturalGradientELBO())

    whole = made()
    dvi.fit(whole, loader, 4, progress=False)
    expected = {name: value.detach().clone() for name, value in whole.guide.named_parameters()}
    assert {value.dtype for value in expected.values()} == {dtype}
    dvi.fit(made(), loader, 2, progress=False, checkpoint=tmp_path / "run.pt")
    again = made()
    history = dvi.load(tmp_path / "run.pt", again, example=loader[0])
    dvi.fit(again, loader, 2, progress=False, history=history)
    assert again.guide.layers == whole.guide.layers
    torch.testing.assert_close(dict(again.guide.named_parameters()), expected, rtol=0, atol=0)


def test_a_state_loads_into_a_guide_that_has_not_seen_its_model():
    x, y = torch.randn(N, 2), torch.randn(N, 2)
    model = regression(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2, bias=False)), N)
    guide, _ = trained(model, x, y)
    before = dvi.predict(model, guide, x, seed=0).mean
    state = copy.deepcopy(guide.state_dict())
    pyro.clear_param_store()
    fresh = dvi.KroneckerGuide(model)
    fresh.load_state_dict(state)
    torch.testing.assert_close(dvi.predict(model, fresh, x, seed=0).mean, before, rtol=0, atol=0)
    assert fresh.layers == guide.layers == {"net.0.weight": "net.0.bias", "net.2.weight": None}
    torch.testing.assert_close(
        dvi.predict(model, copy.deepcopy(guide), x, seed=0).mean, before, rtol=0, atol=0
    )


def test_a_torch_optimizer_trains_as_that_of_pyro():
    x, y, found = torch.randn(N, 2), torch.randn(N, 2), []
    for by_torch in (False, True):
        pyro.clear_param_store()
        torch.manual_seed(0)
        model = regression(nn.Linear(2, 2), N)
        guide, elbo = dvi.KroneckerGuide(model), dvi.NaturalGradientELBO()
        guide.initialize(x, y)
        torch.manual_seed(1)
        if by_torch:
            module = elbo(model, guide)
            optimizer = NoisyKFACOptimizer(module.parameters(), lr=0.5)
            for _ in range(4):
                optimizer.zero_grad()
                module(x, y).backward()
                optimizer.step()
        else:
            svi = SVI(model, guide, NoisyKFAC({"lr": 0.5}), loss=elbo)
            for _ in range(4):
                svi.step(x, y)
        found.append({name: value.detach().clone() for name, value in guide.named_parameters()})
    torch.testing.assert_close(*found, rtol=0, atol=0)


# Mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_fit", [True, False], ids=["fit", "loop"])
@pytest.mark.parametrize(
    "guide, optimizer, message",
    [
        (
            dvi.NaturalGradientGuide,
            NoisyKFAC,
            "a NaturalGradientGuide must be trained with VOGN.*NoisyKFAC.* KroneckerGuide",
        ),
        (
            dvi.KroneckerGuide,
            dvi.VOGN,
            "a KroneckerGuide must be trained with NoisyKFAC: VOGN.* NaturalGradientGuide",
        ),
        (dvi.KroneckerGuide, dvi.IVON, "a KroneckerGuide must be trained with NoisyKFAC"),
    ],
)
def test_guides_and_optimizers_that_do_not_go_together(guide, optimizer, message, by_fit):
    x, y = torch.randn(N, 2), torch.randn(N, 2)
    model = regression(nn.Linear(2, 2), N)
    svi = SVI(model, guide(model), optimizer({}), loss=dvi.NaturalGradientELBO())
    with pytest.raises(GuideError, match=message):
        if by_fit:
            dvi.fit(svi, [(x, y)], 1, progress=False)
        for _ in range(2):
            svi.step(x, y)


def test_another_objective_for_the_guide():
    model = regression(nn.Linear(2, 2), N)
    svi = SVI(model, dvi.KroneckerGuide(model), pyro.optim.Adam({}), loss=dvi.TaylorELBO())
    with pytest.raises(
        GuideError, match="cannot train a KroneckerGuide: train it with NaturalGradientELBO and NoisyKFAC"
    ):
        svi.step(torch.randn(N, 2), torch.randn(N, 2))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"initial_curvature": 1.0}, "no option 'initial_curvature'.*factor_interval"),
        ({"factor_interval": 0}, "factor_interval must be a positive whole number"),
        ({"inverse_interval": 1.5}, "inverse_interval must be a positive whole number"),
        ({"formulation": dvi.natural_gradients.AsPrinted()}, r"Consistent\(\)"),
        ({"estimate": dvi.natural_gradients.Estimate()}, r"LayerFisher\(\)"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ArgumentError, match=message):
        NoisyKFAC(options)


def test_layers_in_half_precision():
    model = regression(nn.Linear(2, 2).bfloat16(), N)
    x, y = torch.randn(N, 2, dtype=torch.bfloat16), torch.randn(N, 2, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match=r"'net\.weight' is torch\.bfloat16.*torch\.autocast"):
        dvi.KroneckerGuide(model)(x, y)


def test_options_of_a_layer_have_to_agree():
    x, y = torch.randn(N, 2), torch.randn(N, 2)
    model = regression(nn.Linear(2, 2), N)
    optimizer = NoisyKFAC(lambda name: {"lr": 0.1 if "bias" in name else 0.2})
    svi = SVI(model, dvi.KroneckerGuide(model), optimizer, loss=dvi.NaturalGradientELBO())
    with pytest.raises(GuideError, match="different options"):
        svi.step(x, y)


def test_a_scheduler_of_pyro_has_an_optimizer_for_each_tensor():
    x, y = torch.randn(N, 2), torch.randn(N, 2)
    model = regression(nn.Linear(2, 2), N)
    scheduler = pyro.optim.ExponentialLR({"optimizer": NoisyKFACOptimizer, "optim_args": {}, "gamma": 0.5})
    svi = SVI(model, dvi.KroneckerGuide(model), scheduler, loss=dvi.NaturalGradientELBO())
    with pytest.raises(GuideError, match="Pyro's schedulers make one optimizer for each"):
        svi.step(x, y)


def test_a_layer_that_is_used_twice_later():
    def model(x, y, twice=False):
        w = pyro.sample("w", dist.Normal(torch.zeros(2, 2), 1.0).to_event(2))
        f = F.linear(x, w)
        f = F.linear(torch.tanh(f), w) if twice else f
        with pyro.plate("data", N):
            pyro.sample("y", dist.Normal(f, 0.5).to_event(1), obs=y)

    x, y = torch.randn(N, 2), torch.randn(N, 2)
    _, svi = trained(model, x, y, 5)  # the next step measures the factors
    with pytest.raises(ModelError, match=r"'w' was the weight of a layer.*VOGN"):
        svi.step(x, y, True)
