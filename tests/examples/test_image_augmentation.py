# SPDX-License-Identifier: Apache-2.0
"""The example of data augmentation, on pictures made up here in the format of Fashion-MNIST."""

import gzip
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("torchvision")
from tests.examples.scripts import imported


@pytest.fixture(scope="module")
def example():
    with imported("image_augmentation") as module:
        yield module


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """Noise whose upper half is brighter the larger the class, as gzipped idx files."""
    folder = tmp_path_factory.mktemp("data")
    raw = folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for stem, count in (("train", 60), ("t10k", 40)):
        labels = np.arange(count) % 10
        images = generator.integers(0, 30, (count, 28, 28))
        images[:, :14] += 20 * labels[:, None, None]
        for kind, header, array in (("images-idx3", 16, images), ("labels-idx1", 8, labels)):
            with gzip.open(raw / f"{stem}-{kind}-ubyte.gz", "wb") as file:
                file.write(bytes(header) + array.astype(np.uint8).tobytes())
    return folder


def arguments(data_dir: Path, *more: str) -> list[str]:
    options = ["--epochs", "2", "--batch-size", "20", "--width", "2", "--num-train", "60"]
    return ["--data-dir", str(data_dir), *options, *more]


@pytest.mark.slow
def test_it_prints_a_table_and_rho_narrows_the_posterior(example, data_dir, capsys):
    results = example.main(arguments(data_dir, "--rho", "1", "100"))
    shown = capsys.readouterr().out
    assert [r.name for r in results] == ["plain", "augmented", "augmented, rho = 100"]
    for r in results:
        assert f"{r.scores['nll']:.3f}" in shown and f"{r.scale:.3f}" in shown
    assert results[2].scale < 0.5 * results[1].scale


def test_transforms_augment_images_for_training_only(example):
    plain, augmented = example.make_transforms()
    image = torch.arange(784, dtype=torch.uint8).reshape(1, 28, 28)
    expected = (image / 255 - 0.286) / 0.353
    torch.testing.assert_close(plain(image), expected)
    torch.manual_seed(0)
    others = [augmented(image) for _ in range(10)]
    assert all(x.shape == (1, 28, 28) for x in others)
    assert sum(not torch.equal(x, expected) for x in others) > 5


def test_without_torchvision_it_says_what_to_install(example, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        example.main([])
    assert stopped.value.code == 2
    assert 'needs torchvision for its transforms: pip install "pyro-dvi[examples]"' in capsys.readouterr().err


MISTAKES = [(["--rho", "0"], "--rho must be positive"), (["--epochs", "0"], "--epochs must be positive")]


@pytest.mark.parametrize(("options", "message"), MISTAKES)
def test_a_mistake_on_the_command_line_is_named(example, options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        example.main(options)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
