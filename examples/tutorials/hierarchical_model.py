# SPDX-License-Identifier: Apache-2.0
"""
A hierarchical model with a network inside
==========================================

Laboratories measure the same response curve. Each has its own offset, and half of them took a single measurement. The
model is written in Pyro's own syntax: a network for the curve, a plate of offsets, and a learned noise scale.
"""

# sphinx_gallery_thumbnail_number = 1

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import nn

import pyro_dvi as dvi

# %%
# The data are simulated, so the true offsets are known. The last laboratory has no data and stands for any new
# laboratory. Each of its 200 held-out measurements comes from a different laboratory with its own offset.

NUM_LABS, SPREAD, NOISE = 25, 0.5, 0.4
random = torch.Generator().manual_seed(1)
counts = torch.tensor([1] * 12 + [3] * 6 + [15] * 6 + [0])
true_offset = SPREAD * torch.randn(NUM_LABS - 1, generator=random)


def curve(dose):
    return 1.5 * torch.tanh(1.5 * dose)


def measure(lab, offset):
    dose = 4 * torch.rand(len(lab), generator=random) - 2
    noise = NOISE * torch.randn(len(lab), generator=random)
    return dose, lab, curve(dose) + offset + noise


lab = torch.arange(NUM_LABS).repeat_interleave(counts)
train = measure(lab, true_offset[lab])
lab = torch.arange(NUM_LABS - 1).repeat_interleave(50)
held_out = measure(lab, true_offset[lab])
new_labs = measure(
    torch.full((200,), NUM_LABS - 1), SPREAD * torch.randn(200, generator=random)
)

# %%
# The model
# ---------
#
# ``to_bayesian_`` puts priors on the weights of the network and keeps its random weights as the starting point.
# ``PyroSample`` makes the spread of the offsets a latent variable, and ``PyroParam`` makes the noise scale a parameter.
# The spread is read before the plate, because inside the plate Pyro would draw one spread for each laboratory.


class Labs(PyroModule):
    def __init__(self, num_data):
        super().__init__()
        self.num_data = num_data
        net = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1))
        self.net = dvi.to_bayesian_(net, prior_scale={"0.*": 1.5, "2.*": 0.5})
        self.spread = PyroSample(dist.HalfNormal(1.0))
        self.noise = PyroParam(torch.tensor(0.5), constraint=dist.constraints.positive)

    def forward(self, dose, lab, y=None):
        spread = self.spread
        with pyro.plate("labs", NUM_LABS):
            offset = pyro.sample("offset", dist.Normal(0.0, spread))
        mean = self.net(dose.unsqueeze(-1)).squeeze(-1) + offset[lab]
        with pyro.plate("data", self.num_data, subsample_size=len(dose)):
            return pyro.sample("obs", dist.Normal(mean, self.noise), obs=y)


# %%
# Two objectives
# --------------
#
# Variational Laplace and Pyro's own ``Trace_ELBO`` with ``AutoNormal`` train the same model, with the same optimizer.
# For regression, we recommend the diagonal of the Gauss-Newton matrix as the curvature.


def sampled_guide(model):
    return AutoNormal(model, init_loc_fn=dvi.bayesian.init_to_module, init_scale=0.01)


taylor = dvi.TaylorELBO(curvature=dvi.curvature.GGNDiagonal())
fitted = {}
for name, make_guide, elbo in [
    ("Trace_ELBO", sampled_guide, Trace_ELBO()),
    ("TaylorELBO", dvi.MeanFieldGuide, taylor),
]:
    pyro.clear_param_store()  # both guides would have parameters of the same names
    pyro.set_rng_seed(0)
    model = Labs(num_data=len(train[0]))
    guide = make_guide(model)
    adam = dvi.optim.Adam(dvi.optim.learning_rates(0.03, scale_multiplier=5))
    dvi.fit(SVI(model, guide, adam, elbo), [train], epochs=400, progress=False)
    low, high = (limits.detach() for limits in guide.quantiles([0.159, 0.841])["offset"])
    fitted[name] = {"offset": guide.median()["offset"].detach(), "sd": (high - low) / 2}
    nll = dvi.predict(model, guide, held_out, seed=0).metrics()["nll"]
    spread = guide.median()["spread"]
    print(f"{name}: spread {spread:.2f}, noise {model.noise:.2f}, held-out NLL {nll:.3f}")

print(f"true values: spread {true_offset.std():.2f}, noise {NOISE:.2f}")

# %%
# Shrinkage
# ---------
#
# Without pooling, an offset would be the mean deviation of a laboratory's measurements from the curve. The model
# shrinks this estimate towards zero, and the fewer the measurements, the stronger the shrinkage. For the new
# laboratory, the posterior of the offset has a mean near zero and the spread of the other offsets. RMSE is the root
# mean squared error of the offsets.

dose, lab, y = train
new = torch.full_like(lab, NUM_LABS - 1)  # has no data, so its mean offset is near 0
at_zero = dvi.predict(model, guide, (dose, new))
no_pooling = torch.zeros(NUM_LABS).index_add(0, lab, y - at_zero.mean) / counts
estimates = {
    "no pooling": no_pooling,
    "partial pooling, Trace_ELBO": fitted["Trace_ELBO"]["offset"],
}
estimates["partial pooling, TaylorELBO"] = fitted["TaylorELBO"]["offset"]
estimates["one offset for all"] = torch.zeros(NUM_LABS)
for name, offset in estimates.items():
    errors = offset[:-1] - true_offset
    # A shift common to all offsets is part of the curve.
    errors = (errors - errors.mean()).square()
    one, more = errors[:12].mean().sqrt(), errors[12:].mean().sqrt()
    print(f"{name:28} RMSE {one:.3f} with one measurement, {more:.3f} with more")

# %%
# A new laboratory
# ----------------
#
# After ``TaylorELBO``, ``predict`` uses the posterior mean. This works for laboratories with data, but is overconfident
# for a new one, whose offset is set to zero. Sampling all weights does not help, because Variational Laplace does not
# guarantee that networks with sampled weights predict well. However, the offsets can vary while the weights stay at
# their means: Pyro's ``condition`` fixes the weights in the model, ``block`` hides them in the guide, and ``Moments()``
# integrates over the offset exactly.

weights = {
    name: value for name, value in guide.median().items() if name.startswith("net.")
}
fixed_net = poutine.condition(model, weights)


def offsets_only(*data):
    with poutine.block(hide=list(weights)):
        return guide(*data)


def predict_lab(data):
    return dvi.predict(fixed_net, offsets_only, data, dvi.Moments(), site="obs")


for name, data in {"known laboratories": held_out, "new laboratories": new_labs}.items():
    for rule, prediction in {
        "at the mean": dvi.predict(model, guide, data),
        "offsets vary": predict_lab(data),
    }.items():
        nll, sd = prediction.metrics()["nll"], prediction.std.mean()
        print(f"{name}, {rule:12}: NLL {nll:6.3f}, predictive sd {sd:.2f}")

# %%
# For known laboratories, this makes little difference. For new laboratories it is essential, because the band at the
# mean covers only the noise.
#
# Left: the offset of each laboratory. Right: the predictions for the last laboratory with data and for new
# laboratories.

figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
place = torch.arange(NUM_LABS)
own = fitted["TaylorELBO"]
axes[0].errorbar(
    place,
    own["offset"],
    2 * own["sd"],
    fmt="o",
    color="#0072B2",
    label="partial pooling, ±2 sd",
)
axes[0].plot(
    place[:-1], no_pooling[:-1], "o", mfc="none", color="#D55E00", label="no pooling"
)
axes[0].plot(place[:-1], true_offset, "_", color="black", markersize=14, label="truth")
axes[0].axhline(0, color="gray", linewidth=0.8, linestyle=":")
axes[0].set_xticks([5.5, 14.5, 20.5, 24], ["one", "three", "fifteen", "none"])
axes[0].set(xlabel="measurements of a laboratory", ylabel="offset")
axes[0].legend(frameon=False, fontsize="small")

grid = torch.linspace(-2, 2, 101)
for which, color, name in [
    (24, "#D55E00", "new laboratories"),
    (23, "#0072B2", "last laboratory with data"),
]:
    prediction = predict_lab((grid, torch.full((101,), which)))
    low, high = prediction.interval(0.9)
    axes[1].fill_between(grid, low, high, color=color, alpha=0.2, label=f"{name}, 90 %")
    axes[1].plot(grid, prediction.mean, color=color)
axes[1].plot(dose[lab == 23], y[lab == 23], ".", color="#0072B2")
axes[1].plot(new_labs[0], new_labs[2], ".", color="#D55E00")
axes[1].set(xlabel="dose", ylabel="response")
axes[1].legend(frameon=False, fontsize="small")
plt.show()
