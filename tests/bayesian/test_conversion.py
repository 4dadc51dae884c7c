# SPDX-License-Identifier: Apache-2.0
"""to_bayesian_: what becomes Bayesian, what is kept, and that the result lives like any module."""

import copy
import io

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal, AutoNormal
from pyro.nn.module import PyroModule
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import pyro_dvi as dvi
from pyro_dvi.bayesian import (
    HierarchicalScale,
    LearnedScale,
    OptimalScale,
    classifier,
    fan_in,
    init_to_module,
    to_bayesian_,
)
from tests.bayesian.latents import sites
from tests.models import residual_network

WEIGHT = "net.0.parametrizations.weight"


class Functional(nn.Module):
    """A network with parameters of its own and functional calls, as people write them."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(5, 3))
        self.gains = nn.ParameterList([nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))])
        self.out = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.softplus(F.linear(x, self.kernel)) * self.gains[0] + self.gains[1]
        return F.linear(h, self.out.weight, self.out.bias)


class Tied(nn.Module):
    """An encoder and decoder that share one matrix, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.first = nn.Linear(4, 4)
        self.again = self.first
        self.decode = nn.Linear(4, 7, bias=False)
        self.decode.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.again(torch.tanh(self.first(self.embed(x))))
        return self.decode(h).mean(1)


def test_the_class_of_a_module_is_kept():
    net = to_bayesian_(Functional())
    assert isinstance(net, Functional) and isinstance(net, PyroModule) and isinstance(net.out, nn.Linear)


def test_functional_modules_with_parameters_of_their_own():
    net = to_bayesian_(Functional(), include=["kernel", "gains.*", nn.Linear])
    assert set(sites(net, torch.randn(6, 3))) == {"kernel", "gains.0", "gains.1", "out.weight", "out.bias"}


def test_shared_weights_stay_one_latent():
    net = to_bayesian_(Tied(), fan_in)
    trace = pyro.poutine.trace(net).get_trace(torch.tensor([[0, 1, 6]]))
    # A layer that is reached by two names has one site, named after the last of them, as in Pyro.
    assert set(trace.stochastic_nodes) == {"embed.weight", "again.weight", "again.bias"}
    tie = trace.nodes["decode.weight"]
    assert tie["infer"]["_deterministic"]
    assert tie["value"] is trace.nodes["embed.weight"]["value"]


def test_shared_weights_train_and_survive_copies():
    model = classifier(to_bayesian_(Tied(), fan_in), num_data=2)
    x, y = torch.tensor([[0, 1, 6], [2, 3, 3]]), torch.tensor([5, 0])
    guide = AutoNormal(model, init_loc_fn=init_to_module)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), Trace_ELBO())
    losses = [svi.step(x, y) for _ in range(60)]
    assert sum(losses[-10:]) < sum(losses[:10])
    clone = copy.deepcopy(model)
    owner = clone.net.decode._pyro_samples["weight"].owner
    assert owner is clone.net.embed and owner is not model.net.embed


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("dtype", "guide_type"), [(torch.float32, AutoNormal), (torch.float64, AutoDiagonalNormal)]
)
def test_svi_trains_from_the_modules_own_weights(dtype, guide_type):
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Softplus(), nn.Linear(8, 3)).to(dtype)
    weight = net[0].weight.detach().clone()
    x = torch.randn(20, 4, dtype=dtype)
    y = x[:, :3].argmax(1)
    model = classifier(to_bayesian_(net, fan_in), num_data=20)
    guide = guide_type(model, init_loc_fn=init_to_module, init_scale=0.01)
    guide(x, y)
    assert torch.allclose(guide.median()["net.0.weight"], weight)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), Trace_ELBO())
    losses = [svi.step(x, y) for _ in range(150)]
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    assert torch.equal(net[0]._buffers["weight_initial"], weight)  # training does not touch the kept weight
    net.eval()
    draws = Predictive(model, guide=guide, num_samples=3)(x)
    assert draws["obs"].shape == (3, 20)
    assert draws["net.0.weight"].dtype is dtype


@pytest.mark.parametrize(
    "prior", [0.5, fan_in, dist.Laplace(0.0, 1.0), LearnedScale(), OptimalScale(), HierarchicalScale()]
)
def test_priors_follow_a_move_after_the_conversion(prior):
    net = to_bayesian_(nn.Linear(3, 2), prior)
    x = torch.randn(4, 3)
    assert {site["value"].dtype for site in sites(net, x).values()} == {torch.float32}
    net.to(torch.float64)
    assert {site["value"].dtype for site in sites(net, x.double()).values()} == {torch.float64}
    net.half().float()
    assert {site["value"].dtype for site in sites(net, x).values()} == {torch.float32}


@pytest.mark.parametrize(
    "prior", [0.5, dist.Laplace(0.0, 1.0), LearnedScale(), OptimalScale(), HierarchicalScale()]
)
def test_priors_follow_a_move_to_a_device(prior, device):
    net = to_bayesian_(nn.Linear(3, 2), prior).to(device)
    assert {site["value"].device for site in sites(net, torch.randn(4, 3).to(device)).values()} == {device}


PRIORS = [
    1.0,
    fan_in,
    dist.StudentT(3.0, 0.0, 1.0),
    LearnedScale(),
    OptimalScale(),
    HierarchicalScale(),
]


@pytest.mark.parametrize("prior", PRIORS)
def test_deepcopy_and_torch_save(prior):
    net = to_bayesian_(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)), copy.deepcopy(prior))
    x = torch.randn(5, 3)
    expected = sites(net, x)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for twin in (copy.deepcopy(net), torch.load(file, weights_only=False)):
        found = sites(twin, x)
        assert list(found) == list(expected)
        for name, site in found.items():
            if hasattr(site["fn"], "initial_value"):
                assert torch.equal(site["fn"].initial_value, expected[name]["fn"].initial_value)
                assert site["fn"].initial_value is not expected[name]["fn"].initial_value


@pytest.mark.parametrize("prior", PRIORS)
def test_checkpoints_from_before_the_conversion_load(prior):
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    net = copy.deepcopy(plain)
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    to_bayesian_(net, copy.deepcopy(prior))
    state = plain.state_dict()
    keys = list(state)
    net.load_state_dict(state)
    assert list(state) == keys  # the caller's mapping is not changed
    assert torch.equal(sites(net, torch.randn(5, 3))["0.weight"]["fn"].initial_value, plain[0].weight)
    assert torch.equal(net[1].weight, plain[1].weight)
    copy.deepcopy(net).load_state_dict(net.state_dict())
    with pytest.raises(RuntimeError, match="size mismatch for 0.weight_initial"):
        net.load_state_dict(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).state_dict())


def test_checkpoints_of_tied_weights_load():
    plain, net = Tied(), to_bayesian_(Tied())
    net.load_state_dict(plain.state_dict())
    assert torch.equal(net.embed._buffers["weight_initial"], plain.embed.weight)


def test_one_draw_serves_a_run_and_each_access_outside_redraws():
    net = to_bayesian_(nn.Linear(3, 2))
    assert not torch.equal(net.weight, net.weight)
    trace = pyro.poutine.trace(net).get_trace(torch.zeros(1, 3))
    assert torch.equal(trace.nodes["_RETURN"]["value"], trace.nodes["bias"]["value"].unsqueeze(0))


def test_the_prior_is_built_once():
    net = to_bayesian_(nn.Linear(300, 200), 0.5)
    x = torch.zeros(1, 300)
    first, second = sites(net, x)["weight"]["fn"], sites(net, x)["weight"]["fn"]
    assert first is second
    assert first.base_dist.scale.untyped_storage().nbytes() == 4  # one scalar, expanded


def test_inference_mode_leaves_no_tensor_behind_that_cannot_be_trained():
    net = to_bayesian_(nn.Linear(3, 2))
    with torch.inference_mode():
        net(torch.zeros(1, 3))
    value = torch.randn(2, 3, requires_grad=True)
    sites(net, torch.zeros(1, 3))["weight"]["fn"].log_prob(value).backward()
    assert torch.allclose(value.grad, -value)


def test_recurrent_layers_on_request():
    net = nn.LSTM(3, 4, batch_first=True)
    weight = net.weight_hh_l0.detach().clone()
    to_bayesian_(net, include=nn.LSTM)
    x = torch.randn(2, 6, 3)
    found = sites(net, x)
    assert set(found) == {"weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"}
    assert torch.equal(found["weight_hh_l0"]["fn"].initial_value, weight)
    values = {name: torch.zeros_like(site["value"]) for name, site in found.items()}
    assert pyro.poutine.condition(net, values)(x)[0].abs().max() == 0
    net.to(torch.float64)
    assert sites(copy.deepcopy(net), x.double())["bias_hh_l0"]["value"].dtype is torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_transformer_encoder(dtype):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, activation=F.softplus)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    net = nn.Sequential(encoder, nn.Flatten(), nn.Linear(40, 3)).to(dtype)
    x = torch.randn(4, 5, 8, dtype=dtype)
    expected = net(x)
    model = classifier(to_bayesian_(net), 4)
    guide = AutoNormal(model, init_loc_fn=init_to_module, init_scale=1e-8)
    guide(x, torch.zeros(4, dtype=torch.long))
    assert sum(name.startswith("net.0.layers.1.") for name in guide.median()) == 8
    for mode in (True, False):  # in eval mode torch takes a fused path that reads the weights elsewhere
        net.train(mode)
        with torch.no_grad():
            found = pyro.poutine.condition(net, guide.median())(x)
        assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.slow
def test_a_residual_network_of_torchvision():
    net = residual_network(num_classes=4)
    x = torch.randn(2, 3, 32, 32)
    net.eval()
    expected = net(x)
    model = classifier(to_bayesian_(net, fan_in), 50)
    guide = AutoNormal(model, init_loc_fn=init_to_module, init_scale=1e-7)
    net.train()
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 1e-7}), Trace_ELBO())
    assert torch.isfinite(torch.tensor(svi.step(x, torch.tensor([0, 3]))))
    assert len(guide.median()) == 14  # 12 convolutions, one Linear with a bias
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.reset_parameters()
    net.eval()
    with torch.no_grad():
        found = pyro.poutine.condition(net, guide.median())(x)
    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-3)


def test_hierarchical_and_learned_scales_are_trained():
    x = torch.randn(50, 3)
    y = (x[:, 0] > 0).long()
    prior = {"0.*": LearnedScale(0.5), "2.*": HierarchicalScale(dist.LogNormal(0.0, 1.0), unit=fan_in)}
    net = to_bayesian_(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)), prior)
    model = classifier(net, 50)
    guide = AutoNormal(model, init_loc_fn=init_to_module, init_scale=0.01)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), Trace_ELBO())
    before = net[0].weight_scale.item()
    for _ in range(50):
        svi.step(x, y)
    assert net[0].weight_scale.item() != before
    assert {"net.2.weight_scale", "net.2.bias_scale"} <= set(guide.median())


@pytest.mark.parametrize("layer", [nn.Linear(3, 4), nn.Conv1d(3, 4, 2)], ids=["linear", "convolution"])
@pytest.mark.parametrize("dim", [0, 1, None])
def test_weight_norm_has_a_prior_on_length_and_direction(layer, dim):
    """The weight itself is computed from the two; networks for sound are built so."""
    torch.manual_seed(0)
    net = nn.Sequential(weight_norm(copy.deepcopy(layer), dim=dim), nn.Flatten(), nn.LazyLinear(3))
    x, y = torch.randn(5, 3) if isinstance(layer, nn.Linear) else torch.randn(5, 3, 4), torch.arange(5) % 3
    expected = net(x).softmax(-1).detach()
    model = dvi.classifier(dvi.to_bayesian_(net, prior_scale=0.5), num_data=5)
    for guide_type, elbo in (
        (dvi.MeanFieldGuide, dvi.TaylorELBO()),
        (dvi.MultiplicativeNoiseGuide, dvi.MomentPropagationELBO()),
    ):
        pyro.clear_param_store()
        guide = guide_type(model)
        guide.initialize(x, y)
        assert {"net.0.bias", f"{WEIGHT}.original0", f"{WEIGHT}.original1"} < set(guide.median())
        torch.testing.assert_close(dvi.predict(model, guide, x, dvi.AtMean()).probabilities, expected)
        SVI(model, guide, dvi.optim.Adam({"lr": 0.01}), elbo).step(x, y)
    exported = dvi.bayesian.to_deterministic(net, guide)
    at_mean = dvi.predict(model, guide, x, dvi.AtMean()).probabilities
    torch.testing.assert_close(exported(x).softmax(-1).detach(), at_mean)
