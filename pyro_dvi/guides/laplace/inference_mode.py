# SPDX-License-Identifier: Apache-2.0
"""Refuse PyTorch's inference mode, whose tensors have no derivatives for good."""

import torch

from pyro_dvi.errors import UnsupportedError

__all__ = ["refuse_inference_mode"]


def refuse_inference_mode() -> None:
    """Refuse to differentiate where nothing can be.

    Raises:
        UnsupportedError: ``torch.inference_mode()`` is on.
    """
    if torch.is_inference_mode_enabled():
        raise UnsupportedError(
            "a Laplace approximation differentiates the model, in predictions too, which torch.inference_mode() rules "
            "out: leave it away, or use torch.no_grad(), and make the inputs outside of it"
        )
