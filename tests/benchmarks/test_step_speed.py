# SPDX-License-Identifier: Apache-2.0
"""The cost of a step: contestants, the table, and NumPyro's model, which has to be that of Pyro."""

import pyro
import pytest

from benchmarks.shared.benchmark import Row
from benchmarks.shared.step_contestants import CASES, CONTESTANTS, contestants, made, ordinary, unit_of
from benchmarks.shared.step_speed import _pays_after, report

MLP, LENET, RESNET = CASES


def line(step: str, ms: float, start: float, **changes: object) -> Row:
    return {
        **{"step": step, "median_ms": ms, "time": ms / 2, "quartiles": [ms / 2, ms / 2], "rounds": 9},
        **{"start_seconds": start, "calls": 50, "mebibytes": 8.0},
        **changes,
    }


def test_every_variant_has_an_ordinary_form_and_a_unit():
    assert {ordinary(name) for name in CONTESTANTS} | {unit_of(name) for name in CONTESTANTS} <= set(
        CONTESTANTS
    )
    assert ordinary("VL, in fit") == ordinary("VL, captured") == "VL"
    assert ordinary("torch, CUDA graph") == "torch"
    assert unit_of("VL, in fit") == "torch, softplus"
    assert unit_of("VOGN") == "torch"


def test_those_who_cannot_take_part_are_left_out(monkeypatch):
    monkeypatch.setattr("benchmarks.shared.step_contestants.find_spec", lambda package: package)
    everyone = contestants(MLP, "cuda", before=True)
    assert everyone == list(CONTESTANTS)
    graphs = {"torch, CUDA graph", "torch, softplus, CUDA graph"}
    assert set(everyone) - set(contestants(MLP, "cpu", before=True)) == graphs
    missing = set(everyone) - set(contestants(RESNET, "cuda", before=True))
    assert missing == {"NumPyro, AutoDelta", "NumPyro, AutoNormal"}
    monkeypatch.setattr("benchmarks.shared.step_contestants.find_spec", lambda package: None)
    assert missing | {"ivon-opt, IVON"} == set(everyone) - set(contestants(MLP, "cuda", before=True))


def test_a_capture_pays_after_the_steps_that_save_its_time():
    plain = line("VL", 10.0, 0.5)
    assert _pays_after(plain, plain) is None
    assert _pays_after(line("VL, captured", 8.0, 10.5), plain) == "5,000"  # 10 s at 2 ms a step
    assert _pays_after(line("VL, captured", 8.0, 0.4), plain) == "0"
    assert _pays_after(line("VL, in fit", 10.0, 20.0), plain) == "never"


def test_the_table_has_new_lines_only_and_multiples_of_the_right_unit(tmp_path):
    steps = [
        line("torch", 2.0, 0.0),
        line("torch, softplus", 4.0, 0.0, calls=100, mebibytes=16.0),
        line("VL", 10.0, 0.5, time=2.5, calls=300, mebibytes=24.0),
        line("VL, in fit", 8.0, 10.5, time=2.0, calls=None, mebibytes=32.0),
    ]
    machine = {"torch": "2.15", "machine": "x86_64 CPU", "note": "Peers: none."}
    row = {"case": MLP, "device": "cpu", "clock": "processor", "steps": steps, "failed": ["IVON"], **machine}
    text = report([{"case": LENET, "device": "cpu", "threads": 1}, row], tmp_path)
    assert "| VL | 10.00 | 2.50 | 5.00 to 5.00 | 3.00 | 1.50 | 0.50 |  |" in text
    assert "| VL, in fit | 8.00 | 2.00 | 4.00 to 4.00 |  | 2.00 | 10.50 | 5,000 |" in text
    assert "Ended by an error: IVON." in text
    assert LENET not in text


@pytest.mark.slow
def test_numpyro_has_the_loss_of_the_same_model():
    pytest.importorskip("numpyro")
    x, y = CASES[LENET].data("cpu")
    losses = {}
    for name in ("MAP", "NumPyro, AutoDelta"):
        pyro.clear_param_store()
        step = made(LENET, name, "cpu")
        losses[name] = [float(step(x, y)) for _ in range(3)]  # the later ones after steps of Adam
    assert losses["NumPyro, AutoDelta"] == pytest.approx(losses["MAP"], rel=1e-5)
