# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a model or guide should be finite and are not."""

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["non_finite"]


def non_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of trained parameters and running statistics that hold NaN or infinities, and of other tensors with NaN.

    A buffer or constant may be infinite by right, as the mask of causal attention. One value is read for each device.

    Example:
        >>> non_finite({"mask": torch.tensor(-torch.inf), "running_var": torch.tensor(torch.inf)})
        ['running_var']
    """
    found: dict[torch.device, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if value.layout == torch.strided:
            finite = value.requires_grad or name.endswith(("running_mean", "running_var"))
            bad = ~torch.isfinite(value).all() if finite else torch.isnan(value).any()
            found.setdefault(value.device, {})[name] = bad
    return [
        name
        for flags in found.values()
        for name, bad in zip(flags, torch.stack(list(flags.values())).tolist(), strict=True)
        if bad
    ]
