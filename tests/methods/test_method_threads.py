# SPDX-License-Identifier: Apache-2.0
"""Several threads train and predict: each gets the values that it gets alone."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from pyro.infer import SVI
from torch import nn

import pyro_dvi as dvi

X = torch.linspace(-1, 1, 20)[:, None]
DATA = [(X, torch.sin(3 * X))]
METHODS = [dvi.VariationalLaplace(), dvi.NaturalGradients()]


@pytest.fixture(autouse=True)
def _often_switched() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))


@pytest.mark.every(2)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_threads_fit_and_predict_what_one_thread_does(method: dvi.methods.Method) -> None:
    networks = [net() for _ in range(2)]

    def fit(network: nn.Module) -> dvi.methods.Posterior:
        return method.fit(network, DATA, 6, progress=False)

    def predict(posterior: dvi.methods.Posterior) -> torch.Tensor:
        return posterior.predict(X, seed=0, progress=False).variance

    alone = [fit(network) for network in networks]
    expected = [predict(posterior) for posterior in alone]
    with ThreadPoolExecutor(3) as threads:
        together = list(threads.map(fit, networks))
        predictions = list(threads.map(predict, [*alone, *together] * 2))
    for k, prediction in enumerate(predictions):
        torch.testing.assert_close(prediction, expected[k % 2], rtol=0, atol=0)


def test_predictions_wait_for_a_loop_in_another_thread() -> None:
    posterior = dvi.VariationalLaplace().fit(net(), DATA, 5, progress=False)
    svi = SVI(posterior.model, posterior.guide, dvi.optim.Adam({"lr": 0.1}), dvi.TaylorELBO())
    before = posterior.predict(X, progress=False).mean
    with ThreadPoolExecutor(1) as threads:
        with posterior.in_store():
            later = threads.submit(lambda: posterior.predict(X, progress=False).mean)
            svi.step(*DATA[0])
            assert not later.done()
        assert not torch.equal(later.result(), before)
