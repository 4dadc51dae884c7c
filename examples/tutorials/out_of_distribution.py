# SPDX-License-Identifier: Apache-2.0
"""
Out-of-distribution inputs
==========================

A classifier assigns every input to one of its classes. Does its uncertainty reveal inputs that belong to none of them?
One small network is trained on the digits 0 to 7 with five methods, and then tested on 8s and 9s, scrambled digits, and
noise.
"""

# sphinx_gallery_thumbnail_number = 2

import matplotlib.pyplot as plt
import pandas as pd
import pyro
import torch
from pyro.infer import SVI
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi as dvi
from pyro_dvi.laplace import Dense

# %%
# In-distribution and out-of-distribution images
# ----------------------------------------------
#
# Five hundred of scikit-learn's digits are enough to learn from, and few enough to leave some uncertainty. Scrambled
# digits are digits with shuffled pixels; noise images have random pixels.

images, labels = load_digits(return_X_y=True)
random = torch.Generator().manual_seed(0)
order = torch.randperm(len(images), generator=random)
x = torch.tensor(images / 16, dtype=torch.float32)[order]
y = torch.tensor(labels)[order]

known = y < 8
train, held_out = (x[known][:500], y[known][:500]), (x[known][500:], y[known][500:])
others = {
    "8 and 9": x[~known],
    "scrambled": torch.stack(
        [image[torch.randperm(64, generator=random)] for image in held_out[0]]
    ),
    "noise": torch.rand(500, 64, generator=random),
}
loader = DataLoader(TensorDataset(*train), batch_size=100, shuffle=True)
print(len(held_out[0]), "in-distribution images")
print({kind: len(x) for kind, x in others.items()}, "out-of-distribution images")

# %%
# Five posteriors
# ---------------
#
# All methods use the same network, prior and KL weight. MAP is a single set of weights, the baseline; Laplace puts a
# Gaussian around the MAP weights of the last layer.

KL_WEIGHT = 0.02
METHODS = {
    "MAP": (dvi.LaplaceGuide, dvi.SampledELBO),
    "Variational Laplace": (dvi.MeanFieldGuide, dvi.TaylorELBO),
    "MNVI": (dvi.MultiplicativeNoiseGuide, dvi.MomentPropagationELBO),
    "VOGN": (dvi.NaturalGradientGuide, dvi.NaturalGradientELBO),
}
inside, outside = {}, {}  # predictions by method, and by method and kind


def show(name, model, guide, rule=None):
    inside[name] = dvi.predict(model, guide, held_out, rule, seed=0)
    outside[name] = {
        kind: dvi.predict(model, guide, x, rule, seed=0) for kind, x in others.items()
    }


for name, (make_guide, make_elbo) in METHODS.items():
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    net = nn.Sequential(nn.Linear(64, 100), nn.Softplus(), nn.Linear(100, 8))
    model = dvi.classifier(
        dvi.to_bayesian_(net, prior_scale=dvi.bayesian.fan_in), num_data=500
    )
    guide = make_guide(model, kl_weight=KL_WEIGHT) if name == "MAP" else make_guide(model)
    adam = dvi.optim.Adam(0.01)
    optimizer = dvi.VOGN({}) if name == "VOGN" else adam
    svi = SVI(model, guide, optimizer, make_elbo(kl_weight=KL_WEIGHT))
    dvi.fit(svi, loader, epochs=80, progress=False)
    show(name, model, guide, dvi.AtMean() if name == "MAP" else None)
    if name == "MAP":
        guide.polish(loader, subset="net.2.*", progress=False)  # to the minimum
        guide.fit(loader, Dense(), subset="net.2.*")
        show("Laplace, last layer", model, guide)

# %%
# Predictions in distribution
# ---------------------------
#
# We start with the in-distribution images: the scores, and the error rate on the remaining images when the most
# uncertain ones are rejected. AUMRC is the area under this curve; lower is better.

scores = pd.DataFrame(
    {name: prediction.metrics() for name, prediction in inside.items()}
).T
print(
    scores[["nll", "nll_standard_error", "accuracy", "aumrc"]]
    .astype(float)
    .round(3)
    .to_string()
)
ax = dvi.plots.rejection_curve(inside)
ax.set_xlim(0, 0.2)
plt.show()

# %%
# Detecting out-of-distribution images
# ------------------------------------
#
# AUROC is the probability that an out-of-distribution image has a higher predictive entropy than an in-distribution
# image; 0.5 is chance. Each method is trained once, on a few hundred images, so differences of 0.01 or 0.02 may vanish
# with another seed.

auroc = pd.DataFrame(
    {
        name: {
            kind: dvi.metrics.auroc(inside[name].entropy, prediction.entropy)
            for kind, prediction in outside[name].items()
        }
        for name in inside
    }
).T
print(auroc.round(3).to_string())
for kind in others:
    best, gain = auroc[kind].idxmax(), auroc[kind].max() - auroc[kind]["MAP"]
    print(f"{kind}: highest for {best}, {gain:+.3f} relative to MAP")

# %%
# The entropy of MAP predictions already detects these images, and on data this easy a posterior adds little. However,
# MAP cannot separate two kinds of uncertainty.

# %%
# Two kinds of uncertainty
# ------------------------
#
# VOGN predicts with posterior samples. Its predictive entropy is the sum of two parts: the mean entropy for each sample
# of the weights, and the disagreement between samples, which is the mutual information of label and weights. More data
# would reduce the second part.

vogn = {"in distribution": inside["VOGN"], **outside["VOGN"]}
parts = pd.DataFrame(
    {
        kind: {
            "entropy": float(prediction.entropy.mean()),
            "mean entropy per sample": float(prediction.expected_entropy.mean()),
            "mutual information": float(prediction.mutual_information.mean()),
        }
        for kind, prediction in vogn.items()
    }
).T
print(parts.round(3).to_string())

uncertainties = {
    name: {
        kind: prediction.entropy
        for kind, prediction in {"in distribution": inside[name], **outside[name]}.items()
    }
    for name in ["MAP", "MNVI"]
}
uncertainties["VOGN"] = {
    kind: prediction.mutual_information for kind, prediction in vogn.items()
}
figure, axes = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
for ax, (name, sets) in zip(axes, uncertainties.items(), strict=True):
    ax.hist(list(sets.values()), bins=20, density=True, histtype="step", label=list(sets))
    ax.set(title=name, xlabel="predictive entropy (nats)")
axes[0].legend()
axes[2].set_xlabel("mutual information of label and weights (nats)")
plt.show()

# %%
# Undetected images
# -----------------
#
# Top row: the 8s and 9s with the lowest entropy. VOGN confidently takes them for the digit in the title. Bottom row:
# the 8s and 9s with the highest entropy.

prediction = outside["VOGN"]["8 and 9"]
order = prediction.entropy.argsort()
confidence, label = prediction.probabilities.max(-1)
figure, axes = plt.subplots(2, 8, figsize=(11, 3.4), layout="constrained")
for row, which in zip(axes, (order[:8], order[-8:]), strict=True):
    for ax, k in zip(row, which.tolist(), strict=True):
        ax.imshow(others["8 and 9"][k].reshape(8, 8).numpy(), cmap="gray_r")
        ax.set(xticks=[], yticks=[])
        ax.set_title(f"{label[k]}? {confidence[k]:.0%}", fontsize="medium")
axes[0, 0].set_ylabel("lowest entropy")
axes[1, 0].set_ylabel("highest entropy")
plt.show()
