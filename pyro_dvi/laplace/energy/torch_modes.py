# SPDX-License-Identifier: Apache-2.0
"""Modes of torch in which no Gaussian is fitted, nor asked."""

import torch

from pyro_dvi.errors import UnsupportedError

__all__ = ["refuse_torch_modes"]


def refuse_torch_modes(device: torch.device | None) -> None:
    """Refuse to differentiate where nothing can be, and to solve equations in half precision.

    Args:
        device: of the model; None: not known, so the CPU.

    Raises:
        UnsupportedError: ``torch.inference_mode()`` or ``torch.autocast`` is on.
    """
    if torch.is_inference_mode_enabled():
        raise UnsupportedError(
            "a Laplace approximation differentiates the model, in predictions too, which torch.inference_mode() rules "
            "out: leave it away, or use torch.no_grad(), and make the inputs outside of it"
        )
    if torch.is_autocast_enabled("cpu" if device is None else device.type):
        raise UnsupportedError(
            "a Laplace approximation solves equations, in predictions too, for which the precision of torch.autocast "
            "is too low: train under it if you like, but leave it to polish, fit, tune and predict"
        )
