# SPDX-License-Identifier: Apache-2.0
"""The command line of scripts in the gallery."""

import tempfile
from typing import Any


def scratch(gallery_conf: dict[str, Any], script_vars: dict[str, Any]) -> list[str]:
    """Let a script write its files into a folder that nobody looks at."""
    return ["--output-dir", tempfile.mkdtemp()]
