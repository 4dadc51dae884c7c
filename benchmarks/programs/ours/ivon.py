# SPDX-License-Identifier: Apache-2.0
"""IVON: from a network to the test NLL."""

import pyro_dvi as dvi
from benchmarks.programs.task import EPOCHS, loader, net, test

posterior = dvi.NaturalGradients(by=dvi.IVON).fit(net, loader, EPOCHS)
nll = posterior.predict(test).metrics()["nll"]
