# SPDX-License-Identifier: Apache-2.0
"""Networks and models that nobody here wrote, through SVI and through plain torch optimizers."""

import copy

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoNormal
from pyro.infer.autoguide.initialization import init_to_median
from torch import Tensor, nn

import pyro_dvi as dvi
from pyro_dvi.curvature import (
    Curvature,
    EmpiricalFisher,
    Fisher,
    GGNDiagonal,
    HessianDiagonal,
    MinibatchGradient,
)
from pyro_dvi.guides import MeanFieldGuide
from pyro_dvi.variational_laplace.taylor import TaylorELBO
from tests.models import residual_network
from tests.objectives.networks import Classifier, images, small_net


def resnet(dtype: torch.dtype, device: torch.device | str = "cpu") -> Classifier:
    torch.manual_seed(0)
    net = residual_network(num_classes=10)
    dvi.bayesian.smooth_activations_(net)
    dvi.to_bayesian_(net, prior_scale=dvi.bayesian.fan_in)
    return Classifier(net, num_data=40).to(device, dtype)


def train_resnet(dtype: torch.dtype, device: torch.device | str = "cpu", steps: int = 2) -> None:
    model = resnet(dtype, device)
    x, y = images(size=2, dtype=dtype, device=device)
    guide = MeanFieldGuide(model)
    optimizer = pyro.optim.ClippedAdam(dvi.optim.learning_rates(1e-3, scale_multiplier=10))
    svi = SVI(model, guide, optimizer, loss=dvi.TaylorELBO(kl_weight=0.03, num_data=40))
    bn = model.net.bn1
    affine = {k: v.detach().clone() for k, v in bn.named_parameters()}
    for step in range(steps):
        loss = svi.step(x, y)
        assert torch.isfinite(torch.tensor(loss))
        assert bn.num_batches_tracked == step + 1
    assert {"weight", "bias"} == set(affine) and all(
        not torch.equal(p, affine[k]) for k, p in bn.named_parameters()
    )
    posterior = guide.get_posterior()["net.conv1.weight"]
    assert posterior.mean.dtype == dtype and posterior.mean.device == torch.device(device)
    tracked = bn.running_mean.clone()
    model.eval()
    assert svi.evaluate_loss(x, y) > 0
    torch.testing.assert_close(bn.running_mean, tracked)


@pytest.mark.slow
@pytest.mark.parametrize("dtype, steps", [(torch.float32, 2), (torch.float64, 1)])
def test_torchvision_resnet(dtype, steps):
    train_resnet(dtype, steps=steps)


@pytest.mark.cuda
def test_torchvision_resnet_on_a_device(device):
    train_resnet(torch.float32, device)


def test_batch_norm_forward_runs_once_and_moves_like_one_plain_pass():
    model = small_net()
    x, y = images(pixels=8)
    plain = small_net()
    with torch.no_grad(), pyro.poutine.condition(data=plain_weights(plain)):
        plain.net(x)
    guide = MeanFieldGuide(model)
    TaylorELBO().loss_and_grads(model, guide, x, y)
    torch.testing.assert_close(model.net[1].running_mean, plain.net[1].running_mean)
    torch.testing.assert_close(model.net[1].running_var, plain.net[1].running_var)


def plain_weights(model: Classifier) -> dict[str, Tensor]:
    guide = MeanFieldGuide(model)
    guide.initialize(*images(pixels=8))
    weights = {k.removeprefix("net."): v for k, v in guide.median().items()}
    return {**weights, **guide.median()}


CURVATURES: list[Curvature] = [
    Fisher(),
    GGNDiagonal(),
    EmpiricalFisher(),
    MinibatchGradient(),
    HessianDiagonal(num_probes=2),
]


@pytest.mark.every(3)
@pytest.mark.parametrize("curvature", CURVATURES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_curvature_trains_a_convolutional_network(curvature, dtype):
    model = small_net(dtype)
    if isinstance(curvature, HessianDiagonal):  # batch statistics have no third derivative
        model.eval()
    x, y = images(size=12, pixels=8, dtype=dtype)
    guide = MeanFieldGuide(model)
    svi = SVI(
        model,
        guide,
        pyro.optim.Adam(dvi.optim.learning_rates(3e-3)),
        loss=TaylorELBO(curvature=copy.deepcopy(curvature), kl_weight=0.1),
    )
    losses = [svi.step(x, y) for _ in range(12)]
    assert losses[-1] < losses[0]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "make",
    [MeanFieldGuide, lambda m: AutoNormal(m, init_loc_fn=init_to_median)],
    ids=["MeanFieldGuide", "AutoNormal"],
)
def test_a_functional_network(make):
    """Weights from pyro.sample, matmuls by hand, three latents of different kind."""
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(-1, 1, 40)[:, None]
    y = torch.sin(3 * x[:, 0]) + 0.1 * torch.randn(40, generator=generator)

    def model(x: Tensor, y: Tensor | None = None) -> None:
        w1 = pyro.sample("w1", dist.Normal(torch.zeros(1, 8), 1.0).to_event(2))
        b1 = pyro.sample("b1", dist.Normal(torch.zeros(8), 1.0).to_event(1))
        w2 = pyro.sample("w2", dist.Normal(torch.zeros(8), 1.0).to_event(1))
        noise = pyro.sample("noise", dist.LogNormal(-1.0, 0.5))
        with pyro.plate("data", 40, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(torch.tanh(x @ w1 + b1) @ w2, noise), obs=y)

    guide = make(model)
    svi = SVI(
        model, guide, pyro.optim.Adam({"lr": 0.05}), loss=TaylorELBO(curvature=Fisher(num_label_samples=2))
    )
    losses = [svi.step(x, y) for _ in range(120)]
    assert sum(losses[-20:]) < 0.6 * sum(losses[:20])
    m = guide.median()
    fit = torch.tanh(x @ m["w1"] + m["b1"]) @ m["w2"]
    assert (fit - y).square().mean() < 0.3 * y.var()


def test_dropout_is_drawn_once_per_step_and_kept_by_the_penalty():
    """At zero scale the loss in training mode is that of one plain dropout pass."""
    net = nn.Sequential(nn.Linear(3, 16), nn.Softplus(), nn.Dropout(0.5), nn.Linear(16, 10))
    dvi.to_bayesian_(net)
    model = Classifier(net, num_data=4)
    x, y = torch.randn(4, 3), torch.arange(4)
    guide = MeanFieldGuide(model)
    elbo = TaylorELBO(curvature=GGNDiagonal())
    elbo.loss(model, guide, x, y)
    values = {elbo.loss(model, guide, x, y) for _ in range(3)}
    assert len(values) == 3
    model.eval()
    assert len({elbo.loss(model, guide, x, y) for _ in range(3)}) == 1


def test_attention():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(
                8, 2, 16, activation="gelu", batch_first=True, dropout=0.0
            )
            self.head = nn.Linear(8, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(x).mean(1))

    net = Attention()
    dvi.to_bayesian_(net)
    model = Classifier(net, num_data=40)
    x, y = torch.randn(6, 5, 8), torch.arange(6)
    for curvature in (Fisher(), GGNDiagonal()):
        pyro.clear_param_store()
        guide = MeanFieldGuide(model)
        loss = TaylorELBO(curvature=curvature).loss_and_grads(model, guide, x, y)
        assert torch.isfinite(torch.tensor(loss))


def test_bound_methods_as_model_and_guide():
    """The style of Pyro's own examples: a class with a `model` and a `guide` method."""

    class Example:
        runs = 0

        def model(self, x: Tensor, y: Tensor) -> None:
            self.runs += 1
            w = pyro.sample("w", dist.Normal(0.0, 1.0))
            with pyro.plate("data", len(x)):
                pyro.sample("y", dist.Normal(w * x, 0.5), obs=y)

        def guide(self, x: Tensor, y: Tensor) -> None:
            pyro.sample("w", dist.Normal(pyro.param("loc", torch.zeros(())), 0.1))

    example = Example()
    x = torch.linspace(-1, 1, 5)
    elbo = TaylorELBO()
    for _ in range(5):
        elbo.loss(example.model, example.guide, x, x)
    assert example.runs == 6, "one look, then one run per evaluation"


def test_init_strategies_of_pyros_guides_start_from_the_network():
    model = small_net()
    x, y = images(pixels=8)
    expected = {k: v for k, v in plain_weights(model).items() if k.startswith("net.")}
    guide = AutoNormal(model, init_loc_fn=dvi.bayesian.init_to_module)
    guide(x, y)
    torch.testing.assert_close(guide.median(), expected)
    other = AutoNormal(model, init_loc_fn=init_to_median(num_samples=3))
    pyro.clear_param_store()
    assert TaylorELBO().loss(model, other, x, y) > 0
