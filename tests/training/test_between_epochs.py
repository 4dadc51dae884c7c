# SPDX-License-Identifier: Apache-2.0
"""Early stopping: which epoch was the best, when patience ends, and whose weights are kept."""

import math

from pyro_dvi.training import EarlyStopping, fit
from tests.training.problems import (
    same,
    sequence,
    svi_of,
    weights_of,
)


def test_early_stopping_counts():
    stopping = EarlyStopping(patience=2, maximise=True)
    assert stopping.best_epoch([1.0, math.nan, 1.6, 1.6]) == 3
    assert not stopping.exhausted([1.0, 1.4, 1.1])
    assert stopping.exhausted([1.0, 1.4, 1.1, 1.4])
    assert stopping.best_epoch([math.nan]) is None
    assert stopping.exhausted([math.nan, math.nan])


def test_early_stopping_restores_the_best_epoch():
    svi = svi_of("AutoNormal + Trace_ELBO")
    metrics = iter([3.0, 1.0, 2.0, math.nan, 4.0, 0.0])
    kept = []
    history = fit(
        svi,
        sequence(),
        10,
        validate=lambda: {"nll": next(metrics)},
        early_stopping=EarlyStopping(patience=3, monitor="nll"),
        callbacks=[lambda state: kept.append(weights_of(svi))],
        progress=False,
    )
    assert (history.stopped, history.best_epoch, history.epoch) == ("early stopping", 2, 5)
    assert same(weights_of(svi), kept[1])
    assert not same(weights_of(svi), kept[4])
