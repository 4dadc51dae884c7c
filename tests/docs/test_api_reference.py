# SPDX-License-Identifier: Apache-2.0
"""The API reference lists what ``import pyro_dvi`` offers."""

import re
from pathlib import Path

import pyro_dvi

REFERENCE = Path(__file__).parents[2] / "docs" / "api.md"


def test_every_public_name_stands_in_the_overview():
    overview = REFERENCE.read_text().split("\n## ")[0]
    assert set(re.findall(r"``(\w+)``", overview)) == set(pyro_dvi.__all__)
