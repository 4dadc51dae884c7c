# SPDX-License-Identifier: Apache-2.0
"""An epoch that was interrupted goes on where it stopped, or starts anew and says so."""

import pyro
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from pyro_dvi.errors import DviWarning
from pyro_dvi.training import History, fit, load
from tests.training.problems import (
    Interrupting,
    data,
    fresh_start,
    same,
    sequence,
    shuffled,
    svi_of,
    weights_of,
)

UNSEEDED = {"shuffle": True, "batch_size": 8}  # a loader that draws from the global generator


@pytest.mark.parametrize("at", [2, 4, 6])
@pytest.mark.parametrize("seeded", [True, False], ids=["own generator", "global generator"])
@pytest.mark.parametrize("in_validation", [False, True], ids=["in a step", "in validation"])
def test_an_interrupted_epoch_goes_on_where_it_stopped(at, seeded, in_validation, tmp_path):
    def loader_of(seed=7):
        return shuffled(seed=seed) if seeded else DataLoader(TensorDataset(*data()), **UNSEEDED)

    method = "AutoNormal + Trace_ELBO"  # whose steps draw random numbers
    pyro.set_rng_seed(1)
    whole = svi_of(method)
    reference = fit(whole, loader_of(), 3, validate=sequence(), progress=False)
    expected = weights_of(whole)

    fresh_start()
    pyro.set_rng_seed(1)
    half, loader, validate = svi_of(method), loader_of(), sequence()
    if in_validation:
        validate = Interrupting(validate, at)
    else:
        loader = Interrupting(loader, at)
    history = fit(half, loader, 3, validate=validate, checkpoint=tmp_path / "x.pt", progress=False)
    assert history.stopped == "interrupted"
    steps = history.step
    assert steps == (at - 1 if not in_validation else 3 * (1 + (at - 1) // 3))

    fresh_start()
    again, loader = svi_of(method, seed=5), loader_of(123)
    history = load(tmp_path / "x.pt", again, loader=loader, example=sequence()[0])
    assert history.step == steps
    fit(again, loader, 3 - history.epoch, history=history, validate=sequence(), progress=False)
    assert history.steps["loss"] == reference.steps["loss"]
    assert {**history.epochs, "seconds": 0} == {**reference.epochs, "seconds": 0}
    assert same(weights_of(again), expected)


class Lazily:
    """A loader that draws every batch when it is asked for it."""

    def __iter__(self):
        x, y = data()
        for _ in range(3):
            rows = torch.randint(len(x), (8,))
            yield x[rows], y[rows]


@pytest.mark.parametrize(
    "other",
    [
        lambda: Interrupting(sequence()[:1], at=0),
        lambda: iter(sequence()),
        lambda: shuffled(),
        lambda: DataLoader(TensorDataset(*data()), batch_size=6),
        lambda: [(x + 1, y) for x, y in sequence()],
        lambda: [(x.flip(0), y.flip(0)) for x, y in sequence()],
        lambda: [*sequence()[1:], sequence()[0]],
    ],
    ids=["shorter", "iterator", "generator", "batch size", "other data", "other rows", "other order"],
)
def test_an_epoch_whose_batches_cannot_be_replayed_starts_anew_and_says_so(other):
    svi = svi_of("AutoNormal + Trace_ELBO")
    history = fit(svi, Interrupting(sequence(), 3), 2, progress=False)
    assert (history.stopped, history.step) == ("interrupted", 2)
    with pytest.warns(DviWarning, match="after 2 batches.*count twice"):
        fit(svi, other(), 1, history=history, progress=False)
    assert history.epoch == 1


def test_an_epoch_of_batches_that_are_drawn_one_by_one_starts_anew_and_says_so(tmp_path):
    svi = svi_of("AutoNormal + Trace_ELBO")  # whose steps draw from the same generator
    fit(svi, Interrupting(Lazily(), 3), 2, checkpoint=tmp_path / "x.pt", progress=False)
    fresh_start()
    again = svi_of("AutoNormal + Trace_ELBO", seed=5)
    history = load(tmp_path / "x.pt", again)
    with pytest.warns(DviWarning, match="draws random numbers while it is read.*count twice"):
        fit(again, Lazily(), 1, history=history, progress=False)
    assert history.epoch == 1


def test_an_error_of_the_loader_leaves_a_history_that_goes_on():
    class Failing(Interrupting):
        def __iter__(self):
            for batch in self.inner:
                self.count += 1
                if self.count == self.at:
                    raise OSError("the disk is away")
                yield batch

    svi, history = svi_of("AutoNormal + Trace_ELBO"), History()
    with pytest.raises(OSError, match="the disk is away"):
        fit(svi, Failing(sequence(), 3), 2, history=history, progress=False)
    fit(svi, sequence(), 1, history=history, progress=False)
    assert (history.epoch, history.step) == (1, 3)
