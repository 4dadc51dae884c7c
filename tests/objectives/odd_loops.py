# SPDX-License-Identifier: Apache-2.0
"""Odd loops, handlers and places where a model keeps something."""

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import nn

from tests.objectives.odd_changes import every
from tests.objectives.odd_habits import ASSIGNS, CHANGES
from tests.objectives.odd_statements import numbers, statements
from tests.objectives.odd_training import NUM_DATA, Calls, Odd, labels, mlp, odd, rows


@dataclass(slots=True)
class Slots:
    factor: float = 1.0


@odd(objectives="map")
def slots_changed():
    slots = Slots()
    net = Calls(lambda net, x: net.first(x) * slots.factor)
    return labels(net, between=every(17, lambda k, elbo: setattr(slots, "factor", 0.5)))


@odd(objectives="map")
def array_changed():
    table = np.ones(3)
    net = Calls(lambda net, x: net.first(x) * float(table[0]))
    return labels(net, between=every(17, lambda k, elbo: table.__setitem__(0, 0.5)))


@odd(objectives="map")
def forward_replaced():
    net = mlp()
    tanh = nn.Tanh()
    return labels(net, between=every(17, lambda k, elbo: setattr(net[1], "forward", tanh.forward)))


@odd(objectives="map")
def cached_function():
    settings = {"factor": 1.0}

    @functools.lru_cache
    def factor(settings_number):
        return settings["factor"]

    net = Calls(lambda net, x: net.first(x) * factor(len(settings)))

    def change(k, elbo):
        settings["factor"] = 0.5
        factor.cache_clear()

    return labels(net, between=every(17, change))


@odd("changes its state", objectives="map")
def count_of_itertools():
    calls = itertools.count(1)
    return labels(Calls(lambda net, x: net.first(x) * (2.0 if next(calls) % 20 == 0 else 1.0)))


@odd(CHANGES, objectives="map")
def activations_kept_by_a_hook():
    net, kept = mlp(), []
    net[0].register_forward_hook(lambda module, given, out: kept.append(out.detach()))
    return labels(net, left=lambda: kept)


@odd(ASSIGNS, objectives="map")
def last_activation_kept():
    net, kept = mlp(), {"last": None}
    net[0].register_forward_hook(lambda module, given, out: kept.update(last=out.detach()))
    return labels(net, left=lambda: kept)


@odd(objectives="map sampled")
def conditioned():
    """By a handler whose data change."""
    data = {"z": torch.tensor(0.5)}

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(4), 1.0).to_event(1))
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        with pyro.plate("data", NUM_DATA, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(x @ w + z, 0.3), obs=y)

    conditioned = poutine.condition(model, data=data)
    return Odd(conditioned, numbers(), between=every(17, lambda k, elbo: data.update(z=torch.tensor(-0.5))))


@odd("is replaced in each step", objectives="sampled")
def seeded_by_a_handler():
    made = statements(lambda f, y: pyro.sample("y", dist.Normal(f + torch.randn(()), 0.3), obs=y))
    made.model = poutine.seed(made.model, 7)
    return made


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
