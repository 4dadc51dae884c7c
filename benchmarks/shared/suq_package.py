# SPDX-License-Identifier: Apache-2.0
"""Streamlined prediction of the package ``suq`` (Li, Klasson, Solin & Trapp, ICLR 2025), from its package.

Its release 0.1.0 lacks the folder ``suq/utils``, which every import asks for and only the fit of its scale factor
needs. An empty stand-in lets the release be imported; a clone of the repository is imported as it is.
"""

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import Tensor, nn

__all__ = ["streamlined"]


def streamlined(net: nn.Sequential, variances: Tensor, likelihood: str) -> Any:
    """Return suq's module for a diagonal posterior; ``forward_latent(x, None)`` gives moments of the outputs.

    Args:
        net: linear layers and activations, with weights at the posterior mean.
        variances: of all parameters, in the order of ``net.parameters()``, flattened.
        likelihood: "classification" or "regression".
    """
    if find_spec("suq") is None:
        raise ModuleNotFoundError(
            'suq is not installed: pip install -e ".[bench]", or install a clone of AaltoML/SUQ'
        )
    try:
        import suq
    except ModuleNotFoundError as error:
        if error.name != "suq.utils":
            raise
        package, module = ModuleType("suq.utils"), ModuleType("suq.utils.utils")
        module.torch_dataset = None  # type: ignore[attr-defined]
        sys.modules.update({package.__name__: package, module.__name__: module})
        import suq
    return suq.streamline_mlp(net, variances, "diag", likelihood)
