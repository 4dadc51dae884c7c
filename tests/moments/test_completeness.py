# SPDX-License-Identifier: Apache-2.0
"""A rule without a test fails here."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

from pyro_dvi.moments.rules import RULES
from pyro_dvi.moments.tensor_like import name_of

OURS = sorted((f for f, rule in RULES.items() if rule.__module__.startswith("pyro_dvi.")), key=name_of)


def functions_with_cases() -> set[Callable]:
    """Every ``case.func`` in the list CASES of a test module beside this one.

    Modules that do not import (or are being written) have no cases; their own tests say what is wrong.
    """
    found: set[Callable] = set()
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        if path == Path(__file__):
            continue
        spec = importlib.util.spec_from_file_location(f"cases_of_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception:
            continue
        found.update(case.func for case in getattr(module, "CASES", ()))
    return found


def test_every_rule_has_a_case() -> None:
    covered = functions_with_cases()
    assert len(OURS) > 1
    missing = [name_of(func) for func in OURS if func not in covered]
    assert missing == [], (
        f"rules without a test: for each, add an item with its function as .func ({', '.join(missing)}) to the list "
        "CASES of the test module of its family in tests/moments/"
    )
