# SPDX-License-Identifier: Apache-2.0
"""Functions with kinks, where a derivative at one point does not describe the slopes on both sides."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.core.autograd_graph import function_of


def kinks_among(nodes: Iterable[Any]) -> Iterator[tuple[Any, str]]:
    """Yield nodes of an autograd graph whose inputs lie on both sides of a kink, with the names of their functions.

    A ``clamp`` that only guards a logarithm is not included, nor is a ``relu`` whose inputs are all positive. Functions
    with kinks where two inputs are equal (max, sort), and functions made of comparisons (``torch.where``), are never
    included.

    Example:
        >>> x = torch.linspace(-1, 1, 4, requires_grad=True)
        >>> [name for _, name in kinks_among([x.relu().grad_fn, (x + 2).relu().grad_fn])]
        ['relu']
    """
    for node in nodes:
        name = function_of(node)
        if name in _PIECES:
            piece = _PIECES[name](node)
            if bool((piece != piece.flatten()[:1]).any()):
                yield node, name


def _beyond(*borders: float | str) -> Callable[[Any], Tensor]:
    """Return a function that numbers the piece of each input; kinks are numbers, or names of saved attributes."""

    def pieces(node: Any) -> Tensor:
        x = node._saved_self if hasattr(node, "_saved_self") else node._saved_result
        places = [getattr(node, f"_saved_{b}") if isinstance(b, str) else b for b in borders]
        return torch.stack([x > place for place in places if place is not None]).sum(0)

    return pieces


def _elu(node: Any) -> Tensor:
    """Number the pieces; if the product of slopes is one, the slopes at zero agree and there is no kink."""
    return _beyond(0)(node) * (node._saved_alpha * node._saved_input_scale != 1)


def _order(node: Any) -> Tensor:
    return node._saved_self > node._saved_other


def _outside(node: Any) -> Tensor:
    return node._saved_self.abs() > node._saved_lambd


# For each function name: computes the number of the piece on which each input lies.
_PIECES: dict[str, Callable[[Any], Tensor]] = {
    **dict.fromkeys(("abs", "leaky_relu", "prelu", "relu", "rrelu"), _beyond(0)),
    **dict.fromkeys(("hardsigmoid", "hardswish"), _beyond(-3, 3)),
    **dict.fromkeys(("hardshrink", "softshrink"), _outside),
    **dict.fromkeys(("fmax", "fmin", "maximum", "minimum"), _order),
    "clamp": _beyond("min", "max"),
    "clamp_max": _beyond("max"),
    "clamp_min": _beyond("min"),
    "elu": _elu,
    "hardtanh": _beyond("min_val", "max_val"),
    "threshold": _beyond("threshold"),
}

PIECEWISE_LINEAR = frozenset(_PIECES) - {"elu", "hardswish"}
"""Names of functions whose second derivative is zero wherever it exists."""
