# SPDX-License-Identifier: Apache-2.0
r"""Sums of squared per-example gradients, :math:`\sum_i (\partial_u \ell_i)^2`, that can be differentiated again."""

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.curvature.likelihood import Linearisation
from pyro_dvi.curvature.per_example.uses import Use, WeightUses, at_least_single

__all__ = ["PerExampleRecorder", "summed_squared_gradients"]

_CHUNK = 64  # examples per vectorised backward pass of the fallback


class PerExampleRecorder(WeightUses):
    """Note every use of the given tensors, for squares that can be differentiated again."""


def summed_squared_gradients(likelihood: Linearisation, outputs: Tensor, cotangent: Tensor) -> list[Tensor]:
    r"""Return :math:`\sum_i (w_i\,\partial_u f_i)^2` for every latent, differentiable in the means.

    Status: exact for the fallback. The layer-wise rules attribute to example i what passes through its own row
    of the activations; the two differ only where rows are coupled, as by batch normalisation in training mode.

    Args:
        likelihood: the linearisation, run under a :class:`PerExampleRecorder` for the fast rules.
        outputs: f, one entry per example; gradients flow to the latent means.
        cotangent: w of the same shape; may depend on the means as well.
    """
    if not outputs.requires_grad:  # everything is masked, or no latent reaches the observed site
        return [torch.zeros_like(u) for u in likelihood.values]
    found: dict[int, Tensor] = {}
    if isinstance(likelihood.recorder, PerExampleRecorder) and outputs.dim() == 1:
        found = _by_layer(likelihood.recorder.served(len(outputs)), outputs, cotangent)
    rest = [k for k in range(len(likelihood.values)) if k not in found]
    if rest:
        values = [likelihood.values[k] for k in rest]
        found.update(zip(rest, _one_pass_per_example(outputs, cotangent, values), strict=True))
    return [found[k].reshape(u.shape) for k, u in enumerate(likelihood.values)]


def _by_layer(served: dict[int, list[Use]], outputs: Tensor, cotangent: Tensor) -> dict[int, Tensor]:
    edges = [use.output for uses in served.values() for use in uses]
    if not edges:
        return {}
    deltas = iter(torch.autograd.grad(outputs, edges, cotangent, create_graph=True, allow_unused=True))
    found = {}
    for k, uses in served.items():
        per_use = [(use, next(deltas)) for use in uses]
        gradients = [
            use.contribution.gradients(at_least_single(delta)) for use, delta in per_use if delta is not None
        ]
        if gradients:
            found[k] = sum(gradients[1:], gradients[0]).square().sum(0)
    return found


def _one_pass_per_example(outputs: Tensor, cotangent: Tensor, values: list[Tensor]) -> list[Tensor]:
    outputs, cotangent = outputs.reshape(-1), cotangent.reshape(-1)
    totals = [torch.zeros_like(v) for v in values]
    for start in range(0, len(outputs), _CHUNK):
        rows = torch.arange(start, min(start + _CHUNK, len(outputs)), device=outputs.device)
        seeds = F.one_hot(rows, len(outputs)).to(outputs) * cotangent
        grads = torch.autograd.grad(
            outputs, values, seeds, is_grads_batched=True, create_graph=True, allow_unused=True
        )
        totals = [t if g is None else t + g.square().sum(0) for t, g in zip(totals, grads, strict=True)]
    return totals
