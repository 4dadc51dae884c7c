# SPDX-License-Identifier: Apache-2.0
"""Train, predict, save and load with the installed wheel, in an environment that has nothing else."""

import tempfile
from pathlib import Path

import torch
from torch import nn

import pyro_dvi as dvi

assert "site-packages" in dvi.__file__, dvi.__file__
torch.manual_seed(0)
x = torch.linspace(-1, 1, 60)[:, None]
y = 0.5 * x[:, 0]
loader = list(zip(x.split(20), y.split(20), strict=True))
method = dvi.Laplace(noise_scale=0.1, lr=0.1)
posterior = method.fit(nn.Linear(1, 1), loader, 100, progress=False)
assert posterior.predict((x, y)).metrics()["rmse"] < 0.1
posterior.to_arviz((x, y), seed=0)
with tempfile.TemporaryDirectory() as folder:
    posterior.save(path := Path(folder) / "posterior.pt")
    again = method.load(path, nn.Linear(1, 1), loader)
torch.testing.assert_close(again.predict(x).variance, posterior.predict(x).variance)
print("pyro-dvi", dvi.__version__, "predicts, saves and loads")
