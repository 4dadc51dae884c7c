# SPDX-License-Identifier: Apache-2.0
"""
Saving, loading and serving
===========================

How to resume an interrupted training run, save a posterior to a file for ArviZ, and export a program that predicts with
uncertainty where neither Pyro nor this library is installed.
"""

# sphinx_gallery_thumbnail_number = 1

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import arviz as az
import matplotlib.pyplot as plt
import pyro
import torch
from pyro.infer import SVI
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi as dvi

# %%
# We train a network on scikit-learn's digits with VOGN. One function builds all objects of a run, because a resumed run
# has to build the same objects.

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
folder = Path(tempfile.mkdtemp())  # use a folder of your own to keep the files


def build():
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    net = nn.Sequential(nn.Linear(64, 50), nn.Softplus(), nn.Linear(50, 10))
    model = dvi.classifier(
        dvi.to_bayesian_(net, prior_scale=dvi.bayesian.fan_in), num_data=1000
    )
    guide = dvi.NaturalGradientGuide(model)
    optimizer, elbo = dvi.VOGN({}), dvi.NaturalGradientELBO(kl_weight=0.02)
    svi = SVI(model, guide, optimizer, elbo)
    data = TensorDataset(x[:1000], y[:1000])
    return svi, DataLoader(data, batch_size=50, shuffle=True, generator=torch.Generator())


# %%
# Stop and resume
# ---------------
#
# ``checkpoint=`` writes a file after every epoch. A killed run can resume from this file. Here, a callback stops the
# run after ten of twenty epochs. Then everything is built anew, as in a new process, and ``load`` restores the state
# from the file.

svi, loader = build()
dvi.fit(svi, loader, epochs=20, progress=False)
uninterrupted = dvi.predict(svi.model, svi.guide, x[1000:], seed=0).probabilities


def accident(state):
    state.stop = state.epoch == 10


svi, loader = build()
checkpoint = folder / "checkpoint.pt"
dvi.fit(svi, loader, 20, callbacks=[accident], checkpoint=checkpoint, progress=False)

svi, loader = build()
history = dvi.load(checkpoint, svi, loader=loader)
print(f"loaded after {history.epoch} epochs")
dvi.fit(svi, loader, epochs=10, history=history, progress=False)

model, guide = svi.model, svi.guide
prediction = dvi.predict(model, guide, (x[1000:], y[1000:]), seed=0)
difference = (prediction.probabilities - uninterrupted).abs().max()
print(f"largest difference from the run that was never stopped: {difference:.1e}")
scores = prediction.metrics()
print(f"accuracy {scores['accuracy']:.1%}, NLL {scores['nll']:.3f}")

# %%
# Saving the posterior for ArviZ
# ------------------------------
#
# Only this library reads a checkpoint. For analysis, export draws, predictions and data to NetCDF, which ArviZ reads.

data = x[1000:], y[1000:]
posterior = dvi.to_arviz(model, guide, data, 100, sites="net.2.bias", seed=0)
posterior.to_netcdf(folder / "posterior.nc")
again = az.from_netcdf(folder / "posterior.nc")
print(dict(again["posterior"]["net.2.bias"].sizes))
print("predicted by", again.attrs["method"])

# %%
# A program that predicts
# -----------------------
#
# ``predict`` inspects model, guide and data at each call. ``predictor`` does this once, and returns a module of torch
# operators. Here, it averages over thirty networks, which are drawn from the posterior once. It returns the mean (the
# class probabilities), the variance, and the epistemic part of the variance, which measures how much the thirty
# networks disagree.

serve = dvi.predictor(model, guide, x[:4], seed=0)
mean, variance, epistemic = serve(x[1000:1001])  # a batch of one
print(
    serve.method, tuple(mean.shape), f"probability of {mean.argmax()}: {mean.max():.3f}"
)


def seconds(function, calls=20):
    function()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls


image = x[1000:1001]
ratio = seconds(lambda: dvi.predict(model, guide, image).mean) / seconds(
    lambda: serve(image)
)
print(f"predict takes {ratio:.0f} times as long as the predictor for one image")

# %%
# ``torch.export`` writes the predictor to one file, for any number of rows. The program below runs in another process
# that imports only torch.

rows = {0: torch.export.Dim("rows")}
program = torch.export.export(serve, (x[:4],), dynamic_shapes=[(rows,)])
torch.export.save(program, folder / "digits.pt2")
torch.save(x[1000:], folder / "images.pt")

SERVICE = """
import sys, torch
serve = torch.export.load("digits.pt2").module()
images = torch.load("images.pt")
torch.save(serve(images), "answers.pt")
print(len(images), "answers; a single image:", serve(images[:1])[0].argmax().item())
print("Pyro or this library loaded:", "pyro" in sys.modules or "pyro_dvi" in sys.modules)
"""
service = subprocess.run(
    [sys.executable, "-W", "ignore", "-c", SERVICE],
    cwd=folder,
    capture_output=True,
    text=True,
)
print(service.stdout)
mean, variance, epistemic = torch.load(folder / "answers.pt")
difference = (mean - serve(x[1000:]).mean).abs().max()
print(f"largest difference from the predictor here: {difference:.1e}")

# %%
# The predictor has the device and the dtype of the model. ``serve.to("cuda")`` moves it before it is exported, and
# ``serve.double()`` computes in float64. The predictions hardly change, because the weights were trained in float32:

double = serve.double()(x[1000:].double()).mean
print(
    f"largest difference between float64 and float32: {(double - mean).abs().max():.1e}"
)

# %%
# The figure shows predictions from the other process: the six images on which the thirty networks disagree most, with
# the class probabilities and their standard deviation across the networks.

most = epistemic.sum(-1).argsort(descending=True)[:6]
figure, axes = plt.subplots(
    2, 6, figsize=(11, 3.8), layout="constrained", height_ratios=[1.2, 1]
)
for (top, bottom), k in zip(axes.T, most.tolist(), strict=True):
    top.imshow(x[1000 + k].reshape(8, 8).numpy(), cmap="gray_r")
    top.set(xticks=[], yticks=[], title=f"a {y[1000 + k]}")
    heights, spread = mean[k].numpy(), epistemic[k].clamp_min(0).sqrt().numpy()
    bottom.bar(
        range(10), heights, yerr=spread, color="#56B4E9", error_kw={"linewidth": 0.8}
    )
    bottom.set(ylim=(0, 1), xticks=range(10))
    bottom.tick_params(labelsize=7)
    bottom.label_outer()
axes[1, 0].set_ylabel("probability")
plt.show()
