# SPDX-License-Identifier: Apache-2.0
"""Sampled variational inference with TyXe."""

import pyro.distributions as dist
import tyxe
from pyro.optim import Adam

from benchmarks.programs.task import EPOCHS, NUM_DATA, loader, net, test

prior = tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0))
likelihood = tyxe.likelihoods.Categorical(NUM_DATA)
bnn = tyxe.VariationalBNN(net, prior, likelihood, tyxe.guides.AutoNormal)
bnn.fit(loader, Adam({"lr": 0.01}), EPOCHS)
error, score = bnn.evaluate(*test, num_predictions=30, reduction="mean")
nll = -score
