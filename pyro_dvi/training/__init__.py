# SPDX-License-Identifier: Apache-2.0
"""Training: the loop and its history, early stopping, checkpoints, and training with several processes."""

from pyro_dvi.training.between_epochs import EarlyStopping, EveryStep
from pyro_dvi.training.checkpoint import load, save
from pyro_dvi.training.data_parallel import DataParallel
from pyro_dvi.training.ensemble import EnsembleGuide, train_ensemble
from pyro_dvi.training.history import History
from pyro_dvi.training.loop import fit

__all__ = [
    "DataParallel",
    "EarlyStopping",
    "EnsembleGuide",
    "EveryStep",
    "History",
    "fit",
    "load",
    "save",
    "train_ensemble",
]
