# SPDX-License-Identifier: Apache-2.0
"""to_deterministic: the network that to_bayesian_ was given, with other weights and nothing of Pyro."""

import copy
import io
import sys
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta, AutoDiagonalNormal, AutoNormal
from pyro.nn.module import PyroModule
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from pyro_dvi.bayesian import (
    HierarchicalScale,
    LearnedScale,
    classifier,
    fan_in,
    init_to_module,
    to_bayesian_,
    to_deterministic,
)
from pyro_dvi.errors import UnsupportedError


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Softplus(), nn.Sequential(nn.Flatten(), nn.Linear(18, 3))
    )


def partly_frozen() -> nn.Module:
    net = nn.Sequential(nn.Flatten(), nn.Linear(25, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    net[1].weight.requires_grad_(False)
    net[2].requires_grad_(False)
    return net


class TiedImages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(25, 25), nn.Linear(25, 25)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(torch.tanh(self.encode(x.flatten(1))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.layers = nn.GRU(5, 4, batch_first=True), nn.ModuleList([nn.Linear(4, 3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](self.rnn(x[:, 0])[0][:, -1])


NETWORKS: list[tuple[Callable[[], nn.Module], dict[str, Any]]] = [
    (convolutional, {}),
    (convolutional, {"prior_scale": fan_in, "include": "*.weight"}),
    (convolutional, {"prior_scale": LearnedScale()}),
    (convolutional, {"prior_scale": HierarchicalScale()}),
    (partly_frozen, {}),
    (TiedImages, {}),
    (Recurrent, {"include": [nn.GRU, nn.Linear]}),
]
GUIDES = [AutoNormal, AutoDiagonalNormal, AutoDelta]


@pytest.mark.parametrize("guide_type", GUIDES)
@pytest.mark.parametrize(("make", "options"), NETWORKS)
def test_round_trip(make, options, guide_type):
    net = make().double().eval()
    original = copy.deepcopy(net)
    model = classifier(to_bayesian_(net, **copy.deepcopy(options)), 6)
    guide = guide_type(model, init_loc_fn=init_to_module)
    x = torch.randn(6, 1, 5, 5, dtype=torch.float64)
    guide(x, torch.zeros(6, dtype=torch.long))

    for plain in (to_deterministic(model, guide), to_deterministic(net, guide)):
        assert [type(module) for module in plain.modules()] == [type(module) for module in original.modules()]
        state, expected = plain.state_dict(), original.state_dict()
        assert list(state) == list(expected)
        for name, value in expected.items():
            assert torch.allclose(state[name], value, atol=1e-12), name
        assert [n for n, _ in plain.named_parameters()] == [n for n, _ in original.named_parameters()]
        assert [p.requires_grad for p in plain.parameters()] == [
            p.requires_grad for p in original.parameters()
        ]
        assert torch.allclose(plain(x), original(x), atol=1e-12)
        assert not plain.training
        # Nothing is shared with the Bayesian network, which is as before.
        kept = {tensor.data_ptr() for tensor in (*model.state_dict().values(), *guide.median().values())}
        assert not kept & {tensor.data_ptr() for tensor in plain.state_dict().values()}
        plain.load_state_dict(expected)
        copy.deepcopy(plain).float()
    assert isinstance(net, PyroModule)
    model(x)


def test_the_result_needs_neither_pyro_nor_this_library(tmp_path, monkeypatch):
    net = to_bayesian_(convolutional())
    values = {name: torch.zeros(site.shape) for name, site in _latents(net).items()}
    torch.save(to_deterministic(net, values), tmp_path / "net.pt")
    torch.save(net, tmp_path / "bayesian.pt")
    with monkeypatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("pyro", "pyro_dvi")]:
            patch.setitem(sys.modules, name, None)  # whoever imports it meets an ImportError
        plain = torch.load(tmp_path / "net.pt", weights_only=False)
        assert plain(torch.zeros(1, 1, 5, 5)).isfinite().all()
        with pytest.raises(ImportError):
            torch.load(tmp_path / "bayesian.pt", weights_only=False)


def _latents(net: nn.Module) -> dict[str, Any]:
    trace = pyro.poutine.trace(net).get_trace(torch.zeros(2, 1, 5, 5))
    return {name: trace.nodes[name]["value"] for name in trace.stochastic_nodes}


def test_a_posterior_draw_may_be_exported():
    net = to_bayesian_(nn.Linear(2, 1))
    weight = torch.randn(1, 2)
    plain = to_deterministic(net, {"weight": weight, "bias": torch.ones(1)})
    assert torch.equal(plain(torch.eye(2)), weight.T + 1)
    plain.weight.data.zero_()
    assert weight.abs().sum() > 0


def test_handwritten_pyro_modules_have_no_plain_form():
    class Layer(PyroModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(1, 1)

    with pytest.raises(UnsupportedError, match="'0' is a Layer, which was written as a PyroModule"):
        to_deterministic(to_bayesian_(nn.Sequential(Layer())), {})


def test_the_whole_model_is_saved_and_loaded():
    net = to_bayesian_(convolutional(), dist.Laplace(0.0, 1.0))
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    values = {name: value.detach() for name, value in _latents(twin).items()}
    assert list(to_deterministic(twin, values).state_dict()) == list(convolutional().state_dict())


@pytest.mark.parametrize(
    ("parametrization", "options"),
    [
        (parametrizations.weight_norm, {}),
        (parametrizations.spectral_norm, {"exclude": "0.*"}),
        (parametrizations.orthogonal, {"exclude": "0.*"}),
    ],
)
def test_parametrizations_are_removed_from_the_plain_network(parametrization, options):
    """Of the converted network torch cannot remove them, and says so; a copy, because it may change weights before."""
    net = nn.Sequential(parametrization(nn.Linear(3, 6)), nn.Tanh(), nn.Linear(6, 2)).double().eval()
    x = torch.randn(5, 3, dtype=torch.float64)
    expected, own = net(x), {name: value.clone() for name, value in net.named_parameters()}
    to_bayesian_(net, **options)
    with pytest.raises(AttributeError, match="weight"):
        parametrize.remove_parametrizations(copy.deepcopy(net)[0], "weight")
    plain = to_deterministic(net, own)
    torch.testing.assert_close(plain(x), expected)
    parametrize.remove_parametrizations(plain[0], "weight")
    assert type(plain[0]) is nn.Linear
    torch.testing.assert_close(plain(x), expected)
