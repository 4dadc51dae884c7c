# SPDX-License-Identifier: Apache-2.0
"""Odd functions inside networks, and odd arguments."""

from collections import namedtuple

import numpy as np
import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import pyro_dvi as dvi
from tests.objectives.odd_training import NUM_DATA, READS, Calls, Odd, labels, mlp, odd, rows

# Functions -----------------------------------------------------------------------------------------------------------


@odd(objectives="map sampled")
def gumbel_softmax():
    return labels(Calls(lambda net, x: F.gumbel_softmax(net.first(x), 0.7)))


@odd(objectives="map")
def gumbel_hard():
    return labels(Calls(lambda net, x: F.gumbel_softmax(net.first(x), 0.7, hard=True)))


@odd("generator of its own", objectives="map")
def explicit_generator():
    made = torch.Generator().manual_seed(0)
    return labels(
        Calls(lambda net, x: net.first(x + 0.1 * torch.randn(x.shape, generator=made))), left=made.get_state
    )


@odd("loss differs", objectives="map")
def seeds_inside():
    def forward(net, x):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            noise = torch.randn_like(x)
        return net.first(x + 0.1 * noise)

    return labels(Calls(forward))


@odd(objectives="taylor map")
def no_grad_parts():
    def forward(net, x):
        with torch.no_grad():
            offset = net.first(x).mean(0)
        return net.first(x) - offset + net.first(x).detach().tanh()

    return labels(Calls(forward))


@odd(objectives="map")
def checkpointed():
    def forward(net, x):
        return checkpoint(lambda z: torch.tanh(net.first(z)), x, use_reentrant=False)

    net = Calls(forward)
    return labels(net, bayesian=net.last)


@odd("use_reentrant", objectives="map")
def checkpointed_reentrant():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.body, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.last(checkpoint(self.body, self.first(x), use_reentrant=True))

    outer = Outer()
    return labels(outer, bayesian=outer.last)


@odd("differs|the step writes to a tensor", objectives="map")
def checkpointed_dropout():
    def forward(net, x):
        return checkpoint(lambda z: F.dropout(torch.tanh(net.first(z)), 0.3), x, use_reentrant=False)

    net = Calls(forward)
    return labels(net, bayesian=net.last)


@odd(objectives="map taylor")
def functional_call_inside():
    def forward(net, x):
        return torch.func.functional_call(net.inner, {"weight": net.inner.weight * 2}, (x,))

    net = Calls(forward)
    net.inner = nn.Linear(4, 4)
    return labels(net, bayesian=net.last)


@odd(objectives="map taylor")
def vmap_inside():
    return labels(Calls(lambda net, x: torch.func.vmap(lambda row: torch.tanh(net.first(row)))(x)))


@odd(objectives="map")
def jacobian_inside():
    def forward(net, x):
        return torch.func.vmap(torch.func.jacrev(lambda row: torch.tanh(net.first(row)).sum()))(x)

    return labels(Calls(forward))


@odd("belongs to no module", objectives="map")
def gradient_inside():
    def forward(net, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(torch.tanh(net.first(x)).sum(), x, create_graph=True)[0]

    return labels(Calls(forward))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, out):
        return 2 * out * ctx.saved_tensors[0].cos()


@odd(objectives="map taylor")
def custom_function():
    return labels(Calls(lambda net, x: Doubled.apply(net.first(x))))


class ReadsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, out):
        return out * (1.0 if out.sum() > 0 else 0.5)


@odd(READS, objectives="map")
def custom_function_that_reads():
    return labels(Calls(lambda net, x: ReadsBackward.apply(net.first(x))))


@odd(READS, objectives="map")
def numpy_round_trip():
    return labels(Calls(lambda net, x: net.first(torch.from_numpy(np.sin(x.numpy())))))


@odd(READS, objectives="map")
def numpy_control_flow():
    """The first batches take one branch."""
    batches = [(x.abs(), y) for x, y in rows(4, count=24)] + [(-x.abs(), y) for x, y in rows(4, count=4)]
    return labels(Calls(lambda net, x: net.first(x if x.numpy().mean() > 0 else -2 * x)), batches=batches)


@odd(READS, objectives="map")
def list_control_flow():
    batches = [(x.abs(), y) for x, y in rows(4, count=24)] + [(-x.abs(), y) for x, y in rows(4, count=4)]
    return labels(Calls(lambda net, x: net.first(x if x.tolist()[0][0] > 0 else -2 * x)), batches=batches)


@odd(READS, objectives="map")
def tensor_of_tensors():
    """A count that is the same in the first batches."""

    def forward(net, x):
        count = torch.tensor([(x[:, 0] > 0).sum()])
        return net.first(x) / (1 + count)

    batches = [(x.abs(), y) for x, y in rows(4, count=24)] + rows(4)
    return labels(Calls(forward), batches=batches)


@odd(objectives="map")
def tensor_of_a_tensor():
    def forward(net, x):
        return net.first(x) / (1 + torch.tensor((x[:, 0] > 0).sum().detach()))

    batches = [(x.abs(), y) for x, y in rows(4, count=24)] + rows(4)
    return labels(Calls(forward), batches=batches)


@odd(READS, objectives="map")
def split_by_a_tensor():
    def forward(net, x):
        first, second = torch.tensor_split(net.first(x), (x[:, 0] > 0).sum().reshape(1), 0)
        return torch.cat([first, 2 * second])

    batches = [(x.abs(), y) for x, y in rows(4, count=24)] + rows(4)
    return labels(Calls(forward), batches=batches)


@odd(READS, objectives="map")
def control_flow_on_what_was_written():
    """Through a view of memory that began as a constant."""

    def forward(net, x):
        count = torch.zeros(3)
        count[1:] = (x[:, :2] > 0).sum(0)
        return net.first(x if count.sum() > 1 else -2 * x)

    batches = [(x.abs(), y) for x, y in rows(4, count=24)] + [(-x.abs(), y) for x, y in rows(4)]
    return labels(Calls(forward), batches=batches)


@odd(READS, objectives="taylor map sampled vogn")
def control_flow_on_data():
    return labels(Calls(lambda net, x: net.first(x) if x.mean() > 0 else -net.first(x)))


@odd(READS, objectives="map")
def one_hot_of_unknown_size():
    def forward(net, x):
        return net.first(F.one_hot(x).float()[:, :4])

    made = torch.Generator().manual_seed(5)
    return labels(
        Calls(forward),
        batches=[
            (torch.cat([torch.tensor([4]), torch.randint(4, (7,), generator=made)]), y) for _, y in rows(4)
        ],
    )


@odd("a shape depends on values", objectives="map")
def selected_rows():
    def forward(net, x):
        return net.first(x).index_add(0, torch.nonzero(x[:, 0] > 0)[:, 0], net.first(x[x[:, 0] > 0]))

    return labels(Calls(forward))


@odd(objectives="map taylor")
def fourier():
    return labels(Calls(lambda net, x: torch.fft.ifft(torch.fft.fft(net.first(x)) * 1j).imag))


@odd("sparse", objectives="map")
def sparse_input():
    return labels(
        Calls(lambda net, x: net.first(x.to_dense())), batches=[(x.relu().to_sparse(), y) for x, y in rows(4)]
    )


# Arguments -----------------------------------------------------------------------------------------------------------


@odd(objectives="map taylor")
def dictionary_input():
    return labels(
        Calls(lambda net, x: net.first(x["a"] + x["b"][0])),
        batches=[({"a": x, "b": [x * 2]}, y) for x, y in rows(4)],
    )


Pair = namedtuple("Pair", "a b")


@odd(objectives="map")
def namedtuple_input():
    return labels(
        Calls(lambda net, x: net.first(x.a + x.b)), batches=[(Pair(x, 2 * x), y) for x, y in rows(4)]
    )


class Record:
    def __init__(self, a):
        self.a = a

    def __len__(self):
        return len(self.a)


@odd("arguments of type Record", objectives="map")
def object_input():
    return labels(Calls(lambda net, x: net.first(x.a)), batches=[(Record(x), y) for x, y in rows(4)])


@odd(objectives="map taylor")
def keyword_arguments():
    return labels(
        Calls(lambda net, x, scale=1.0: net.first(x) * scale),
        batches=[{"x": x, "y": y, "scale": 2.0} for x, y in rows(4)],
    )


@odd("arguments", objectives="map")
def annealed_number():
    batch = rows(4)
    return labels(
        Calls(lambda net, x, t=1.0: net.first(x) * t),
        batches=[lambda k: {"x": batch[0][0], "y": batch[0][1], "t": 1 + 0.01 * k}],
        steps=120,
    )


@odd(objectives="map")
def annealed_tensor():
    batch = rows(4)
    return labels(
        Calls(lambda net, x, t=1.0: net.first(x) * t),
        batches=[lambda k: {"x": batch[0][0], "y": batch[0][1], "t": torch.tensor(1 + 0.01 * k)}],
    )


@odd(objectives="map sampled")
def same_tensor_twice():
    """As an autoencoder's target, which is another tensor later."""

    class Same(pyro.nn.PyroModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 4)

        def forward(self, x, y):
            out = self.net(x)
            with pyro.plate("data", NUM_DATA, subsample_size=len(x)):
                pyro.sample("y", dist.Normal(out, 1.0).to_event(1), obs=y)

    model = Same()
    dvi.to_bayesian_(model.net)
    return Odd(model, [(x, x) for x, _ in rows(4, count=20)] + [(x, 2 * x) for x, _ in rows(4)])


@odd(objectives="map")
def inputs_with_gradients():
    batches = [(x.requires_grad_(), y) for x, y in rows(4)]
    return labels(mlp(), batches=batches, left=lambda: [x.grad for x, _ in batches])


@odd("belongs to no module", objectives="map")
def trained_outside():
    outside = nn.Linear(4, 4)
    batch = rows(4)
    return labels(
        mlp(),
        batches=[lambda k: (outside(batch[k % 4][0]), batch[k % 4][1])],
        left=lambda: outside.weight.grad,
    )


@odd(objectives="map taylor")
def curriculum():
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(2, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.head(torch.tanh(self.first(x)).mean(1))

    batch = rows(6, 2)
    return labels(Mean(), batches=[lambda k: (batch[k % 4][0][:, : 2 + k // 14], batch[k % 4][1])])
