# SPDX-License-Identifier: Apache-2.0
"""The guide by mean and precision: what it says about its posterior, how it is saved, loaded, trained and read."""

import copy
import io

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Predictive
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi as dvi
from pyro_dvi.errors import ArgumentError, GuideError, ModelError
from pyro_dvi.guides import MeanFieldGuide
from pyro_dvi.natural_gradients.ivon import IVON
from pyro_dvi.natural_gradients.natural_elbo import NaturalGradientELBO
from pyro_dvi.natural_gradients.precision_guide import NaturalGradientGuide
from pyro_dvi.natural_gradients.updates import OGN, VOGN, VOGNOptimizer
from pyro_dvi.training import fit, load, save

N = 24
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1).sin()


class Net(pyro.nn.PyroModule):
    """A converted network with batch normalisation, and a regression with a noise of its own around it."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Softplus(), nn.Linear(4, 1))
        self.net.to(dtype)
        self.weights = {k: v.detach().clone() for k, v in self.net.named_parameters()}
        dvi.to_bayesian_(self.net, prior_scale=0.5)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        f = self.net(x)[:, 0]
        with pyro.plate("data", N, subsample_size=len(x)):
            return pyro.sample("obs", dist.Normal(f, 0.5), obs=y)


def loader(dtype: torch.dtype = torch.float32, seed: int = 7) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    data = TensorDataset(X.to(dtype), Y.to(dtype))
    return DataLoader(data, batch_size=8, shuffle=True, generator=generator)


def trained(optimizer=None, epochs: int = 3, dtype: torch.dtype = torch.float32):
    model = Net(dtype)
    guide = NaturalGradientGuide(model)
    svi = SVI(model, guide, optimizer or VOGN({}), loss=NaturalGradientELBO(kl_weight=0.5))
    history = fit(svi, loader(dtype), epochs, progress=False)
    return svi, history


def constrained(x: Tensor, y: Tensor | None = None) -> None:
    """Normal priors in unconstrained space: of a weight and of a positive scale."""
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    s = pyro.sample("s", dist.LogNormal(-0.5, 0.4))
    with pyro.plate("data", len(x)):
        pyro.sample("obs", dist.Normal(x @ w, s), obs=y)


# Start ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("local_params", [False, True])
def test_starts_at_the_weights_of_the_network_with_a_fraction_of_the_priors_scale(local_params):
    with pyro.settings.context(module_local_params=local_params):
        model = Net()
        guide = NaturalGradientGuide(model, initial_scale=0.1)
        guide.initialize(X, Y)
        for site, value in guide.median().items():
            torch.testing.assert_close(value, model.weights[site.removeprefix("net.")])
            precision = guide.precision_parameter(site)
            torch.testing.assert_close(precision, torch.full_like(value, (0.1 * 0.5) ** -2))
        assert int(model.net[1].num_batches_tracked) == 0


@pytest.mark.every(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("optimizer", [VOGN, OGN, IVON])
def test_parameters_follow_the_models_dtype(dtype, optimizer):
    svi, history = trained(optimizer({}), dtype=dtype)
    assert {p.dtype for p in svi.guide.parameters()} == {dtype}
    assert all(torch.isfinite(p).all() for p in svi.guide.parameters())
    assert all((p > 0).all() for n, p in svi.guide.named_parameters() if n.startswith("precisions"))
    assert {v.dtype for v in svi.guide.sample(2).values()} == {dtype}


# Reading -------------------------------------------------------------------------------------------------------


def test_median_quantiles_and_draws_are_those_of_its_gaussians():
    svi, _ = trained()
    guide = svi.guide
    quantiles, medians = guide.quantiles([0.15865525, 0.5, 0.84134475]), guide.median()
    draws = guide.sample(20000)
    for name, median in medians.items():
        scale = guide.precision_parameter(name).detach().rsqrt()
        torch.testing.assert_close((quantiles[name][2] - quantiles[name][0]) / 2, scale, rtol=1e-4, atol=0)
        torch.testing.assert_close(quantiles[name][1], median)
        z = (draws[name].mean(0) - median) / (scale / 20000**0.5)
        assert z.abs().max() < 5  # 21 Gaussians: fails once in 80,000 seeds
        assert (draws[name].std(0) / scale - 1).abs().max() < 5 / 40000**0.5
    ours = torch.stack([guide()["net.3.bias"] for _ in range(400)]).detach()
    scale = guide.precision_parameter("net.3.bias").detach().rsqrt()
    assert ((ours.mean(0) - medians["net.3.bias"]) / (scale / 20)).abs() < 4


def test_predictive_draws_weights_and_labels():
    svi, _ = trained()
    svi.model.eval()
    draws = Predictive(svi.model, guide=svi.guide, num_samples=7)(X)
    assert draws["net.0.weight"].shape[-2:] == (4, 3) and draws["obs"].shape == (7, N)
    assert draws["net.0.weight"].std(0).min() > 0


def test_predict_draws_thirty_samples_unless_told_otherwise():
    svi, _ = trained()
    prediction = dvi.predict(svi.model, svi.guide, (X, Y), seed=1)
    assert prediction.method == dvi.Samples(30)
    by_hand = dvi.predict(svi.model, svi.guide, (X, Y), method=dvi.Samples(30), seed=1)
    assert torch.equal(prediction.mean, by_hand.mean)
    svi.guide.prediction_rule = dvi.AtMean()
    assert dvi.predict(svi.model, svi.guide, X).method == dvi.AtMean()


def test_moments_propagate_from_it():
    svi, _ = trained()
    moments = dvi.predict(svi.model, svi.guide, X, method=dvi.Moments())
    sampled = dvi.predict(svi.model, svi.guide, X, method=dvi.Samples(2000), seed=0)
    assert ((moments.mean - sampled.mean).abs() / sampled.variance.sqrt()).max() < 0.2
    assert (moments.variance / sampled.variance - 1).abs().max() < 0.2


def test_summary_shows_scales_and_training_their_mean():
    svi, history = trained()
    table = dvi.summary(svi.model, svi.guide)
    scales = [svi.guide.precision_parameter(site).detach().rsqrt() for site in table["site"]]
    assert table["scale"] == pytest.approx([float(scale.mean()) for scale in scales], rel=1e-4)
    every = torch.cat([scale.reshape(-1) for scale in scales])
    assert history["posterior_scale"][-1] == pytest.approx(float(every.mean()), rel=1e-5)
    assert history["posterior_scale"][0] != history["posterior_scale"][-1]


def test_the_mean_scale_is_recorded_for_elbo_modules_too():
    with pyro.settings.context(module_local_params=True):
        model = Net()
        guide = NaturalGradientGuide(model)
        guide.initialize(X, Y)
        module = NaturalGradientELBO(num_data=N)(model, guide)
        optimizer = VOGNOptimizer(module.parameters(), lr=0.05)
        before = guide.median()
        history = fit(module, loader(), 20, optimizer=optimizer, progress=False)
        scales = [p.detach().rsqrt().reshape(-1) for p in guide.precisions.parameters()]
        assert history["posterior_scale"][-1] == pytest.approx(float(torch.cat(scales).mean()), rel=1e-5)
        assert history["loss"][-1] < history["loss"][0]
        assert not torch.equal(guide.median()["net.0.weight"], before["net.0.weight"])
        assert not len(pyro.get_param_store())
        assert len(dvi.predict(model, guide, X)) == N


@pytest.mark.slow
def test_constrained_latents_train_and_stay_in_their_support():
    x = torch.randn(200, 3)
    y = x @ torch.tensor([1.0, -1.0, 0.5]) + 0.3 * torch.randn(200)
    guide = NaturalGradientGuide(constrained)
    vogn = VOGN({"lr": 0.1, "max_step": 0.3, "betas": (0.9, 0.97)})
    svi = SVI(constrained, guide, vogn, loss=NaturalGradientELBO())
    for _ in range(300):
        svi.step(x, y)
    median = guide.median()
    assert abs(median["s"] - 0.3) < 0.06 and abs(median["w"][1] + 1) < 0.1
    assert (guide.sample(500)["s"] > 0).all()
    posterior = guide.get_posterior()
    assert torch.isfinite(posterior["s"].log_prob(median["s"]))
    quantiles = guide.quantiles([0.1, 0.9])["s"]
    assert 0 < quantiles[0] < median["s"] < quantiles[1]
    assert guide.precision_parameter("s").shape == ()


# Saving --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("looks_first", [False, True], ids=["lazily", "after initialisation"])
@pytest.mark.parametrize("local_params", [False, True])
def test_state_dict_loads_into_a_fresh_guide(local_params, looks_first):
    with pyro.settings.context(module_local_params=local_params):
        guide = NaturalGradientGuide(Net())
        guide.initialize(X, Y)
        with torch.no_grad():
            for parameter in guide.parameters():
                parameter.mul_(1 + torch.rand_like(parameter))
        buffer = io.BytesIO()
        torch.save(guide.state_dict(), buffer)
        expected = guide.quantiles([0.3, 0.6])

        pyro.clear_param_store()
        buffer.seek(0)
        fresh = NaturalGradientGuide(Net())
        if looks_first:
            fresh.initialize(X, Y)
        assert fresh.load_state_dict(torch.load(buffer)).missing_keys == []
        fresh.initialize(X, Y)
        torch.testing.assert_close(fresh.quantiles([0.3, 0.6]), expected, rtol=0, atol=0)
        assert {p.shape for p in fresh.precisions.parameters()} == {p.shape for p in fresh.locs.parameters()}
        torch.manual_seed(0)
        first = NaturalGradientELBO().loss(fresh.model, fresh, X, Y)
        torch.manual_seed(0)
        assert NaturalGradientELBO().loss(guide.model, guide, X, Y) == pytest.approx(first)


def test_a_mean_field_state_is_refused():
    other = MeanFieldGuide(Net())
    other.initialize(X, Y)
    guide = NaturalGradientGuide(Net())
    guide.initialize(X, Y)
    with pytest.raises(GuideError, match=r"(?s)does not fit this NaturalGradientGuide.*precisions.*scales"):
        guide.load_state_dict(other.state_dict())
    lazy = NaturalGradientGuide(Net())
    with pytest.raises(GuideError, match="scales"):
        lazy.load_state_dict(other.state_dict())


@pytest.mark.every(4)
@pytest.mark.parametrize("optimizer", [VOGN, OGN, IVON])
@pytest.mark.parametrize("looks_first", [False, True], ids=["lazily", "with an example"])
def test_resuming_is_bit_identical(optimizer, looks_first, tmp_path):
    def build():
        model = Net()
        guide = NaturalGradientGuide(model)
        elbo = NaturalGradientELBO(kl_weight=dvi.schedules.LinearWarmup(9, start=0.1))
        return SVI(model, guide, optimizer({"total_steps": 12}), loss=elbo)

    pyro.set_rng_seed(1)
    whole = build()
    reference = fit(whole, loader(), 4, progress=False)
    expected = {k: v.clone() for k, v in whole.guide.state_dict().items()}

    pyro.clear_param_store()
    pyro.set_rng_seed(1)
    half, batches = build(), loader()
    history = fit(half, batches, 2, progress=False)
    save(tmp_path / "half.pt", half, history=history, loader=batches)

    pyro.clear_param_store()
    pyro.set_rng_seed(5)
    again, batches = build(), loader(seed=99)
    example = next(iter(loader())) if looks_first else None
    history = load(tmp_path / "half.pt", again, loader=batches, example=example)
    history = fit(again, batches, 2, history=history, progress=False)
    assert history.steps["loss"] == reference.steps["loss"]
    torch.testing.assert_close(dict(again.guide.state_dict()), expected, rtol=0, atol=0)


def test_the_parameter_store_saves_and_loads(tmp_path):
    svi, _ = trained()
    expected = svi.guide.median()
    pyro.get_param_store().save(str(tmp_path / "store"))
    pyro.clear_param_store()
    pyro.get_param_store().load(str(tmp_path / "store"))
    guide = NaturalGradientGuide(svi.model)
    with pytest.warns(dvi.errors.DviWarning, match="already holds"):
        guide(X, Y)
    torch.testing.assert_close(guide.median(), expected)
    again = SVI(svi.model, guide, VOGN({}), loss=NaturalGradientELBO())
    before = guide.precision_parameter("net.0.weight").detach().clone()
    again.step(X, Y)
    assert not torch.equal(guide.precision_parameter("net.0.weight"), before), "the update reaches the guide"


@pytest.mark.parametrize("local_params", [False, True])
def test_copies_are_independent(local_params):
    with pyro.settings.context(module_local_params=local_params):
        model = Net()
        guide = NaturalGradientGuide(model)
        guide.initialize(X, Y)
        module = NaturalGradientELBO()(model, guide)
        optimizer = VOGNOptimizer(module.parameters())
        module(X, Y).backward()
        optimizer.step()
        twin = copy.deepcopy(guide)
        buffer = io.BytesIO()
        torch.save(guide, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        before = guide.quantiles([0.2, 0.5])
        for other in (twin, loaded):
            torch.testing.assert_close(other.quantiles([0.2, 0.5]), before)
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.mul_(2.0)
        torch.testing.assert_close(guide.quantiles([0.2, 0.5]), before)
        module(X, Y).backward()
        optimizer.step()
        changed = guide.quantiles([0.2, 0.5])
        assert not torch.equal(changed["net.0.weight"], before["net.0.weight"])
        if local_params:  # else the copies share the store's parameters as soon as they run
            module = NaturalGradientELBO()(model, twin)
            optimizer = VOGNOptimizer(module.parameters())
            precision = twin.precision_parameter("net.0.weight").detach().clone()
            module(X, Y).backward()
            optimizer.step()
            assert not torch.equal(twin.precision_parameter("net.0.weight"), precision)
            torch.testing.assert_close(guide.quantiles([0.2, 0.5]), changed, rtol=0, atol=0)


# Mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, -1.0, 11.0, float("nan")])
def test_initial_scales_out_of_range(scale):
    with pytest.raises(ArgumentError, match="initial_scale"):
        NaturalGradientGuide(Net(), initial_scale=scale)


def test_a_guide_that_has_not_seen_its_model():
    with pytest.raises(GuideError, match=r"NaturalGradientGuide is not initialised.*guide\.initialize"):
        NaturalGradientGuide(Net()).median()
    with pytest.raises(TypeError, match="callable"):
        NaturalGradientGuide(3)


def test_priors_that_are_not_normal():
    def model(x: Tensor) -> None:
        s = pyro.sample("s", dist.HalfCauchy(1.0))
        pyro.sample("y", dist.Normal(0.0, s).expand(x.shape).to_event(x.dim()), obs=x)

    with pytest.raises(ModelError, match=r"prior of site 's' is HalfCauchy.*TaylorELBO"):
        SVI(model, NaturalGradientGuide(model), VOGN({}), loss=NaturalGradientELBO()).step(X)


def test_priors_that_depend_on_latents():
    def model(x: Tensor) -> None:
        s = pyro.sample("s", dist.LogNormal(0.0, 1.0))
        w = pyro.sample("w", dist.Normal(0.0, s))
        pyro.sample("y", dist.Normal(w, 1.0).expand(x.shape).to_event(x.dim()), obs=x)

    with pytest.raises(
        ModelError, match=r"prior of site 'w' depends on site 's_unconstrained'.*LearnedScale"
    ):
        SVI(model, NaturalGradientGuide(model), VOGN({}), loss=NaturalGradientELBO()).step(X)


def test_discrete_latents():
    def model(x: Tensor) -> None:
        pyro.sample("k", dist.Poisson(3.0))

    with pytest.raises(ModelError, match="'k' is discrete"):
        NaturalGradientGuide(model).initialize(X)


def test_a_guide_holds_no_weights_of_its_first_look_at_the_model():
    model = dvi.bayesian.classifier(dvi.to_bayesian_(nn.Linear(3, 2), prior_scale=1.0), num_data=N)
    guide = NaturalGradientGuide(model)
    guide.initialize(X, torch.zeros(N, dtype=torch.long))
    for name, site in guide.prototype_trace.iter_stochastic_nodes():
        assert site["value"].shape == guide.median()[name].shape
        assert site["value"].untyped_storage().nbytes() == 4
        assert site["fn"].initial_value is None
