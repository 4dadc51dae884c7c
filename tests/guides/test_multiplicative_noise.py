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
from pyro.nn import PyroModule, PyroSample
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

import pyro_dvi as dvi
from pyro_dvi.curvature import GGN
from pyro_dvi.elbos import TaylorELBO
from pyro_dvi.errors import ArgumentError, CheckpointError, GuideError, ModelError
from pyro_dvi.guides import Deterministic, MeanField, MultiplicativeNoiseGuide, PerSite, SGDStepSize
from pyro_dvi.handlers.distributions import strip_event_dims
from pyro_dvi.moments import GaussianMoments, MultiplicativeMoments
from pyro_dvi.multiplicative_normal import MultiplicativeNormal
from tests.guides.networks import Net
from tests.models import LinearRegression
from tests.training.problems import Net as TrainingNet
from tests.training.problems import sequence

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1)
ALPHA_0 = 0.04858735157374206  # log(1 + exp(-3))


def started(model: Any, *args: Any, **options: Any) -> MultiplicativeNoiseGuide:
    guide = MultiplicativeNoiseGuide(model, **options)
    guide.initialize(*args)
    return guide


def kinds(guide: MultiplicativeNoiseGuide) -> dict[str, str]:
    """Class of the posterior of each site, in unconstrained space."""
    return {name: type(strip_event_dims(guide._posterior(name))).__name__ for name in guide.median()}


def noise_shapes(guide: MultiplicativeNoiseGuide) -> dict[str, tuple[int, ...]]:
    posteriors = {name: strip_event_dims(guide._posterior(name)) for name in guide.median()}
    return {k: tuple(p.alpha.shape) for k, p in posteriors.items() if isinstance(p, MultiplicativeNormal)}


# Layout of the noise -------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Bilinear(3, 2, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.both(x, x[..., :2])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)


IMAGE = torch.randn(2, 6, 5, 5, generator=torch.Generator().manual_seed(1))
TOKENS = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(1))
INDICES = torch.tensor([[0, 2, 1], [4, 4, 0]])

# Module, input, shapes of alpha by site. A layer that is a whole model has sites without a prefix.
LAYERS = {
    "linear": (lambda: nn.Linear(3, 4), X, {"weight": (1, 3)}),
    "conv1d": (lambda: nn.Conv1d(4, 3, 2), TOKENS[:, :, :].transpose(1, 2), {"weight": (1, 4, 1)}),
    "conv2d": (lambda: nn.Conv2d(6, 4, 3), IMAGE, {"weight": (1, 6, 1, 1)}),
    "grouped": (lambda: nn.Conv2d(6, 4, 3, groups=2), IMAGE, {"weight": (4, 3, 1, 1)}),
    "depthwise": (lambda: nn.Conv2d(6, 12, 3, groups=6), IMAGE, {"weight": (12, 1, 1, 1)}),
    "transposed": (lambda: nn.ConvTranspose2d(6, 4, 3), IMAGE, {"weight": (6, 1, 1, 1)}),
    "transposed grouped": (lambda: nn.ConvTranspose2d(6, 4, 3, groups=2), IMAGE, {"weight": (6, 1, 1, 1)}),
    "embedding": (lambda: nn.Embedding(5, 3), INDICES, {"weight": (5, 1)}),
    "embedding bag": (lambda: nn.EmbeddingBag(5, 3), INDICES, {"weight": (5, 1)}),
    "bilinear": (TwoInputs, X, {"both.weight": (1, 3, 2)}),
    "attention": (
        lambda: Attention(add_bias_kv=True), TOKENS,
        {"attention.in_proj_weight": (1, 4), "attention.out_proj.weight": (1, 4)},
    ),
    "attention of other widths": (
        lambda: Attention(kdim=4, vdim=4), TOKENS,
        {"attention.in_proj_weight": (1, 4), "attention.out_proj.weight": (1, 4)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
def test_one_noise_per_input_unit(layer, functional):
    make, x, expected = LAYERS[layer]
    net = dvi.to_bayesian_(make())
    guide = started((lambda *a: net(*a)) if functional else net, x)
    assert noise_shapes(guide) == expected
    for name, shape in expected.items():
        torch.testing.assert_close(
            strip_event_dims(guide._posterior(name)).alpha, torch.full(shape, ALPHA_0), rtol=1e-5, atol=0
        )
    assert guide() and set(kinds(guide).values()) <= {"MultiplicativeNormal", "Delta"}


def test_recurrent_weights_have_it_per_column():
    net = dvi.to_bayesian_(Recurrent(), include=nn.GRUCell)
    assert noise_shapes(started(net, X)) == {"cell.weight_ih": (1, 3), "cell.weight_hh": (1, 2)}


def test_norms_are_no_weights():
    net = nn.Sequential(nn.Linear(3, 4), nn.Unflatten(1, (2, 2)), nn.LayerNorm((2, 2)))
    guide = started(dvi.to_bayesian_(net, include=[nn.Linear, nn.LayerNorm]), X)
    assert kinds(guide) == {
        "0.weight": "MultiplicativeNormal", "0.bias": "Delta", "2.weight": "Delta", "2.bias": "Delta",
    }  # fmt: skip


def test_channels_of_all_groups_have_their_own_noise():
    """A grouped convolution whose noise is known channel by channel, against its blocks one after the other."""
    net = dvi.to_bayesian_(nn.Conv2d(6, 4, 3, groups=2))
    guide = started(net, IMAGE)
    assert guide.alphas.weight.shape == (2, 3, 1, 1)
    with torch.no_grad():
        guide.alphas.weight_unconstrained.normal_()
    alphas = guide.alphas.weight.detach()
    posterior = strip_event_dims(guide.get_posterior()["weight"])
    for unit in range(4):  # output channels 0, 1 read input channels 0 to 2; 2, 3 the others
        expected = alphas[unit // 2] * posterior.loc[unit] ** 2 + posterior.eps
        torch.testing.assert_close(posterior.variance[unit], expected)
    posterior.alpha[3, 1, 0, 0].backward()
    hit = guide.alphas.weight_unconstrained.grad != 0
    assert hit.nonzero().tolist() == [[1, 1, 0, 0]]


def test_number_of_parameters():
    guide = started(dvi.to_bayesian_(nn.Linear(300, 100)), torch.ones(1, 300))
    assert sum(p.numel() for p in guide.parameters()) == 300 * 100 + 100 + 300


def test_a_layer_that_pyro_made():
    class Hand(PyroModule):
        def __init__(self) -> None:
            super().__init__("mine")
            self.up = PyroModule[nn.ConvTranspose1d](4, 3, 2)
            self.up.weight = PyroSample(dist.Normal(0.0, 1.0).expand([4, 3, 2]).to_event(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x)

    assert noise_shapes(started(Hand(), TOKENS.transpose(1, 2))) == {"mine.up.weight": (4, 1, 1)}


# Functional models ---------------------------------------------------------------------------------------------


def functional(x: Tensor, y: Tensor | None = None) -> None:
    zero = x.new_zeros(())
    noise = pyro.sample("noise", dist.LogNormal(zero, 0.3))
    w1 = pyro.sample("w1", dist.Normal(zero, 1.0).expand([5, 3]).to_event(2))
    b1 = pyro.sample("b1", dist.Normal(zero, 1.0).expand([5]).to_event(1))
    w2 = pyro.sample("w2", dist.Normal(zero, 1.0).expand([5]).to_event(1))
    shift = pyro.sample("shift", dist.Normal(zero, 1.0))
    f = torch.tanh(F.linear(x, w1, b1)) @ w2 + shift
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(f, noise), obs=y)


def batched(x: Tensor) -> None:
    """K nets [K, in, out], and an ensemble in a plate."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([7, 3, 2]).to_event(3))
    with pyro.plate("nets", 4):
        v = pyro.sample("v", dist.Normal(0.0, 1.0).expand([2, 3]).to_event(2))
    pyro.sample("y", dist.Normal((x @ w).sum() + v.sum(), 1.0), obs=x.new_zeros(()))


@pytest.mark.parametrize(
    "biases, other", [(None, "Delta"), (Deterministic(), "Delta"), (MeanField(), "Normal")]
)
def test_sites_of_a_functional_model(biases, other):
    guide = started(functional, X, Y, biases=biases)
    assert kinds(guide) == {
        "noise": "Normal", "w1": "MultiplicativeNormal", "b1": other, "w2": other, "shift": other,
    }  # fmt: skip
    assert noise_shapes(guide) == {"w1": (1, 3)}
    assert (guide.sample(50)["noise"] > 0).all() and guide.sample(50)["noise"].std() > 0


@pytest.mark.parametrize(
    "option, expected",
    [
        (None, {"w": (1, 3, 1)}),
        (-2, {"w": (1, 3, 1)}),
        ((0, 1), {"w": (7, 3, 1)}),
        ((1, 0), {"w": (7, 3, 1)}),
        (0, {"w": (7, 1, 1)}),
        ({"w": (0, 1)}, {"w": (7, 3, 1)}),
        ({"?": (0, 1)}, {"w": (7, 3, 1), "v": (4, 2, 1)}),
        ({"v": (0, -1)}, {"w": (1, 3, 1), "v": (4, 1, 3)}),
        ({"w": None}, {}),
        (lambda name: (0, 1) if name == "w" else None, {"w": (7, 3, 1)}),
        (lambda name: None, {}),
    ],
)
def test_the_user_says_where_inputs_are(option, expected):
    guide = started(batched, torch.ones(3), input_axis=option)
    assert noise_shapes(guide) == expected
    assert guide()["w"].shape == (7, 3, 2) and guide()["v"].shape == (4, 2, 3)


def test_a_vector_may_be_a_weight():
    assert noise_shapes(started(functional, X, Y, input_axis={"w2": 0})) == {"w1": (1, 3), "w2": (5,)}


def test_layers_know_better_than_one_axis_for_all_but_not_than_a_name():
    net = dvi.to_bayesian_(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    guide = started(net, X, input_axis=0)
    assert noise_shapes(guide) == {"0.weight": (1, 3), "1.weight": (1, 4)}
    pyro.clear_param_store()
    guide = started(net, X, input_axis={"0.*": 0, "1.weight": None})
    assert noise_shapes(guide) == {"0.weight": (4, 1), "0.bias": (4,)}


def local(index: Tensor) -> None:
    with pyro.plate("rows", 10, subsample=index):
        z = pyro.sample("z", dist.Normal(torch.zeros(2, 2), 1.0).to_event(2))
        pyro.sample("y", dist.Normal(z.sum((-1, -2)), 0.5), obs=index.float())


@pytest.mark.parametrize("option, store", [(None, "scales"), ({"z": (0, -1)}, "alphas")])
def test_latents_in_a_plate(option, store):
    guide = MultiplicativeNoiseGuide(
        local, input_axis=option, create_plates=lambda index: pyro.plate("rows", 10, subsample=index)
    )
    svi = SVI(local, guide, pyro.optim.Adam({"lr": 0.1}), loss=TaylorELBO())
    svi.step(torch.tensor([1, 4]))
    assert guide.locs.z.shape == (10, 2, 2)
    assert getattr(guide, store).z.shape == ((10, 2, 2) if option is None else (10, 1, 2))
    before = guide.locs.z.detach().clone()
    svi.step(torch.tensor([0, 7, 9]))
    assert (guide.locs.z != before).any(-1).any(-1)[[0, 7, 9]].all()
    assert guide.sample(3)["z"].shape == (3, 10, 2, 2)


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


@pytest.mark.parametrize("biases", [Deterministic(), MeanField()])
def test_objectives_have_their_closed_form(biases):
    """Linear regression, whose objective and gradients are known: TaylorELBO is exact, Pyro's agree on average."""
    x, y = X.double(), Y.double()
    guide = started(regression, x, y, biases=biases)
    w, b = guide.locs.w_unconstrained, guide.locs.b_unconstrained
    rho = guide.alphas.w_unconstrained
    prior = dist.Normal(torch.tensor(0.0).double(), 0.7)
    variance = F.softplus(rho) * w**2 + 1e-8
    fit = dist.Normal(F.linear(x, w, b)[:, 0], 0.5).log_prob(y).sum() - 0.5 * (x**2 @ variance.T).sum() / 0.25
    kl = torch.distributions.kl_divergence(dist.Normal(w, variance.sqrt()), prior).sum()
    if isinstance(biases, MeanField):
        scale = guide.scales.b_unconstrained.exp()
        fit = fit - 0.5 * len(x) * scale.square().sum() / 0.25
        kl = kl + torch.distributions.kl_divergence(dist.Normal(b, scale), prior).sum()
    else:
        kl = kl - prior.log_prob(b).sum()
    expected = kl - fit
    elbo = TaylorELBO(curvature=GGN())
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


@pytest.mark.parametrize("elbo", [Trace_ELBO, TraceMeanField_ELBO, TaylorELBO])
def test_training_lowers_the_loss(elbo):
    model = Net()
    guide = MultiplicativeNoiseGuide(model)
    svi = SVI(model, guide, pyro.optim.Adam(dvi.learning_rates(0.02)), loss=elbo())
    losses = [svi.step(X, Y) for _ in range(80)]
    assert sum(losses[-20:]) < 0.7 * sum(losses[:20])
    alphas = torch.cat([a.flatten() for a in (guide.alphas.net._modules["0"].weight,)])
    assert (alphas > 0).all() and ((alphas - ALPHA_0).abs() > 1e-3).any()


def test_the_optimizer_tells_alphas_apart():
    guide = started(Net(), X, Y, biases=MeanField())
    guide(X, Y)
    rates = dvi.learning_rates(1e-3, scale_multiplier=10)
    fast = {name for name in pyro.get_param_store() if rates(name)["lr"] == pytest.approx(1e-2)}
    store = "MultiplicativeNoiseGuide"
    assert fast == {
        f"{store}.alphas.net.0.weight", f"{store}.alphas.net.3.weight",
        f"{store}.scales.net.0.bias", f"{store}.scales.net.3.bias",
    }  # fmt: skip
    groups = {g["name"]: g["params"] for g in dvi.parameter_groups(guide, 1e-3)}
    assert len(groups["scales"]) == 4 and len(groups["parameters"]) == 4


def test_as_a_part_of_a_list_of_guides():
    guide = AutoGuideList(functional)
    guide.append(MultiplicativeNoiseGuide(pyro.poutine.block(functional, expose=["w1", "b1"])))
    guide.append(AutoNormal(pyro.poutine.block(functional, hide=["w1", "b1"])))
    assert TaylorELBO().loss(functional, guide, X, Y) > 0
    assert set(guide.median(X, Y)) == {"w1", "b1", "noise", "w2", "shift"}


# Saving --------------------------------------------------------------------------------------------------------


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
        expected, loss = guide.median(), TaylorELBO(curvature=GGN()).loss(Net().eval(), guide, X, Y)

        pyro.clear_param_store()
        buffer.seek(0)
        fresh = MultiplicativeNoiseGuide(Net(), biases=biases)
        if initialised:
            fresh.initialize(X, Y)
        assert fresh.load_state_dict(torch.load(buffer)).missing_keys == []
        fresh.initialize(X, Y)
        torch.testing.assert_close(fresh.median(), expected, rtol=0, atol=0)
        assert TaylorELBO(curvature=GGN()).loss(Net().eval(), fresh, X, Y) == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize(
    "saved, loaded, message",
    [
        ({"biases": MeanField()}, {}, "locs and scales for site 'b1', where this guide has locs:"),
        ({}, {"biases": MeanField()}, "has locs for site 'b1', where this guide has locs and scales"),
        ({"input_axis": 0}, {}, r"alphas of site 'w1' have the shape \(5, 1\), this guide's have \(1, 3\)"),
        ({"input_axis": {"w1": None}}, {}, "'w1', where this guide has alphas and locs"),
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
        return SVI(model, guide, pyro.optim.Adam(dvi.learning_rates(0.01)), TaylorELBO(curvature=GGN()))

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


@pytest.mark.parametrize("option", ["w", 1.0, True, (), (0, "1"), {0: 1}])
def test_an_input_axis_that_is_none(option):
    with pytest.raises(ArgumentError, match="input_axis"):
        MultiplicativeNoiseGuide(functional, input_axis=option)


@pytest.mark.parametrize(
    "option, message",
    [
        (2, "'w1' is 2, but its values have 2 dimensions"),
        (-3, "'w1' is -3"),
        ((0, 0), "'w1'"),
        ((1, -1), "'w1'"),
        ({"w1": 1.0}, "'w1' must be an axis"),
        ({"shift": 0}, "'shift' is 0, but its values have 0 dimensions"),
        ({"w3": 0}, "names 'w3', which is no site of the guide; there are .*'w1'"),
        (lambda name: "in", "'w1' must be an axis"),
    ],
)
def test_an_input_axis_that_does_not_fit_names_the_site(option, message):
    guide = MultiplicativeNoiseGuide(functional, input_axis=option)
    with pytest.raises(ArgumentError, match=message):
        guide.initialize(X, Y)
    assert guide.prototype_trace is None


def test_a_constrained_latent_is_no_weight():
    def model() -> None:
        pyro.sample("rates", dist.Gamma(torch.ones(2, 3), 1.0).to_event(2))

    with pytest.raises(ModelError, match="'rates', whose support .* is constrained"):
        started(model, input_axis={"rates": 0})
    assert kinds(started(model)) == {"rates": "Normal"}


def test_discrete_latents_and_none_at_all():
    with pytest.raises(ModelError, match="'k' is discrete"):
        started(lambda: pyro.sample("k", dist.Bernoulli(0.5)))
    with pytest.raises(ModelError, match="MultiplicativeNoiseGuide found no latent site"):
        started(lambda: None)
    with pytest.raises(GuideError, match="MultiplicativeNoiseGuide has not seen its model"):
        MultiplicativeNoiseGuide(functional).median()


def test_two_guides_that_share_parameters_are_told():
    started(regression, X, Y)(X, Y)
    with pytest.warns(dvi.errors.DviWarning, match=r"MultiplicativeNoiseGuide\.locs\.w"):
        started(regression, X, Y)


def test_the_guide_keeps_no_network():
    guide = started(Net(), X, Y)
    assert not guide._layers.called
    from torch.nn.modules import module

    assert not module._global_forward_pre_hooks


def test_mean_weights_in_one_dimension_stay_with_the_choice_for_biases():
    problem = LinearRegression()
    guide = started(problem.model, problem.x, problem.y, biases=MeanField(PerSite()))
    assert kinds(guide) == {"weight": "Normal", "bias": "Normal"} and guide.scales.weight.shape == (1,)


# Moments ----------------------------------------------------------------------------------------------------


class Given(Messenger):
    """Put values, uncertain ones too, at the sites of a model."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__()
        self.values = values

    def _pyro_sample(self, msg: Any) -> None:
        msg["value"], msg["done"] = self.values[msg["name"]], True


@pytest.mark.parametrize("uncertain", [False, True])
@pytest.mark.parametrize("layer", [name for name in LAYERS if name != "attention"])
def test_layers_read_the_noise_as_the_guide_lays_it_out(layer, uncertain):
    """Rules that use the factor of each input unit give what the variances of the single weights give."""
    make, x, _ = LAYERS[layer]
    if uncertain and not x.is_floating_point():
        pytest.skip("indices are certain")
    net = dvi.to_bayesian_(make()).double()
    x = x.double() if x.is_floating_point() else x
    guide = started(net, x)
    with torch.no_grad():
        for rho in guide.alphas.parameters():
            rho.normal_()
    by_unit, by_weight = {}, {}
    for name in guide.median():
        q = strip_event_dims(guide._posterior(name))
        by_unit[name] = by_weight[name] = q.mean.detach()
        if isinstance(q, MultiplicativeNormal):
            by_unit[name] = MultiplicativeMoments(q.loc.detach(), q.alpha.detach())
            by_weight[name] = GaussianMoments(q.loc.detach(), (q.variance - q.eps).detach())
    given = GaussianMoments(x, torch.rand_like(x)) if uncertain else x
    with Given(by_unit):
        result = net(given)
    with Given(by_weight):
        expected = net(given)
    torch.testing.assert_close(result.loc, expected.loc)
    torch.testing.assert_close(result.variance, expected.variance)
    assert (result.variance > 0).all()


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
