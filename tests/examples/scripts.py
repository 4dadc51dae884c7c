# SPDX-License-Identifier: Apache-2.0
"""The examples as modules."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@contextmanager
def imported(name: str) -> Iterator[ModuleType]:
    """Import an example; what it imports from its own folder, as a script does, is forgotten afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    for path in EXAMPLES.glob("*.py"):
        sys.modules.pop(path.stem, None)
