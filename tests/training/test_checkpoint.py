# SPDX-License-Identifier: Apache-2.0
import pickle
import random
import struct
import zipfile

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.nn import PyroModule
from pyro.optim import SGD, Adam, ClippedAdam, ExponentialLR
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi as dvi
from pyro_dvi.bayesian import classifier, to_bayesian_
from pyro_dvi.elbos.taylor import TaylorELBO
from pyro_dvi.errors import ArgumentError, CheckpointError, DviWarning, GuideError, ModelError
from pyro_dvi.guides import MeanFieldGuide
from pyro_dvi.optim import learning_rates
from pyro_dvi.schedules import LinearWarmup
from pyro_dvi.training import Checkpoint, EarlyStopping, History, fit, load, save
from tests.training.problems import (
    METHODS,
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
OPTIMIZERS = {
    "Adam": lambda: Adam(learning_rates(0.01)),
    "ClippedAdam": lambda: ClippedAdam(learning_rates(0.01, lrd=0.99)),
    "ExponentialLR": lambda: ExponentialLR(
        {"optimizer": torch.optim.Adam, "optim_args": learning_rates(0.01), "gamma": 0.9}
    ),
}


def elbo_of(method):
    return TaylorELBO(kl_weight=LinearWarmup(12)) if "Taylor" in method else Trace_ELBO()


def fresh_start():
    """As in a new process: an empty store, other random states."""
    pyro.clear_param_store()
    pyro.set_rng_seed(999)


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


class FunctionalProblem:
    """Model and guide as functions: parameters in Pyro's store only, a network that no module lists."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Softplus())

        def model(x, y=None):
            pyro.module("net", self.net)
            w = pyro.sample("w", dist.Normal(torch.zeros(4), 1.0).to_event(1))
            noise = pyro.param("noise", torch.tensor(0.5), dist.constraints.positive)
            with pyro.plate("data", 24, subsample_size=len(x)):
                pyro.sample("obs", dist.Normal(self.net(x) @ w, noise), obs=y)

        def guide(x, y=None):
            loc = pyro.param("loc", torch.randn(4))
            scale = pyro.param("scale", torch.full((4,), 0.1), dist.constraints.softplus_positive)
            pyro.sample("w", dist.Normal(loc, scale).to_event(1))

        self.svi = SVI(model, guide, Adam(learning_rates(0.01, scale_pattern="^scale$")), Trace_ELBO())

    def weights(self):
        return {
            **{name: value.detach().clone() for name, value in self.net.state_dict().items()},
            **{name: value.detach().clone() for name, value in pyro.get_param_store().items()},
        }


def test_resuming_functions_is_bit_identical(tmp_path):
    whole = FunctionalProblem()
    reference = fit(whole.svi, shuffled(), 4, progress=False)
    expected = whole.weights()

    fresh_start()
    half = FunctionalProblem()
    loader, checkpoint = shuffled(), Checkpoint(tmp_path / "half.pt", modules={"net": half.net})
    fit(half.svi, loader, 2, checkpoint=checkpoint, progress=False)

    fresh_start()
    again = FunctionalProblem(seed=5)
    loader = shuffled(seed=123)
    history = load(tmp_path / "half.pt", again.svi, loader=loader, modules={"net": again.net})
    fit(again.svi, loader, 2, history=history, progress=False)
    assert history.steps["loss"] == reference.steps["loss"]
    assert same(again.weights(), expected)


def test_functions_resume_with_an_example_instead_of_the_network(tmp_path):
    first = FunctionalProblem()
    fit(first.svi, shuffled(), 1, progress=False)
    save(tmp_path / "x.pt", first.svi)
    expected = dict(first.net.named_parameters())
    fresh_start()
    again = FunctionalProblem(seed=5)
    with pytest.raises(CheckpointError, match=r"'net\$\$\$0.weight' of pyro.module"):
        load(tmp_path / "x.pt", again.svi)
    load(tmp_path / "x.pt", again.svi, example=sequence()[0])
    assert same(dict(again.net.named_parameters()), expected)
    assert all(
        value is pyro.get_param_store()._params[f"net$$${n}"] for n, value in again.net.named_parameters()
    )


def test_buffers_that_a_checkpoint_cannot_see_are_refused(tmp_path):
    with pytest.raises(ModelError, match="BatchNorm1d.*modules="):
        fit(FunctionalProblem().svi, shuffled(), 1, checkpoint=tmp_path / "x.pt", progress=False)


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


@BOTH
@pytest.mark.parametrize("stops", [False, True], ids=["the last epoch", "the best epoch"])
def test_the_last_file_holds_the_recomputed_statistics(method, stops, tmp_path):
    metrics = [3.0, 1.0, 2.0, 2.0]
    stopping = (
        {"validate": lambda: metrics.pop(0), "early_stopping": EarlyStopping(patience=2)} if stops else {}
    )
    svi = svi_of(method)
    fit(
        svi,
        shuffled(),
        4,
        recompute_batch_norm=True,
        checkpoint=tmp_path / "x.pt",
        progress=False,
        **stopping,
    )
    expected = weights_of(svi)
    fresh_start()
    again = svi_of(method, seed=3)
    load(tmp_path / "x.pt", again, example=sequence()[0], best=stops)
    assert same(weights_of(again), expected)


def test_a_run_that_was_killed_after_its_last_epoch_is_finished_by_no_further_epochs(tmp_path):
    def run():
        svi, loader = svi_of("MeanFieldGuide + TaylorELBO"), shuffled()
        fit(svi, loader, 2, recompute_batch_norm=True, checkpoint=tmp_path / "x.pt", progress=False)
        return svi, loader

    expected = weights_of(run()[0])
    fresh_start()
    svi, loader = svi_of("MeanFieldGuide + TaylorELBO"), shuffled()
    history = fit(svi, loader, 2, progress=False)
    save(tmp_path / "killed.pt", svi, history=history, loader=loader)
    fresh_start()
    svi, loader = svi_of("MeanFieldGuide + TaylorELBO", seed=3), shuffled(seed=9)
    history = load(tmp_path / "killed.pt", svi, loader=loader)
    fit(svi, loader, 0, history=history, recompute_batch_norm=True, progress=False)
    assert (history.epoch, history.stopped) == (2, "epochs")
    assert same(weights_of(svi), expected)


class Interrupting:
    """Validation, or a loader, that is interrupted once."""

    def __init__(self, inner, at):
        self.inner, self.at, self.count = inner, at, 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __iter__(self):
        for batch in self.inner:
            self.count += 1
            if self.count == self.at:
                raise KeyboardInterrupt
            yield batch


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
        lambda: sequence()[:1],
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


def test_checkpoint_is_written_when_it_should(tmp_path):
    path = tmp_path / "run.pt"
    seen = []
    svi = svi_of("AutoNormal + Trace_ELBO")
    checkpoint = Checkpoint(path, every=2)
    fit(
        svi,
        sequence(),
        3,
        checkpoint=checkpoint,
        callbacks=[lambda s: seen.append(path.exists())],
        progress=False,
    )
    assert seen == [False, False, True]
    fresh_start()
    again = svi_of("AutoNormal + Trace_ELBO")
    assert load(path, again, example=sequence()[0]).epoch == 3
    assert list(tmp_path.iterdir()) == [path]


def test_interrupt_writes_a_checkpoint(tmp_path):
    def interrupt(state):
        raise KeyboardInterrupt

    path = tmp_path / "run.pt"
    svi = svi_of("AutoNormal + Trace_ELBO")
    history = fit(
        svi, sequence(), 3, checkpoint=Checkpoint(path, every=9), callbacks=[interrupt], progress=False
    )
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


def test_the_file_is_safe_to_load(tmp_path):
    """Constraints aside, whose classes are Pyro's and torch's, torch's own safe loader reads it."""
    problem = FunctionalProblem()
    fit(problem.svi, shuffled(), 1, progress=False)
    save(tmp_path / "x.pt", problem.svi, modules={"net": problem.net})
    with pytest.raises(pickle.UnpicklingError, match="constraints"):
        torch.load(tmp_path / "x.pt", weights_only=True)
    fresh_start()
    svi = svi_of("MeanFieldGuide + TaylorELBO")
    fit(svi, shuffled(), 1, progress=False)
    save(tmp_path / "y.pt", svi)
    assert torch.load(tmp_path / "y.pt", weights_only=True)["format"] == "pyro_dvi checkpoint"


# -- files and objects that do not fit ------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of AutoNormal + Trace_ELBO, and an empty store."""
    svi = svi_of("AutoNormal + Trace_ELBO")
    history = fit(svi, shuffled(), 1, progress=False)
    save(tmp_path / "run.pt", svi, history=history, loader=shuffled())
    fresh_start()
    return tmp_path / "run.pt"


def other_width():
    svi = svi_of("AutoNormal + Trace_ELBO")
    svi.model.first = nn.Linear(3, 4)
    return svi


def other_net():
    svi = svi_of("AutoNormal + Trace_ELBO")
    svi.model.extra = nn.Linear(1, 1)
    del svi.model.norm
    return svi


def functional_guide():
    svi = svi_of("AutoNormal + Trace_ELBO")
    return SVI(svi.model, lambda *args: None, svi.optim, Trace_ELBO())


MISFITS = [
    ("other width", other_width, {}, r"does not fit the model: 'first.weight' is \(4, 2\).*and \(4, 3\)"),
    (
        "other network",
        other_net,
        {},
        r"missing keys \['extra.bias', 'extra.weight'\], unexpected keys \['norm.bias'",
    ),
    (
        "other dtype",
        lambda: svi_of("AutoNormal + Trace_ELBO", torch.float64),
        {},
        "float32 in the file and .*float64",
    ),
    (
        "other guide",
        lambda: svi_of("MeanFieldGuide + TaylorELBO", elbo=Trace_ELBO()),
        {},
        "does not fit the guide",
    ),
    (
        "other ELBO",
        lambda: svi_of("AutoNormal + Trace_ELBO", elbo=TaylorELBO()),
        {},
        "Trace_ELBO, the target has Taylor",
    ),
    (
        "other optimizer",
        lambda: svi_of("AutoNormal + Trace_ELBO", optimizer=SGD({"lr": 0.1})),
        {},
        "with Adam, the target has SGD",
    ),
    ("functional guide", functional_guide, {}, r"holds modules \['guide', 'model'\].*are \['model'\]"),
    (
        "other route",
        lambda: module_of("AutoNormal + Trace_ELBO")[0],
        {},
        "saved from an SVI, but.*ELBOModule",
    ),
    (
        "superfluous modules",
        lambda: svi_of("AutoNormal + Trace_ELBO"),
        {"modules": {"net": nn.Linear(1, 1)}},
        "'net'",
    ),
    ("no best", lambda: svi_of("AutoNormal + Trace_ELBO"), {"best": True}, "no best weights"),
    (
        "other loader",
        lambda: svi_of("AutoNormal + Trace_ELBO"),
        {"loader": sequence()},
        "1 generators.*has 0",
    ),
]


@pytest.mark.parametrize(
    ("build", "options", "message"), [m[1:] for m in MISFITS], ids=[m[0] for m in MISFITS]
)
def test_objects_that_do_not_fit(saved, build, options, message):
    with pytest.raises(CheckpointError, match=message):
        load(saved, build(), **{"example": sequence()[0], **options})


def test_a_file_without_rows_of_data_needs_an_example_for_guides_of_pyro(tmp_path):
    svi = svi_of("AutoNormal + Trace_ELBO")
    fit(svi, sequence(), 1, progress=False)
    save(tmp_path / "x.pt", svi)
    fresh_start()
    with pytest.raises(CheckpointError, match="AutoNormal has no parameters before"):
        load(tmp_path / "x.pt", svi_of("AutoNormal + Trace_ELBO"))


def converted(seed=0, width=4, prior_scale=1.0, num_data=24, activation=nn.Softplus, noise=0.3, **elbo):
    """Batch normalisation and a deterministic first layer among converted ones."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), activation(), nn.Linear(width, 1))
    dvi.to_bayesian_(net, prior_scale=prior_scale, exclude="0.*")
    model = dvi.regressor(net, num_data=num_data, noise_scale=noise)
    return SVI(model, MeanFieldGuide(model), Adam(learning_rates(0.01)), TaylorELBO(**elbo))


OTHERS = [
    ({"prior_scale": 3.0}, "prior of site 'net.3.weight': scale 1 → 3"),
    ({"num_data": 48}, r"plates \{'data': 24\} → \{'data': 48\}"),
    ({"activation": nn.Tanh}, r"distribution of site '\w+': loc"),
    ({"noise": 0.9}, r"distribution of site '\w+': scale 0.3 → 0.9"),
    ({"kl_weight": 0.1}, "trained with kl_weight=1.0, the target has 0.1"),
    ({"kl_weight": LinearWarmup(3)}, r"kl_weight=1.0, the target has LinearWarmup\(steps=3"),
]


@pytest.mark.parametrize(
    ("options", "message"),
    OTHERS,
    ids=[next(iter(o)) + type(next(iter(o.values()))).__name__ for o, _ in OTHERS],
)
def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(options, message, tmp_path):
    x, y = data()
    loader = [(x[:8], y[:8, None]), (x[8:], y[8:, None])]
    svi = converted()
    fit(svi, loader, 2, checkpoint=tmp_path / "x.pt", progress=False)
    expected = weights_of(svi)
    fresh_start()
    again = converted(seed=3)
    load(tmp_path / "x.pt", again)
    assert same(weights_of(again), expected)

    fresh_start()
    other = converted(seed=3, **options)
    before = {name: value.clone() for name, value in other.model.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "x.pt", other)
    assert same(other.model.state_dict(), before)


def test_other_data_and_statistics_that_training_moves_do_not_make_another_model(tmp_path):
    x, y = data()
    svi = converted()
    history = fit(svi, [(x[:8], y[:8, None])], 1, progress=False)
    history = fit(
        svi, [(10 * x[8:], y[8:, None])], 2, history=history, checkpoint=tmp_path / "x.pt", progress=False
    )
    fresh_start()
    again = converted(seed=3)
    history = load(tmp_path / "x.pt", again)
    fit(again, [(x[3:5], y[3:5, None])], 1, history=history, checkpoint=tmp_path / "x.pt", progress=False)
    fresh_start()
    assert load(tmp_path / "x.pt", converted(seed=4)).epoch == 4


def test_loading_is_enough_to_predict(tmp_path):
    x, y = data()
    svi = converted()
    fit(svi, [(x, y[:, None])], 1, checkpoint=tmp_path / "x.pt", progress=False)
    expected = dvi.predict(svi.model, svi.guide, x).mean
    for without_rows in (False, True):
        if without_rows:
            save(tmp_path / "x.pt", svi)
        fresh_start()
        svi = converted(seed=3)
        load(tmp_path / "x.pt", svi)
        assert torch.equal(dvi.predict(svi.model, svi.guide, x).mean, expected)


def test_a_misfit_changes_nothing(saved):
    svi = svi_of("AutoNormal + Trace_ELBO", torch.float64)
    svi.guide(*sequence(torch.float64)[0])
    before, state = weights_of(svi), torch.get_rng_state()
    with pytest.raises(CheckpointError):
        load(saved, svi)
    assert same(weights_of(svi), before)
    assert torch.equal(torch.get_rng_state(), state)


def test_parameters_of_another_guide_are_not_overwritten(saved):
    first = svi_of("AutoNormal + Trace_ELBO")
    fit(first, sequence(), 1, progress=False)
    before = weights_of(first)
    with pytest.raises(GuideError, match="clear_param_store"):
        load(saved, svi_of("AutoNormal + Trace_ELBO"), example=sequence()[0])
    assert same(weights_of(first), before)


def truncated(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def text(path):
    path.write_text("not a checkpoint")


def empty(path):
    path.write_bytes(b"")


def plain_pickle(path):
    path.write_bytes(pickle.dumps({"a": 1}))


def state_dict(path):
    torch.save(nn.Linear(2, 2).state_dict(), path)


def store(path):
    pyro.param("x", torch.ones(()))
    pyro.get_param_store().save(path)
    pyro.clear_param_store()


def module(path):
    torch.save(nn.Linear(2, 2), path)


def newer(path):
    content = torch.load(path, weights_only=True)
    torch.save({**content, "version": 99}, path)


def without_an_optimizer(path):
    content = torch.load(path, weights_only=True)
    del content["optimizer"]
    torch.save(content, path)


def without_constraints(path):
    content = torch.load(path, weights_only=True)
    del content["store"]["constraints"]
    torch.save(content, path)


FILES = [
    (truncated, "cut off"),
    (text, "not a checkpoint"),
    (empty, "not a checkpoint"),
    (plain_pickle, "not a checkpoint|not written by"),
    (state_dict, "not written by pyro_dvi.save.*'weight', 'bias'"),
    (store, r"not written by|not a checkpoint|safe load"),
    (module, "safe load"),
    (newer, "version 99"),
    (without_an_optimizer, r"run.pt' has no \['optimizer'\] in its contents"),
    (without_constraints, r"run.pt' has no \['constraints'\] in its store"),
    (lambda path: path.unlink(), "There is no checkpoint"),
]


@pytest.mark.parametrize(("damage", "message"), FILES, ids=[f[0].__name__ for f in FILES])
def test_files_that_are_no_checkpoints(saved, damage, message):
    damage(saved)
    with pytest.raises(CheckpointError, match=message):
        load(saved, svi_of("AutoNormal + Trace_ELBO"), example=sequence()[0])


@pytest.mark.parametrize("checksums", [True, False], ids=["", "torch.save without checksums"])
def test_a_bit_that_flips_anywhere_in_a_tensor_is_found(tmp_path, checksums):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(checksums)
    try:
        svi = svi_of("MeanFieldGuide + TaylorELBO")
        fit(svi, shuffled(), 1, checkpoint=tmp_path / "run.pt", progress=False)
    finally:
        torch.serialization.set_crc32_options(before)
    sound = (tmp_path / "run.pt").read_bytes()
    with zipfile.ZipFile(tmp_path / "run.pt") as archive:
        tensors = [entry for entry in archive.infolist() if "/data/" in entry.filename and entry.file_size]
    draw = random.Random(0)
    for _ in range(40):
        entry = draw.choice(tensors)
        header = sound[entry.header_offset :][:30]
        start = entry.header_offset + 30 + sum(struct.unpack("<HH", header[26:]))  # after name and padding
        flipped = bytearray(sound)
        flipped[start + draw.randrange(entry.file_size)] ^= 1 << draw.randrange(8)
        (tmp_path / "run.pt").write_bytes(flipped)
        with pytest.raises(CheckpointError, match="run.pt.*/data/.*is damaged"):
            load(tmp_path / "run.pt", svi, example=sequence()[0])
    (tmp_path / "run.pt").write_bytes(sound)
    load(tmp_path / "run.pt", svi)


@BOTH
@pytest.mark.parametrize("looked", [False, True], ids=["fresh guide", "guide with parameters"])
def test_files_of_the_first_version_are_read(method, looked, tmp_path):
    svi = svi_of(method)
    fit(svi, sequence(), 1, checkpoint=tmp_path / "old.pt", progress=False)
    content = torch.load(tmp_path / "old.pt", weights_only=True)
    content["states"]["guide"].pop("_extra_state", None)
    old = {k: v for k, v in content.items() if k not in ("unfinished", "fingerprint")}
    torch.save({**old, "version": 1}, tmp_path / "old.pt")
    fresh_start()
    again = svi_of(method, seed=3)
    if looked:
        again.guide(*sequence()[0])
    assert load(tmp_path / "old.pt", again, example=sequence()[0]).epoch == 1
    assert same(weights_of(again), weights_of(svi))


def test_saving_where_there_is_no_folder(tmp_path):
    svi = svi_of("AutoNormal + Trace_ELBO")
    with pytest.raises(CheckpointError, match="Could not write"):
        save(tmp_path / "missing" / "run.pt", svi)


def test_save_wants_something_to_save(tmp_path):
    with pytest.raises(ArgumentError, match="got Linear"):
        save(tmp_path / "x.pt", nn.Linear(1, 1))
    with pytest.raises(ArgumentError, match="every must be"):
        Checkpoint(tmp_path / "x.pt", every=0)


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
        return SVI(model, MeanFieldGuide(model), ClippedAdam(learning_rates(0.01)), TaylorELBO(kl_weight=0.1))

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
    history = fit(
        svi, loader, 2, device=device, validate=sequence(), recompute_batch_norm=True, progress=False
    )
    assert next(svi.guide.parameters()).device == device
    save(tmp_path / "x.pt", svi, history=history, loader=loader)
    expected = {name: value.cpu() for name, value in weights_of(svi).items()}
    fresh_start()
    again, loader = svi_of(method, seed=2), shuffled()
    history = load(tmp_path / "x.pt", again, loader=loader, example=sequence()[0], map_location="cpu")
    assert same(weights_of(again), expected)
    assert fit(again, loader, 1, history=history, progress=False).epoch == 3
