# SPDX-License-Identifier: Apache-2.0
"""The latent sites of a model."""

from collections.abc import Callable
from typing import Any

import pyro


def sites(model: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Run the model once and return its latent sites."""
    trace = pyro.poutine.trace(model).get_trace(*args)
    return {
        name: site
        for name, site in trace.nodes.items()
        if site["type"] == "sample" and not site["is_observed"]
    }
