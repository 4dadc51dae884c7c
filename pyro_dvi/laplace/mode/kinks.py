# SPDX-License-Identifier: Apache-2.0
"""Functions with kinks between the latents and U: a Hessian knows nothing of the slope on the other side."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.core.autograd_graph import function_of, graph_between, graph_of
from pyro_dvi.core.distributions import tensors_of
from pyro_dvi.laplace.energy.energy import Energy

TIES = frozenset({"max_pool", "max", "sort"})
"""Functions whose kinks are where two of their inputs are equal."""


def kinks(energy: Energy) -> tuple[str, ...]:
    """Name the functions with kinks on the way from the latents that vary to U.

    Those of densities are named with their place, as ``"abs in the likelihood"`` of a Laplace distribution.
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
        >>> net = torch.nn.Sequential(
        ...     torch.nn.Linear(1, 20), torch.nn.ReLU(), torch.nn.Linear(20, 1)
        ... )
        >>> _ = torch.manual_seed(0)
        >>> guide = dvi.LaplaceGuide(
        ...     dvi.regressor(dvi.to_bayesian_(net), num_data=9, noise_scale=0.1)
        ... )
        >>> batches = [(torch.linspace(-1, 1, 9)[:, None], torch.zeros(9, 1))]
        >>> kinks(guide.energy(batches)), kinks(guide.energy(batches, subset="net.2.*"))
        (('relu',), ())
    """
    with torch.enable_grad():
        values, run = energy.first_run(energy.start)
        log_likelihood = run.log_likelihood()
        nodes = graph_between(values, [log_likelihood, run.log_prior])
    outputs = graph_of(tensor for site in run.sites for tensor in tensors_of(site.fn))
    likelihood = graph_of([log_likelihood])
    found = set()
    for node in nodes:
        where = "" if node in outputs else " in the likelihood" if node in likelihood else " in a prior"
        name = function_of(node)
        if "max_pool" in name or name in _TIES:
            found.add(_TIES.get(name, "max_pool") + where)
        elif name in _PIECES:
            piece = _PIECES[name](node)
            if bool((piece != piece.flatten()[:1]).any()):
                found.add(name + where)
    return tuple(sorted(found))


def without_kinks(found: tuple[str, ...]) -> str:
    """Say what to take in the place of functions with kinks."""
    of_networks = "smooth_activations_(net) before training"
    of_densities = "a density that is smooth at its mode, as StudentT or Normal in the place of Laplace"
    ways = {of_densities if " in " in name else of_networks for name in found}
    return " and ".join(sorted(ways, reverse=True))


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


def _order(node: Any) -> Tensor:
    return node._saved_self > node._saved_other


def _outside(node: Any) -> Tensor:
    return node._saved_self.abs() > node._saved_lambd


# By the function: on which piece of it each element is.
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
_TIES = {
    **dict.fromkeys(("amax", "amin", "aminmax", "cummax", "cummin", "max", "min"), "max"),
    **dict.fromkeys(("kthvalue", "median", "sort", "topk"), "sort"),
}
