# SPDX-License-Identifier: Apache-2.0
"""A deep ensemble: from a network to the test NLL."""

import pyro_dvi as dvi
from benchmarks.programs.task import EPOCHS, loader, net, test

posterior = dvi.Ensemble().fit(net, loader, EPOCHS)
nll = posterior.predict(test).metrics()["nll"]
