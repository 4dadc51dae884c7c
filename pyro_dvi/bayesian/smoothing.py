# SPDX-License-Identifier: Apache-2.0
"""Smooth replacements for activations with kinks such as ReLU, whose second derivative is zero almost everywhere."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from pyro.nn.module import PyroModule, to_pyro_module_
from torch import Tensor, nn

from pyro_dvi.bayesian.converted import plain_type

Replacement = type[nn.Module] | Callable[[nn.Module], nn.Module]


class RoundedCorners(nn.Module):
    r"""A piecewise linear function with rounded corners.

    .. math::
        f(x) = b + s x + \sum_k d_k \operatorname{softplus}_\beta(x - t_k)

    Status: a rounded corner differs from the sharp corner by at most :math:`|d_k| \log(2) / \beta`. The
    difference is largest at :math:`t_k`.

    Args:
        offset: :math:`b`, the constant term.
        slope: :math:`s`, the slope far to the left.
        corners: mapping from places :math:`t_k` to changes :math:`d_k` of the slope.
        beta: :math:`\beta`, the sharpness of the corners, per unit of ``x``.

    Example:
        >>> clamp = RoundedCorners(0.0, 0.0, {0.0: 1.0, 6.0: -1.0})
        >>> clamp(torch.tensor([3.0, 50.0]))
        tensor([3., 6.])
    """

    def __init__(
        self, offset: float, slope: float, corners: Mapping[float, float], beta: float = 1.0
    ) -> None:
        super().__init__()
        self.offset, self.slope, self.corners, self.beta = offset, slope, dict(corners), beta

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to every entry."""
        rounded = [change * F.softplus(x - place, self.beta) for place, change in self.corners.items()]
        return self.offset + self.slope * x + sum(rounded)

    def extra_repr(self) -> str:
        """Show the corners."""
        return f"offset={self.offset}, slope={self.slope}, corners={self.corners}, beta={self.beta}"


def _leaky(old: nn.Module) -> nn.Module:
    slope = float(old.negative_slope)  # type: ignore[arg-type]
    return RoundedCorners(0.0, slope, {0.0: 1.0 - slope})


def _clamp(old: nn.Module) -> nn.Module:
    low, high = float(old.min_val), float(old.max_val)  # type: ignore[arg-type]
    # Corners as wide as the range would flatten the function; with this sharpness, the slope in the middle is 0.9.
    return RoundedCorners(low, 0.0, {low: 1.0, high: -1.0}, beta=max(1.0, 6.0 / (high - low)))


SMOOTH: Mapping[type[nn.Module], Replacement] = {
    nn.ReLU: nn.Softplus,
    nn.ReLU6: _clamp,
    nn.Hardtanh: _clamp,
    nn.LeakyReLU: _leaky,
    nn.Hardswish: nn.SiLU,
    nn.Hardsigmoid: nn.Sigmoid,
}
"""The default replacements. Pass ``{**SMOOTH, nn.ReLU: nn.GELU}`` to change one entry."""

_FUNCTIONS = (F.relu, torch.relu, torch.relu_, F.relu_)


def smooth_activations_(
    module: nn.Module, mapping: Mapping[type[nn.Module], Replacement] = SMOOTH
) -> nn.Module:
    r"""Replace the activation modules of ``module`` by smooth ones, in place.

    .. math::
        \operatorname{relu}(x) \to \operatorname{softplus}(x) = \log(1 + e^x), \text{ and so on}

    :class:`~pyro_dvi.TaylorELBO` differentiates squared gradients, which requires activations with a second derivative.
    Besides modules, a ``relu`` function stored as an attribute is replaced by softplus, as in
    ``nn.TransformerEncoderLayer``. **Calls of F.relu in the code of a forward method cannot be replaced**: change that
    code; :class:`~pyro_dvi.TaylorELBO` warns of the remaining kinks. Call this function before training, because it
    changes the function that the network computes.

    Status: the result is another network, not an approximation of the same posterior; softplus exceeds ReLU by at most
    :math:`\log 2`.

    Args:
        module: the network.
        mapping: mapping from types of activations to module classes, or to callables that take the old module and
            return the new one. A subclass of a listed type is replaced only if it is listed itself.

    Returns:
        ``module``, or its replacement if ``module`` itself is an activation.

    Example:
        >>> smooth_activations_(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)))[1]
        Softplus(beta=1.0, threshold=20.0)
    """
    made: dict[int, nn.Module] = {}  # one activation module may be used in several places

    def smooth(old: nn.Module) -> nn.Module:
        make = mapping.get(plain_type(old) or type(old))
        if make is None:
            return old
        if id(old) not in made:
            new = make() if isinstance(make, type) else make(old)
            made[id(old)] = new.train(old.training)
            if isinstance(old, PyroModule):
                to_pyro_module_(new)
        return made[id(old)]

    if (new_root := smooth(module)) is not module:
        return new_root
    for parent in list(module.modules()):
        children = {name: smooth(child) for name, child in parent._modules.items() if child is not None}
        replaced = {name: child for name, child in children.items() if child is not parent._modules[name]}
        functions = [name for name, value in vars(parent).items() if any(value is f for f in _FUNCTIONS)]
        parent._modules.update(replaced)
        vars(parent).update(dict.fromkeys(functions, F.softplus))
        if isinstance(parent, nn.TransformerEncoderLayer) and (replaced or functions):
            parent.activation_relu_or_gelu = 0  # the fused path supports only ReLU and GELU
    for encoder in module.modules():
        if isinstance(encoder, nn.TransformerEncoder):
            # Nested tensors, for padded batches, are supported only by the fused path.
            fused = all(getattr(layer, "activation_relu_or_gelu", 1) for layer in encoder.layers)
            encoder.use_nested_tensor = encoder.use_nested_tensor and fused
    return module
