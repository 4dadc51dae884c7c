# SPDX-License-Identifier: Apache-2.0
"""What an objective measures for a natural-gradient optimizer, kept with the parameter that both see.

Pyro hands its optimizers parameters and their gradients, one parameter at a time. A natural-gradient update needs more
than the gradient: the objective leaves it here, as an attribute of the parameter of the means, and the optimizer finds
it there in its step.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

__all__ = [
    "NaturalState",
    "Statistics",
    "ask",
    "attach",
    "is_trained",
    "leaf_of",
    "natural_state_of",
    "note_trained",
    "wanted_of",
]

_ATTRIBUTE = "_pyro_dvi_natural_state"
_TRAINED = "_pyro_dvi_trained_by_natural_gradients"
_WANTED = "_pyro_dvi_wanted"


@dataclass(frozen=True)
class Statistics:
    """Which statistics of the gradients an optimizer reads.

    An objective that does not know its optimizer before the first step measures the default.

    Attributes:
        squares: sums of squared per-example gradients.
        noise_products: gradients times the noise of the draw, which need no examples (IVON).
        at_mean: everything at the mean instead of at draws (OGN).
    """

    squares: bool = True
    noise_products: bool = True
    at_mean: bool = False


@dataclass
class NaturalState:
    r"""Measurements of the last minibatch for the means of one site.

    Attributes:
        precision: the posterior precision that the guide samples with; the optimizer writes to it.
        prior_loc: mean of the Normal prior.
        prior_precision: its precision :math:`\delta`.
        num_data: N.
        temperature: :math:`\beta`, the weight of the KL divergence.
        loss_factor: what the loss was multiplied with before the backward pass; gradients carry it, the rest does not.
        squares: :math:`\sum_i g_i^2` scaled up to the data set, a mean over draws; None if not measured.
        noise_products: gradient times noise over standard deviation, likewise; None if not measured.
        measured: which measurements these are.
    """

    precision: Tensor
    prior_loc: Tensor
    prior_precision: Tensor
    num_data: float = 1.0
    temperature: float = 1.0
    loss_factor: Tensor | float = 1.0
    squares: Tensor | None = None
    noise_products: Tensor | None = None
    measured: Statistics = Statistics()

    def measurements(self) -> list[str]:
        """Name those that no optimizer has used."""
        return [name for name in ("squares", "noise_products") if getattr(self, name) is not None]

    @property
    def is_fresh(self) -> bool:
        """Whether there are measurements that no optimizer has used."""
        return bool(self.measurements())

    def add_squares(self, squares: Tensor) -> None:
        """Add the share of one draw."""
        self.squares = squares if self.squares is None else self.squares + squares

    def add_noise_products(self, products: Tensor) -> None:
        """Add the share of one draw."""
        self.noise_products = products if self.noise_products is None else self.noise_products + products

    def clear(self) -> None:
        """Forget the measurements."""
        self.squares = self.noise_products = None


def natural_state_of(parameter: Tensor) -> NaturalState | None:
    """Return the state that belongs to a parameter of means, or None."""
    return getattr(parameter, _ATTRIBUTE, None)


def attach(parameter: Tensor, state: NaturalState) -> None:
    """Make ``state`` belong to a parameter of means."""
    setattr(parameter, _ATTRIBUTE, state)


def ask(parameter: Tensor, wanted: Statistics) -> None:
    """Leave word with a parameter of what to measure in the next step."""
    setattr(parameter, _WANTED, wanted)


def wanted_of(parameter: Tensor) -> Statistics:
    """Return what an optimizer has asked for, or the default."""
    wanted: Statistics = getattr(parameter, _WANTED, Statistics())
    return wanted


def note_trained(parameters: Iterable[Tensor]) -> None:
    """Leave word with parameters, means or not, that an objective of natural gradients gives them their gradients."""
    for parameter in parameters:
        setattr(parameter, _TRAINED, True)


def is_trained(parameter: Tensor) -> bool:
    """Whether an objective of natural gradients has ever given this parameter a gradient."""
    return hasattr(parameter, _TRAINED)


def leaf_of(tensor: Tensor) -> Tensor:
    """Return the parameter that a tensor is, or is a view of.

    Raises:
        LookupError: it is computed from several parameters, or from none.
    """
    if tensor.is_leaf and tensor.requires_grad:
        return tensor
    node = tensor.grad_fn
    while node is not None:
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            return variable
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        node = parents[0] if len(parents) == 1 else None
    raise LookupError("no single parameter")
