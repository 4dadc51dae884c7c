# SPDX-License-Identifier: Apache-2.0
"""Variational Laplace, with every part written out."""

from pyro.infer import SVI

import pyro_dvi as dvi
from benchmarks.programs.task import EPOCHS, NUM_DATA, loader, net, test

model = dvi.classifier(dvi.to_bayesian_(net, prior_scale=1.0), NUM_DATA)
guide = dvi.MeanFieldGuide(model)
svi = SVI(model, guide, dvi.optim.Adam(0.01), loss=dvi.TaylorELBO(temperature=0.1))
dvi.fit(svi, loader, EPOCHS)
nll = dvi.predict(model, guide, test).metrics()["nll"]
