# SPDX-License-Identifier: Apache-2.0
"""Laplace: from a trained network to the test NLL, with a prior tuned on validation data."""

import pyro_dvi as dvi
from benchmarks.programs.trained import loader, net, test, validation

posterior = dvi.Laplace().fit(net, loader, validation=validation)
nll = posterior.predict(test).metrics()["nll"]
