# SPDX-License-Identifier: Apache-2.0
"""What models keep from step to step."""

import random

import numpy as np
import torch

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


STATE = {"calls": 0, "mean": torch.zeros(4)}


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
