# SPDX-License-Identifier: Apache-2.0
"""Gauss-Newton matrices that are estimated from drawn labels: of each batch its own, the same in every pass."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from pyro_dvi.errors import DataError, DviWarning
from pyro_dvi.laplace.energy.energy import Energy

NUM_DATA = 200


def extremes(x: Tensor, y: Tensor | None = None) -> Any:
    """Fisher information of a Gumbel's location: 1 / scale²; there is no rule for it."""
    loc = pyro.sample("loc", dist.Normal(x.new_zeros(()), 1.0))
    with pyro.plate("data", NUM_DATA, subsample_size=len(x)):
        pyro.sample("y", dist.Gumbel(loc * x, 1.0), obs=y)
        return pyro.sample("z", dist.Gumbel(loc * x, 1.0), obs=y)


def data() -> TensorDataset:
    return TensorDataset(torch.ones(NUM_DATA), torch.linspace(-1, 3, NUM_DATA))


def energy(batches: Any, **options: Any) -> Energy:
    return Energy(extremes, batches, {"loc": torch.zeros(())}, **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the Fisher information of Gumbel")
def test_labels_average_out_over_batches_and_sites() -> None:
    """The squared score has variance 8, so that the mean of 2 x 200 x 8 has a standard error of 0.05."""
    found = energy(DataLoader(data(), batch_size=1))
    information = found.at(found.start).ggn(torch.ones(1, 1)).item() - 1
    assert abs(information / (2 * NUM_DATA) - 1) < 5 * 0.05
    sites = [graph.run.sites for graph in found.at(found.start).graphs()][:2]
    labels = [torch.stack(found.labels(s, batch)) for batch, pair in enumerate(sites) for s in pair]
    assert len({float(drawn.sum()) for drawn in labels}) == 4


@pytest.mark.filterwarnings("ignore:the Fisher information of Gumbel")
def test_the_matrix_is_the_same_in_every_pass() -> None:
    without_graphs = energy(DataLoader(data(), batch_size=50), memory=0)
    local, vector = without_graphs.at(without_graphs.start), torch.ones(1, 1)
    assert torch.equal(local.ggn(vector), local.ggn(vector))
    kept = energy(DataLoader(data(), batch_size=50))
    torch.testing.assert_close(kept.at(kept.start).ggn(vector), local.ggn(vector))


@pytest.mark.filterwarnings("ignore:the Fisher information of Gumbel")
def test_shuffled_rows_are_refused_where_labels_are_drawn() -> None:
    torch.manual_seed(0)
    shuffled = energy(DataLoader(data(), batch_size=50, shuffle=True), memory=0)
    local = shuffled.at(shuffled.start)
    assert torch.isfinite(local.gradient).all() and torch.isfinite(local.value)
    with pytest.raises(DataError, match=r"'y' \(Gumbel\).*list\(loader\)"):
        local.ggn(torch.ones(1, 1))


def test_drawing_is_announced_once_for_each_site() -> None:
    found = energy(DataLoader(data(), batch_size=100), memory=0)
    with pytest.warns(DviWarning) as caught:
        for _ in range(2):
            found.at(found.start).ggn(torch.ones(1, 1))
    assert ["'y'" in str(caught[0].message), "'z'" in str(caught[1].message), len(caught)] == [True, True, 2]
