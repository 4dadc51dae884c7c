# SPDX-License-Identifier: Apache-2.0
"""The file of a checkpoint is safe to load."""

import torch

from pyro_dvi.training import fit
from tests.training.problems import FunctionalProblem, fresh_start, shuffled, svi_of


def test_the_file_is_safe_to_load(tmp_path):
    for name, svi in (("x.pt", FunctionalProblem().svi), ("y.pt", svi_of("MeanFieldGuide + TaylorELBO"))):
        fresh_start()
        fit(svi, shuffled(), 1, checkpoint=tmp_path / name, progress=False)
        assert torch.load(tmp_path / name, weights_only=True)["format"] == "pyro_dvi checkpoint"
