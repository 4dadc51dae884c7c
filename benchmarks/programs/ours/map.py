# SPDX-License-Identifier: Apache-2.0
"""The most probable weights: from a network to the test NLL."""

import pyro_dvi as dvi
from benchmarks.programs.task import EPOCHS, loader, net, test

posterior = dvi.MAP().fit(net, loader, EPOCHS)
nll = posterior.predict(test).metrics()["nll"]
