# SPDX-License-Identifier: Apache-2.0
"""Replace activations with kinks, whose second derivative is zero almost everywhere, by smooth ones."""

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from pyro.nn.module import PyroModule, to_pyro_module_
from torch import Tensor, nn

from pyro_dvi.bayesian.converted import plain_type
from pyro_dvi.core.kinks import KINKED_MODULES
from pyro_dvi.errors import ArgumentError, warn

Replacement = nn.Module | type[nn.Module] | Callable[[nn.Module], nn.Module]


class SmoothLeakyReLU(nn.Module):
    r"""A leaky ReLU with a rounded corner.

    .. math::
        f(x) = a x + (1 - a) \operatorname{softplus}(x)

    Status: within :math:`(1 - a)\log 2` of the leaky ReLU, farthest at zero.

    Args:
        negative_slope: :math:`a`, the slope far below zero.

    Example:
        >>> SmoothLeakyReLU(0.1)(torch.tensor([-50.0, 50.0]))
        tensor([-5., 50.])
    """

    def __init__(self, negative_slope: float = 0.01) -> None:
        super().__init__()
        self.negative_slope = negative_slope

    def forward(self, x: Tensor) -> Tensor:
        """Apply it to every entry."""
        return self.negative_slope * x + (1.0 - self.negative_slope) * F.softplus(x)

    def extra_repr(self) -> str:
        """Show the slope."""
        return f"negative_slope={self.negative_slope}"


class SmoothClamp(nn.Module):
    r"""A clamp to ``[low, high]`` with rounded corners; stands for ReLU6 and Hardtanh.

    .. math::
        f(x) = l + \operatorname{softplus}_\beta(x - l) - \operatorname{softplus}_\beta(x - h)

    Status: within :math:`\log(2) / \beta` of the clamp, farthest at the corners.

    Args:
        low: :math:`l`, the value far below.
        high: :math:`h`, the value far above.
        beta: :math:`\beta`, the sharpness of the corners, per unit of ``x``.

    Raises:
        ArgumentError: if ``low`` is not below ``high``.

    Example:
        >>> SmoothClamp(0.0, 6.0)(torch.tensor([3.0, 50.0]))
        tensor([3., 6.])
    """

    def __init__(self, low: float, high: float, beta: float = 1.0) -> None:
        super().__init__()
        if not low < high:
            raise ArgumentError(f"SmoothClamp: low={low} is not below high={high}.")
        self.low, self.high, self.beta = low, high, beta

    def forward(self, x: Tensor) -> Tensor:
        """Apply it to every entry."""
        return self.low + F.softplus(x - self.low, self.beta) - F.softplus(x - self.high, self.beta)

    def extra_repr(self) -> str:
        """Show the range."""
        return f"low={self.low}, high={self.high}, beta={self.beta}"


def _leaky(old: nn.Module) -> nn.Module:
    return SmoothLeakyReLU(float(old.negative_slope))  # type: ignore[arg-type]


def _clamp(old: nn.Module) -> nn.Module:
    low, high = float(old.min_val), float(old.max_val)  # type: ignore[arg-type]
    # Corners as wide as the range would flatten it; this sharpness keeps a slope of 0.9 in the middle.
    return SmoothClamp(low, high, beta=max(1.0, 6.0 / (high - low)))


SMOOTH: Mapping[type[nn.Module], Replacement] = {
    nn.ReLU: nn.Softplus,
    nn.ReLU6: _clamp,
    nn.Hardtanh: _clamp,
    nn.LeakyReLU: _leaky,
    nn.Hardswish: nn.SiLU,
    nn.Hardsigmoid: nn.Sigmoid,
}
"""The default replacements. Pass ``{**SMOOTH, nn.ReLU: nn.GELU}`` to change one entry."""

_SMOOTH_ALREADY = (nn.Softplus, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.ELU, nn.SELU, nn.CELU)
_FUNCTIONS = (F.relu, torch.relu, torch.relu_, F.relu_)


def smooth_activations_(
    module: nn.Module, mapping: Mapping[type[nn.Module], Replacement] = SMOOTH
) -> nn.Module:
    r"""Replace the activation modules of ``module`` by smooth ones, in place.

    .. math::
        \operatorname{relu}(x) \to \operatorname{softplus}(x) = \log(1 + e^x), \text{ and so on}

    :class:`~pyro_dvi.TaylorELBO` trains with the derivative of squared gradients, which needs activations
    with a second derivative. Besides modules, a ``relu`` function that is kept as an attribute is replaced by
    softplus, as in ``nn.TransformerEncoderLayer``. **Calls of F.relu in the code of a forward method cannot
    be replaced**: change that code. Call it before training: the network computes another function
    afterwards.

    Status: another network, not an approximation of the same posterior; softplus exceeds ReLU by
    :math:`\log 2` at most.

    Args:
        module: the network.
        mapping: type of activation -> a module class, a module (copied) or a callable that gets the old
            module and returns the new one. A subclass of a listed type is replaced only if it is listed
            itself.

    Returns:
        ``module``; the replacement itself if ``module`` is an activation.

    Raises:
        ArgumentError: if ``mapping`` has entries of another form.

    Warns:
        DviWarning: if activations with kinks are left, or if none was found at all.

    Example:
        >>> smooth_activations_(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)))[1]
        Softplus(beta=1.0, threshold=20.0)
    """
    for old, new in mapping.items():
        if not (isinstance(old, type) and issubclass(old, nn.Module)) or not callable(new):
            raise ArgumentError(
                f"smooth_activations_: the entry {old!r}: {new!r} of mapping is not of the form nn.ReLU: nn.GELU"
            )
    made: dict[int, nn.Module] = {}  # one activation module may be used in several places

    def smooth(old: nn.Module) -> nn.Module:
        replacement = mapping.get(plain_type(old) or type(old))
        if replacement is None:
            return old
        if id(old) not in made:
            new = _made(replacement, old)
            new.train(old.training)
            if isinstance(old, PyroModule):
                to_pyro_module_(new)
            made[id(old)] = new
        return made[id(old)]

    if (new_root := smooth(module)) is not module:
        return new_root
    changed = []
    for parent in list(module.modules()):
        children = {name: smooth(child) for name, child in parent._modules.items() if child is not None}
        replaced = {name: child for name, child in children.items() if child is not parent._modules[name]}
        functions = [name for name, value in vars(parent).items() if any(value is f for f in _FUNCTIONS)]
        parent._modules.update(replaced)
        vars(parent).update(dict.fromkeys(functions, F.softplus))
        if replaced or functions:
            changed.append(parent)
    _leave_fused_paths(module, changed)
    _report(module, bool(changed))
    return module


def _made(replacement: Replacement, old: nn.Module) -> nn.Module:
    if isinstance(replacement, nn.Module):
        return copy.deepcopy(replacement)
    new = replacement() if isinstance(replacement, type) else replacement(old)
    if not isinstance(new, nn.Module):
        raise ArgumentError(
            f"smooth_activations_: the replacement of {type(old).__name__} returned a {type(new).__name__}, no module"
        )
    return new


def _leave_fused_paths(root: nn.Module, changed: Sequence[nn.Module]) -> None:
    """Tell transformers whose activation has been replaced not to use their fused path, which knows only relu and gelu.

    Only that path can read padded batches in packed form, so the encoders around such layers do not pack them.
    """
    for layer in changed:
        if isinstance(layer, nn.TransformerEncoderLayer):
            layer.activation_relu_or_gelu = 0
    for encoder in root.modules():
        if isinstance(encoder, nn.TransformerEncoder) and any(
            isinstance(layer, nn.TransformerEncoderLayer) and not layer.activation_relu_or_gelu
            for layer in encoder.layers
        ):
            encoder.use_nested_tensor = False


def _report(module: nn.Module, replaced: bool) -> None:
    """Warn about kinks that are left, and about networks without any activation module."""
    left = sorted({type(m).__name__ for m in module.modules() if isinstance(m, KINKED_MODULES)})
    if left:
        warn(
            f"smooth_activations_ left {', '.join(left)} in place, whose second derivative is zero: name a replacement "
            "in mapping, as {**SMOOTH, nn.PReLU: nn.SiLU}"
        )
    elif not replaced and not any(isinstance(m, (*_SMOOTH_ALREADY, SmoothClamp)) for m in module.modules()):
        warn(
            "smooth_activations_ found no activation module. It cannot replace calls of F.relu in a forward method: "
            "change them to F.softplus or F.gelu in the code"
        )
