# SPDX-License-Identifier: Apache-2.0
"""Flat vectors of whole sites, and of some of their entries."""

import torch

from pyro_dvi.laplace.energy.query import Layout

SITES = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(7.0), "c": torch.arange(10.0, 14.0)}
LAYOUT = Layout(
    {name: site.shape for name, site in SITES.items()}, {"a": torch.tensor([1, 5]), "b": torch.tensor([0])}
)


def test_pieces_go_back_to_where_they_were_taken_from():
    vector = LAYOUT.flatten(LAYOUT.pieces(SITES))
    assert LAYOUT.size == 7 and vector.tolist() == [1, 5, 7, 10, 11, 12, 13]
    whole = LAYOUT.place(LAYOUT.split(vector), SITES)
    assert list(whole) == list(SITES) and all(torch.equal(whole[name], SITES[name]) for name in SITES)
    only = LAYOUT.place(LAYOUT.split(vector))
    assert only["a"].tolist() == [[0, 1, 0], [0, 0, 5]] and torch.equal(only["c"], SITES["c"])


def test_leading_dimensions_stay():
    vectors = torch.randn(4, 2, 7)
    whole = LAYOUT.place(LAYOUT.split(vectors), SITES)
    assert [tuple(site.shape) for site in whole.values()] == [(4, 2, 2, 3), (4, 2), (4, 2, 4)]
    for i in range(4):
        for j in range(2):
            single = LAYOUT.place(LAYOUT.split(vectors[i, j]), SITES)
            assert all(torch.equal(whole[name][i, j], single[name]) for name in SITES)
    torch.testing.assert_close(LAYOUT.flatten(LAYOUT.split(vectors)), vectors)
