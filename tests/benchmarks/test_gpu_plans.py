# SPDX-License-Identifier: Apache-2.0
"""The runs of ``--budget gpu`` that no CPU waits for: each starts, on the device that stands for a GPU, and ends.

Images are made up, a training is one step of a few of them, and a prediction has few rows.
"""

from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch

import pyro_dvi as dvi
from benchmarks.natural_gradients.continual import example as continual
from benchmarks.shared import images, ranking
from benchmarks.shared.benchmark import all_benchmarks
from benchmarks.shared.networks import preact_resnet18

FEW = 20
FOUND = all_benchmarks()
# What the benchmark is, and settings that tell one run of its plan from the others.
RUNS: list[tuple[str, dict[str, Any]]] = [
    *(("vl_cifar10", {"method": method}) for method in ("VI", "VL")),
    ("vl_fashion_mnist", {"num_train": 50_000, "method": "VL"}),
    ("vl_early_stopping", {"method": "VI"}),
    *(("vl_sgd_variance", {"method": method}) for method in ("MinibatchGradient", "drawn weights")),
    *(("mnvi_lenet", {"method": method}) for method in ("MNVI", "MFVI", "MC dropout")),
    *(("vogn_lenet", {"data": data, "stage": "sweep", "recipe": "K = 4"}) for data in ("MNIST", "CIFAR10")),
    *(("ranking", {"method": method, "stage": "test"}) for method in ("MAP", "MNVI", "VOGN", "Noisy K-FAC")),
    ("continual_learning", {"data": "MNIST, 10 tasks of 50,000", "learner": "VOGN"}),
]

# Lines of earlier runs, without which a plan asks for no other.
CHOSEN = {
    "ranking": [
        {"stage": "tune", "task": task, "method": name, "seed": ranking.TUNING_SEED}
        | {"chosen": {setting: values[0] for setting, values in contestant.space.items()}}
        for task in ranking.GPU_TASKS
        for name, contestant in ranking.CONTESTANTS.items()
    ]
}


@pytest.fixture
def made_up(monkeypatch, device):
    """Replace the images by few made-up ones on the device, and each training by one step."""
    monkeypatch.setenv("PYRO_DVI_DEVICE", str(device))
    fit = dvi.fit

    def pictures(name: str, train: bool, data_dir: str | None) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (3, 32, 32) if name == "CIFAR10" else (1, 28, 28)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(3 * FEW, *shape, generator=generator)
        return x.to(device), (torch.arange(3 * FEW) % 10).to(device)

    def one_step(svi: Any, batches: Any, epochs: int = 1, **options: Any) -> Any:
        return fit(svi, list(islice(batches, 1)), 1, **options)

    load_split = images.load_split

    def few(name: str, train: int, validation: int, test: int, seed: int, data_dir: Any) -> Any:
        return load_split(name, min(train, FEW), min(validation, FEW), min(test, FEW), seed, data_dir)

    monkeypatch.setattr(images, "_load", pictures)
    for module in ("benchmarks.shared.tasks", *(module for _, module in FOUND.values())):
        loaded = __import__(module, fromlist=["load_split"])
        if hasattr(loaded, "load_split"):
            monkeypatch.setattr(loaded, "load_split", few)
        if hasattr(loaded, "outside_images"):
            monkeypatch.setattr(loaded, "outside_images", lambda name, of, *_: pictures(of, False, None)[0])
    # Continual learning has its own images.
    digits = torch.randint(256, (3 * FEW, 1, 28, 28)), torch.arange(3 * FEW) % 10
    load = continual.load_images
    monkeypatch.setattr(continual, "idx_images", lambda *_: digits)
    monkeypatch.setattr(continual, "load_images", lambda folder, _, seed: load(folder, FEW, seed))
    monkeypatch.setattr(dvi, "fit", one_step)
    for name, task in ranking.GPU_TASKS.items():  # the same network with few channels
        monkeypatch.setitem(ranking.GPU_TASKS, name, replace(task, network=partial(preact_resnet18, width=2)))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "wanted"), RUNS, ids=lambda value: str(value))
def test_a_run_of_the_gpu_plan_starts_and_ends(name, wanted, made_up):
    benchmark, _ = FOUND[name]
    settings = next(s for s in benchmark.plan(CHOSEN.get(name, []), "gpu") if wanted.items() <= s.items())
    assert settings not in benchmark.plan([], "small")
    row = benchmark.run(settings, "made up")
    assert row and "failure" not in row
