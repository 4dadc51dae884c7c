# SPDX-License-Identifier: Apache-2.0
"""The tests mirror the package: ``tests/variational_laplace/test_taylor*.py`` for ``variational_laplace/taylor.py``."""

from pathlib import Path

import pyro_dvi

TESTS = Path(__file__).parents[1]
PACKAGE = Path(pyro_dvi.__file__).parent  # which may be installed elsewhere
FILES = sorted(path.relative_to(TESTS) for path in TESTS.rglob("test_*.py"))

NO_CHAPTERS = {"benchmarks", "docs", "emulated", "examples", "fuzz", "whole_package"}
WHOLE_CHAPTER = {
    "*/test_mistakes.py",
    "*/test_device.py",
    "expectations/test_networks.py",
    "moments/test_brute_force.py",
    "moments/test_completeness.py",
    "moments/test_torchvision*.py",
    "predictive/test_pyro_predictive.py",
}


def is_called_after_what_it_tests(path: Path) -> bool:
    place = PACKAGE / path.parent
    modules = place.rglob("*.py") if place != PACKAGE else place.glob("*.py")
    names = {file.parent.name if file.stem == "__init__" else file.stem for file in modules}
    tested = path.stem.removeprefix("test_") + "_"
    return any(tested.startswith(name + "_") for name in names)


def test_tests_are_called_after_what_they_test():
    places = [path for path in FILES if path.parts[0] not in NO_CHAPTERS]
    others = [path for path in places if not any(path.match(pattern) for pattern in WHOLE_CHAPTER)]
    assert [str(path) for path in others if not is_called_after_what_it_tests(path)] == []


def test_every_chapter_has_tests():
    chapters = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert chapters <= {path.parts[0] for path in FILES}
