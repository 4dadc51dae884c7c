# SPDX-License-Identifier: Apache-2.0
"""Functions with kinks between the latents and U: a Hessian knows nothing of the slope on the other side."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.autograd_graph import graph_between
from pyro_dvi.laplace.energy.energy import Energy

__all__ = ["TIES", "kinks"]

TIES = frozenset({"max_pool", "max", "sort"})
"""Functions whose kinks are where two of their inputs are equal."""


def kinks(energy: Energy) -> tuple[str, ...]:
    """Name the functions with kinks on the way from the latents that vary to U.

    A function counts where its inputs lie on both sides of a kink, so that ``clamp`` does not where it only guards a
    logarithm, and ``relu`` does not where all units are on. Functions of :data:`TIES` always count.

    Status: of the first batch, at the mode. Functions made of comparisons (``torch.where``), and those inside compiled
    modules, are not recognised.

    Args:
        energy: U on fixed batches.

    Returns:
        names in alphabetical order; empty for a smooth model.

    Example:
        >>> import pyro_dvi as dvi
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.ReLU(), torch.nn.Linear(20, 1))
        >>> _ = torch.manual_seed(0)
        >>> guide = dvi.LaplaceGuide(dvi.regressor(dvi.to_bayesian_(net), num_data=9, noise_scale=0.1))
        >>> batches = [(torch.linspace(-1, 1, 9)[:, None], torch.zeros(9, 1))]
        >>> kinks(guide.energy(batches)), kinks(guide.energy(batches, subset="net.2.*"))
        (('relu',), ())
    """
    with torch.enable_grad():
        values, run = energy.first_run(energy.start)
        nodes = graph_between(values, [run.log_likelihood(), run.log_prior])
    found = set()
    for node in nodes:
        kind = node.name().rstrip("0123456789").removesuffix("Backward")
        if kind in _TIES:
            found.add(_TIES[kind])
        elif kind in _PIECES:
            name, pieces = _PIECES[kind]
            piece = pieces(node)
            if bool((piece != piece.flatten()[:1]).any()):
                found.add(name)
    return tuple(sorted(found))


def _beyond(*borders: float | str) -> Callable[[Any], Tensor]:
    """Number the piece of each input by the kinks below it: numbers, or names under which the node saved them."""

    def pieces(node: Any) -> Tensor:
        x = node._saved_self if hasattr(node, "_saved_self") else node._saved_result
        places = [getattr(node, f"_saved_{b}") if isinstance(b, str) else b for b in borders]
        return torch.stack([x > place for place in places if place is not None]).sum(0)

    return pieces


def _elu(node: Any) -> Tensor:
    """With a product of one the slopes at zero agree."""
    return _beyond(0)(node) * (node._saved_alpha * node._saved_input_scale != 1)


# By the node that torch leaves in the graph: the name, and which linear or smooth piece each element is on.
_PIECES: dict[str, tuple[str, Callable[[Any], Tensor]]] = {
    "Abs": ("abs", _beyond(0)),
    "Clamp": ("clamp", _beyond("min", "max")),
    "ClampMax": ("clamp", _beyond("max")),
    "ClampMin": ("clamp", _beyond("min")),
    "Elu": ("elu", _elu),
    "Fmax": ("maximum", lambda node: node._saved_self > node._saved_other),
    "Fmin": ("minimum", lambda node: node._saved_self > node._saved_other),
    "Hardshrink": ("hardshrink", lambda node: node._saved_self.abs() > node._saved_lambd),
    "Hardsigmoid": ("hardsigmoid", _beyond(-3, 3)),
    "Hardswish": ("hardswish", _beyond(-3, 3)),
    "Hardtanh": ("hardtanh", _beyond("min_val", "max_val")),
    "LeakyRelu": ("leaky_relu", _beyond(0)),
    "Maximum": ("maximum", lambda node: node._saved_self > node._saved_other),
    "Minimum": ("minimum", lambda node: node._saved_self > node._saved_other),
    "PreluKernel": ("prelu", _beyond(0)),
    "Relu": ("relu", _beyond(0)),
    "RreluWithNoise": ("rrelu", _beyond(0)),
    "Softshrink": ("softshrink", lambda node: node._saved_self.abs() > node._saved_lambd),
    "Threshold": ("threshold", _beyond("threshold")),
}
_POOLS = ("MaxPool2DWithIndices", "MaxPool3DWithIndices", "AdaptiveMaxPool2D", "AdaptiveMaxPool3D")
_TIES = {
    **dict.fromkeys((*_POOLS, "FractionalMaxPool2D", "FractionalMaxPool3D", "MkldnnMaxPool2D"), "max_pool"),
    **dict.fromkeys(("Amax", "Amin", "Aminmax", "Cummax", "Cummin", "Max", "Min"), "max"),
    **dict.fromkeys(("Kthvalue", "Median", "Sort", "Topk"), "sort"),
}
