# SPDX-License-Identifier: Apache-2.0
"""Laplace with torch-uncertainty, which wraps laplace-torch."""

from torch_uncertainty import TUTrainer
from torch_uncertainty.post_processing import LaplaceApprox
from torch_uncertainty.routines import ClassificationRoutine

from benchmarks.programs.trained import loader, net, test_loader

laplace = LaplaceApprox("classification", model=net, hessian_struct="full")
laplace.fit(loader)
routine = ClassificationRoutine(net, num_classes=3, loss=None, post_processing=laplace)
trainer = TUTrainer(accelerator="cpu", logger=False)
nll = trainer.test(routine, test_loader)[0]["test/post/NLL"]
