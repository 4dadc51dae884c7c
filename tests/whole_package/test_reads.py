# SPDX-License-Identifier: Apache-2.0
"""A read of a value makes the program wait for the device: how many does a step, or a batch of a prediction, take?"""

from collections.abc import Iterator
from typing import Any

import pyro
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal

import pyro_dvi as dvi
from tests import emulated
from tests.whole_package.methods import METHODS, classifier, images

pytestmark = pytest.mark.skipif(not emulated.AVAILABLE, reason="this torch cannot emulate a device")
NAMES = ["Taylor, empirical Fisher", "multiplicative noise", "mean-field moments", "VOGN", "OGN", "IVON"]


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Always the emulated one, which alone can count."""
    if request.config.getoption("--device") != "emulated":
        pytest.skip("only the emulated device counts reads")
    with emulated.in_use() as device:
        yield device


def started(name: str, device: torch.device) -> tuple[SVI, tuple[Any, Any]]:
    """Four steps into training, when all that a first step looks at has been seen."""
    svi, data = METHODS[name](classifier(device)), images(device)
    for _ in range(4):
        svi.step(*data)
    return svi, data


@pytest.mark.every(3)
@pytest.mark.parametrize("name", NAMES)
def test_a_step_reads_the_loss_alone(name, device):
    pyro.enable_validation(False)
    svi, data = started(name, device)
    with emulated.counted_reads() as reads:
        for _ in range(3):
            svi.step(*data)
    assert reads.total() == 3, str(reads)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", NAMES)
def test_what_other_loops_call_reads_nothing(name, device):
    pyro.enable_validation(False)
    svi, data = started(name, device)
    elbo = svi.loss_and_grads.__self__
    with emulated.counted_reads() as reads:
        elbo.differentiable_loss(svi.model, svi.guide, *data).backward()
    assert not reads, str(reads)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", NAMES)
def test_validation_takes_a_few_reads_more(name, device):
    svi, data = started(name, device)
    with emulated.counted_reads() as reads:
        svi.step(*data)
    assert reads.total() <= 7, str(reads)


def test_a_step_of_pyro_for_comparison(device):
    model, data = classifier(device), images(device)
    svi = SVI(model, AutoNormal(model), pyro.optim.Adam({"lr": 0.01}), Trace_ELBO())
    svi.step(*data)
    with emulated.counted_reads() as reads:
        svi.step(*data)
    assert 60 < reads.total() < 80, str(reads)


@pytest.mark.parametrize(
    ("rule", "most"),
    [(dvi.AtMean(), 2), (dvi.Moments(), 2), (dvi.Samples(3), 3)],
    ids=lambda value: str(value)[:12],
)
def test_a_batch_of_a_prediction(rule, most, device):
    """The support of the labels; for samples whether the draws are those of the last batch, and finite."""
    pyro.enable_validation(False)
    svi, _ = started("mean-field moments", device)
    data = images("cpu")

    def reads(batch_size: int) -> emulated.Reads:
        with emulated.counted_reads() as found:
            dvi.predict(svi.model, svi.guide, data, rule, batch_size=batch_size, seed=0)
        return found

    one, three = reads(12), reads(4)
    assert three.total() - one.total() <= 2 * most, str(three - one)


@pytest.mark.parametrize(
    ("rule", "most"),
    [(dvi.AtMean(), 4), (dvi.Moments(), 4), (dvi.Samples(3), 15)],
    ids=lambda value: str(value)[:12],
)
def test_a_whole_prediction(rule, most, device):
    """Beside the batch: whether guide and model are finite, and for samples whether they can run at once."""
    pyro.enable_validation(False)
    svi, _ = started("mean-field moments", device)
    with emulated.counted_reads() as reads:
        dvi.predict(svi.model, svi.guide, images("cpu"), rule, batch_size=12, seed=0)
    assert reads.total() <= most, str(reads)


def test_quantiles_of_a_guide_are_checked_before_they_reach_the_device(device):
    svi, _ = started("mean-field moments", device)
    with emulated.counted_reads() as reads:
        svi.guide.quantiles([0.1, 0.9])
    assert not reads, str(reads)
