# SPDX-License-Identifier: Apache-2.0
"""Variational Laplace: from a network to the test NLL."""

import pyro_dvi as dvi
from benchmarks.programs.task import EPOCHS, loader, net, test

posterior = dvi.VariationalLaplace().fit(net, loader, EPOCHS)
nll = posterior.predict(test).metrics()["nll"]
