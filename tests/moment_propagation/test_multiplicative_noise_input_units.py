# SPDX-License-Identifier: Apache-2.0
"""One noise for each input unit: by layer, by the shape of a weight, or as the user says."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.nn import PyroModule, PyroSample
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

import pyro_dvi as dvi
from pyro_dvi.core.distributions import strip_event_dims
from pyro_dvi.errors import ArgumentError
from pyro_dvi.gaussians.normals import MultiplicativeNormal
from pyro_dvi.guides import Deterministic, MeanField
from pyro_dvi.moment_propagation.multiplicative_noise import MultiplicativeNoiseGuide
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.bilinear import MultiplicativeMoments
from pyro_dvi.variational_laplace.taylor import TaylorELBO
from tests.guides.noise import ALPHA_0, X, Y, functional, kinds, noise_shapes, started


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


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
    "attention": (
        Attention, TOKENS,
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
            strip_event_dims(guide._marginals()[name]).alpha, torch.full(shape, ALPHA_0), rtol=1e-5, atol=0
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
        ({"w": -2}, {"w": (1, 3, 1)}),
        ({"w": (1, 0)}, {"w": (7, 3, 1)}),
        ({"w": (0, 1)}, {"w": (7, 3, 1)}),
        ({"?": (0, 1)}, {"w": (7, 3, 1), "v": (4, 2, 1)}),
        ({"v": (0, -1)}, {"w": (1, 3, 1), "v": (4, 1, 3)}),
        ({"w": None}, {}),
    ],
)
def test_the_user_says_where_inputs_are(option, expected):
    guide = started(batched, torch.ones(3), input_axis=option)
    assert noise_shapes(guide) == expected
    assert guide()["w"].shape == (7, 3, 2) and guide()["v"].shape == (4, 2, 3)


def test_a_vector_may_be_a_weight():
    assert noise_shapes(started(functional, X, Y, input_axis={"w2": 0})) == {"w1": (1, 3), "w2": (5,)}


def test_a_choice_overrides_the_layer():
    net = dvi.to_bayesian_(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
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


@pytest.mark.parametrize(
    "option, message",
    [
        ({"w1": 2}, "'w1' is 2, but its values have 2 dimensions"),
        ({"w1": -3}, "'w1' is -3"),
        ({"w1": (0, 0)}, "'w1'"),
        ({"w1": (1, -1)}, "'w1'"),
        ({"w1": ()}, "'w1' is .*pass axes"),
        ({"w1": True}, "'w1' is .*pass axes"),
        ({"w1": 1.0}, "'w1' is .*pass axes"),
        ({"shift": 0}, "'shift' is 0, but its values have 0 dimensions"),
        ({"w3": 0}, "names 'w3', which is not a site of the guide; the sites are .*'w1'"),
    ],
)
def test_an_input_axis_that_does_not_fit_names_the_site(option, message):
    guide = MultiplicativeNoiseGuide(functional, input_axis=option)
    with pytest.raises(ArgumentError, match=message):
        guide.initialize(X, Y)
    assert guide.prototype_trace is None


class Given(Messenger):
    """Put values, uncertain ones too, at the sites of a model."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__()
        self.values = values

    def _pyro_sample(self, msg: Any) -> None:
        msg["value"], msg["done"] = self.values[msg["name"]], True


@pytest.mark.parametrize("uncertain", [False, True])
@pytest.mark.parametrize("layer", [name for name in LAYERS if name not in ("attention", "embedding bag")])
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
        q = strip_event_dims(guide._marginals()[name])
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
