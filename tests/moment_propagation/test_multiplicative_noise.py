# SPDX-License-Identifier: Apache-2.0
"""The guide of multiplicative noise: the shape of its noise by layer, its draws, objectives, saving and mistakes."""

import copy
import io
import pickle
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoGuideList, AutoNormal, init_to_value
from torch import Tensor, nn

import pyro_dvi as dvi
from pyro_dvi.core.distributions import strip_event_dims
from pyro_dvi.curvature import GGNDiagonal
from pyro_dvi.errors import ArgumentError, CheckpointError, GuideError, ModelError
from pyro_dvi.gaussians.normal_divergence import multiplicative_divergence
from pyro_dvi.guides import Deterministic, MeanField, PerSite, SGDStepSize
from pyro_dvi.moment_propagation.multiplicative_noise import MultiplicativeNoiseGuide
from pyro_dvi.variational_laplace.taylor import TaylorELBO
from tests.guides.networks import Net
from tests.guides.noise import ALPHA_0, X, Y, functional, kinds, noise_shapes, started
from tests.models import LinearRegression
from tests.training.problems import Net as TrainingNet, sequence

# Start and reading ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("local_params", [False, True])
def test_starts_at_the_weights_of_the_network(local_params):
    with pyro.settings.context(module_local_params=local_params):
        model = Net()
        before = {k: v.clone() for k, v in model.net[1].state_dict().items()}
        guide = started(model, X, Y, initial_rho=-1.5)
        for site, value in guide.median().items():
            torch.testing.assert_close(value, model.weights[site.removeprefix("net.")])
        assert noise_shapes(guide) == {"net.0.weight": (1, 3), "net.3.weight": (1, 4)}
        for _, rho in guide.alphas.named_parameters():
            torch.testing.assert_close(rho.detach(), torch.full_like(rho, -1.5))
        torch.testing.assert_close(dict(model.net[1].state_dict()), before, rtol=0, atol=0)
        guide(X, Y)
        stored = [name for name in pyro.get_param_store() if name.startswith("MultiplicativeNoiseGuide.")]
        assert len(stored) == (0 if local_params else 6)


def test_any_initialisation_strategy_of_pyro():
    values = {"w1": torch.arange(15.0).view(5, 3), "noise": torch.tensor(0.7)}
    guide = started(functional, X, Y, init_loc_fn=init_to_value(values=values))
    for name, value in values.items():
        torch.testing.assert_close(guide.median()[name], value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parameters_follow_the_models_dtype(dtype):
    model = Net().to(dtype)
    guide = MultiplicativeNoiseGuide(model, biases=MeanField(PerSite()))
    loss = TaylorELBO().differentiable_loss(model, guide, X.to(dtype), Y.to(dtype))
    assert loss.dtype == dtype and {p.dtype for p in guide.parameters()} == {dtype}
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in guide.parameters())
    assert all(p.grad.any() for p in guide.alphas.parameters())


def test_draws_have_the_moments_of_the_posterior():
    """Means and variances of each weight at z = 4, of direct draws and of runs of the guide."""
    guide = started(functional, X, Y)
    with torch.no_grad():
        guide.alphas.w1_unconstrained.copy_(torch.tensor([[-3.0, 0.0, 2.0]]))
    alpha = F.softplus(torch.tensor([[-3.0, 0.0, 2.0]]))
    loc = guide.median()["w1"]
    for n, draws in (
        (20000, guide.sample(20000)["w1"]),
        (600, torch.stack([guide()["w1"] for _ in range(600)])),
    ):
        draws = draws.detach()
        assert ((draws.mean(0) - loc).abs() < 4 * (alpha * loc**2 / n).sqrt()).all()
        assert ((draws.var(0) / (alpha * loc**2) - 1).abs() < 4 * (2 / n) ** 0.5).all()
    assert (guide.sample(5)["b1"] == guide.median()["b1"]).all()
    quantiles = guide.quantiles([0.1, 0.5, 0.9])
    below = (guide.sample(20000)["w1"] < quantiles["w1"][0]).float().mean(0)
    assert ((below - 0.1).abs() < 4 * (0.09 / 20000) ** 0.5).all()
    assert quantiles["b1"].shape == (3, 5) and (quantiles["b1"] == guide.median()["b1"]).all()
    assert (quantiles["noise"].diff(dim=0) > 0).all()


def test_predictive_of_pyro():
    model = Net().eval()
    guide = started(model, X, Y)
    draws = Predictive(model, guide=guide, num_samples=7)(X)
    assert draws["net.0.weight"].shape[-2:] == (4, 3) and draws["y"].shape == (7, 6)
    assert draws["net.0.weight"].std(0).min() > 0 and draws["net.0.bias"].std(0).max() == 0


# Objectives ----------------------------------------------------------------------------------------------------


def regression(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(x.new_zeros(()), 0.7).expand([1, 3]).to_event(2))
    b = pyro.sample("b", dist.Normal(x.new_zeros(()), 0.7).expand([1]).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(F.linear(x, w, b)[:, 0], 0.5), obs=y)


@pytest.mark.parametrize("options, eps", [({}, 1e-10), ({"eps": 1e-6}, 1e-6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_divergence_is_the_papers_but_for_a_constant(options, eps, dtype):
    """Appendix A adds its eps inside the logarithm; also where a weight is zero, and in float32."""
    guide = started(regression, X.to(dtype), Y.to(dtype), **options)
    m, rho = guide.locs.w_unconstrained, guide.alphas.w_unconstrained
    with torch.no_grad():
        m.copy_(torch.tensor([[0.0, 1e-5, -0.8]]))
    q = strip_event_dims(guide._marginals()["w"])
    zero, scale = torch.zeros((), dtype=dtype), torch.full((), 0.7, dtype=dtype)
    kl = multiplicative_divergence([q.loc], [q.alpha], [q.eps], [zero], [scale])
    exact_m, exact_rho = (p.detach().double().requires_grad_() for p in (m, rho))
    alpha = F.softplus(exact_rho)
    printed = 0.5 * ((1 + alpha) * exact_m**2 / 0.49 - 1 - ((alpha * exact_m**2 + eps) / 0.49).log()).sum()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(kl.double(), printed + 3 * eps / 0.98, rtol=tolerance, atol=0)
    for own, exact in zip(
        torch.autograd.grad(kl, (m, rho)), torch.autograd.grad(printed, (exact_m, exact_rho)), strict=True
    ):
        assert torch.isfinite(own).all()
        torch.testing.assert_close(own.double(), exact, rtol=tolerance, atol=tolerance)


def test_eps_is_positive():
    with pytest.raises(ArgumentError, match="eps must be a positive number"):
        MultiplicativeNoiseGuide(regression, eps=0.0)


@pytest.mark.every(2)
@pytest.mark.parametrize("biases", [Deterministic(), MeanField()])
def test_objectives_have_their_closed_form(biases):
    """Linear regression, whose objective and gradients are known: TaylorELBO is exact, Pyro's agree on average."""
    x, y = X.double(), Y.double()
    guide = started(regression, x, y, biases=biases)
    w, b = guide.locs.w_unconstrained, guide.locs.b_unconstrained
    rho = guide.alphas.w_unconstrained
    prior = dist.Normal(torch.tensor(0.0).double(), 0.7)
    variance = F.softplus(rho) * w**2 + 1e-10
    fit = dist.Normal(F.linear(x, w, b)[:, 0], 0.5).log_prob(y).sum() - 0.5 * (x**2 @ variance.T).sum() / 0.25
    kl = torch.distributions.kl_divergence(dist.Normal(w, variance.sqrt()), prior).sum()
    if isinstance(biases, MeanField):
        scale = guide.scales.b_unconstrained.exp()
        fit = fit - 0.5 * len(x) * scale.square().sum() / 0.25
        kl = kl + torch.distributions.kl_divergence(dist.Normal(b, scale), prior).sum()
    else:
        kl = kl - prior.log_prob(b).sum()
    expected = kl - fit
    elbo = TaylorELBO(curvature=GGNDiagonal())
    loss = elbo.differentiable_loss(regression, guide, x, y)
    torch.testing.assert_close(loss, expected)
    parameters = list(guide.parameters())
    assert len(parameters) == (4 if isinstance(biases, MeanField) else 3)
    torch.testing.assert_close(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters)
    )
    for pyros in (Trace_ELBO(), TraceMeanField_ELBO()):
        draws = torch.tensor([pyros.loss(regression, guide, x, y) for _ in range(150)]).double()
        assert abs((draws.mean() - expected.detach()) / (draws.std() / 150**0.5)) < 4


@pytest.mark.every(3)
@pytest.mark.parametrize("elbo", [Trace_ELBO, TraceMeanField_ELBO, TaylorELBO])
def test_training_lowers_the_loss(elbo):
    model = Net()
    guide = MultiplicativeNoiseGuide(model)
    svi = SVI(model, guide, pyro.optim.Adam(dvi.optim.learning_rates(0.02)), loss=elbo())
    losses = [svi.step(X, Y) for _ in range(80)]
    assert sum(losses[-20:]) < 0.7 * sum(losses[:20])
    alphas = torch.cat([a.flatten() for a in (guide.alphas.net._modules["0"].weight,)])
    assert (alphas > 0).all() and ((alphas - ALPHA_0).abs() > 1e-3).any()


def test_the_optimizer_tells_alphas_apart():
    guide = started(Net(), X, Y, biases=MeanField())
    guide(X, Y)
    rates = dvi.optim.learning_rates(1e-3, scale_multiplier=10)
    fast = {name for name in pyro.get_param_store() if rates(name)["lr"] == pytest.approx(1e-2)}
    store = "MultiplicativeNoiseGuide"
    assert fast == {
        f"{store}.alphas.net.0.weight", f"{store}.alphas.net.3.weight",
        f"{store}.scales.net.0.bias", f"{store}.scales.net.3.bias",
    }  # fmt: skip
    groups = {g["name"]: g["params"] for g in dvi.optim.parameter_groups(guide, 1e-3)}
    assert len(groups["scales"]) == 4 and len(groups["parameters"]) == 4


def test_as_a_part_of_a_list_of_guides():
    guide = AutoGuideList(functional)
    guide.append(MultiplicativeNoiseGuide(pyro.poutine.block(functional, expose=["w1", "b1"])))
    guide.append(AutoNormal(pyro.poutine.block(functional, hide=["w1", "b1"])))
    assert TaylorELBO().loss(functional, guide, X, Y) > 0
    assert set(guide.median(X, Y)) == {"w1", "b1", "noise", "w2", "shift"}


# Saving --------------------------------------------------------------------------------------------------------


@pytest.mark.every(5)
@pytest.mark.parametrize("biases", [Deterministic(), MeanField(), MeanField(SGDStepSize(0.1, 4))], ids=repr)
@pytest.mark.parametrize("local_params", [False, True])
@pytest.mark.parametrize("initialised", [False, True])
def test_state_dict_loads_into_a_guide(local_params, biases, initialised):
    with pyro.settings.context(module_local_params=local_params):
        guide = started(Net(), X, Y, biases=biases)
        with torch.no_grad():
            for parameter in guide.parameters():
                parameter.add_(torch.randn_like(parameter))
        buffer = io.BytesIO()
        torch.save(guide.state_dict(), buffer)
        expected, loss = guide.median(), TaylorELBO(curvature=GGNDiagonal()).loss(Net().eval(), guide, X, Y)

        pyro.clear_param_store()
        buffer.seek(0)
        fresh = MultiplicativeNoiseGuide(Net(), biases=biases)
        if initialised:
            fresh.initialize(X, Y)
        assert fresh.load_state_dict(torch.load(buffer)).missing_keys == []
        fresh.initialize(X, Y)
        torch.testing.assert_close(fresh.median(), expected, rtol=0, atol=0)
        assert TaylorELBO(curvature=GGNDiagonal()).loss(Net().eval(), fresh, X, Y) == pytest.approx(
            loss, rel=1e-6
        )


@pytest.mark.parametrize(
    "saved, loaded, message",
    [
        (
            {"biases": MeanField()},
            {},
            r"site 'b1', .* shapes \{'scales': .*\}, but this guide has \{\}:",
        ),
        (
            {},
            {"biases": MeanField()},
            r"site 'b1', .* shapes \{\}, but this guide has \{'scales': ",
        ),
        (
            {"input_axis": {"w1": 0}},
            {},
            r"site 'w1', .*'alphas': \(5, 1\)\}, but this guide has \{'alphas': \(1, 3\)",
        ),
        ({"input_axis": {"w1": None}}, {}, "'w1', .*, but this guide has {'alphas'"),
    ],
)
def test_a_state_of_other_options_is_refused(saved, loaded, message):
    state = started(functional, X, Y, **saved).state_dict()
    pyro.clear_param_store()
    fresh = MultiplicativeNoiseGuide(functional, **loaded)
    fresh.load_state_dict(state)
    with pytest.raises(GuideError, match=message):
        fresh.initialize(X, Y)


def test_copies_and_pickles():
    model = Net()
    guide = started(model, X, Y)
    twin = copy.deepcopy(guide)
    before = guide.median()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1.0)
    torch.testing.assert_close(guide.median(), before)
    buffer = io.BytesIO()
    torch.save(guide, buffer)
    buffer.seek(0)
    pyro.clear_param_store()
    again = torch.load(buffer, weights_only=False)
    torch.testing.assert_close(again.median(), before)
    assert noise_shapes(again) == {"net.0.weight": (1, 3), "net.3.weight": (1, 4)}
    assert TaylorELBO().loss(model, again, X, Y) > 0


def test_fit_save_and_load(tmp_path):
    def build(seed: int, **options: Any) -> SVI:
        torch.manual_seed(seed)
        model = TrainingNet()
        guide = MultiplicativeNoiseGuide(model, **options)
        return SVI(
            model, guide, pyro.optim.Adam(dvi.optim.learning_rates(0.01)), TaylorELBO(curvature=GGNDiagonal())
        )

    svi = build(0)
    dvi.fit(svi, sequence(), 2, progress=False)
    dvi.save(tmp_path / "run.pt", svi)
    expected = dvi.fit(svi, sequence(), 1, progress=False).steps["loss"][-3:]
    pyro.clear_param_store()
    again = build(1)
    dvi.load(tmp_path / "run.pt", again, example=sequence()[0])
    assert dvi.fit(again, sequence(), 1, progress=False).steps["loss"][-3:] == expected
    pyro.clear_param_store()
    with pytest.raises(CheckpointError, match="guide"):
        dvi.load(tmp_path / "run.pt", build(1, biases=MeanField()), example=sequence()[0])


# Mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rho", [float("nan"), float("inf"), -float("inf"), 50.0, True, "-3", None])
def test_bad_starts(rho):
    with pytest.raises(ArgumentError, match="initial_rho"):
        MultiplicativeNoiseGuide(functional, initial_rho=rho)


@pytest.mark.parametrize("biases", [Deterministic, MeanField, "mean field", 0.0])
def test_bad_biases(biases):
    with pytest.raises(TypeError, match=r"Deterministic\(\) or MeanField\(\)"):
        MultiplicativeNoiseGuide(functional, biases=biases)


def test_bad_scales_of_biases():
    with pytest.raises(ArgumentError, match="PerWeight"):
        MeanField(0.1)


def test_a_model_must_be_callable():
    with pytest.raises(TypeError, match="model must be callable"):
        MultiplicativeNoiseGuide(3)


def test_a_constrained_latent_is_no_weight():
    def model() -> None:
        pyro.sample("rates", dist.Gamma(torch.ones(2, 3), 1.0).to_event(2))

    with pytest.raises(ModelError, match="support of site 'rates' is constrained.*remove it from input_axis"):
        started(model, input_axis={"rates": 0})
    assert kinds(started(model)) == {"rates": "Normal"}


def test_discrete_latents_and_none_at_all():
    with pytest.raises(ModelError, match="'k' is discrete"):
        started(lambda: pyro.sample("k", dist.Bernoulli(0.5)))
    with pytest.raises(ModelError, match="MultiplicativeNoiseGuide found no latent site"):
        started(lambda: None)
    with pytest.raises(GuideError, match="MultiplicativeNoiseGuide is not initialised"):
        MultiplicativeNoiseGuide(functional).median()


def test_two_guides_that_share_parameters_are_told():
    started(regression, X, Y)(X, Y)
    with pytest.warns(dvi.errors.DviWarning, match=r"MultiplicativeNoiseGuide\.locs\.w"):
        started(regression, X, Y)


def test_mean_weights_in_one_dimension_stay_with_the_choice_for_biases():
    problem = LinearRegression()
    guide = started(problem.model, problem.x, problem.y, biases=MeanField(PerSite()))
    assert kinds(guide) == {"weight": "Normal", "bias": "Normal"} and guide.scales.weight.shape == (1,)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda guide: pickle.loads(pickle.dumps(guide))])
def test_a_copy_predicts_and_leaves_the_original_predicting(copied: Any) -> None:
    model = dvi.classifier(dvi.to_bayesian_(nn.Linear(2, 3)), num_data=4)
    guide = MultiplicativeNoiseGuide(model)
    x = torch.randn(4, 2)
    guide.initialize(x, torch.arange(4) % 3)
    expected = dvi.predict(model, guide, x).probabilities
    twin = copied(guide)
    torch.testing.assert_close(dvi.predict(model, guide, x).probabilities, expected)
    torch.testing.assert_close(dvi.predict(model, twin, x).probabilities, expected)
