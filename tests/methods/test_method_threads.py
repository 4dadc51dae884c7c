# SPDX-License-Identifier: Apache-2.0
"""Several threads train and predict: each gets the values that it gets alone."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyro
import pytest
import torch
from pyro.infer import SVI
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.core.in_turn import in_turn

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


class Waiting:
    """Batches, before each of which other code runs."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run = run

    def __iter__(self) -> Iterator[Any]:
        for batch in DATA:
            self.run()
            yield batch


PLACES: dict[str, Callable[[Callable[[], Any]], dict[str, Any]]] = {
    "callback": lambda run: {"callbacks": [lambda _: run()]},
    "validation": lambda run: {"validate": lambda: run() or 1.0},
    "validation loader": lambda run: {"validate": Waiting(run)},
    "loader": lambda run: {"loader": Waiting(run)},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("apart", [True, False], ids=["method.fit", "fit"])
def test_code_in_training_may_wait_for_a_thread_that_predicts(place: str, apart: bool) -> None:
    known = dvi.VariationalLaplace().fit(net(), DATA, 5, progress=False)
    expected, found, network = known.predict(X, progress=False).mean, [], net()

    def predict_in_a_thread() -> None:
        before = dict(pyro.get_param_store())
        thread = threading.Thread(
            target=lambda: found.append(known.predict(X, seed=0, progress=False).mean), daemon=True
        )
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
        assert dict(pyro.get_param_store()) == before  # those of this training

    def fit(loader: Any = DATA, **options: Any) -> torch.Tensor:
        if apart:
            options["loader"] = loader
            posterior = dvi.NaturalGradients().fit(network, epochs=6, progress=False, **options)
            return posterior.predict(X, seed=0, progress=False).variance
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        svi = dvi.NaturalGradients().svi(network, DATA, 6)
        dvi.fit(svi, loader, 6, progress=False, **options)
        return dvi.predict(svi.model, svi.guide, X, seed=0, progress=False).variance

    options = PLACES[place]
    found_alone = fit(**options(lambda: None))
    assert torch.equal(fit(**options(predict_in_a_thread)), found_alone)
    assert len(found) >= 6 and all(torch.equal(one, expected) for one in found)


SHARED = dvi.to_bayesian_(net(), exclude="0.*")


def with_shared_network(x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    f = SHARED(x)
    with pyro.plate("data", 20, subsample_size=len(x)):
        return pyro.sample("y", pyro.distributions.Normal(f[:, 0], 0.3), obs=None if y is None else y[:, 0])


class Noisy(torch.utils.data.Dataset[Any]):
    """Examples that are drawn when they are read."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, row: int) -> Any:
        return X[row] + 0.1 * torch.randn(1), DATA[0][1][row]


LOADERS: dict[str, Any] = {
    "list": DATA,
    "shuffled": torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*DATA[0]), 10, shuffle=True),
    "augmented": torch.utils.data.DataLoader(Noisy(), 10, shuffle=True),
}


@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize("model", [net, lambda: with_shared_network], ids=["network", "function"])
def test_two_trainings_that_alternate_are_what_they_are_alone(model: Callable[[], Any], loader: Any) -> None:
    models, meeting = [model() for _ in range(2)], threading.Barrier(2)

    def fit(number: int, *callbacks: Any) -> dvi.methods.Posterior:
        options = {"seed": number, "progress": False, "callbacks": callbacks}
        return dvi.NaturalGradients().fit(models[number], loader, 6, **options)

    def variances(posteriors: list[dvi.methods.Posterior]) -> list[list[float]]:
        predictions = [posterior.predict(X, seed=0, progress=False) for posterior in posteriors]
        return [prediction.variance.flatten().tolist() for prediction in predictions]

    expected = variances(list(map(fit, range(2))))
    assert expected[0] != expected[1]
    random = torch.get_rng_state()
    with ThreadPoolExecutor(2) as threads:  # they meet after each epoch
        together = list(threads.map(lambda number: fit(number, lambda _: meeting.wait(30)), range(2)))
    assert torch.equal(torch.get_rng_state(), random) and not len(pyro.get_param_store())
    assert variances(together) == expected


def test_a_thread_that_waits_has_its_turn_after_the_step() -> None:
    posterior = dvi.VariationalLaplace().fit(net(), DATA, 1, progress=False)
    runs, seen = list[None](), list[int]()
    data = [(X + k, X) for k in range(100)]

    class Counted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                runs.append(None)
            if len(runs) == 10 and not seen:
                seen.append(0)
                threading.Thread(target=predict).start()
                while not in_turn._queue.locked():  # until it waits
                    time.sleep(0.001)
            return super().forward(x)

    def predict() -> None:
        posterior.predict(X, progress=False)
        seen.append(len(runs))

    dvi.VariationalLaplace().fit(nn.Sequential(Counted(1, 1)), data, 1, progress=False, capture=False)
    assert 10 <= seen[1] <= 60 < len(runs)  # soon; the other thread may be slow to say so
