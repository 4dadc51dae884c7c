# SPDX-License-Identifier: Apache-2.0
"""The loop over batches and epochs: what it trains, what it records, and when it stops."""

import math
import os
import signal
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam, ExponentialLR, PyroOptim
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from pyro_dvi import optim
from pyro_dvi.core.undisturbed import preserve_buffers
from pyro_dvi.errors import DataError, DviWarning
from pyro_dvi.objectives.sampled import SampledELBO
from pyro_dvi.objectives.schedules import LinearWarmup
from pyro_dvi.optim import learning_rates
from pyro_dvi.training import fit
from pyro_dvi.training.between_epochs import EveryStep, validation_metrics
from pyro_dvi.training.targets import route_of
from pyro_dvi.variational_laplace.taylor import TaylorELBO
from tests.training.problems import (
    BATCH,
    BOTH,
    NUM_DATA,
    Net,
    data,
    module_of,
    same,
    sequence,
    shuffled,
    svi_of,
    weights_of,
)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_fit_is_the_loop_over_svi_step(method, dtype):
    by_hand = svi_of(method, dtype)
    with (
        preserve_buffers()
    ):  # Pyro's guides advance the BatchNorm when they look at the model; fit does not let them
        by_hand.guide(*sequence(dtype)[0])
    losses = [by_hand.step(*batch) for _ in range(3) for batch in sequence(dtype)]
    expected = weights_of(by_hand)
    pyro.clear_param_store()

    svi = svi_of(method, dtype)
    history = fit(svi, sequence(dtype), 3, progress=False)
    assert history.steps["loss"] == losses
    assert same(weights_of(svi), expected)
    assert history.stopped == "epochs"
    assert history["loss"] == pytest.approx([math.fsum(losses[i : i + 3]) / 3 for i in (0, 3, 6)])
    assert history.steps["step"] == list(range(1, 10))
    assert set(history.steps["lr"]) == {0.01}
    assert all(value.dtype == dtype for name, value in weights_of(svi).items() if "num_batches" not in name)
    assert history["posterior_scale"][-1] > 0
    assert all(seconds > 0 for seconds in history["seconds"])


def test_fit_calls_the_step_of_a_subclass():
    class Counted(SVI):
        steps = 0

        def step(self, *args, **kwargs):
            self.steps += 1
            return super().step(*args, **kwargs)

    usual = svi_of("MeanFieldGuide + TaylorELBO")
    svi = Counted(usual.model, usual.guide, usual.optim, loss=TaylorELBO())
    history = fit(svi, sequence(), 2, progress=False)
    assert svi.steps == history.step == 2 * len(sequence())


@pytest.mark.every(3)
@BOTH
@pytest.mark.parametrize("local", [False, True], ids=["global store", "module_local_params"])
def test_fit_trains_an_elbo_module(method, local):
    with pyro.settings.context(module_local_params=local):
        module, optimizer = module_of(method)
        before = weights_of(module)
        history = fit(module, shuffled(), 15, optimizer=optimizer, progress=False)
        after = weights_of(module)
    assert history["loss"][-1] < history["loss"][0]
    assert not any(torch.equal(before[name], after[name]) for name in before if name.startswith("guide"))


def test_terms_of_the_elbo_are_recorded():
    elbo = TaylorELBO(kl_weight=LinearWarmup(9))
    history = fit(svi_of("MeanFieldGuide + TaylorELBO", elbo=elbo), shuffled(), 3, progress=False)
    row = {name: column[4] for name, column in history.steps.items()}
    assert row["loss"] == pytest.approx(
        row["penalty"] - row["log_likelihood"] + row["kl_weight"] * row["kl"], rel=1e-5
    )
    assert history.steps["kl_weight"] == pytest.approx([step / 9 for step in range(9)])
    assert history["kl_weight"] == pytest.approx([2 / 9, 5 / 9, 8 / 9])
    assert elbo.step == 9


def test_terms_may_be_absent():
    history = fit(svi_of("AutoNormal + Trace_ELBO"), sequence(), 1, progress=False)
    assert "kl" not in history.epochs


class TestBatches:
    def model(self, x, y=None, *, weight=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", NUM_DATA, subsample_size=len(x)):
            scale = 1.0 if weight is None else weight
            pyro.sample("obs", dist.Normal(w * x[:, 0], scale), obs=x[:, 1] if y is None else y)

    def guide(self, x, y=None, *, weight=None):
        loc = pyro.param("loc", torch.zeros(()))
        pyro.sample("w", dist.Normal(loc, pyro.param("scale", torch.ones(()), dist.constraints.positive)))

    @pytest.mark.parametrize("kind", ["tuple", "list", "mapping", "mapping without y", "tensor"])
    def test_arguments(self, kind):
        x, y = data()
        batch = {
            "tuple": (x, y),
            "list": [x, y],
            "mapping": {"x": x, "y": y, "weight": torch.tensor(2.0)},
            "mapping without y": {"x": x},
            "tensor": x,
        }[kind]
        svi = SVI(self.model, self.guide, Adam(learning_rates(0.1)), Trace_ELBO())
        history = fit(svi, [batch], 4, progress=False)
        assert history.step == 4
        assert history.steps["step"] == [1, 2, 3, 4]


def test_num_data_comes_from_the_loader_and_goes():
    elbo = TaylorELBO()
    seen = []
    svi = svi_of("MeanFieldGuide + TaylorELBO", elbo=elbo)
    fit(svi, shuffled(), 1, progress=False, callbacks=[lambda state: seen.append(state.elbo.num_data)])
    assert seen == [NUM_DATA]
    assert elbo.num_data is None


@BOTH
def test_a_plate_of_another_size_is_found(method):
    svi = svi_of(method)
    svi.model.num_data = 1000
    with pytest.raises(DataError, match="'obs'.*1000"):
        fit(svi, shuffled(), 1, progress=False)
    assert getattr(svi.loss.__self__, "num_data", None) is None


X, Y = data()
WRONG_LISTS = {
    "plate too large": (1000, sequence()),
    "plate of a batch": (BATCH, sequence()),
    "plate of a batch, mappings": (BATCH, [{"x": x, "y": y} for x, y in sequence()]),
    "one batch": (1000, [(X, Y)]),
    "part of the data": (NUM_DATA, sequence()[:2]),
}
RIGHT_LISTS = {
    "all of the data": (NUM_DATA, sequence()),
    "shorter last batch": (NUM_DATA, list(zip(X.split(7), Y.split(7), strict=True))),
    "last batch dropped": (NUM_DATA, list(zip(X.split(7), Y.split(7), strict=True))[:-1]),
    "the same again": (NUM_DATA, [(X, Y)] * 3),
    "augmented": (NUM_DATA, [(X + 0.1 * k, Y) for k in range(3)]),
    "a tensor for all batches": (NUM_DATA, [(torch.ones(2), x, y) for x, y in sequence()]),
    "a scalar beside": (NUM_DATA, [(torch.tensor(1.0), x, y) for x, y in sequence()]),
    "one batch, others dropped": (NUM_DATA, [(X[:16], Y[:16])]),
    "epochs shuffled anew": (
        NUM_DATA,
        [(X[i], Y[i]) for k in range(2) for i in ((torch.arange(24) * 5 + k) % 24).split(8)],
    ),
    "overlapping": (NUM_DATA, [(X[k : k + 8], Y[k : k + 8]) for k in range(10)]),
    "no tensors": (NUM_DATA, [{"x": X.tolist(), "y": Y.tolist()}]),
}


def on_list(method, size, elbo=None):
    """A step of a model that takes more arguments before its data, or lists in place of tensors."""
    svi = svi_of(method, elbo=elbo)
    svi.model.num_data = size
    forward = svi.model.forward
    svi.model.forward = lambda *args, **kwargs: forward(
        *map(torch.as_tensor, args[-2:]), **{k: torch.as_tensor(v) for k, v in kwargs.items()}
    )
    return svi


def complaint(elbo, message):
    """An error of an ELBO that can be told the size of the data set; of Pyro's own a warning."""
    told = hasattr(elbo, "num_data")
    return pytest.raises(DataError, match=message) if told else pytest.warns(DviWarning, match=message)


@BOTH
@pytest.mark.parametrize(("size", "batches"), WRONG_LISTS.values(), ids=WRONG_LISTS)
def test_the_batches_of_a_list_are_counted(method, size, batches):
    svi = on_list(method, size)
    with complaint(svi.loss.__self__, rf"'obs' sees .* scaled to {size}.*num_data={size}"):
        fit(svi, batches, 1, progress=False)


@BOTH
@pytest.mark.parametrize(("size", "batches"), RIGHT_LISTS.values(), ids=RIGHT_LISTS)
def test_lists_that_agree_with_the_plate(method, size, batches):
    assert fit(on_list(method, size), batches, 1, progress=False).step == len(batches)


def test_a_list_may_be_a_part_of_the_data(monkeypatch):
    """The objective says so; and each of several processes has a share of its own."""
    method = "MeanFieldGuide + TaylorELBO"
    part = sequence()[:1]
    svi = on_list(method, NUM_DATA, TaylorELBO(num_data=NUM_DATA))
    assert fit(svi, part, 1, progress=False).step == 1
    pyro.clear_param_store()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert fit(on_list(method, NUM_DATA), part, 1, progress=False).step == 1


@pytest.mark.parametrize("elbo", [TaylorELBO, Trace_ELBO])
def test_a_model_without_plates_takes_one_batch(elbo):
    """Each of several would be taken for all the data."""

    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("obs", dist.Normal(x @ w, 0.3).to_event(1), obs=y)

    svi = SVI(model, AutoNormal(model), Adam({"lr": 0.01}), loss=elbo())
    with complaint(svi.loss.__self__, r"'obs' sees 8 of 24 examples.*size=24, subsample_size=len\(x\)"):
        fit(svi, sequence(), 1, progress=False)
    assert fit(svi, [(X, Y)] * 2, 1, progress=False).step == 2


def weights():
    return pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))


def one_row(x, y):
    f = x @ weights()
    with pyro.plate("data", NUM_DATA, subsample_size=1):
        pyro.sample("obs", dist.Normal(f.reshape(1), 0.3), obs=y.reshape(1))


def one_row_scaled(x, y):
    f = x @ weights()
    with poutine.scale(scale=float(NUM_DATA)):
        pyro.sample("obs", dist.Normal(f, 0.3), obs=y)


def sentence(tokens, label):
    w = weights()
    with pyro.plate("sentences", 4, subsample_size=1):
        pyro.sample("obs", dist.Bernoulli(logits=w[tokens].mean().reshape(1)), obs=label.reshape(1))


def series(y):
    f = y[:-1] * weights().sum()
    with pyro.plate("windows", 4, subsample_size=1):
        pyro.sample("obs", dist.Normal(f, 0.3).to_event(1), obs=y[1:])


def time_first(x, y):
    f = x @ weights()
    with pyro.plate("data", NUM_DATA, subsample_size=8), pyro.plate("time", 5, dim=-2):
        pyro.sample("obs", dist.Normal(f, 0.3), obs=y)


def groups(x, y):
    f = x @ weights()
    for k in range(2):
        with pyro.plate(f"group {k}", NUM_DATA // 2, subsample_size=len(x) // 2):
            pyro.sample(f"obs {k}", dist.Normal(f[k::2], 0.3), obs=y[k::2])


def labelled_half(x, y):
    f = x @ weights()
    with pyro.plate("labelled", NUM_DATA // 2, subsample_size=len(x) // 2):
        pyro.sample("obs", dist.Normal(f[: len(f) // 2], 0.3), obs=y[: len(f) // 2])


def pixels(x, y):
    f = (x[..., None] * weights()).sum(-1).flatten()
    with pyro.plate("pixels", 3 * x.numel(), subsample_size=x.numel()):
        pyro.sample("obs", dist.Normal(f, 0.3), obs=y.flatten())


def autoencoder(x):
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(torch.zeros(len(x), 2), 1.0).to_event(1))
        pyro.sample("obs", dist.Normal(z @ torch.ones(2, 3), 0.3).to_event(1), obs=x)


def encoder(x):
    loc = pyro.param("loc", torch.zeros(3, 2))
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(x @ loc, 0.5).to_event(1))


def tempered(x, y):
    f = x @ weights()
    with pyro.plate("data", NUM_DATA, subsample_size=len(x)):
        pyro.sample("obs", dist.Normal(f, 0.3), obs=y)


def common_rows(x, y, part, label):
    w = weights()
    with pyro.plate("all", NUM_DATA):
        pyro.sample("all obs", dist.Normal(x @ w, 0.3), obs=y)
    with pyro.plate("data", NUM_DATA, subsample_size=len(part)):
        pyro.sample("obs", dist.Normal(part @ w, 0.3), obs=label)


X3 = torch.cat([X, Y[:, None]], 1)
ROWS = list(zip(X3, Y, strict=True))
IN_THREE = list(zip(X3.split(8), Y.split(8), strict=True))
IMAGES = [(torch.ones(4, 2, 2) * k, torch.zeros(4, 2, 2)) for k in range(3)]
OTHER_MODELS = {
    "one row": (one_row, None, ROWS),
    "one row, poutine.scale": (one_row_scaled, None, ROWS),
    "sentences": (sentence, None, [(torch.zeros(n).long(), torch.ones(())) for n in (3, 5, 4, 2)]),
    "windows": (series, None, [(Y[k : k + 6],) for k in range(0, 24, 6)]),
    "time first": (time_first, None, [(torch.ones(5, 8, 3), torch.ones(5, 8) * k) for k in range(3)]),
    "groups": (groups, None, IN_THREE),
    "half of each batch": (labelled_half, None, IN_THREE),
    "pixels": (pixels, None, IMAGES),
    "autoencoder": (autoencoder, encoder, [(x,) for x in X3.split(10)]),
    "tempered": (poutine.scale(tempered, scale=0.1), None, IN_THREE),
    "rows in all batches": (common_rows, None, [(X3[:], Y[:], *batch) for batch in IN_THREE]),
}


@pytest.mark.parametrize("elbo", [SampledELBO, Trace_ELBO])
@pytest.mark.parametrize(("model", "guide", "batches"), OTHER_MODELS.values(), ids=OTHER_MODELS)
def test_lists_whose_rows_are_no_lengths(elbo, model, guide, batches):
    """Of tensors, or whose plates are not of the rows of the list."""
    svi = SVI(model, guide or AutoNormal(model), Adam({"lr": 0.01}), loss=elbo())
    assert fit(svi, batches, 1, progress=False).step == len(batches)


def test_a_whole_data_set_may_have_a_weight():
    """Of poutine.scale: no plate has another size than the list."""

    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with poutine.scale(scale=3.0), pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(x @ w, 0.3), obs=y)

    svi = SVI(model, AutoNormal(model), Adam({"lr": 0.01}), loss=TaylorELBO())
    assert fit(svi, [(X, Y)], 1, progress=False).step == 1


def test_subset_sampler_counts_its_subset():
    loader = DataLoader(
        TensorDataset(*data()),
        batch_size=4,
        sampler=SubsetRandomSampler(range(12), generator=torch.Generator()),
    )
    svi = svi_of("AutoNormal + Trace_ELBO")
    svi.model.num_data = 12
    assert fit(svi, loader, 1, progress=False).step == 3


def test_modes_are_kept():
    svi = svi_of("AutoNormal + Trace_ELBO")
    svi.model.norm.eval()  # a frozen BatchNorm within a training model
    fit(svi, sequence(), 1, progress=False)
    assert svi.model.training and not svi.model.norm.training
    assert svi.model.norm.num_batches_tracked == 0
    svi.model.eval()
    modes = []
    fit(svi, sequence(), 1, progress=False, callbacks=[lambda state: modes.append(state.model.norm.training)])
    assert modes == [True]
    assert not any(module.training for module in svi.model.modules())


@BOTH
def test_validation_leaves_no_trace_in_training(method):
    fit(plain := svi_of(method), shuffled(), 4, progress=False)
    expected = weights_of(plain)
    pyro.clear_param_store()
    svi = svi_of(method)
    history = fit(svi, shuffled(), 4, validate=shuffled(seed=3), progress=False)
    assert same(weights_of(svi), expected)
    assert len(history["validation_loss"]) == 4
    assert all(math.isfinite(value) for value in history["validation_loss"])


def test_validation_callable_runs_in_evaluation_mode():
    svi = svi_of("AutoNormal + Trace_ELBO")
    modes = []

    def validate():
        modes.append(svi.model.norm.training)
        return {"nll": torch.tensor(0.5), "accuracy": 1}

    history = fit(svi, sequence(), 2, validate=validate, progress=False)
    assert modes == [False, False]
    assert history["validation_nll"] == [0.5, 0.5]
    assert history["validation_accuracy"] == [1.0, 1.0]


def test_validation_batches_of_nested_tensors_count_by_their_size():
    def nothing(batch):
        pass

    svi = SVI(nothing, nothing, Adam({"lr": 0.1}), loss=lambda model, guide, batch: batch["x"].mean())
    batches = [[{"x": torch.zeros(3)}], [{"x": torch.ones(1)}]]
    assert validation_metrics(route_of(svi), batches, None) == {"loss": 0.25}


def test_a_callback_can_stop():
    def callback(state):
        state.stop = state.epoch == 2

    history = fit(svi_of("AutoNormal + Trace_ELBO"), sequence(), 10, callbacks=[callback], progress=False)
    assert (history.epoch, history.stopped) == (2, "callback")


def test_history_continues():
    svi = svi_of("AutoNormal + Trace_ELBO")
    history = fit(svi, sequence(), 2, progress=False)
    assert fit(svi, sequence(), 3, history=history, progress=False) is history
    assert history["epoch"] == [1, 2, 3, 4, 5]
    assert history["step"] == [3, 6, 9, 12, 15]


# -- learning rates -------------------------------------------------------------------------------------------


OPTIONS = {"optimizer": torch.optim.Adam, "optim_args": learning_rates(0.01), "gamma": 0.5}
HALVED = {
    "Pyro's": lambda: ExponentialLR(dict(OPTIONS)),
    "ours": lambda: optim.Adam(
        learning_rates(0.01), scheduler=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    ),
}


@pytest.mark.parametrize("make", HALVED.values(), ids=HALVED)
def test_the_schedule_of_an_svi_moves_every_epoch(make):
    history = fit(svi_of("AutoNormal + Trace_ELBO", optimizer=make()), sequence(), 3, progress=False)
    assert history["lr"] == pytest.approx([0.01, 0.005, 0.0025])


@pytest.mark.parametrize("make", HALVED.values(), ids=HALVED)
def test_the_schedule_of_an_svi_can_move_every_step(make):
    svi = svi_of("AutoNormal + Trace_ELBO", optimizer=make())
    history = fit(svi, sequence(), 1, lr_schedule=EveryStep(svi.optim), progress=False)
    assert history.steps["lr"] == pytest.approx([0.01, 0.005, 0.0025])


@pytest.mark.parametrize("every_step", [False, True])
def test_torch_schedulers(every_step):
    module, optimizer = module_of("AutoNormal + Trace_ELBO")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    schedule = EveryStep(scheduler) if every_step else scheduler
    history = fit(module, sequence(), 2, optimizer=optimizer, lr_schedule=schedule, progress=False)
    expected = [0.01 * 0.5**i for i in range(6)] if every_step else [0.01] * 3 + [0.005] * 3
    assert history.steps["lr"] == pytest.approx(expected)
    assert optimizer.param_groups[1]["lr"] == pytest.approx(10 * optimizer.param_groups[0]["lr"])


def test_reduce_on_plateau_follows_validation():
    module, optimizer = module_of("AutoNormal + Trace_ELBO")
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    history = fit(
        module,
        sequence(),
        3,
        optimizer=optimizer,
        lr_schedule=scheduler,
        validate=lambda: 1.0,
        progress=False,
    )
    assert history["lr"] == pytest.approx([0.01, 0.01, 0.001])


def test_reduce_on_plateau_in_an_svi_follows_validation():
    scheduler = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, factor=0.1, patience=0)
    svi = svi_of("AutoNormal + Trace_ELBO", optimizer=optim.Adam(learning_rates(0.01), scheduler=scheduler))
    history = fit(svi, sequence(), 3, validate=lambda: 1.0, progress=False)
    assert history["lr"] == pytest.approx([0.01, 0.01, 0.001])


# -- when it is interrupted ----------------------------------------------------------------------------------


@pytest.fixture
def _interruptible():
    """Ctrl-C as in a terminal, also where the tests run in the background and ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.usefixtures("_interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_keeps_what_was_trained(number):
    svi = svi_of("AutoNormal + Trace_ELBO")

    class Interrupted(PyroOptim):
        calls = 0

        def __call__(self, params, *args, **kwargs):
            self.calls += 1
            if self.calls == 5:  # in the middle of a step
                os.kill(os.getpid(), number)
            super().__call__(params, *args, **kwargs)

    svi.optim.__class__ = Interrupted
    history = fit(svi, sequence(), 4, progress=False)
    assert (history.stopped, history.epoch, history.step) == ("interrupted", 1, 5)
    interrupted = weights_of(svi)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    pyro.clear_param_store()
    batches = sequence()
    other = svi_of("AutoNormal + Trace_ELBO")
    with preserve_buffers():
        other.guide(*batches[0])
    for batch in [*batches, *batches[:2]]:
        other.step(*batch)
    assert same(weights_of(other), interrupted)


def test_net_on_its_own_size():
    """The tests above rely on a plate that fits the data."""
    assert Net().num_data == NUM_DATA == len(data()[0]) == BATCH * len(sequence())
