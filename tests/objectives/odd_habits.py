# SPDX-License-Identifier: Apache-2.0
"""What models keep from step to step."""

import functools
import itertools
import random
from types import SimpleNamespace

import numpy as np
import pyro
import pyro.distributions as dist
import torch

from tests.objectives.odd_statements import statements
from tests.objectives.odd_training import Calls, labels, odd

CHANGES = "changes from"
ASSIGNS = "assigns"

# What a model keeps --------------------------------------------------------------------------------------------------


@odd(CHANGES, objectives="map taylor sampled vogn")
def counter():
    def forward(net, x):
        net.calls = getattr(net, "calls", 0) + 1
        return net.first(x) * (2.0 if net.calls % 3 == 0 else 1.0)

    net = Calls(forward)
    return labels(net, left=lambda: net.calls)


@odd(CHANGES, objectives="map taylor")
def rare_counter():
    """Every 20th call is another, and the counter is in a list."""

    def forward(net, x):
        net.calls[0] += 1
        return net.first(x) * (2.0 if net.calls[0] % 20 == 0 else 1.0)

    net = Calls(forward)
    net.calls = [0]
    return labels(net, left=lambda: net.calls)


@odd(CHANGES, objectives="map")
def counter_in_a_cell():
    calls = 0

    def forward(net, x):
        nonlocal calls
        calls += 1
        return net.first(x) * (2.0 if calls % 20 == 0 else 1.0)

    return labels(Calls(forward), left=lambda: calls)


STATE = {"calls": 0, "mean": torch.zeros(4)}


@odd(CHANGES, objectives="map taylor")
def counter_in_a_global_dictionary():
    STATE["calls"] = 0

    def forward(net, x):
        STATE["calls"] += 1
        return net.first(x) * (2.0 if STATE["calls"] % 20 == 0 else 1.0)

    return labels(Calls(forward), left=lambda: STATE["calls"])


@odd(CHANGES, objectives="map")
def log_in_a_list():
    def forward(net, x):
        out = net.first(x)
        net.log.append(len(x))
        return out

    net = Calls(forward)
    net.log = []
    return labels(net, left=lambda: net.log)


@odd(ASSIGNS, objectives="map taylor")
def running_mean_in_an_attribute():
    def forward(net, x):
        net.mean = 0.9 * net.mean + 0.1 * x.mean(0)
        return net.first(x - net.mean)

    net = Calls(forward)
    net.mean = torch.zeros(4)
    return labels(net, left=lambda: net.mean)


@odd(ASSIGNS, objectives="map")
def running_mean_in_a_new_buffer():
    def forward(net, x):
        net.mean = 0.9 * net.mean + 0.1 * x.mean(0)
        return net.first(x - net.mean)

    net = Calls(forward)
    net.register_buffer("mean", torch.zeros(4))
    return labels(net)


@odd(objectives="map taylor")
def running_mean_in_place():
    def forward(net, x):
        net.mean.lerp_(x.mean(0), 0.1)
        return net.first(x - net.mean)

    net = Calls(forward)
    net.register_buffer("mean", torch.zeros(4))
    return labels(net)


@odd(ASSIGNS, objectives="map")
def running_mean_in_a_list():
    """Which the loss does not use."""

    def forward(net, x):
        net.mean[0] = 0.9 * net.mean[0] + 0.1 * x.mean(0)
        return net.first(x)

    net = Calls(forward)
    net.mean = [torch.zeros(4)]
    return labels(net, left=lambda: net.mean)


@odd(ASSIGNS, objectives="map")
def running_mean_in_a_cell():
    mean = torch.zeros(4)

    def forward(net, x):
        nonlocal mean
        mean = 0.9 * mean + 0.1 * x.mean(0)
        return net.first(x)

    return labels(Calls(forward), left=lambda: mean)


@odd(ASSIGNS, objectives="map")
def running_mean_in_a_global_dictionary():
    STATE["mean"] = torch.zeros(4)

    def forward(net, x):
        STATE["mean"] = 0.9 * STATE["mean"] + 0.1 * x.mean(0)
        return net.first(x)

    return labels(Calls(forward), left=lambda: STATE["mean"])


@odd(ASSIGNS, objectives="map")
def running_mean_in_an_object():
    keeps = SimpleNamespace(mean=torch.zeros(4))

    def forward(net, x):
        keeps.mean = 0.9 * keeps.mean + 0.1 * x.mean(0)
        return net.first(x)

    return labels(Calls(forward), left=lambda: keeps.mean)


@odd(CHANGES, objectives="map")
def logs_every_tenth_call():
    def forward(net, x):
        net.calls += 1
        out = net.first(x)
        if net.calls % 10 == 0:
            net.log = out.sum().item()
        return out

    net = Calls(forward)
    net.calls, net.log = 0, 0.0
    return labels(net, left=lambda: net.log)


@odd("outside torch", objectives="map sampled")
def pythons_random():
    return labels(Calls(lambda net, x: net.first(x) * random.random()))


@odd("outside torch", objectives="map")
def numpys_random():
    return labels(Calls(lambda net, x: net.first(x) * (1.0 if np.random.rand() > 0.05 else 2.0)))


@odd("changes its state", objectives="map")
def generator_of_numpy():
    """Whose draws change something now and then."""

    def forward(net, x):
        return net.first(x) * (1.0 if net.made.uniform() > 0.05 else 2.0)

    net = Calls(forward)
    net.made = np.random.default_rng(0)
    return labels(net, left=lambda: net.made.bit_generator.state["state"]["state"])


@odd("changes its state", objectives="map")
def generator_of_python():
    made = random.Random(0)
    return labels(
        Calls(lambda net, x: net.first(x) * (1.0 if made.random() > 0.05 else 2.0)), left=made.getstate
    )


@odd("changes its state", objectives="map")
def iterator():
    steps = itertools.cycle([1.0] * 15 + [2.0])
    return labels(Calls(lambda net, x: net.first(x) * next(steps)))


@odd(CHANGES, objectives="map")
def counter_of_a_partial():
    kept = {"calls": 0}

    def scaled(kept, net, x):
        kept["calls"] += 1
        return net.first(x) * (2.0 if kept["calls"] % 20 == 0 else 1.0)

    return labels(Calls(functools.partial(scaled, kept)), left=lambda: kept["calls"])


@odd(CHANGES, objectives="map")
def counter_behind_a_function():
    kept = [0]

    def helper(out):
        kept[0] += 1
        return out * (2.0 if kept[0] % 20 == 0 else 1.0)

    def wrapped(function):
        @functools.wraps(function)
        def inner(x, y=None):
            return function(x, y)

        return inner

    made = statements(lambda f, y: pyro.sample("y", dist.Normal(helper(f), 0.3), obs=y))
    made.model, made.left = wrapped(made.model), lambda: kept
    return made
