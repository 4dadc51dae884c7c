# SPDX-License-Identifier: Apache-2.0
"""
Regression with error bands
===========================

A small network learns a curve from 200 noisy points that leave a gap. Four methods say how sure they are, and we look
at what each of them says inside the gap, where nobody has measured anything.
"""

# %%
# Data with a gap
# ---------------
#
# The curve is :math:`\sin 2x`, the noise has a standard deviation of 0.1, and there are no points between -1 and 1.
# Another 400 points of the same kind are kept for the test.

from copy import deepcopy
from functools import partial

import matplotlib.pyplot as plt
import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

import pyro_dvi as dvi

torch.manual_seed(0)


def measure(num_points):
    x = 1 + 1.5 * torch.rand(num_points, 1)
    x[: num_points // 2] *= -1
    y = torch.sin(2 * x).squeeze(-1) + 0.1 * torch.randn(num_points)
    return x, y


train, test = measure(200), measure(400)

# %%
# An ordinary network
# -------------------
#
# It is trained by torch alone, which takes a second or two. Every method can start from weights that are trained
# already, and then has little left to do.

net = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1))
plain_adam = torch.optim.Adam(net.parameters(), lr=0.02)
for _ in range(2000):
    loss = (net(train[0]).squeeze(-1) - train[1]).square().mean()
    plain_adam.zero_grad()
    loss.backward()
    plain_adam.step()
print(f"root mean squared error: {loss.item() ** 0.5:.3f}")

# %%
# A Bayesian network
# ------------------
#
# ``to_bayesian_`` puts a Normal prior on every weight, here wider in the first layer than in the second. ``regressor``
# adds the noise. Its size is unknown to us, so that it has a prior, too: a median of 0.14, and anything
# between 0.02 and 1 is plausible. (A number would fix it, ``dvi.bayesian.Heteroscedastic()`` lets it depend on x.)


def make_model():
    pyro.clear_param_store()  # Pyro keeps parameters by name: each method starts afresh
    pyro.set_rng_seed(0)
    bayesian = dvi.to_bayesian_(deepcopy(net), prior_scale={"0.*": 2.0, "2.*": 0.5})
    return dvi.regressor(bayesian, num_data=200, noise_scale=dist.LogNormal(-2.0, 1.0))


print(dvi.summary(make_model()))

# %%
# Four methods
# ------------
#
# A method is a guide, which is the family of posteriors, and an ELBO, which is the objective. Below
# ``kl_weight=1``, which is Bayes' rule, a posterior is narrower and fits the data closer. The three methods whose
# weights are independent need that here: at 1 they explain part of the curve as noise. Moment propagation takes the
# most steps, since its noise settles last; ``polish`` spares Laplace most of its steps.

EPOCHS = {
    "Variational Laplace": 200,
    "Moment propagation": 800,
    "VOGN": 200,
    "Laplace": 50,
}  # of one batch: all points


def adam(epochs):
    decay = partial(ExponentialLR, gamma=0.1 ** (1 / epochs))  # ends at a tenth
    return dvi.optim.Adam(dvi.optim.learning_rates(0.02), scheduler=decay)


curvature = dvi.curvature.GGNDiagonal()
methods = {
    "Variational Laplace": (
        dvi.MeanFieldGuide,
        dvi.TaylorELBO(curvature=curvature, kl_weight=0.1),
        adam(EPOCHS["Variational Laplace"]),
    ),
    "Moment propagation": (
        dvi.MultiplicativeNoiseGuide,
        dvi.MomentPropagationELBO(kl_weight=0.1),
        adam(EPOCHS["Moment propagation"]),
    ),
    "VOGN": (
        dvi.NaturalGradientGuide,
        dvi.NaturalGradientELBO(kl_weight=0.1),
        dvi.VOGN({}),
    ),
    "Laplace": (dvi.LaplaceGuide, dvi.SampledELBO(), adam(EPOCHS["Laplace"])),
}

# %%
# Training is the same four lines for all of them. Laplace trains the most probable weights only and has two
# lines more: ``polish`` goes to the very minimum, ``fit`` puts a Gaussian with all covariances there.
#
# ``predict`` uses each posterior as it was trained: at the mean, by propagated moments, by draws, or linearised.

grid = torch.linspace(-3.5, 3.5, 141).unsqueeze(-1)
scores, bands = {}, {}
for name, (make_guide, elbo, optimizer) in methods.items():
    model = make_model()
    guide = make_guide(model)
    dvi.fit(
        SVI(model, guide, optimizer, loss=elbo), [train], EPOCHS[name], progress=False
    )
    if name == "Laplace":
        guide.polish([train], progress=False)
        guide.fit([train], dvi.laplace.Dense())
    scores[name] = dvi.predict(model, guide, test, keep_draws=True, seed=0).metrics()
    bands[name] = dvi.predict(model, guide, grid, keep_draws=True, seed=0)

print(pd.DataFrame(scores).T.round(3).to_string())

# %%
# On points like those of the training all four are good: with the true curve and the true noise the ``nll`` would be
# about -0.88. But such points say nothing about the gap.
#
# What do they know in the gap?
# -----------------------------

places = {"on the data": grid.abs() - 1.75, "gap": grid, "outside": grid.abs() - 3.25}
print(
    f"{'predictive standard deviation':30}" + "".join(f"{place:>14}" for place in places)
)
for name, band in bands.items():
    sds = (band.std[(where.abs() < 0.25).squeeze(-1)].mean() for where in places.values())
    print(f"{name:30}" + "".join(f"{sd:14.3f}" for sd in sds))

# %%
# Laplace opens widely in the gap, VOGN less, the others not at all. That is what theory expects: many curves pass
# through the data and differ in the gap, but they differ by changing several weights *together*. Laplace keeps these
# covariances. VOGN and moment propagation treat weights as independent, so that a posterior which is sure on the
# data is sure nearly everywhere. Variational Laplace predicts at its mean, with the noise alone.
#
# ``interval(level)`` gives the central interval of each prediction (``quantiles(q)`` single quantiles). The dark band
# holds 50 % of new observations, the light one 90 %, if the model is right.

figure, axes = plt.subplots(2, 2, figsize=(10, 6.4), sharex=True, sharey=True)
for ax, (name, band) in zip(axes.flat, bands.items(), strict=True):
    x = grid.squeeze(-1)
    for level, alpha in ((0.9, 0.2), (0.5, 0.45)):
        low, high = band.interval(level)
        label = f"{level:.0%} of observations"
        ax.fill_between(
            x, low, high, color="tab:blue", alpha=alpha, linewidth=0, label=label
        )
    ax.plot(x, band.mean, color="tab:red", label="mean")
    ax.plot(x, torch.sin(2 * x), color="black", linestyle=":", label="true curve")
    ax.plot(*train, ".", color="black", markersize=3, alpha=0.4, label="data")
    ax.set(title=name, ylim=(-2.2, 2.2))
figure.legend(*ax.get_legend_handles_labels(), loc="lower center", ncols=5, frameon=False)
figure.tight_layout(rect=(0, 0.05, 1, 1))
plt.show()

# %%
# Where it matters that a model knows what it has not seen, take Laplace on a small network, or look at
# ``dvi.train_ensemble``. Outside of the data no band reaches the true curve, which turns back where no point says so.
