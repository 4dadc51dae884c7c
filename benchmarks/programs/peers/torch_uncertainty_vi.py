# SPDX-License-Identifier: Apache-2.0
"""Sampled variational inference with torch-uncertainty."""

from torch import nn
from torch.optim import Adam
from torch_uncertainty import TUTrainer
from torch_uncertainty.layers.bayesian import BayesLinear
from torch_uncertainty.losses import ELBOLoss
from torch_uncertainty.methods import StochasticModel
from torch_uncertainty.routines import ClassificationRoutine

from benchmarks.programs.task import EPOCHS, NUM_DATA, loader, test_loader

layers = nn.Sequential(BayesLinear(2, 20), nn.Tanh(), BayesLinear(20, 3))
net = StochasticModel(layers, num_samples=30)
loss = ELBOLoss(net, nn.CrossEntropyLoss(), kl_weight=1 / NUM_DATA, num_samples=1)
adam = Adam(net.parameters(), lr=0.01)
routine = ClassificationRoutine(net, num_classes=3, loss=loss, is_ensemble=True, optim_recipe=adam)
trainer = TUTrainer(max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False)
trainer.fit(routine, loader)
nll = trainer.test(routine, test_loader)[0]["test/cls/NLL"]
