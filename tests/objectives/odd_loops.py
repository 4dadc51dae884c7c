# SPDX-License-Identifier: Apache-2.0
"""Odd loops, handlers and places where a model keeps something."""

from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import nn

from tests.objectives.odd_changes import every
from tests.objectives.odd_statements import numbers, statements
from tests.objectives.odd_training import Calls, Odd, labels, mlp, odd, rows


@dataclass(slots=True)
class Slots:
    factor: float = 1.0


@odd(objectives="map")
def forward_replaced():
    net = mlp()
    tanh = nn.Tanh()
    return labels(net, between=every(17, lambda k, elbo: setattr(net[1], "forward", tanh.forward)))


@odd(objectives="map sampled")
def plate_used_again():
    plate = pyro.plate("data", 8)

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(4), 1.0).to_event(1))
        with plate:
            pyro.sample("y", dist.Normal(x @ w, 0.3), obs=y)

    return Odd(model, numbers())


@odd(objectives="map")
def writes_to_the_batch():
    batches = rows(4)
    return labels(
        Calls(lambda net, x: net.first(x.mul_(0.99))), batches=batches, left=lambda: [x for x, _ in batches]
    )


@odd(objectives="map taylor")
def batch_changed_in_place():
    batches = rows(4, count=1)
    return labels(mlp(), batches=batches, between=lambda k, elbo, loss: batches[0][0].mul_(-1.01))


@odd(objectives="map taylor")
def losses_multiplied():
    """Two before the optimizer's step, one of them times two."""

    def step(svi, elbo, x, y):
        with poutine.trace(param_only=True) as seen:
            losses = [elbo.differentiable_loss(svi.model, svi.guide, x, y) for x in (x, -x)]
        parameters = {site["value"].unconstrained() for site in seen.trace.nodes.values()}
        losses[0].backward()
        (2 * losses[1]).backward()
        svi.optim(parameters)
        pyro.infer.util.zero_grads(parameters)
        return losses[1].item()

    return labels(mlp(), step=step)


@odd(objectives="map")
def store_cleared():
    """And filled again, as for a new start."""
    made = statements(
        lambda f, y: pyro.sample("y", dist.Normal(f + pyro.param("a", torch.tensor(0.1)), 0.3), obs=y)
    )

    def restart(k, elbo):
        pyro.get_param_store().clear()

    made.between = every(17, restart)
    return made


@odd("belongs to no module", objectives="map")
def read_from_the_store():
    pyro.param("a", torch.tensor(0.1))
    return statements(lambda f, y: pyro.sample("y", dist.Normal(f + pyro.get_param_store()["a"], 0.3), obs=y))


@odd(objectives="map taylor")
def rolled_back():
    """To the state of some steps ago."""
    kept: dict[str, Any] = {}

    def roll(k, elbo, loss):
        if k == 12:
            kept.update(pyro.get_param_store().get_state())
            kept["params"] = {n: p.detach().clone().requires_grad_() for n, p in kept["params"].items()}
        if k == 25:
            pyro.get_param_store().set_state(kept)

    return statements(
        lambda f, y: pyro.sample("y", dist.Normal(f + pyro.param("a", torch.tensor(0.1)), 0.3), obs=y),
        between=roll,
    )
