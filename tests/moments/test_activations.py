# SPDX-License-Identifier: Apache-2.0
"""Rules of nonlinear functions of each element."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.moments.battery import CHECKS, Case, name_of_check

CASES = [
    Case(F.relu, kinks=(0.0,)),
    Case(torch.relu, kinks=(0.0,)),
]


@pytest.mark.parametrize("check", CHECKS, ids=name_of_check)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case: Case, check: Callable[[Case], None]) -> None:
    check(case)
