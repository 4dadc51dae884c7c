# SPDX-License-Identifier: Apache-2.0
"""The package as a whole: what it imports, what it asks for, and that one version number holds everywhere."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

import pyro_dvi
from pyro_dvi.errors import MissingLibraryError

ROOT = Path(__file__).parents[2]
PACKAGE = Path(pyro_dvi.__file__).parent  # which may be installed elsewhere


FRESH = """
import sys, torch, pyro
known = set(sys.modules)
import pyro_dvi
pyro_dvi.to_arviz
print(*{name.partition(".")[0] for name in set(sys.modules) - known} - sys.stdlib_module_names)
import matplotlib
before = dict(matplotlib.rcParams)
print(pyro_dvi.plots.__name__, before == dict(matplotlib.rcParams))
"""


@pytest.mark.slow
def test_optional_libraries_are_loaded_only_when_asked_and_matplotlib_is_left_as_it_was():
    """In a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=True)
    loaded, plots = done.stdout.splitlines()
    assert loaded.split() == ["pyro_dvi"], "the import loads what torch and Pyro do not"
    assert plots.split() == ["pyro_dvi.analysis.plots", "True"]


MISSING = {
    "matplotlib": (lambda: pyro_dvi.plots, "plots need matplotlib: .*plots]"),
}


@pytest.mark.parametrize("library", MISSING)
def test_a_library_that_is_missing_is_asked_for(library, monkeypatch):
    use, message = MISSING[library]
    for name in [name for name in sys.modules if name.startswith("pyro_dvi.analysis.plots")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingLibraryError, match=message):
        use()


def test_what_an_editor_offers_are_the_public_names():
    offered = {name for name in dir(pyro_dvi) if not name.startswith("__")}
    assert offered == set(pyro_dvi.__all__)
    assert all(hasattr(pyro_dvi, name) for name in offered)


def test_package_is_typed():
    assert (PACKAGE / "py.typed").exists()


def test_one_version_everywhere():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert version("pyro-dvi") == pyro_dvi.__version__ == declared
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == declared
    assert f"## [{declared}]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_file_names_its_licence_and_its_idea():
    """The line after the licence opens the module docstring."""
    start = re.compile(r'# SPDX-License-Identifier: Apache-2\.0\nr?"""\S')
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 100
    assert [path for path in files if not start.match(path.read_text())] == []


def test_ci_runs_the_commands_that_the_readme_gives():
    commands = re.findall(r"^python -m venv .* -e .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    ci = (ROOT / ".ci" / "run").read_text()
    assert len(commands) == 2 and all(command in ci for command in commands)
