# SPDX-License-Identifier: Apache-2.0
"""Settings that are chosen on validation data."""

from dataclasses import replace

import pyro
import pytest
import torch

import pyro_dvi as dvi
from tests.methods.cases import EPOCHS, METHODS, loader, network, rows


@pytest.mark.slow
def test_settings_that_are_best_on_validation_data(tmp_path):
    space = {"lr": (1e-4, 0.01, 3.0), "temperature": (0.1,)}
    posterior = dvi.VariationalLaplace().tune(
        network(), loader(), EPOCHS, validation=rows(40, 2), space=space, max_trainings=3, progress=False
    )
    assert posterior.method == dvi.VariationalLaplace(lr=0.01, temperature=0.1)
    assert posterior.tuned.table["lr"] == [1e-4, 0.01, 3.0]
    by_hand = posterior.method.fit(network(), loader(), EPOCHS, progress=False)
    test = rows(20, 1)
    assert torch.equal(posterior.predict(test).probabilities, by_hand.predict(test).probabilities)
    assert posterior.history["loss"] == by_hand.history["loss"]
    assert list(pyro.get_param_store()) == []
    posterior.save(tmp_path / "tuned.pt")
    read = posterior.method.load(tmp_path / "tuned.pt", network(), loader())
    assert torch.equal(read.predict(test).probabilities, by_hand.predict(test).probabilities)


@pytest.mark.parametrize("name", METHODS)
def test_the_space_of_each_method_names_its_arguments(name):
    method = METHODS[name]
    for setting, values in method.space.items():
        assert getattr(replace(method, **{setting: values[0]}), setting) == values[0]
    with pytest.raises(TypeError, match="'rate'"):
        method.tune(network(), loader(), 1, validation=rows(9, 2), space={"rate": (0.1, 0.2)})


@pytest.mark.filterwarnings("ignore:the best lr")
def test_a_finished_study_gives_the_same_posterior():
    optuna = pytest.importorskip("optuna")
    space = {"lr": (0.001, 0.01)}
    study = optuna.create_study(sampler=optuna.samplers.GridSampler(space, seed=0))
    options = {"validation": rows(40, 2), "space": space, "study": study, "max_trainings": 2}
    first, second = (dvi.MAP().tune(network(), loader(), EPOCHS, progress=False, **options) for _ in "12")
    assert second.tuned.table == first.tuned.table and second.history["loss"] == first.history["loss"]
    assert torch.equal(second.predict(rows(20, 1)).probabilities, first.predict(rows(20, 1)).probabilities)


def test_without_epochs_the_step_size_is_not_tuned(monkeypatch):
    seen: list[dict] = []

    def noted(train, data, space, **_):
        seen.append(space)
        raise ZeroDivisionError

    monkeypatch.setattr("pyro_dvi.methods.tunable.tune", noted)
    for epochs in (0, 1):
        with pytest.raises(ZeroDivisionError):
            dvi.Laplace().tune(network(), loader(), epochs, validation=rows(9, 2))
    assert [list(space) for space in seen] == [
        ["prior_scale", "temperature"],
        ["lr", "prior_scale", "temperature"],
    ]


@pytest.mark.filterwarnings("ignore:the best lr")
def test_options_of_fit_reach_every_training_run():
    counts: list[object] = []
    options = {"space": {"lr": (0.01, 0.1)}, "max_trainings": 2, "progress": False, "device": "cpu"}
    posterior = dvi.MAP().tune(
        network(), loader(), 2, validation=rows(40, 2), callbacks=[counts.append], **options
    )
    assert len(counts) == 4 and len(posterior.tuned.table["lr"]) == 2
