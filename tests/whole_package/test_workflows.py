# SPDX-License-Identifier: Apache-2.0
"""The workflows of the forge run commands that exist, and cover the table of environments."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FORGE = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / ".github").rglob("*.yml")}
JOBS = {name: job for file in FORGE.values() for name, job in file.get("jobs", {}).items()}
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
ENVIRONMENTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["tox"]["env_list"]


@pytest.mark.parametrize("file", [path for path in FORGE if "jobs" in FORGE[path]])
def test_workflows_run_targets_that_exist(file):
    steps = [step for job in FORGE[file]["jobs"].values() for step in job["steps"]]
    asked = [word for step in steps for word in re.findall(r"^make (.*)$", step.get("run", ""), re.MULTILINE)]
    assert {target for words in asked for target in words.split()} <= TARGETS


def test_every_environment_of_the_table_is_run():
    matrix = JOBS["environments"]["strategy"]["matrix"]["include"]
    assert [row["env"] for row in matrix] == ENVIRONMENTS


def test_nothing_is_published_before_the_repository_asks_for_it():
    for name in ("docs.yml", "release.yml"):
        jobs = FORGE[name]["jobs"]
        assert jobs["publish"]["if"].startswith("vars.PUBLISH_") and " || " not in jobs["publish"]["if"]
        assert FORGE[name]["permissions"] == {"contents": "read"} and "permissions" not in jobs["build"]
