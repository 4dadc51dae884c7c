# SPDX-License-Identifier: Apache-2.0
import math
import os
import signal
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import Adam, ExponentialLR, PyroOptim
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from pyro_dvi.elbos.taylor import TaylorELBO
from pyro_dvi.errors import DataError, GuideError, NonFiniteError
from pyro_dvi.optim import learning_rates
from pyro_dvi.schedules import LinearWarmup
from pyro_dvi.training import EarlyStopping, EveryStep, History, fit
from pyro_dvi.undisturbed import preserve_buffers
from tests.training.problems import (
    BATCH,
    METHODS,
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

BOTH = pytest.mark.parametrize("method", METHODS)


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


def test_early_stopping_may_keep_the_last_epoch():
    svi = svi_of("AutoNormal + Trace_ELBO")
    kept: list[dict[str, torch.Tensor]] = []
    fit(
        svi,
        sequence(),
        3,
        validate=lambda: len(kept),
        early_stopping=EarlyStopping(patience=5, restore_best=False),
        callbacks=[lambda state: kept.append(weights_of(svi))],
        progress=False,
    )
    assert same(weights_of(svi), kept[-1])


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


def test_pyro_scheduler_steps_every_epoch():
    optimizer = ExponentialLR(
        {"optimizer": torch.optim.Adam, "optim_args": learning_rates(0.01), "gamma": 0.5}
    )
    history = fit(svi_of("AutoNormal + Trace_ELBO", optimizer=optimizer), sequence(), 3, progress=False)
    assert history["lr"] == pytest.approx([0.01, 0.005, 0.0025])


def test_pyro_scheduler_can_step_every_step():
    optimizer = ExponentialLR(
        {"optimizer": torch.optim.Adam, "optim_args": learning_rates(0.01), "gamma": 0.5}
    )
    svi = svi_of("AutoNormal + Trace_ELBO", optimizer=optimizer)
    history = fit(svi, sequence(), 1, lr_schedule=EveryStep(optimizer), progress=False)
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


# -- when it goes wrong ---------------------------------------------------------------------------------------


class Poison:
    """A loader whose batches turn bad at one step."""

    def __init__(self, at, spoil):
        self.at, self.spoil, self.count = at, spoil, 0

    def __iter__(self):
        for x, y in sequence():
            self.count += 1
            if self.count == self.at:
                x = self.spoil(x)
            yield x, y


# Pyro's own ELBOs also warn of a NaN; that is theirs to say.
NAN_WARNING = pytest.mark.filterwarnings("ignore:Encountered (NaN|\\+?-?inf):UserWarning")


@NAN_WARNING
@BOTH
@pytest.mark.parametrize("elbo_module", [False, True], ids=["SVI", "ELBOModule"])
@pytest.mark.parametrize("validate", [False, True], ids=["unvalidated", "validated"])
def test_nan_restores_the_last_good_epoch(method, elbo_module, validate):
    def spoil(x):
        x = x.clone()
        x[0, 0] = math.nan
        return x

    kept = []
    with pyro.settings.context(validate_distributions_pyro=validate), pyro.validation_enabled(validate):
        options: dict[str, Any] = {"progress": False}
        if elbo_module:
            target, options["optimizer"] = module_of(method)
        else:
            target = svi_of(method)
        options["callbacks"] = [lambda state: kept.append(weights_of(target))]
        with pytest.raises(NonFiniteError) as caught:
            fit(target, Poison(8, spoil), 5, **options)
    error = caught.value
    assert (error.epoch, error.step) == (3, 8)
    assert "argument 0 (1 of 16 elements)" in str(error)
    assert len(error.history) == 2 and error.history.step == 7
    assert error.history.stopped == "non-finite"
    assert same(weights_of(target), kept[-1])
    # Training goes on from there as it would have.
    options.pop("callbacks")
    history = fit(target, sequence(), 1, history=error.history, **options)
    assert history["epoch"] == [1, 2, 3]


@NAN_WARNING
@BOTH
def test_divergence_in_the_first_epoch_restores_the_start(method):
    svi = svi_of(method)
    svi.guide(*sequence()[0])
    start = weights_of(svi)
    with pytest.raises(NonFiniteError, match="as they were before training") as caught:
        fit(svi, Poison(2, lambda x: x * math.inf), 1, progress=False)
    assert (caught.value.epoch, caught.value.step) == (1, 2)
    assert same(weights_of(svi), start)
    assert all(math.isfinite(loss) for loss in caught.value.history.steps["loss"])


def test_bad_parameters_are_named():
    svi = svi_of("MeanFieldGuide + TaylorELBO")

    def spoil(state):
        with torch.no_grad():
            dict(state.guide.named_parameters())["scales.last.weight_unconstrained"].fill_(math.nan)

    # The callback comes after the epoch's snapshot: the next step meets the bad parameter.
    with pytest.raises(NonFiniteError, match=r"parameters: MeanFieldGuide\.scales\.last\.weight[;.]"):
        fit(svi, sequence(), 2, callbacks=[spoil], progress=False)
    assert all(torch.isfinite(value).all() for value in weights_of(svi).values())


def test_bad_terms_are_named():
    class Broken(TaylorELBO):
        def _evaluate(self, *args, **kwargs):
            terms = super()._evaluate(*args, **kwargs)
            if self.step == 4:
                terms["penalty"] = terms["penalty"] * math.inf
                terms["loss"] = terms["loss"] + terms["penalty"]
            return terms

    svi = svi_of("MeanFieldGuide + TaylorELBO", elbo=Broken())
    with pytest.raises(NonFiniteError, match="terms of the loss: penalty=inf"):
        fit(svi, sequence(), 3, progress=False)
    assert svi.loss.__self__.step == 3


@NAN_WARNING
def test_an_update_that_overflows_is_found_at_the_end_of_the_epoch():
    svi = svi_of("AutoNormal + Trace_ELBO", optimizer=pyro.optim.SGD({"lr": 1e38}))
    with pytest.raises(NonFiniteError):
        fit(svi, sequence()[:1], 1, progress=False)


class Explodes(PyroOptim):
    """Makes every parameter huge, but finite, at one step."""

    calls = 0

    def __call__(self, params, *args, **kwargs):
        super().__call__(params, *args, **kwargs)
        type(self).calls += 1
        if type(self).calls == type(self).at:
            with torch.no_grad():
                for p in params:
                    p.mul_(type(self).factor)


@NAN_WARNING
@BOTH
@pytest.mark.parametrize("factor", [1e31, -1e31])
@pytest.mark.parametrize("family", ["logits", "scale"])
@pytest.mark.parametrize(
    "at_step", [2, 3, 5], ids=["within an epoch", "in its last step", "in the next epoch"]
)
def test_parameters_that_are_finite_but_far_too_large_are_a_divergence(method, factor, family, at_step):
    class Extreme(Net):
        def forward(self, x, y=None):
            f = self.last(nn.functional.softplus(self.norm(self.first(x)))).squeeze(-1)
            with pyro.plate("data", len(x)):
                fn = (
                    dist.Normal(f - f, f.exp())
                    if family == "scale"
                    else dist.Bernoulli(logits=(f * f - f * f))
                )
                return pyro.sample("obs", fn, obs=None if y is None else (y > 0).to(f))

    class Once(Explodes):
        at = at_step

    Once.factor = factor
    torch.manual_seed(0)
    guide_class, elbo_class = METHODS[method]
    model = Extreme()
    svi = SVI(model, guide_class(model), Adam({"lr": 1e-4}), elbo_class())
    svi.guide(*sequence()[0])
    start = weights_of(svi)
    svi.optim.__class__ = Once
    kept = [start]
    with pytest.raises(NonFiniteError, match="the largest parameter is|Not finite") as caught:
        fit(svi, sequence(), 3, progress=False, callbacks=[lambda state: kept.append(weights_of(svi))])
    assert caught.value.step == at_step + 1
    assert same(weights_of(svi), kept[at_step // 4])
    assert caught.value.history.stopped == "non-finite"


@NAN_WARNING
@BOTH
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", [1, 2])
def test_bad_numbers_in_the_first_batch_are_reported_as_in_later_ones(method, bad, at):
    def spoil(x):
        x = x.clone()
        x[0, 0] = bad
        return x

    svi = svi_of(method)
    with pytest.raises(NonFiniteError, match=r"argument 0 \(1 of 16 elements\).*Drop or mask") as caught:
        fit(svi, Poison(at, spoil), 1, progress=False)
    assert (caught.value.epoch, caught.value.step) == (1, at)
    assert fit(svi, sequence(), 1, history=caught.value.history, progress=False).epoch == 1


def test_an_error_of_a_batch_that_would_fail_before_too_passes_and_changes_nothing():
    svi = svi_of("AutoNormal + Trace_ELBO")
    fit(svi, sequence(), 1, progress=False)
    kept = svi.guide.median()
    x, y = sequence()[0]
    with pytest.raises(ValueError, match="not broadcastable"):
        fit(svi, [(x, y[:-1])], 1, progress=False)
    assert same(svi.guide.median(), kept)


@BOTH
@pytest.mark.parametrize("at", [5, 6, 9])
def test_an_error_that_comes_once_in_the_model_passes_and_changes_nothing(method, at):
    svi = svi_of(method)
    fit(svi, sequence(), 1, progress=False)
    plain, steps = svi.model.norm.forward, []

    def failing(x):
        if svi.model.training and torch.is_grad_enabled():  # a step, no evaluation
            steps.append(weights_of(svi))
            if len(steps) == at:
                raise ValueError("my own server did not answer")
        return plain(x)

    svi.model.norm.forward = failing
    history = History()
    with pytest.raises(ValueError, match="^my own server did not answer"):
        fit(svi, sequence(), 5, history=history, progress=False)
    assert same(weights_of(svi), steps[-1])
    assert history.stopped is None and history.unfinished is not None


def test_the_message_of_a_divergence_quotes_the_error_as_it_is():
    svi = svi_of("AutoNormal + Trace_ELBO")
    fit(svi, sequence(), 1, progress=False)
    plain = svi.model.norm.forward

    def failing(x):
        if svi.model.first.weight.isnan().any():
            raise ValueError("iPad and iPhone differ")
        return plain(x)

    def spoil(state):
        with torch.no_grad():
            svi.model.first.weight[0, 0] = math.nan

    svi.model.norm.forward = failing
    with pytest.raises(
        NonFiniteError, match=r"step 4\. iPad and iPhone differ\. Not finite: parameters: first\."
    ):
        fit(svi, sequence(), 5, callbacks=[spoil], history=History(), progress=False)


def test_other_errors_pass():
    svi = svi_of("AutoNormal + Trace_ELBO")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fit(svi, [(torch.ones(3, 5), torch.ones(3))], 1, progress=False)


@BOTH
@pytest.mark.parametrize("epochs_before", [0, 1])
def test_an_ordinary_error_in_a_model_with_a_mask_of_minus_infinity_passes(method, epochs_before):
    svi = svi_of(method)
    svi.model.first.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
    if epochs_before:
        fit(svi, sequence(), 1, progress=False)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fit(svi, [(torch.ones(3, 5), torch.ones(3))], 1, progress=False)


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


# -- Pyro's store ---------------------------------------------------------------------------------------------


def test_a_second_guide_of_the_same_name_is_refused():
    fit(svi_of("AutoNormal + Trace_ELBO"), sequence(), 1, progress=False)
    with pytest.raises(GuideError, match="store already holds 'AutoNormal.locs.*clear_param_store"):
        fit(svi_of("AutoNormal + Trace_ELBO"), sequence(), 1, progress=False)


def test_a_second_guide_that_adopted_parameters_is_refused():
    first = svi_of("AutoNormal + Trace_ELBO")
    fit(first, sequence(), 1, progress=False)
    second = svi_of("AutoNormal + Trace_ELBO")
    second.guide(*sequence()[0])
    with pytest.raises(GuideError, match="belongs to another AutoNormal|another parameter under the name"):
        fit(second, sequence(), 1, progress=False)


def test_a_second_model_of_the_same_names_is_refused():
    first = svi_of("AutoNormal + Trace_ELBO")
    fit(first, sequence(), 1, progress=False)
    with pytest.raises(GuideError, match=r"name 'first\.weight' of this model"):
        fit(svi_of("MeanFieldGuide + TaylorELBO"), sequence(), 1, progress=False)


def test_two_guides_of_one_model_may_share_it():
    first = svi_of("AutoNormal + Trace_ELBO")
    fit(first, sequence(), 1, progress=False)
    guide = pyro.infer.autoguide.AutoDelta(first.model)
    fit(SVI(first.model, guide, Adam({"lr": 0.01}), Trace_ELBO()), sequence(), 1, progress=False)
    fit(first, sequence(), 1, progress=False)


def test_a_new_start_after_clearing():
    fit(svi_of("AutoNormal + Trace_ELBO"), sequence(), 1, progress=False)
    pyro.clear_param_store()
    fit(svi_of("AutoNormal + Trace_ELBO"), sequence(), 1, progress=False)


def test_a_copy_in_the_store_is_found():
    svi = svi_of("AutoNormal + Trace_ELBO")
    svi.model.first.weight = nn.Parameter(torch.randn(2, 4).t())
    with pytest.raises(Exception, match="not contiguous"):
        fit(svi, sequence(), 2, progress=False)


def test_net_on_its_own_size():
    """The tests above rely on a plate that fits the data."""
    assert Net().num_data == NUM_DATA == len(data()[0]) == BATCH * len(sequence())
