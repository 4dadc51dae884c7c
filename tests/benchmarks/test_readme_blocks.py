# SPDX-License-Identifier: Apache-2.0
"""Benchmarks that run README's own blocks find them."""

import ast

import pytest

from benchmarks.laplace import first_block
from benchmarks.shared import recipe


@pytest.mark.parametrize(
    "code", [first_block.blocks(30, 2), recipe.recipe(30, 2, num_data=341)], ids=["first_block", "recipe"]
)
def test_the_blocks_make_a_prediction_for_another_network(code):
    ast.parse(code)
    assert "prediction = " in code
    assert "nn.Linear(30, 100)" in code and "nn.Linear(100, 2)" in code and "64" not in code
