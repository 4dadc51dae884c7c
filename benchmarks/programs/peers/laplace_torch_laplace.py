# SPDX-License-Identifier: Apache-2.0
"""Laplace of laplace-torch, last layer, with a prior tuned on validation data."""

from laplace import Laplace
from torch.nn.functional import nll_loss

from benchmarks.programs.trained import loader, net, test, validation

la = Laplace(net, "classification", hessian_structure="full")
la.fit(loader)
la.optimize_prior_precision(method="gridsearch", val_loader=validation)
x, y = test
nll = nll_loss(la(x).log(), y)
