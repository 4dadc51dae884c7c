# SPDX-License-Identifier: Apache-2.0
"""Per-example gradients of a table of embeddings; tokens that repeat within an example add up before squaring."""

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.curvature.per_example.rules import Contribution, per_example_rule
from pyro_dvi.errors import UnsupportedError


def _without_padding(delta: Tensor, tokens: Tensor, padding_idx: int | None, size: int) -> Tensor:
    """Gradients as ``[M, T, d]``, zero at padding tokens, which get none."""
    delta = delta.reshape(*tokens.shape, delta.shape[-1])
    if padding_idx is None:
        return delta
    return delta * (tokens != padding_idx % size).unsqueeze(-1)


@per_example_rule(F.embedding)
def _embedding(
    wanted: str,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Contribution | None:
    if sparse:
        raise UnsupportedError(
            "an embedding with sparse=True has sparse gradients, but every entry of a latent table moves in every "
            "step, by its prior: use sparse=False"
        )
    if wanted != "weight" or input.dim() < 1 or max_norm is not None or scale_grad_by_freq:
        return None
    shape = weight.shape

    def gradients(delta: Tensor, tokens: Tensor) -> Tensor:
        delta = _without_padding(delta, tokens, padding_idx, shape[0])
        index = tokens.unsqueeze(-1).expand_as(delta)
        return delta.new_zeros(len(tokens), *shape).scatter_add(1, index, delta)

    def sum_of_squares(delta: Tensor, tokens: Tensor) -> Tensor:
        """Sum within (example, token), then square: memory for the tokens seen, not for the whole table."""
        delta = _without_padding(delta, tokens, padding_idx, shape[0]).flatten(0, 1)
        examples = torch.arange(len(tokens), device=tokens.device).unsqueeze(-1)
        keys, order = (examples * shape[0] + tokens).flatten().sort()
        starts = torch.ones_like(keys)
        starts[1:] = keys[1:] != keys[:-1]
        segment = starts.cumsum(0) - 1
        sums = torch.zeros_like(delta).index_add_(0, segment, delta[order])
        token = torch.zeros_like(keys).scatter_(0, segment, keys % shape[0])
        return delta.new_zeros(shape).index_add_(0, token, sums.square_())

    return Contribution(gradients, (input.reshape(len(input), -1),), sum_of_squares)
