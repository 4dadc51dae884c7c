# SPDX-License-Identifier: Apache-2.0
"""What a type checker knows of a first program; ``make types`` has mypy and pyright read it."""

from typing import assert_type

import torch
from pandas import DataFrame
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import ClippedAdam
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi as dvi
from pyro_dvi.bayesian.likelihoods import Classifier, Regressor
from pyro_dvi.training import History
from pyro_dvi.training.ensemble import EnsembleModel

x, y = torch.randn(20, 3), torch.randn(20)
loader = DataLoader(TensorDataset(x, y), batch_size=10)
net = nn.Sequential(nn.Linear(3, 8), nn.Softplus(), nn.Linear(8, 1))
assert_type(dvi.to_bayesian_(net, prior_scale=dvi.bayesian.fan_in), nn.Sequential)
assert_type(dvi.classifier(net, num_data=20), Classifier)
model = assert_type(dvi.regressor(net, num_data=20), Regressor)
guide = dvi.MeanFieldGuide(model)
svi = SVI(model, guide, dvi.optim.Adam(dvi.optim.learning_rates(1e-2)), loss=dvi.TaylorELBO(kl_weight=0.1))
SVI(model, AutoNormal(model), ClippedAdam(dvi.optim.learning_rates(1e-2)), loss=Trace_ELBO())
SVI(model, guide, dvi.VOGN({"lr": 10.0}), loss=dvi.NaturalGradientELBO())
history = assert_type(dvi.fit(svi, loader, epochs=2), History)
assert_type(history["loss"], list[float])
prediction = assert_type(dvi.predict(model, guide, (x, y)), dvi.predictive.Prediction)
assert_type(prediction.mean, Tensor)
assert_type(prediction.interval(0.9), tuple[Tensor, Tensor])
assert_type(prediction.metrics()["nll"], float)
assert_type(prediction.to_dataframe(), DataFrame)
assert_type(dvi.load("run.pt", svi), History)
assert_type(dvi.__version__, str)
assert_type(dvi.train_ensemble(lambda: (model, guide)), tuple[EnsembleModel, dvi.training.EnsembleGuide])
dvi.to_arviz(model, guide, (x, y), coords={"layer": ["a"]}, dims=dict(weight=["layer"]))
