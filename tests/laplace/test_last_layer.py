"""The last layer is found by running the model: weights that act on the outputs with no trainable weight after them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import pyro_dvi as dvi
from pyro_dvi.bayesian import Heteroscedastic
from pyro_dvi.errors import ModelError
from pyro_dvi.laplace import LaplaceGuide, last_layer

N, HIDDEN = 12, 8
Linear = nn.Linear


class Net(nn.Module):
    """Parts in the order in which they are registered, and the function that runs them."""

    def __init__(self, run: Callable, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = run

    def forward(self, input):
        return self.run(self, input)

    def hidden(self, x):
        return torch.tanh(self.body(x))


def head(size=2):
    return Linear(HIDDEN, size)


def body():
    return Linear(3, HIDDEN)


def written_into(net, x):
    out, h = x.new_zeros(len(x), 2), net.hidden(x)
    out[:, :1] = net.head(h)
    out[:, 1] = net.other(h)[:, 0]
    return out


def without_gradients(net, x):
    with torch.no_grad():
        h = net.hidden(x)
    return net.head(h)


def encoded(net, x):
    return net.encoder(net.body(x)[:, None])[:, 0]


def attended(net, x):
    h = net.body(x)[:, None]
    return net.attention(h, h, h)[0][:, 0]


def encoder():
    return nn.TransformerEncoderLayer(HIDDEN, 2, 8, batch_first=True)


@dataclass
class Case:
    net: Net
    last: list[str]  # modules or sites
    exclude: list[str] | tuple = ()


CASES = {
    "head registered first": Case(Net(lambda n, x: n.head(n.hidden(x)), head=head(), body=body()), ["head"]),
    "two heads": Case(
        Net(
            lambda n, x: torch.cat([n.mean(n.hidden(x)), n.spread(n.hidden(x))], 1),
            mean=head(1),
            body=body(),
            spread=head(1),
        ),
        ["mean", "spread"],
    ),
    "heads written into a tensor": Case(
        Net(written_into, other=head(1), head=head(1), body=body()), ["other", "head"]
    ),
    "one head latent": Case(
        Net(
            lambda n, x: torch.stack([n.head(n.hidden(x))[:, 0], n.other(n.hidden(x))[:, 0]], 1),
            other=head(1),
            head=head(1),
            body=body(),
        ),
        ["head"],
        exclude=["other.*"],
    ),
    "wide and deep": Case(
        Net(lambda n, x: n.head(n.hidden(x)) + n.wide(x), head=head(), wide=Linear(3, 2), body=body()),
        ["head", "wide"],
    ),
    "residual": Case(
        Net(lambda n, x: n.body(x) + n.head(n.hidden(x)), head=head(HIDDEN), body=body()), ["head"]
    ),
    "gate": Case(
        Net(
            lambda n, x: n.gate(n.hidden(x)).sigmoid() * n.head(n.hidden(x)),
            head=head(),
            body=body(),
            gate=head(),
        ),
        ["head", "gate"],
    ),
    "written as products": Case(
        Net(lambda n, x: n.hidden(x) @ n.head.weight.T + n.head.bias, head=head(), body=body()), ["head"]
    ),
    "einsum": Case(
        Net(lambda n, x: torch.einsum("oi,bi->bo", n.head.weight, n.hidden(x)), head=head(), body=body()),
        ["head.weight"],
    ),
    "masked weights": Case(
        Net(
            lambda n, x: F.linear(n.hidden(x), torch.eye(2, HIDDEN) * n.head.weight), head=head(), body=body()
        ),
        ["head.weight"],
    ),
    "weight norm": Case(
        Net(lambda n, x: n.head(n.hidden(x)), head=parametrizations.weight_norm(head()), body=body()),
        ["head"],
    ),
    "bilinear": Case(
        Net(lambda n, x: n.head(n.hidden(x), x), head=nn.Bilinear(HIDDEN, 3, 2), body=body()), ["head"]
    ),
    "LSTM below": Case(
        Net(
            lambda n, x: n.head(n.lstm(x[:, None])[0][:, -1]),
            head=head(),
            lstm=nn.LSTM(3, HIDDEN, batch_first=True),
        ),
        ["head"],
    ),
    "convolution": Case(
        Net(
            lambda n, x: n.out(n.first(x[:, None]) * n.scale(x)[:, None, :1])[:, :, 0],
            out=nn.Conv1d(2, 2, 1),
            first=nn.Conv1d(1, 2, 1),
            scale=Linear(3, 3),
        ),
        ["out"],
    ),
    "attention last": Case(
        Net(attended, attention=nn.MultiheadAttention(HIDDEN, 2, batch_first=True), body=body()),
        ["attention.out_proj"],
    ),
    "attention below": Case(
        Net(lambda n, x: n.head(encoded(n, x)), head=head(), encoder=encoder(), body=body()), ["head"]
    ),
    "checkpointed": Case(
        Net(lambda n, x: checkpoint(n.head, n.hidden(x), use_reentrant=False), head=head(), body=body()),
        ["head"],
    ),
    "frozen layer after": Case(
        Net(
            lambda n, x: n.frozen(n.head(n.hidden(x))),
            head=head(),
            frozen=Linear(2, 2).requires_grad_(False),
            body=body(),
        ),
        ["head"],
    ),
    "features without gradients": Case(
        Net(without_gradients, head=head(), body=body()), ["head"], exclude=["body.*"]
    ),
    "a constant output beside": Case(
        Net(
            lambda n, x: torch.cat([n.head(n.hidden(x)), n.spread.expand(len(x), 1)], 1),
            head=head(1),
            spread=nn.Parameter(torch.zeros(1)),
            body=body(),
        ),
        ["head"],
    ),
}
NONE = {
    "layer norm after": (
        Net(lambda n, x: n.norm(n.head(n.hidden(x))), norm=nn.LayerNorm(2), head=head(), body=body()),
        r"not latent act after all latents: \['net\.norm\.weight', 'net\.norm\.bias'.*Pass names of sites",
    ),
    "a temperature after": (
        Net(lambda n, x: n.head(n.hidden(x)) * n.t, t=nn.Parameter(torch.ones(())), head=head(), body=body()),
        r"'net\.t'",
    ),
    "a loop": (Net(lambda n, x: n.body(n.body(x).tanh()), body=Linear(3, 3)), "their own results, as in a loop"),
    "an LSTM": (
        Net(lambda n, x: n.lstm(x[:, None])[0][:, 0], lstm=nn.LSTM(3, 2, batch_first=True)),
        "their own results",
    ),
    "data outside of torch": (
        Net(lambda n, x: n.head(n.hidden(torch.as_tensor(x.numpy()))), head=head(), body=body()),
        "do not depend on its arguments",
    ),
}  # fmt: skip


class Product(torch.autograd.Function):
    """A function that no mode of torch observes."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.T @ x


def guide_of(net, include=(nn.Linear, nn.Conv1d, nn.Bilinear, nn.MultiheadAttention, nn.LSTM), exclude=()):
    found = [kind for kind in include if any(isinstance(m, kind) for m in net.modules())]
    return LaplaceGuide(dvi.classifier(dvi.to_bayesian_(net, include=found, exclude=exclude), num_data=N))


def batches():
    return [(torch.randn(N, 3), torch.arange(N) % 2)]


@pytest.mark.parametrize("name", CASES)
def test_weights_with_nothing_trainable_after_them(name):
    case = CASES[name]
    guide = guide_of(case.net, exclude=case.exclude)
    found, names = last_layer(guide, batches()), list(guide.unconstrained_mode())
    expected = [n for n in names if any(f"{n}.".startswith(f"net.{part}.") for part in case.last)]
    assert found == expected != [] and (len(found) < len(names) or case.exclude)


@pytest.mark.parametrize("name", NONE)
def test_there_is_none(name):
    net, message = NONE[name]
    with pytest.raises(ModelError, match=message):
        last_layer(guide_of(net), batches())


def test_a_layer_without_a_prior_is_last():
    guide = guide_of(Net(lambda n, x: n.head(n.hidden(x)), body=body(), head=head()), exclude=["head.*"])
    with pytest.raises(ModelError, match=r"after all latents: \['net\.head\.weight', 'net\.head\.bias'"):
        last_layer(guide, batches())


def test_a_function_that_cannot_be_observed():
    net = Net(lambda n, x: Product.apply(n.hidden(x), n.head.weight), head=head(), body=body())
    with pytest.raises(ModelError, match=r"function that uses \['net\.head\.weight'.* cannot be observed"):
        last_layer(guide_of(net), batches())


def test_the_observed_sites_may_be_several_and_scales_are_no_layer():
    """Both heads of a model that is a function; neither the latent noise nor its prior's scale acts on data."""

    def model(x, y=None):
        head = pyro.sample("head", dist.Normal(torch.zeros(4), 1.0).to_event(1))
        other = pyro.sample("other", dist.Normal(torch.zeros(4), 1.0).to_event(1))
        width = pyro.sample("width", dist.LogNormal(0.0, 1.0))
        body = pyro.sample("body", dist.Normal(torch.zeros(3, 4), width).to_event(2))
        noise = pyro.sample("noise", dist.LogNormal(0.0, 1.0))
        with pyro.plate("data", N, subsample_size=len(x)):
            h = torch.tanh(x @ body)
            mean = h @ head
            pyro.sample("a", dist.Normal(mean, noise.expand_as(mean)), obs=y)
            pyro.sample("b", dist.Normal(h @ other, torch.ones_like(mean) * noise), obs=y)

    assert last_layer(LaplaceGuide(model), [(torch.randn(N, 3), torch.randn(N))]) == ["head", "other"]


@pytest.mark.parametrize("loader", [lambda x, y: [(x, y)], lambda x, y: [{"input": x, "y": y}]])
def test_both_heads_of_a_regression_get_the_gaussian(loader):
    """The precision of mean and log-variance, each linear in its own weights, has a closed form."""
    torch.manual_seed(0)
    net = Net(
        lambda n, x: torch.cat([n.mean(n.hidden(x)), n.spread(n.hidden(x))], 1),
        mean=head(1),
        body=body(),
        spread=head(1),
    )
    net = net.double()
    x, y = torch.randn(N, 3, dtype=torch.float64), torch.randn(N, 1, dtype=torch.float64)
    method = dvi.Laplace(noise_scale=Heteroscedastic(), prior_scale=1.0)
    posterior = method.fit(net, loader(x, y), progress=False)
    with torch.no_grad():
        h, at = torch.cat([net.hidden(x), x.new_ones(N, 1)], 1), posterior.guide.median()
        log_variance = h @ torch.cat([at["net.spread.weight"], at["net.spread.bias"][:, None]], 1).T
    mean, spread = h.T @ (h / log_variance.exp()), h.T @ h / 2
    expected = torch.block_diag(mean, spread) + torch.eye(2 * HIDDEN + 2)
    names = ["net.mean.weight", "net.mean.bias", "net.spread.weight", "net.spread.bias"]
    assert posterior.guide.fitted.layout.names == names
    torch.testing.assert_close(posterior.guide.posterior.precision, expected.double())
