# SPDX-License-Identifier: Apache-2.0
"""The last layer of a model, found by running the model, in whatever order its layers are registered."""

from collections.abc import Callable, Iterable
from typing import Any

import pyro
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pyro_dvi.core.autograd_graph import leaves_of
from pyro_dvi.core.batches import tensors_in
from pyro_dvi.core.distributions import tensors_of
from pyro_dvi.core.weight_parts import WeightRecorder, name_of
from pyro_dvi.errors import ModelError
from pyro_dvi.laplace.guide import LaplaceGuide

# Functions in which weights are added to activations, or placed beside them, instead of acting on them.
_JOINS = frozenset(
    "add iadd radd sub isub rsub subtract cat concat concatenate stack hstack vstack dstack column_stack where setitem "
    "index_put index_add index_copy copy scatter scatter_add masked_fill masked_scatter".split()
)
_RECURRENT = frozenset("lstm gru rnn_tanh rnn_relu".split())


class Succession(WeightRecorder):
    """While the model runs, record which weights act on activations that were computed with other weights.

    A value is an activation if it depends on the data; a value computed from weights alone, such as a transposed or
    masked weight, counts as a weight. Weights are leaves of the autograd graph.

    Args:
        data: the arguments of the model.

    Attributes:
        followed: ids of weights on whose results some weight acts.
        acting: ids of weights that were seen together with activations.
    """

    def __init__(self, data: Iterable[Tensor]) -> None:
        super().__init__()
        self.followed: set[int] = set()
        self.acting: set[int] = set()
        # By id: whether a value is an activation, and the value, kept alive so that its id is not reused.
        self._known = {id(value): (True, value) for value in data}

    def is_activation(self, value: Tensor) -> bool:
        """Return True if a value depends on the data; results of functions that cannot be observed count as well."""
        known = self._known.get(id(value))
        return value.requires_grad and not value.is_leaf if known is None else known[0]

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        given = [(v, self.is_activation(v)) for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
        acted = [value for value, is_activation in given if is_activation]
        weights = [value for value, is_activation in given if value.requires_grad > is_activation]
        output, name = super().__torch_function__(func, types, args, kwargs), name_of(func)
        results = [v for v in tree_leaves(args[:1] if output is None else output) if isinstance(v, Tensor)]
        if name.endswith("_like") or name.startswith("new_"):  # which take only a shape
            return output
        kinds = [is_activation for _, is_activation in given]
        if not (name.endswith("_as") or name == "broadcast_tensors"):  # where each result has one source
            kinds = [bool(acted)] * len(results)
            if acted and weights:
                self.acting |= weights_in(weights)
                self.followed |= weights_in(() if name in _JOINS else acted)
                self.followed |= weights_in(weights if name in _RECURRENT else ())
        if acted or weights:
            self._known |= {id(v): (kind, v) for v, kind in zip(results, kinds, strict=False)}
        return output


def weights_in(values: Iterable[Tensor]) -> set[int]:
    """Return the ids of the weights that values depend on."""
    return {
        id(leaf)
        for value in values
        if value.requires_grad
        for leaf in (leaves_of([value]) if value.grad_fn else [value])
    }


def last_layer(guide: LaplaceGuide, batches: Iterable[Any]) -> list[str]:
    """Return the sites of the last layer, for ``subset=``: weights that act on the outputs with none after them.

    The model runs once, so the order in which a network registers its layers does not matter. If a network has several
    heads, the weights of all heads are returned. Deterministic parameters that are trained count as layers, too.

    Args:
        guide: a guide of the model.
        batches: the training data, of which the first batch is used.

    Returns:
        Names of sites.

    Raises:
        ModelError: if no latent acts last, for example because a deterministic layer follows, or because the last layer
            shares its weights with an earlier one.

    Example:
        >>> import torch, pyro_dvi as dvi
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> guide = LaplaceGuide(dvi.classifier(dvi.to_bayesian_(net), num_data=5))
        >>> last_layer(guide, [(torch.randn(5, 3), torch.zeros(5).long())])
        ['net.2.weight', 'net.2.bias']
    """
    model = guide._plain_model.get()
    energy = guide._point_mass(batches).energy(model, batches, None, differentiable=True)
    batch = next(iter(energy.passes))
    order = Succession(tensors_in(batch))
    values, run = energy.run(batch, energy.start, lambda sites: order)
    outputs = [t for site in run.sites for t in tensors_of(site.fn) if order.is_activation(t)]
    names = {id(value): name for name, value in zip(energy.layout.names, values, strict=True)}
    last = weights_in(outputs) - order.followed
    if last & names.keys() and last <= order.acting:
        return [name for key, name in names.items() if key in last]
    modules = model.named_parameters() if isinstance(model, nn.Module) else ()
    names |= {id(p): name for name, p in (*pyro.get_param_store().named_parameters(), *modules)}
    found = [name for key, name in names.items() if key in last]
    why = "its weights act on their own results, as in a loop, or its outputs do not depend on its arguments"
    if last:
        why = f"parameters that are trained but not latent act after all latents: {found}"
    if last - order.acting:
        why = f"some function that uses {found} cannot be observed"
    raise ModelError(
        f"the model has no last layer: {why}. Pass names of sites as layers, or None for all latents"
    )
