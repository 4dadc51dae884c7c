# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint and its objects must agree in, files that are none, and mistakes in saving."""

import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import SGD, Adam
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.core.file_format import FORMAT_VERSION
from pyro_dvi.errors import ArgumentError, CheckpointError, GuideError
from pyro_dvi.guides import MeanFieldGuide
from pyro_dvi.optim import learning_rates
from pyro_dvi.training import fit, load, save
from pyro_dvi.variational_laplace.taylor import TaylorELBO
from tests.training.problems import (
    data,
    fresh_start,
    module_of,
    same,
    sequence,
    shuffled,
    svi_of,
    weights_of,
)


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of AutoNormal + Trace_ELBO, and an empty store."""
    svi = svi_of("AutoNormal + Trace_ELBO")
    history = fit(svi, shuffled(), 1, progress=False)
    save(tmp_path / "run.pt", svi, history=history, loader=shuffled())
    fresh_start()
    return tmp_path / "run.pt"


def other_depth():
    svi = svi_of("AutoNormal + Trace_ELBO")
    svi.model.first = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    return svi


def other_net():
    svi = svi_of("AutoNormal + Trace_ELBO")
    svi.model.extra, svi.model.norm = nn.Linear(1, 1), nn.Identity()
    return svi


def functional_guide():
    svi = svi_of("AutoNormal + Trace_ELBO")
    return SVI(svi.model, lambda *args: None, svi.optim, Trace_ELBO())


MISFITS = [
    ("other depth", other_depth, {}, 'does not fit the model: .*Missing key.*"first.0.weight"'),
    ("other network", other_net, {}, 'Missing key.*"extra.weight", .*Unexpected key.*"norm.weight"'),
    (
        "other guide",
        lambda: svi_of("MeanFieldGuide + TaylorELBO", elbo=Trace_ELBO()),
        {},
        "with the guide AutoNormal, but the target has MeanFieldGuide",
    ),
    (
        "other ELBO",
        lambda: svi_of("AutoNormal + Trace_ELBO", elbo=TaylorELBO()),
        {},
        "Trace_ELBO, but the target has Taylor",
    ),
    (
        "other optimizer",
        lambda: svi_of("AutoNormal + Trace_ELBO", optimizer=SGD({"lr": 0.1})),
        {},
        "with the optimizer Adam, but the target has SGD",
    ),
    (
        "functional guide",
        functional_guide,
        {},
        r"modules \['guide', 'model'\], but the target has \['model'\]",
    ),
    (
        "other route",
        lambda: module_of("AutoNormal + Trace_ELBO")[0],
        {},
        "trained with SVI, but the target has ELBOModule",
    ),
    ("no best", lambda: svi_of("AutoNormal + Trace_ELBO"), {"best": True}, "no best_weights"),
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
    with pytest.raises(
        CheckpointError, match="without parameters before its first call, pass one batch.* example="
    ):
        load(tmp_path / "x.pt", svi_of("AutoNormal + Trace_ELBO"))


def converted(seed=0, width=4, prior_scale=1.0, noise=0.3, exclude="0.*", norm=nn.BatchNorm1d):
    """Batch normalisation and a deterministic first layer among converted ones."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, width), norm(width), nn.Softplus(), nn.Linear(width, 1))
    dvi.to_bayesian_(net, prior_scale=prior_scale, exclude=exclude)
    model = dvi.regressor(net, num_data=24, noise_scale=noise)
    return SVI(model, MeanFieldGuide(model), Adam(learning_rates(0.01)), TaylorELBO())


OTHERS = [
    ({"prior_scale": dist.Laplace(0.0, 1.0)}, "prior of site 'net.3.weight': family Normal → Laplace"),
    ({"width": 5}, r"prior of site 'net.3.weight': shape \(1, 4\) → \(1, 5\)"),
    ({"noise": dist.HalfNormal(1.0)}, "site 'noise_scale' is new"),
    ({"exclude": ("0.*", "3.bias")}, "site 'net.3.bias' is missing"),
    ({"norm": nn.Identity}, "does not fit the model: .*Unexpected key.*1.running_mean"),
]


@pytest.mark.parametrize(
    ("options", "message"),
    OTHERS,
    ids=[next(iter(o)) for o, _ in OTHERS],
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
    svi.loss.__self__.num_data = 24  # the lists below are parts of the data
    history = fit(svi, [(x[:8], y[:8, None])], 1, progress=False)
    history = fit(
        svi, [(10 * x[8:], y[8:, None])], 2, history=history, checkpoint=tmp_path / "x.pt", progress=False
    )
    fresh_start()
    again = converted(seed=3)
    again.loss.__self__.num_data = 24
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
    svi = other_depth()
    svi.guide(*sequence()[0])
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


FILES = [
    (truncated, "truncated"),
    (text, "not a checkpoint"),
    (empty, "not a checkpoint"),
    (plain_pickle, "not a checkpoint|not written by"),
    (state_dict, "not written by pyro_dvi.save.*'weight', 'bias'"),
    (store, r"not written by|not a checkpoint|load safely"),
    (module, "load safely"),
    (newer, f"version 99, .*versions up to {FORMAT_VERSION}: update pyro-dvi"),
    (lambda path: path.unlink(), "is missing.*No such file"),
]


@pytest.mark.parametrize(("damage", "message"), FILES, ids=[f[0].__name__ for f in FILES])
def test_files_that_are_no_checkpoints(saved, damage, message):
    damage(saved)
    with pytest.raises(CheckpointError, match=message):
        load(saved, svi_of("AutoNormal + Trace_ELBO"), example=sequence()[0])


def test_saving_where_there_is_no_folder(tmp_path):
    svi = svi_of("AutoNormal + Trace_ELBO")
    with pytest.raises(RuntimeError, match="does not exist"):
        save(tmp_path / "missing" / "run.pt", svi)


def test_save_wants_something_to_save(tmp_path):
    with pytest.raises(ArgumentError, match="not Linear"):
        save(tmp_path / "x.pt", nn.Linear(1, 1))
