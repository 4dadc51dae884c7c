# SPDX-License-Identifier: Apache-2.0
"""What authors do between steps."""

from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroSample
from torch import nn

from pyro_dvi.curvature import EmpiricalFisher
from tests.objectives.odd_statements import statements
from tests.objectives.odd_training import Calls, Labels, Odd, labels, mlp, odd, rows

SCALE = 1.0

# What an author does between steps -----------------------------------------------------------------------------------


def every(period, action):
    """Act now and then."""

    def between(k, elbo, loss):
        if k % period == period - 1:
            action(k, elbo)

    return between


@odd(objectives="map taylor")
def attribute_changed():
    net = Calls(lambda net, x: net.first(x) * net.factor)
    net.factor = 1.0
    return labels(net, between=every(20, lambda k, elbo: setattr(net, "factor", net.factor / 2)))


class Scaled(Labels):
    factor = 1.0

    def forward(self, x, y=None):
        return super().forward(self.features(x), y)

    def features(self, x):
        return x * SCALE * self.factor


@odd(objectives="map taylor")
def submodule_replaced():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    return labels(net, between=every(17, lambda k, elbo: net.__setitem__(1, nn.ReLU())), bayesian=net[2])


@odd(objectives="map taylor")
def layer_replaced():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    return labels(
        net, between=every(17, lambda k, elbo: net.__setitem__(0, nn.Linear(4, 4))), bayesian=net[2]
    )


@odd(objectives="map")
def activation_replaced():
    net = Calls(lambda net, x: net.act(net.first(x)))
    net.act = torch.tanh
    return labels(net, between=every(17, lambda k, elbo: setattr(net, "act", torch.sigmoid)))


@odd(objectives="map")
def forward_hook_added():
    net = mlp()
    add = every(17, lambda k, elbo: k < 20 and net[0].register_forward_hook(lambda m, i, out: 2 * out))
    return labels(net, between=add)


@odd(objectives="map")
def forward_hooks():
    net = mlp()
    net[0].register_forward_hook(lambda m, i, out: 2 * out)
    net[0].register_full_backward_hook(lambda m, i, out: None)
    return labels(net)


@odd(objectives="map taylor")
def weights_clipped():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))

    def clip(k, elbo, loss):
        with torch.no_grad():
            net[0].weight.clamp_(-0.3, 0.3)

    return labels(net, between=clip, bayesian=net[2])


@odd(objectives="map taylor")
def averaged_weights():
    kept: dict[str, Any] = {}

    def average(k, elbo, loss):
        for name, value in pyro.get_param_store().items():
            kept[name] = value.detach() * 0.1 + 0.9 * kept.get(name, 0)

    return labels(mlp(), between=average, left=lambda: kept)


@odd(objectives="map")
def parameter_replaced():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))

    def replace(k, elbo):
        net[0].weight = nn.Parameter(torch.randn(4, 4))

    return labels(net, between=every(15, replace), bayesian=net[2])


@odd(objectives="map")
def parameter_data_replaced():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))

    def replace(k, elbo):
        net[0].weight.data = torch.randn(4, 4)

    return labels(net, between=every(15, replace), bayesian=net[2])


@odd(objectives="map taylor")
def layers_thawed():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    net[0].requires_grad_(False)
    return labels(net, between=every(17, lambda k, elbo: net[0].requires_grad_(True)), bayesian=net[2])


@odd(objectives="map taylor")
def eval_mode_now_and_then():
    net = mlp(nn.BatchNorm1d(6), nn.Dropout(0.2))
    return labels(net, between=every(9, lambda k, elbo: net.train(not net.training)))


@odd(objectives="map sampled")
def gradient_hooks():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    net[0].weight.register_hook(lambda g: 2 * g)
    return labels(net, bayesian=net[2])


@odd(objectives="map")
def hooks_after_accumulation():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    seen = []

    def note(parameter):
        seen.append(parameter.grad.norm().item())
        parameter.grad.clamp_(-1, 1)

    net[0].weight.register_post_accumulate_grad_hook(note)
    return labels(net, bayesian=net[2], left=lambda: seen)


@odd(objectives="map sampled taylor")
def gradients_clipped_by_norm():
    """In place, where two parameters have one gradient."""

    def observe(f, y):
        a, b = pyro.param("a", torch.tensor(0.1)), pyro.param("b", torch.zeros(2))
        pyro.sample("y", dist.Normal(f + 2 * (a + b.sum() + pyro.param("c", torch.zeros(()))), 0.3), obs=y)

    optimizer = pyro.optim.Adam({"lr": 0.01}, {"clip_norm": 0.5})
    return statements(observe, optimizer=optimizer)


def _own_loop(svi, elbo, x, y):
    """Take a step as loops of plain torch do: two backward passes, clipping, gradients set to zero."""
    with pyro.poutine.trace(param_only=True) as seen:
        loss = elbo.differentiable_loss(svi.model, svi.guide, x, y)
        loss.backward()
    parameters = [site["value"].unconstrained() for site in seen.trace.nodes.values()]
    torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    with torch.no_grad():
        for parameter in parameters:
            parameter -= 0.01 * parameter.grad
            parameter.grad.zero_()
    return loss.item()


@odd(objectives="map sampled taylor")
def loop_of_its_own():
    made = gradients_clipped_by_norm()
    made.step = _own_loop
    return made


@odd(objectives="sampled")
def gradient_hooks_in_a_loop():
    made = labels(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)), step=_own_loop)
    net = made.net = nn.Linear(4, 4)
    net.weight.register_hook(lambda g: 2 * g)
    made.model = Labels(nn.Sequential(net, made.model.net))
    return made


@odd(objectives="map taylor")
def accumulated_gradients():
    def step(svi, elbo, x, y):
        losses = [elbo.loss_and_grads(svi.model, svi.guide, x, y) for _ in range(2)]
        with pyro.poutine.trace(param_only=True) as seen:
            losses.append(elbo.loss_and_grads(svi.model, svi.guide, x, y))
        svi.optim({site["value"].unconstrained() for site in seen.trace.nodes.values()})
        pyro.infer.util.zero_grads({site["value"].unconstrained() for site in seen.trace.nodes.values()})
        return sum(losses)

    return labels(mlp(), step=step)


@odd(objectives="map taylor vogn")
def kl_weight_set():
    return labels(mlp(), between=lambda k, elbo, loss: setattr(elbo, "kl_weight", 0.1 + 0.01 * k))


@odd(objectives="taylor")
def curvature_replaced():
    return labels(mlp(), between=every(17, lambda k, elbo: setattr(elbo, "curvature", EmpiricalFisher())))


@odd(objectives="taylor")
def curvature_changed():
    return labels(mlp(), between=every(17, lambda k, elbo: setattr(elbo.curvature, "every", 2)))


@odd(objectives="sampled")
def more_particles():
    return labels(mlp(), between=every(17, lambda k, elbo: setattr(elbo, "num_particles", 3)))


@odd(objectives="map taylor")
def prior_scale_attribute():
    class Prior(Labels):
        def __init__(self):
            net: Any = pyro.nn.PyroModule[nn.Linear](4, 3)
            super().__init__(net)
            net.scale = 1.0
            net.weight = PyroSample(lambda net: dist.Normal(torch.zeros(3, 4), net.scale).to_event(2))

    model = Prior()
    return Odd(model, rows(4), between=every(17, lambda k, elbo: setattr(model.net, "scale", 0.3)))


@odd(objectives="map taylor")
def prior_scale_tensor():
    scale = torch.tensor(1.0)
    net = pyro.nn.PyroModule[nn.Linear](4, 3)
    net.weight = PyroSample(dist.Normal(torch.zeros(3, 4), scale).to_event(2))
    return Odd(Labels(net), rows(4), between=every(17, lambda k, elbo: scale.fill_(0.3)))


@odd(objectives="map taylor")
def prior_replaced():
    net = pyro.nn.PyroModule[nn.Linear](4, 3)
    net.weight = PyroSample(dist.Normal(torch.zeros(3, 4), 1.0).to_event(2))

    def replace(k, elbo):
        net.weight = PyroSample(dist.Normal(torch.zeros(3, 4), 0.3).to_event(2))

    return Odd(Labels(net), rows(4), between=every(17, replace))


@odd(objectives="map")
def compiled_part():
    part = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), backend="aot_eager")
    net = nn.Sequential(part, nn.Linear(4, 3))
    return labels(net, bayesian=net[1])
