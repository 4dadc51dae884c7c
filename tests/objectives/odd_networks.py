# SPDX-License-Identifier: Apache-2.0
"""Odd layers and networks."""

import pyro
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from tests.models import residual_network
from tests.objectives.odd_training import READS, Calls, labels, mlp, odd, rows

CANNOT_LSTM = (
    "a replay fails"  # torch's kernel for the CPU leaves a result undefined, which Python cannot pass on
)

# Layers --------------------------------------------------------------------------------------------------------------


@odd(objectives="taylor sampled map vogn ivon ggn empirical every moments")
def dropout():
    return labels(mlp(nn.Dropout(0.3)))


@odd(objectives="taylor sampled map vogn")
def batch_norm():
    return labels(mlp(nn.BatchNorm1d(6)))


@odd(objectives="taylor")
def batch_norm_2d():
    return labels(
        nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.SiLU(), nn.Flatten(), nn.Linear(27, 3)),
        1,
        5,
        5,
    )


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


@odd(CANNOT_LSTM, objectives="taylor map sampled vogn")
def lstm():
    return recurrent(nn.LSTM)


@odd(objectives="taylor map")
def gru_bidirectional():
    return recurrent(nn.GRU, bidirectional=True)


@odd(objectives="map")
def rnn_with_dropout():
    return recurrent(nn.RNN, num_layers=2, dropout=0.2)


@odd(CANNOT_LSTM, objectives="map sampled")
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
        nn.Conv1d(2, 4, 3, groups=2),
        nn.SiLU(),
        nn.ConvTranspose1d(4, 2, 3, stride=2),
        nn.Flatten(),
        nn.Linear(14, 3),
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
