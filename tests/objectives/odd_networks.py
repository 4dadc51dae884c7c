# SPDX-License-Identifier: Apache-2.0
"""Odd networks and distributions."""

import random
from collections import namedtuple
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro import poutine
from pyro.infer.autoguide import AutoDelta
from torch import Tensor, nn
from torch.distributions import constraints
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import pyro_dvi as dvi
from tests.objectives.odd_training import NUM_DATA, READS, Calls, Labels, Odd, labels, mlp, odd, rows
from tests.models import residual_network

# Layers --------------------------------------------------------------------------------------------------------------


@odd(objectives="taylor sampled map vogn ivon ggn empirical every moments")
def dropout():
    return labels(mlp(nn.Dropout(0.3)))


@odd(objectives="taylor sampled map vogn")
def batch_norm():
    return labels(mlp(nn.BatchNorm1d(6)))


@odd(objectives="taylor")
def batch_norm_2d():
    return labels(nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.SiLU(), nn.Flatten(), nn.Linear(27, 3)), 1, 5, 5)


@odd(READS)
def batch_norm_cumulative():
    return labels(mlp(nn.BatchNorm1d(6, momentum=None)))


@odd(objectives="taylor map")
def batch_norm_untracked():
    return labels(mlp(nn.BatchNorm1d(6, track_running_stats=False)))


@odd()
def batch_norm_in_eval():
    net = mlp(nn.BatchNorm1d(6)).eval()
    return labels(net)


@odd(objectives="map sampled")
def spectral_norm():
    net = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3))
    return labels(net, bayesian=net[2])


@odd(objectives="map taylor")
def weight_norm():
    net = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3))
    return labels(net, bayesian=net[2])


class Recurrent(nn.Module):
    def __init__(self, kind, **others):
        super().__init__()
        self.inner = kind(2, 3, batch_first=True, **others)
        self.head = nn.Linear(6 if others.get("bidirectional") else 3, 3)

    def forward(self, x):
        return self.head(self.inner(x)[0][:, -1])


def recurrent(kind, **others):
    net = Recurrent(kind, **others)
    return labels(net, 5, 2, bayesian=net.head)


@odd(objectives="taylor map sampled vogn")
def lstm():
    return recurrent(nn.LSTM)


@odd(objectives="taylor map")
def gru_bidirectional():
    return recurrent(nn.GRU, bidirectional=True)


@odd(objectives="map")
def rnn_with_dropout():
    return recurrent(nn.RNN, num_layers=2, dropout=0.2)


@odd(objectives="map sampled")
def lstm_of_latents():
    return labels(Recurrent(nn.LSTM), 5, 2)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.GRU(2, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, batch):
        x, lengths = batch
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.inner(packed)[1][0])


@odd(READS, objectives="map")
def packed_sequences():
    """The first batches have the same lengths, others of the same sum, which packs as many rows."""
    net = Packed()
    batches = [((x, torch.tensor([5, 4, 3, 3, 3, 2, 2, 2])), y) for x, y in rows(5, 2, count=24)]
    batches += [((x, torch.tensor([4, 4, 3, 3, 3, 3, 2, 2])), y) for x, y in rows(5, 2, count=4)]
    return labels(net, bayesian=net.head, batches=batches)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.layer(x).mean(1))


@odd(objectives="taylor map vogn")
def transformer_layer():
    net = Encoder()
    return labels(net, 5, 4, bayesian=net.head)


@odd(objectives="map sampled")
def transformer_of_latents():
    return labels(Encoder(), 5, 4)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        mask = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
        return self.head(self.layer(x, x, x, attn_mask=mask)[0].mean(1))


@odd(objectives="map taylor")
def attention():
    net = Attention()
    return labels(net, 5, 4, bayesian=net.head)


def tokens(high=7):
    made = torch.Generator().manual_seed(5)
    return [(torch.randint(high, (8, 5), generator=made), y) for _, y in rows(4)]


@odd(objectives="taylor map vogn")
def embedding_with_padding():
    net = nn.Sequential(nn.Embedding(7, 4, padding_idx=0), nn.Flatten(), nn.Linear(20, 3))
    return labels(net, batches=tokens())


@odd("writes to a parameter", objectives="map taylor")
def embedding_of_bounded_norm():
    net = nn.Sequential(nn.Embedding(7, 4, max_norm=0.5), nn.Flatten(), nn.Linear(20, 3))
    return labels(net, batches=tokens(), bayesian=net[2])


@odd(objectives="map")
def embedding_bag():
    net = nn.Sequential(nn.EmbeddingBag(7, 4, mode="sum"), nn.Linear(4, 3))
    return labels(net, batches=tokens(), bayesian=net[1])


@odd("Sparse", objectives="map")
def sparse_embedding():
    net = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Flatten(), nn.Linear(20, 3))
    return labels(net, batches=tokens(), bayesian=net[2], optimizer=pyro.optim.SGD({"lr": 0.01}))


@odd(objectives="taylor map vogn")
def grouped_and_transposed_convolution():
    net = nn.Sequential(
        nn.Conv1d(2, 4, 3, groups=2), nn.SiLU(), nn.ConvTranspose1d(4, 2, 3, stride=2), nn.Flatten(), nn.Linear(14, 3)
    )
    return labels(net, 2, 5)


@odd(objectives="taylor map")
def residual():
    return labels(residual_network(3), 3, 8, 8, batches=rows(3, 8, 8, size=4))


@odd(objectives="taylor map")
def tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.last(torch.tanh(F.linear(torch.tanh(self.first(x)), self.first.weight.T)))

    return labels(Tied())


@odd(objectives="taylor map")
def frozen_layers():
    net = mlp(nn.Linear(6, 6))
    net[1].requires_grad_(False)
    return labels(net, bayesian=net[3])


@odd(objectives="map")
def lazy_modules():
    net = nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.Linear(6, 3))
    odd_one = labels(net, bayesian=net[2])
    net(torch.zeros(1, 4))
    return odd_one


@odd(objectives="taylor sampled")
def double_precision():
    return labels(mlp().double(), batches=[(x.double(), y) for x, y in rows(4)])


@odd(objectives="taylor map")
def autocast():
    def forward(net, x):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.tanh(net.first(x)).float()

    return labels(Calls(forward))


@odd(objectives="map taylor")
def scripted_part():
    part = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    net = nn.Sequential(part, nn.Linear(4, 3))
    return labels(net, bayesian=net[1])


@odd(READS, objectives="map")
def scripted_control_flow():
    @torch.jit.script
    def flow(x):
        if bool(x.sum() > 0):
            return x
        return -x

    return labels(Calls(lambda net, x: flow(net.first(x))))


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


@odd("differs", objectives="map")
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
        Calls(forward), batches=[(torch.cat([torch.tensor([4]), torch.randint(4, (7,), generator=made)]), y) for _, y in rows(4)]
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
    return labels(Calls(lambda net, x: net.first(x.a + x.b)), batches=[(Pair(x, 2 * x), y) for x, y in rows(4)])


class Record:
    def __init__(self, a):
        self.a = a

    def __len__(self):
        return len(self.a)


@odd("an argument is a Record", objectives="map")
def object_input():
    return labels(Calls(lambda net, x: net.first(x.a)), batches=[(Record(x), y) for x, y in rows(4)])


@odd(objectives="map taylor")
def keyword_arguments():
    return labels(
        Calls(lambda net, x, scale=1.0: net.first(x) * scale), batches=[{"x": x, "y": y, "scale": 2.0} for x, y in rows(4)]
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
    return labels(mlp(), batches=[lambda k: (outside(batch[k % 4][0]), batch[k % 4][1])], left=lambda: outside.weight.grad)


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
