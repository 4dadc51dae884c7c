# SPDX-License-Identifier: Apache-2.0
"""The package as a whole: what importing it costs, and that one version number holds everywhere."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]


def imported_by(statement: str) -> set[str]:
    """Top-level packages that are loaded after ``statement`` in a fresh interpreter."""
    code = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_loads_no_optional_library():
    assert imported_by("import pyro_dvi").isdisjoint(
        {"arviz", "matplotlib", "torchvision", "sklearn", "xarray"}
    )


def test_package_is_typed():
    assert (ROOT / "pyro_dvi" / "py.typed").exists()


def test_one_version_everywhere():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert version("pyro-dvi") == declared
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == declared
    assert f"## [{declared}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    "path", sorted((ROOT / "pyro_dvi").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT))
)
def test_every_file_names_its_licence_and_its_idea(path: Path):
    first, second, *_ = path.read_text().split("\n", 2)
    assert first == "# SPDX-License-Identifier: Apache-2.0"
    assert re.match(r'r?"""\S', second), "the line after the licence opens the module docstring"


def test_ci_runs_the_command_that_the_readme_gives():
    command = re.search(r"^python -m venv .*pytest.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert command and command[0] in (ROOT / ".ci" / "run").read_text()
