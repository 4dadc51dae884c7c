# SPDX-License-Identifier: Apache-2.0
"""When and by which versions something was exported."""

from datetime import UTC, datetime
from importlib.metadata import version

import pyro
import torch

__all__ = ["provenance"]


def provenance() -> dict[str, str]:
    """Return the time and the versions of the libraries, as ArviZ calls them."""
    return {
        "created_at": datetime.now(UTC).isoformat(),
        "inference_library": "pyro_dvi",
        "inference_library_version": version("pyro-dvi"),
        "pyro_version": pyro.__version__,
        "torch_version": str(torch.__version__),
    }
