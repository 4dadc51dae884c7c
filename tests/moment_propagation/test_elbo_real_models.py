# SPDX-License-Identifier: Apache-2.0
"""Moments through models that were not written for them: a torchvision net, recurrence, attention, several sites."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.moment_propagation.elbo import MomentPropagationELBO
from tests.models import residual_network

GUIDES = [dvi.MeanFieldGuide, dvi.MultiplicativeNoiseGuide]
every_guide = pytest.mark.parametrize("guide_class", GUIDES, ids=lambda g: g.__name__)


def train(model, guide, *data, steps: int = 12, lr: float = 3e-3) -> list[float]:
    svi = SVI(model, guide, pyro.optim.Adam({"lr": lr}), loss=MomentPropagationELBO(kl_weight=0.01))
    return [svi.step(*data) for _ in range(steps)]


class Recurrent(nn.Module):
    """Latent weights of the embedding and the head; the LSTM between them stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        states, _ = self.lstm(self.embedding(tokens))
        return self.head(states[:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


class Residual(nn.Module):
    """Batch norm, a skip connection, work in place, two ways of pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1)
        self.block = nn.Sequential(
            nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Conv2d(6, 6, 3, padding=1, groups=2)
        )
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        x = self.stem(x)
        x = torch.relu_(x + self.block(x))
        pooled = [nn.functional.adaptive_avg_pool2d(x, 1), nn.functional.adaptive_max_pool2d(x, 1)]
        return self.head(torch.cat(pooled, 1).flatten(1))


NETS = {
    "recurrent": (Recurrent, lambda: torch.randint(20, (12, 5))),
    "attention": (Attention, lambda: torch.randint(20, (12, 5))),
    "residual": (Residual, lambda: torch.randn(12, 1, 8, 8)),
}


@pytest.mark.every(5)
@every_guide
@pytest.mark.parametrize("name", NETS)
def test_networks_train_and_predict(name, guide_class):
    make, inputs = NETS[name]
    x, y = inputs(), torch.arange(12) % 3
    model = dvi.classifier(dvi.to_bayesian_(make(), prior_scale=0.3), num_data=12)
    guide = guide_class(model)
    losses = train(model, guide, x, y)
    assert all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-3:]) < sum(losses[:3])
    probabilities = dvi.predict(model, guide, x, method=dvi.Moments()).probabilities
    sampled = dvi.predict(model, guide, x, method=dvi.Samples(200), seed=0).probabilities
    torch.testing.assert_close(probabilities, sampled, atol=0.06, rtol=0)


class Padded(nn.Module):
    def __init__(self, nested: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested)
        self.embedding, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x, padding):
        return self.head(self.encoder(self.embedding(x), src_key_padding_mask=padding)[:, 0])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_transformer_with_padding_predicts_without_nested_tensors():
    x, padding = torch.randn(20, 5, 8), torch.arange(5) >= torch.randint(1, 6, (20, 1))
    data = (x, padding), (x[:, 0, 0] > 0).long()
    found = []
    for nested in (True, False):
        posterior = dvi.MomentPropagation().fit(Padded(nested), [data], 2, progress=False)
        found.append(posterior.predict(data).probabilities)
    torch.testing.assert_close(*found)
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.slow
@every_guide
def test_a_torchvision_resnet_trains(guide_class):
    net = residual_network(num_classes=3)
    model = dvi.classifier(dvi.to_bayesian_(net, prior_scale=dvi.bayesian.fan_in), num_data=6)
    guide = guide_class(model)
    x, y = torch.randn(6, 3, 32, 32), torch.arange(6) % 3
    losses = train(model, guide, x, y, steps=4, lr=1e-3)
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0]
    probabilities = dvi.predict(model, guide, x, method=dvi.Moments()).probabilities
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(6))


def test_two_likelihoods_with_plates_of_their_own():
    """A mean over one data set and a rate over another share a slope; draws of Pyro's loss are the reference."""
    x1, x2 = torch.linspace(-1, 1, 6, dtype=torch.float64), torch.linspace(0, 1, 4, dtype=torch.float64)

    def model(y1, y2):
        w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=torch.float64), 1.0).to_event(1))
        with pyro.plate("first", 60, subsample_size=6):
            pyro.sample("y1", dist.Normal(w[0] * x1, 0.5), obs=y1)
        with pyro.plate("second", 8, subsample_size=4):
            pyro.sample("y2", dist.Poisson(torch.exp(w[1] * x2)), obs=y2)

    def guide(y1, y2):
        loc = torch.tensor([0.4, -0.2], dtype=torch.float64)
        pyro.sample("w", dist.Normal(loc, torch.tensor([0.3, 0.2], dtype=torch.float64)).to_event(1))

    data = (x1.sin(), torch.tensor([0.0, 1.0, 2.0, 1.0], dtype=torch.float64))
    loss = MomentPropagationELBO().loss(model, guide, *data)
    trace = Trace_ELBO()
    draws = torch.tensor([trace.loss(model, guide, *data) for _ in range(400)])
    assert abs(loss - draws.mean()) < 4 * draws.std() / 20
