# SPDX-License-Identifier: Apache-2.0
"""Random networks from a seed, with inputs and a likelihood, and what they compute by Pyro and autograd alone."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pyro_dvi import to_bayesian_
from tests.fuzz.layers import EXAMPLES, random_network


def _rows(f: Tensor, step: int) -> Tensor:
    return (torch.arange(f.numel()) % step).reshape(f.shape).to(f.dtype)


# From f: the distribution, labels, and the Fisher information of f [B, K, K].
LIKELIHOODS: dict[
    str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
] = {
    "Categorical": (
        lambda f: dist.Categorical(logits=f),
        lambda f: torch.arange(len(f)) % f.shape[-1],
        lambda f: f.softmax(-1).diag_embed() - f.softmax(-1)[:, :, None] * f.softmax(-1)[:, None, :],
    ),
    "Normal": (
        lambda f: dist.Normal(f, 0.5).to_event(1),
        lambda f: torch.linspace(-1, 1, f.numel(), dtype=f.dtype).reshape(f.shape),
        lambda f: torch.full_like(f, 4.0).diag_embed(),
    ),
    "Bernoulli": (
        lambda f: dist.Bernoulli(logits=f).to_event(1),
        lambda f: _rows(f, 2),
        lambda f: (f.sigmoid() * (-f).sigmoid()).diag_embed(),
    ),
    "Poisson": (
        lambda f: dist.Poisson((0.3 * f).exp()).to_event(1),
        lambda f: _rows(f, 3),
        lambda f: (0.09 * (0.3 * f).exp()).diag_embed(),
    ),
}


class Case(PyroModule):
    """A random network with data, as a Pyro model.

    Attributes:
        plain: the network before its conversion, for the message.
        x, y: data.
        num_data: N, larger than their number.
        locs: values of the latents by site.
    """

    def __init__(self, seed: int, *, smooth: bool = False, likelihood: str | None = None) -> None:
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        torch.set_default_dtype(torch.float32 if seed % 4 == 0 else torch.float64)
        net, self.x, _ = random_network(rng, smooth)
        self.likelihood = likelihood or rng.choice(list(LIKELIHOODS))
        self.plain, self.seed = [copy.deepcopy(net)], seed  # in a list: no part of the model
        self.net = to_bayesian_(net, prior_scale=1.0, include=nn.Module)
        self.distribution, labels, self.information = LIKELIHOODS[self.likelihood]
        with torch.no_grad():
            self.y = labels(self.plain[0](self.x))
        self.num_data = 3 * EXAMPLES
        self.locs = {f"net.{name}": value.detach() for name, value in self.plain[0].named_parameters()}

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        f = self.net(x)
        with pyro.plate("data", self.num_data, subsample_size=len(x)):
            pyro.sample("y", self.distribution(f), obs=y)
        return f

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        return self.x, self.y

    def __str__(self) -> str:
        return f"seed {self.seed}, {self.likelihood}, x {tuple(self.x.shape)}:\n{self.plain[0]}"

    # Brute force -------------------------------------------------------------------------------------------------

    def leaves(self) -> dict[str, Tensor]:
        """Return copies of the latents to differentiate by."""
        return {name: value.clone().requires_grad_() for name, value in self.locs.items()}

    def outputs_at(self, values: dict[str, Tensor]) -> Tensor:
        """Return f, by Pyro alone."""
        with sdpa_kernel(SDPBackend.MATH):  # which can be differentiated twice
            trace = poutine.trace(poutine.condition(self.net, data=values)).get_trace(self.x)
        result: Any = trace.nodes["_RETURN"]["value"]
        return result

    def log_prob(self, values: dict[str, Tensor]) -> Tensor:
        """Return the log-likelihood of each example."""
        result: Tensor = self.distribution(self.outputs_at(values)).log_prob(self.y)
        return result


def rows_of(outputs: Tensor, values: dict[str, Tensor], **options: Any) -> Tensor:
    """Return the gradients of outputs ``[*shape, D]``, one backward pass after another."""
    rows = [gradient_of(one, values, **options) for one in outputs.reshape(-1)]
    return torch.stack(rows).reshape(*outputs.shape, -1)


def gradient_of(output: Tensor, values: dict[str, Tensor], **options: Any) -> Tensor:
    """Return one flat gradient, in the order of ``values``; zero where nothing depends on one."""
    found = torch.autograd.grad(
        output, list(values.values()), retain_graph=True, allow_unused=True, **options
    )
    return flat(found, values)


def flat(tensors: Any, values: dict[str, Tensor]) -> Tensor:
    """Return one vector."""
    pairs = zip(tensors, values.values(), strict=True)
    return torch.cat([(torch.zeros_like(v) if t is None else t).reshape(-1) for t, v in pairs])
