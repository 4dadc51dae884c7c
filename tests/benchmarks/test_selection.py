# SPDX-License-Identifier: Apache-2.0
"""The search for a KL weight by runs that can be resumed."""

import pytest

from benchmarks.vl.selection import LADDER, weights_to_try


def found_by(best: float, lowest: float) -> list[float]:
    """Weights tried in the end, and that each round but the last asks for something new."""
    done: list[dict] = []
    while True:
        wanted = weights_to_try(done, lowest)
        new = [weight for weight in wanted if weight not in [row["kl_weight"] for row in done]]
        if not new:
            return wanted
        for weight in new:
            nll = abs(LADDER.index(weight) - LADDER.index(best))
            scores = {"validation_nll": nll, "nll": nll}
            done.append({"kl_weight": weight, "seed": 0, "checkpoints": [{"epoch": 1, "mean": scores}]})


@pytest.mark.parametrize("best", LADDER)
def test_the_grid_grows_until_its_best_weight_has_neighbours_on_both_sides(best):
    tried = found_by(best, lowest=0.01)
    around = LADDER[max(LADDER.index(best) - 1, 0) : LADDER.index(best) + 2]
    assert set(around) | {0.01, 0.03, 0.1} <= set(tried)
    assert len(tried) <= 3 + abs(LADDER.index(best) - LADDER.index(0.03))
