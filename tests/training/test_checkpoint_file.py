# SPDX-License-Identifier: Apache-2.0
"""The file of a checkpoint: safe to load, and found out where it is damaged."""

import random
import struct
import zipfile

import pytest
import torch

from pyro_dvi.errors import CheckpointError
from pyro_dvi.training import fit, load
from tests.training.problems import (
    FunctionalProblem,
    fresh_start,
    sequence,
    shuffled,
    svi_of,
)


def test_the_file_is_safe_to_load(tmp_path):
    for name, svi in (("x.pt", FunctionalProblem().svi), ("y.pt", svi_of("MeanFieldGuide + TaylorELBO"))):
        fresh_start()
        fit(svi, shuffled(), 1, checkpoint=tmp_path / name, progress=False)
        assert torch.load(tmp_path / name, weights_only=True)["format"] == "pyro_dvi checkpoint"


def test_a_bit_that_flips_anywhere_in_a_tensor_is_found(tmp_path):
    svi = svi_of("MeanFieldGuide + TaylorELBO")
    fit(svi, shuffled(), 1, checkpoint=tmp_path / "run.pt", progress=False)
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
