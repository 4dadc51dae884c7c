# SPDX-License-Identifier: Apache-2.0
"""Standardisation of the benchmarks' regression sets."""

import pytest
import torch

from benchmarks.shared.regressions import standards


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_columns_that_are_constant_but_for_rounding_are_not_blown_up(dtype):
    column = torch.linspace(-1, 1, 506, dtype=dtype)
    constant = torch.full_like(column, 1234.1)
    constant[::2] = torch.nextafter(constant[::2], 2 * constant[::2])
    tiny = 1e-20 * column  # small, but not by rounding
    x = torch.stack([column, constant, 10 + 1e-3 * column, torch.zeros_like(column), tiny], 1)
    assert x[:, 1].std(correction=0) > 0  # by rounding alone
    means, scales = standards([x, x[:100]])
    for part, mean, scale in zip((x, x[:100]), means, scales, strict=True):
        z = (part - mean) / scale
        assert z[:, [1, 3]].abs().max() < 1e-2
        torch.testing.assert_close(z[:, [0, 2, 4]].std(0, correction=0), torch.ones(3, dtype=dtype))
