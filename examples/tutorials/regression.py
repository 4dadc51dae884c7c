# SPDX-License-Identifier: Apache-2.0
"""
Regression with error bands
===========================

A small network learns a curve from 200 noisy points that leave a gap. We compare the error bars of four methods, in
particular inside the gap, where there are no data.
"""

# %%
# Data with a gap
# ---------------
#
# The curve is :math:`\sin 2x`, the noise has a standard deviation of 0.1, and there are no points between -1 and 1.
# Another 400 points from the same distribution are held out for testing.

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
# The network is trained with plain torch, which takes a second or two. Every method can start from these weights, and
# then needs only a few epochs.

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
# adds the noise. Its scale is unknown and also gets a prior, with a median of 0.14 and plausible values between 0.02
# and 1. (A number would fix the scale; ``dvi.bayesian.Heteroscedastic()`` makes it depend on x.)


def make_model():
    pyro.clear_param_store()  # Pyro stores parameters by name; each method starts afresh
    pyro.set_rng_seed(0)
    bayesian = dvi.to_bayesian_(deepcopy(net), prior_scale={"0.*": 2.0, "2.*": 0.5})
    return dvi.regressor(bayesian, num_data=200, noise_scale=dist.LogNormal(-2.0, 1.0))


print(dvi.summary(make_model()))

# %%
# Four methods
# ------------
#
# A method consists of a guide, which is the family of posteriors, and an ELBO, which is the objective. ``kl_weight=1``
# is Bayes' rule; with smaller values, the posterior is narrower and fits the data more closely. Here, the three methods
# with independent weights need a smaller value: at 1, they explain part of the curve as noise. Moment propagation takes
# the most steps, because its noise scale converges last. Laplace needs few steps, because ``polish`` does the rest.

EPOCHS = {
    "Variational Laplace": 200,
    "Moment propagation": 800,
    "VOGN": 200,
    "Laplace": 50,
}  # each epoch is one batch of all points


def adam(epochs):
    decay = partial(ExponentialLR, gamma=0.1 ** (1 / epochs))  # decays to a tenth
    return dvi.optim.Adam(0.02, scheduler=decay)


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
# Training takes the same few lines for all methods. Laplace trains the most probable weights and needs two more lines:
# ``polish`` moves to the exact minimum, and ``fit`` puts a Gaussian with a full covariance there.
#
# ``predict`` uses the prediction rule that fits each method: the posterior mean, propagated moments, posterior samples,
# or a linearised network.

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
# On test points from the training distribution, all four methods are good: with the true curve and the true noise, the
# ``nll`` would be about -0.88. But these points say nothing about the gap.
#
# Uncertainty in the gap
# ----------------------

places = {"on the data": grid.abs() - 1.75, "gap": grid, "outside": grid.abs() - 3.25}
print(
    f"{'predictive standard deviation':30}" + "".join(f"{place:>14}" for place in places)
)
for name, band in bands.items():
    sds = (band.std[(where.abs() < 0.25).squeeze(-1)].mean() for where in places.values())
    print(f"{name:30}" + "".join(f"{sd:14.3f}" for sd in sds))

# %%
# The band of Laplace widens strongly in the gap, the band of VOGN widens less, and the other bands do not widen.
# Theory predicts this: many curves pass through the data and differ in the gap, but to move between them, several
# weights must change *together*. Laplace keeps these covariances. VOGN and moment propagation treat weights as
# independent, so a posterior that is confident on the data is confident nearly everywhere. Variational Laplace predicts
# at the posterior mean, and its band contains only the noise.
#
# ``interval(level)`` returns the central interval of each prediction, and ``quantiles(q)`` returns single quantiles. If
# the model is right, the dark band contains 50 % of new observations and the light band 90 %.

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
# If uncertainty away from the data matters, use Laplace on a small network, or try ``dvi.train_ensemble``. Beyond the
# range of the data, no band contains the true curve, which turns back where no data show it.
