# SPDX-License-Identifier: Apache-2.0
"""A point estimate with torch-uncertainty; weight decay is its prior."""

from torch import nn
from torch.optim import Adam
from torch_uncertainty import TUTrainer
from torch_uncertainty.routines import ClassificationRoutine

from benchmarks.programs.task import EPOCHS, NUM_DATA, loader, net, test_loader

adam = Adam(net.parameters(), lr=0.01, weight_decay=1 / NUM_DATA)
routine = ClassificationRoutine(net, num_classes=3, loss=nn.CrossEntropyLoss(), optim_recipe=adam)
trainer = TUTrainer(max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False)
trainer.fit(routine, loader)
nll = trainer.test(routine, test_loader)[0]["test/cls/NLL"]
