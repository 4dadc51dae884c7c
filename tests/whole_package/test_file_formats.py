# SPDX-License-Identifier: Apache-2.0
"""Files of every format version since the first release can be read, and those of later ones are refused."""

import pytest
import torch

import pyro_dvi as dvi
from pyro_dvi.core.file_format import FORMAT_VERSION
from pyro_dvi.errors import CheckpointError
from pyro_dvi.laplace.methods.method import LaplacePosterior
from pyro_dvi.runs.trained_for import encoded
from tests.whole_package.file_formats import (
    FITS,
    GUIDES,
    LOADER,
    METHODS,
    SAVED,
    X,
    fresh_guide,
    fresh_svi,
    marginals,
    network,
    unpack,
    write,
)

VERSIONS = sorted(int(folder.name) for folder in SAVED.iterdir())
TOLERANCE = {"rtol": 1e-6, "atol": 1e-9}  # between processors


@pytest.fixture(params=VERSIONS, ids="version {}".format)
def files(request, tmp_path):
    unpack(request.param, tmp_path)
    return tmp_path


@pytest.fixture
def expected(files):
    return torch.load(files / "expected.pt", weights_only=True)


def test_there_are_files_of_every_version():
    assert VERSIONS == list(range(1, FORMAT_VERSION + 1)), "run python -m tests.whole_package.file_formats"


@pytest.mark.parametrize("name", [*GUIDES, *FITS])
def test_states_of_guides_are_read(name, files, expected):
    state = torch.load(files / "guides.pt", weights_only=True)[name]
    guide = fresh_guide(name)
    guide.load_state_dict(state)
    torch.testing.assert_close(marginals(guide), expected[name], **TOLERANCE)


def test_a_checkpoint_is_read_and_resumed(files, expected):
    svi = fresh_svi()
    history = dvi.load(files / "checkpoint.pt", svi)
    torch.testing.assert_close(marginals(svi.guide), expected["checkpoint"], **TOLERANCE)
    resumed = dvi.fit(svi, LOADER, 3, history=history, progress=False)
    assert list(resumed["loss"]) == pytest.approx(expected["resumed"])


@pytest.mark.parametrize("name", METHODS)
def test_posteriors_are_read(name, files, expected):
    prediction = METHODS[name].load(files / f"{name}.pt", network(), LOADER).predict(X)
    torch.testing.assert_close(prediction.mean, expected[f"{name}.pt"]["mean"], **TOLERANCE)
    torch.testing.assert_close(prediction.variance, expected[f"{name}.pt"]["variance"], **TOLERANCE)


def outline(value):
    """Keys, types and shapes, without what depends on torch or the moment."""
    if isinstance(value, dict):
        varying = {"optimizer", "random", "seconds"}
        return {key: outline(entry) for key, entry in value.items() if key not in varying}
    if isinstance(value, list | tuple):
        return [outline(entry) for entry in value]
    return (value.dtype, value.shape) if torch.is_tensor(value) else type(value)


@pytest.fixture(scope="module")
def written_now(tmp_path_factory):
    write(folder := tmp_path_factory.mktemp("now"))
    return folder


@pytest.mark.every(3)
@pytest.mark.parametrize("file", ["guides.pt", "checkpoint.pt", *(f"{name}.pt" for name in METHODS)])
def test_what_is_written_now_has_the_format_of_its_version(file, written_now, tmp_path):
    """If this fails: raise FORMAT_VERSION, read both formats, and write the files of the new one."""
    unpack(FORMAT_VERSION, tmp_path)
    found, known = (torch.load(folder / file, weights_only=True) for folder in (written_now, tmp_path))
    assert outline(found) == outline(known)


def test_every_gaussian_that_can_be_saved_is_among_the_files(tmp_path):
    unpack(FORMAT_VERSION, tmp_path)
    states = torch.load(tmp_path / "guides.pt", weights_only=True)
    kept = {states[name]["_extra_state"]["gaussian"]["kind"] for name in FITS}
    ours = {kind: cls for kind, cls in LaplacePosterior.kinds.items() if kind.startswith("pyro_dvi.")}
    assert kept == {kind for kind, cls in ours.items() if cls.stored is not None}


def later(state):
    """The state of a guide, as a later release might write it."""
    extra = state["_extra_state"]
    if isinstance(extra, dict):
        return {**state, "_extra_state": {**extra, "version": FORMAT_VERSION + 1}}
    text = bytes(extra.tolist()).replace(b"%d " % FORMAT_VERSION, b"%d " % (FORMAT_VERSION + 1), 1)
    return {**state, "_extra_state": torch.tensor(list(text), dtype=torch.uint8)}


@pytest.mark.parametrize("name", ["MeanFieldGuide", "Dense"])
def test_a_state_of_a_later_release_is_refused_and_changes_nothing(name):
    first = fresh_guide(name)
    first.initialize(X, X[:, 0])
    guide = fresh_guide(name)
    refusal = (
        f"version {FORMAT_VERSION + 1}, but pyro-dvi {dvi.__version__} .* {FORMAT_VERSION}: update pyro-dvi"
    )
    with pytest.raises(CheckpointError, match=refusal):
        guide.load_state_dict(later(first.state_dict()))
    assert list(guide.parameters()) == []


def test_the_state_of_a_guide_begins_with_its_version():
    """So that a later release is recognised whatever follows."""
    assert bytes(encoded(None, 1e-300).tolist()).startswith(b"%d " % FORMAT_VERSION)
    assert encoded("x" * 80, 1.2345678901234567e-300).shape == encoded(None).shape
