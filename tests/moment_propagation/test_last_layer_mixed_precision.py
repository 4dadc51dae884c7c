"""A last layer with covariances under autocast: loss, gradients and predictions are those of float32 up to rounding."""

import pyro
import pytest
import torch
from pyro.infer import SVI
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.bayesian import Heteroscedastic
from pyro_dvi.guides import MeanField
from pyro_dvi.moment_propagation import AllOutputs, LowRank, PerOutput

N = 40
COVARIANCES = [PerOutput(), AllOutputs(), LowRank(2), MeanField()]
NETWORKS = {
    "tanh": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), "2"),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 2, bias=False)),
        "3",
    ),
    "dense": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), "2"),
    "convolution": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Conv1d(4, 2, 2), nn.Flatten()
        ),
        "3",
    ),
}
MODELS = {
    "classifier": lambda net: dvi.classifier(net, N),
    "regressor": lambda net: dvi.regressor(net, N, noise_scale=0.5),
    "own noise": lambda net: dvi.regressor(net, N, noise_scale=Heteroscedastic()),
}


def rows(kind):
    x = torch.randn(N, 4, generator=torch.Generator().manual_seed(0))
    return x, {"classifier": x[:, 0].gt(0).long(), "regressor": x[:, :2], "own noise": x[:, :1]}[kind]


def found(kind, network, guide_of, autocast, **options):
    """Loss, gradients and predictions at moved parameters."""
    pyro.clear_param_store()
    torch.manual_seed(0)
    make, layer = NETWORKS[network]
    model, (x, y) = MODELS[kind](dvi.to_bayesian_(make())), rows(kind)
    guide = guide_of(model, f"net.{layer}")
    guide.initialize(x, y)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    svi = SVI(model, guide, dvi.optim.Adam({"lr": 0.01}), loss=dvi.MomentPropagationELBO(**options))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = svi.loss_and_grads(model, guide, x, y)
        gradients = torch.cat([p.grad.flatten() for p in guide.parameters() if p.grad is not None])
        prediction = dvi.predict(model, guide, x)
        outputs = (
            [prediction.probabilities] if kind == "classifier" else [prediction.mean, prediction.variance]
        )
        svi.step(x, y)
    assert {p.dtype for p in guide.parameters()} == {gradients.dtype} == {torch.float32}
    return loss, gradients, torch.stack([part.float() for part in outputs])


CASES = [
    *((kind, network, PerOutput()) for kind in MODELS for network in ("tanh", "batch norm", "convolution")),
    *((kind, "tanh", covariance) for kind in ("classifier", "own noise") for covariance in COVARIANCES[1:]),
]


@pytest.mark.every(4)
@pytest.mark.parametrize(("kind", "network", "covariance"), CASES)
def test_bfloat16_is_float32_up_to_rounding(kind, network, covariance):
    """A mean of bfloat16 has three digits, and so have logits that are averaged under autocast."""
    rest = dvi.MeanFieldGuide if network == "batch norm" else None
    check(kind, network, lambda m, layer: dvi.LastLayerGuide(m, layer, covariance=covariance, rest=rest))


@pytest.mark.parametrize("kind", MODELS)
def test_full_covariances_in_bfloat16(kind):
    check(kind, "dense", lambda model, layer: dvi.MeanFieldGuide(model), full_covariance=True)


def check(*case, **options):
    loss, gradients, outputs = found(*case, autocast=False, **options)
    other_loss, other_gradients, other_outputs = found(*case, autocast=True, **options)
    assert other_loss == pytest.approx(loss, rel=5e-3)
    assert (other_gradients - gradients).norm() < 0.03 * gradients.norm()
    torch.testing.assert_close(other_outputs, outputs, rtol=0.02, atol=0.01)
