# SPDX-License-Identifier: Apache-2.0
"""Training: the loop, its record, early stopping, checkpoints and batch-normalisation statistics."""

from pyro_dvi.training.batch_norm import BatchNormStatistics, recompute_batch_norm
from pyro_dvi.training.checkpoint import Checkpoint, load, save
from pyro_dvi.training.early_stopping import EarlyStopping
from pyro_dvi.training.ensemble import EnsembleGuide, EnsembleModel, train_ensemble
from pyro_dvi.training.history import History, Table
from pyro_dvi.training.loop import TrainingState, fit
from pyro_dvi.training.lr_schedule import EveryStep
from pyro_dvi.training.posterior import TrainedPosterior, train_apart

__all__ = [
    "BatchNormStatistics",
    "Checkpoint",
    "EarlyStopping",
    "EnsembleGuide",
    "EnsembleModel",
    "EveryStep",
    "History",
    "Table",
    "TrainedPosterior",
    "TrainingState",
    "fit",
    "load",
    "recompute_batch_norm",
    "save",
    "train_apart",
    "train_ensemble",
]
