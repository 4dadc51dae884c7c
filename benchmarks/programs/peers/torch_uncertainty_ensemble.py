# SPDX-License-Identifier: Apache-2.0
"""A deep ensemble with torch-uncertainty."""

from torch import nn
from torch.optim import Adam
from torch_uncertainty import TUTrainer
from torch_uncertainty.methods import deep_ensembles
from torch_uncertainty.routines import ClassificationRoutine
from torch_uncertainty.transforms import RepeatTarget

from benchmarks.programs.task import EPOCHS, NUM_DATA, loader, net, test_loader

net = deep_ensembles(net, num_estimators=5, task="classification", reset_model_parameters=True)
adam = Adam(net.parameters(), lr=0.01, weight_decay=1 / NUM_DATA)
routine = ClassificationRoutine(
    net,
    num_classes=3,
    loss=nn.CrossEntropyLoss(),
    is_ensemble=True,
    optim_recipe=adam,
    format_batch_fn=RepeatTarget(5),
)
trainer = TUTrainer(max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False)
trainer.fit(routine, loader)
nll = trainer.test(routine, test_loader)[0]["test/cls/NLL"]
