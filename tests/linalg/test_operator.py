# SPDX-License-Identifier: Apache-2.0
"""Rows that matrices are multiplied with."""

import pytest
import torch

from pyro_dvi.linalg.operator import identity_rows


@pytest.mark.parametrize(("size", "at_once"), [(5, 2), (6, 3), (1, 4), (3, 3)])
def test_rows_of_the_identity(size, at_once):
    rows = list(identity_rows(torch.zeros(size), at_once))
    assert all(len(part) <= at_once for part in rows)
    assert torch.equal(torch.cat(rows), torch.eye(size))
