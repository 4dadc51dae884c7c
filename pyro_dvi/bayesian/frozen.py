# SPDX-License-Identifier: Apache-2.0
"""Keep frozen parameters frozen: Pyro sets ``requires_grad`` on every parameter that a Pyro module reads.

They become buffers of the same name, so checkpoints fit as before and no optimizer sees them.
"""

from torch import Tensor, nn

from pyro_dvi.bayesian.original_order import FROZEN, is_plain, parameter_order

__all__ = ["keep_frozen", "restored_frozen"]


def keep_frozen(root: nn.Module) -> None:
    """Turn the frozen parameters below ``root`` into buffers."""
    for module in root.modules():
        positions = {name: index for index, name in enumerate(parameter_order(module))}
        for name, parameter in list(module._parameters.items()):
            if parameter is None or parameter.requires_grad or not is_plain(module, name):
                continue
            del module._parameters[name]
            module.register_buffer(name, parameter.detach())
            module.__dict__.setdefault(FROZEN, {})[name] = positions[name]


def restored_frozen(module: nn.Module) -> dict[str, nn.Parameter]:
    """Take the buffers that :func:`keep_frozen` made from ``module`` and return them as frozen parameters."""
    restored = {}
    for name in module.__dict__.pop(FROZEN, {}):
        value: Tensor | None = module._buffers.pop(name)
        assert value is not None
        restored[name] = nn.Parameter(value, requires_grad=False)
    return restored
