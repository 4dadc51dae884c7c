# SPDX-License-Identifier: Apache-2.0
"""A run that is saved and taken up again gives the numbers of one that went through."""

import random
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.nn import PyroModule
from pyro.optim import Adam, ClippedAdam, ExponentialLR
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from pyro_dvi import optim
from pyro_dvi.bayesian import classifier, to_bayesian_
from pyro_dvi.errors import CheckpointError
from pyro_dvi.guides import MeanFieldGuide
from pyro_dvi.objectives.schedules import LinearWarmup
from pyro_dvi.optim import learning_rates
from pyro_dvi.training import EarlyStopping, History, fit, load, save
from pyro_dvi.variational_laplace.taylor import TaylorELBO
from tests.training.problems import (
    BOTH,
    METHODS,
    FunctionalProblem,
    Net,
    data,
    fresh_start,
    module_of,
    same,
    sequence,
    shuffled,
    svi_of,
    weights_of,
)

OPTIMIZERS = {
    "Adam": lambda: Adam(learning_rates(0.01)),
    "ClippedAdam": lambda: ClippedAdam(learning_rates(0.01, lrd=0.99, clip_norm=1e3)),
    "ExponentialLR": lambda: ExponentialLR(
        {"optimizer": torch.optim.Adam, "optim_args": learning_rates(0.01), "gamma": 0.9}
    ),
    "one for all": lambda: optim.Adam(learning_rates(0.01)),
    "one for all, scheduled": lambda: optim.SGD(
        learning_rates(1e-4, momentum=0.9), {"clip_norm": 100.0}, scheduler=partial(StepLR, step_size=1)
    ),
}


def elbo_of(method):
    return TaylorELBO(kl_weight=LinearWarmup(12)) if "Taylor" in method else Trace_ELBO()


@pytest.mark.every(4)
@BOTH
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_resuming_an_svi_is_bit_identical(method, optimizer, dtype, tmp_path):
    def build(seed):
        return svi_of(method, dtype, optimizer=OPTIMIZERS[optimizer](), seed=seed, elbo=elbo_of(method))

    pyro.set_rng_seed(1)
    whole = build(0)
    reference = fit(whole, shuffled(dtype), 4, progress=False)
    expected = weights_of(whole)
    assert len(set(reference.steps["loss"])) == 12

    fresh_start()
    pyro.set_rng_seed(1)
    half, loader = build(0), shuffled(dtype)
    history = fit(half, loader, 2, progress=False)
    save(tmp_path / "half.pt", half, history=history, loader=loader)
    random.random(), np.random.rand(), torch.rand(5)

    fresh_start()
    again, loader = build(5), shuffled(dtype, seed=123)
    example = None if "MeanField" in method else sequence(dtype)[0]
    history = load(tmp_path / "half.pt", again, loader=loader, example=example)
    history = fit(again, loader, 2, history=history, progress=False)
    assert history.steps["loss"] == reference.steps["loss"]
    assert history["lr"] == reference["lr"]
    assert same(weights_of(again), expected)


@pytest.mark.every(3)
@BOTH
@pytest.mark.parametrize("local", [False, True], ids=["global store", "module_local_params"])
def test_resuming_an_elbo_module_is_bit_identical(method, local, tmp_path):
    def build(seed):
        module, optimizer = module_of(method, seed=seed)
        return module, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    with pyro.settings.context(module_local_params=local):
        module, optimizer, schedule = build(0)
        pyro.set_rng_seed(1)
        reference = fit(module, shuffled(), 4, optimizer=optimizer, lr_schedule=schedule, progress=False)
        expected = weights_of(module)

        fresh_start()
        module, optimizer, schedule = build(0)
        pyro.set_rng_seed(1)
        loader, path = shuffled(), tmp_path / "half.pt"
        fit(module, loader, 2, optimizer=optimizer, lr_schedule=schedule, checkpoint=path, progress=False)

        fresh_start()
        module, optimizer, schedule = build(5)
        loader = shuffled(seed=123)
        history = load(path, module, optimizer=optimizer, lr_schedule=schedule, loader=loader)
        fit(module, loader, 2, optimizer=optimizer, lr_schedule=schedule, history=history, progress=False)
        assert history.steps["loss"] == reference.steps["loss"]
        assert history["lr"] == reference["lr"]
        assert same(weights_of(module), expected)


def test_resuming_functions_is_bit_identical(tmp_path):
    whole = FunctionalProblem()
    reference = fit(whole.svi, shuffled(), 4, progress=False)
    expected = whole.weights()

    fresh_start()
    half = FunctionalProblem()
    fit(half.svi, shuffled(), 2, checkpoint=tmp_path / "half.pt", progress=False)

    fresh_start()
    again = FunctionalProblem(seed=5)
    loader = shuffled(seed=123)
    history = load(tmp_path / "half.pt", again.svi, loader=loader)
    fit(again.svi, loader, 2, history=history, progress=False)
    assert history.steps["loss"] == reference.steps["loss"]
    assert same(again.weights(), expected)


def test_networks_of_functions_are_saved_with_their_buffers(tmp_path):
    first = FunctionalProblem()
    history = fit(first.svi, shuffled(), 1, progress=False)
    save(tmp_path / "x.pt", first.svi, history=history)
    save(tmp_path / "without.pt", first.svi)
    expected = first.net.state_dict()
    fresh_start()
    with pytest.raises(CheckpointError, match="differ in .*'called 0'.* as history= to save"):
        load(tmp_path / "without.pt", FunctionalProblem(seed=5).svi, example=sequence()[0])
    fresh_start()
    again = FunctionalProblem(seed=5)
    load(tmp_path / "x.pt", again.svi)
    assert same(again.net.state_dict(), expected)
    assert all(
        value is pyro.get_param_store()._params[f"net$$${n}"] for n, value in again.net.named_parameters()
    )


def test_functions_of_which_no_shapes_are_known_need_an_example(tmp_path):
    first = FunctionalProblem()
    history = History()

    def forget(state):
        history.inputs = None

    fit(
        first.svi,
        shuffled(),
        1,
        history=history,
        callbacks=[forget],
        checkpoint=tmp_path / "x.pt",
        progress=False,
    )
    expected = first.weights()
    fresh_start()
    again = FunctionalProblem(seed=5)
    with pytest.raises(CheckpointError, match="differ in .* example="):
        load(tmp_path / "x.pt", again.svi)
    load(tmp_path / "x.pt", again.svi, example=sequence()[0])
    assert same(again.weights(), expected)


def test_early_stopping_resumes_with_its_best_epoch(tmp_path):
    def validate_with(values):
        return lambda: values.pop(0)

    metrics = [3.0, 1.0, 2.0, 2.0, 2.0, 2.0]
    options = {"early_stopping": EarlyStopping(patience=3), "progress": False}
    whole = svi_of("AutoNormal + Trace_ELBO")
    fit(whole, shuffled(), 6, validate=validate_with(list(metrics)), **options)
    expected = weights_of(whole)

    fresh_start()
    path = tmp_path / "run.pt"
    half, loader = svi_of("AutoNormal + Trace_ELBO"), shuffled()
    fit(half, loader, 3, validate=validate_with(metrics[:3]), checkpoint=path, **options)
    fresh_start()
    again, loader = svi_of("AutoNormal + Trace_ELBO", seed=3), shuffled(seed=9)
    history = load(path, again, loader=loader, example=sequence()[0])
    fit(again, loader, 6, history=history, validate=validate_with(metrics[3:]), **options)
    assert (history.stopped, history.best_epoch, history.epoch) == ("early stopping", 2, 5)
    assert same(weights_of(again), expected)

    fresh_start()
    best = svi_of("AutoNormal + Trace_ELBO", seed=4)
    load(path, best, example=sequence()[0], best=True)
    assert same(weights_of(best), expected)


def test_a_run_that_was_stopped_early_stays_stopped(tmp_path):
    """Also one that was killed between its last epoch and the end of fit, whose file does not say so."""
    path = tmp_path / "run.pt"
    options = {"early_stopping": EarlyStopping(patience=2), "progress": False}
    metrics = [3.0, 1.0, 2.0, 2.0]
    svi, loader = svi_of("AutoNormal + Trace_ELBO"), shuffled()
    fit(svi, loader, 6, validate=lambda: metrics.pop(0), checkpoint=path, **options)
    assert metrics == []
    expected = weights_of(svi)
    for stopped in ("early stopping", None):
        fresh_start()
        again, loader = svi_of("AutoNormal + Trace_ELBO", seed=3), shuffled(seed=9)
        history = load(path, again, loader=loader, example=sequence()[0])
        assert history.stopped == "early stopping"
        history.stopped = stopped
        fit(again, loader, 2, history=history, validate=lambda: 0.0, checkpoint=path, **options)
        assert (history.stopped, history.best_epoch, history.epoch) == ("early stopping", 2, 4)
        assert same(weights_of(again), expected)


def test_a_run_that_was_killed_after_its_last_epoch_is_finished_by_no_further_epochs(tmp_path):
    svi = svi_of("MeanFieldGuide + TaylorELBO")
    fit(svi, shuffled(), 2, checkpoint=tmp_path / "x.pt", progress=False)
    expected = weights_of(svi)
    fresh_start()
    svi, loader = svi_of("MeanFieldGuide + TaylorELBO", seed=3), shuffled(seed=9)
    history = load(tmp_path / "x.pt", svi, loader=loader)
    fit(svi, loader, 0, history=history, progress=False)
    assert (history.epoch, history.stopped) == (2, "epochs")
    assert same(weights_of(svi), expected)


def test_checkpoints_use_up_no_random_numbers_of_any_kind(tmp_path):
    class Noisy(Net):
        def forward(self, x, y=None):
            return super().forward(x + 0.1 * random.random() + 0.1 * float(np.random.rand()), y)

    losses = []
    for checkpoint in (None, tmp_path / "x.pt"):
        fresh_start()
        model = Noisy()
        svi = SVI(model, MeanFieldGuide(model), Adam({"lr": 0.01}), Trace_ELBO())
        losses.append(fit(svi, shuffled(), 2, checkpoint=checkpoint, progress=False).steps["loss"])
    assert losses[0] == losses[1]


def test_a_callback_may_save_less_often(tmp_path):
    path, seen = tmp_path / "run.pt", []
    svi = svi_of("AutoNormal + Trace_ELBO")

    def every_second(state):
        if state.epoch % 2 == 0:
            save(path, svi, history=state.history)
        seen.append(path.exists())

    fit(svi, sequence(), 3, callbacks=[every_second], progress=False)
    assert seen == [False, True, True]
    fresh_start()
    again = svi_of("AutoNormal + Trace_ELBO")
    assert load(path, again).epoch == 2
    assert list(tmp_path.iterdir()) == [path]


def test_interrupt_writes_a_checkpoint(tmp_path):
    def interrupt(state):
        raise KeyboardInterrupt

    path = tmp_path / "run.pt"
    svi = svi_of("AutoNormal + Trace_ELBO")
    history = fit(svi, sequence(), 3, checkpoint=path, callbacks=[interrupt], progress=False)
    assert (history.stopped, history.epoch) == ("interrupted", 1)
    expected = weights_of(svi)
    fresh_start()
    again = svi_of("AutoNormal + Trace_ELBO", seed=1)
    load(path, again, example=sequence()[0])
    assert same(weights_of(again), expected)


def test_loading_back_into_the_same_objects():
    """In a notebook: the optimizer has seen the parameters already, and PyroOptim.set_state would not reach them."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.pt"
        svi, loader = svi_of("MeanFieldGuide + TaylorELBO"), shuffled()
        fit(svi, loader, 2, progress=False)
        save(path, svi, loader=loader)
        first = fit(svi, loader, 2, progress=False)
        load(path, svi, loader=loader)
        assert fit(svi, loader, 2, progress=False).steps["loss"] == first.steps["loss"]


def test_loading_to_predict_only(tmp_path):
    module, optimizer = module_of("MeanFieldGuide + TaylorELBO")
    fit(module, shuffled(), 1, optimizer=optimizer, progress=False)
    save(tmp_path / "x.pt", module, optimizer=optimizer, loader=shuffled())
    expected = weights_of(module)
    fresh_start()
    model = Net()
    again = TaylorELBO()(model, MeanFieldGuide(model))
    state = torch.get_rng_state()
    load(tmp_path / "x.pt", again, restore_random=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert same(weights_of(again), expected)


def test_hand_written_guide_module(tmp_path):
    class Guide(PyroModule):
        def __init__(self):
            super().__init__()
            self.loc = nn.Parameter(torch.zeros(5))

        def forward(self, x, y=None):
            pyro.sample("last.weight", dist.Normal(self.loc[:4].reshape(1, 4), 0.1).to_event(2))
            pyro.sample("last.bias", dist.Normal(self.loc[4:], 0.1).to_event(1))

    def build():
        model = Net()
        return SVI(model, Guide(), Adam({"lr": 0.01}), Trace_ELBO())

    svi = build()
    fit(svi, shuffled(), 1, progress=False)
    save(tmp_path / "x.pt", svi, history=History())
    expected = weights_of(svi)
    fresh_start()
    again = build()
    load(tmp_path / "x.pt", again)
    assert same(weights_of(again), expected)
    assert data()[0].dtype == torch.float32


def test_a_converted_network_resumes(tmp_path):
    x, y = data()
    loader = DataLoader(TensorDataset(x, (y > 0).long()), batch_size=8)

    def build(seed):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Softplus(), nn.Linear(4, 2))
        model = classifier(to_bayesian_(net), num_data=len(x))
        optimizer = ClippedAdam(learning_rates(0.01, clip_norm=1e3))
        return SVI(model, MeanFieldGuide(model), optimizer, TaylorELBO(kl_weight=0.1))

    whole = build(0)
    reference = fit(whole, loader, 4, progress=False)
    fresh_start()
    half = build(0)
    fit(half, loader, 2, checkpoint=tmp_path / "x.pt", progress=False)
    fresh_start()
    again = build(3)
    history = load(tmp_path / "x.pt", again)
    assert fit(again, loader, 2, history=history, progress=False).steps["loss"] == reference.steps["loss"]
    assert same(weights_of(again), weights_of(whole))


@pytest.mark.parametrize("method", METHODS)
def test_from_a_device_to_the_cpu(method, tmp_path, device):
    svi = svi_of(method)
    loader = shuffled()
    history = fit(svi, loader, 2, device=device, validate=sequence(), progress=False)
    assert next(svi.guide.parameters()).device == device
    save(tmp_path / "x.pt", svi, history=history, loader=loader)
    expected = {name: value.cpu() for name, value in weights_of(svi).items()}
    fresh_start()
    again, loader = svi_of(method, seed=2), shuffled()
    history = load(tmp_path / "x.pt", again, loader=loader, example=sequence()[0], map_location="cpu")
    assert same(weights_of(again), expected)
    assert fit(again, loader, 1, history=history, progress=False).epoch == 3
