# SPDX-License-Identifier: Apache-2.0
"""
Inputs unlike the training data
===============================

A classifier has to choose one of its classes, whatever it is shown. Does its uncertainty say when none of them fits?
Five posteriors of one small network learn the digits 0 to 7, and are then shown 8s and 9s, scrambled digits, and noise.
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
# Familiar and foreign images
# ---------------------------
#
# Five hundred of scikit-learn's digits are enough to learn from, and few enough to leave room for doubt. Scrambled
# digits have the ink of a digit and no shape; noise has not even the ink.

images, labels = load_digits(return_X_y=True)
random = torch.Generator().manual_seed(0)
order = torch.randperm(len(images), generator=random)
x = torch.tensor(images / 16, dtype=torch.float32)[order]
y = torch.tensor(labels)[order]

known = y < 8
train, held_out = (x[known][:500], y[known][:500]), (x[known][500:], y[known][500:])
foreign = {
    "8 and 9": x[~known],
    "scrambled": torch.stack(
        [image[torch.randperm(64, generator=random)] for image in held_out[0]]
    ),
    "noise": torch.rand(500, 64, generator=random),
}
loader = DataLoader(TensorDataset(*train), batch_size=100, shuffle=True)
print(
    len(held_out[0]),
    "familiar images,",
    {kind: len(x) for kind, x in foreign.items()},
    "foreign ones",
)

# %%
# Five posteriors
# ---------------
#
# The same network, prior and KL weight for all. MAP is one set of weights, the base to beat; Laplace puts a Gaussian
# around it, in the last layer only.

KL_WEIGHT = 0.02
METHODS = {
    "MAP": (dvi.LaplaceGuide, dvi.SampledELBO),
    "Variational Laplace": (dvi.MeanFieldGuide, dvi.TaylorELBO),
    "MNVI": (dvi.MultiplicativeNoiseGuide, dvi.MomentPropagationELBO),
    "VOGN": (dvi.NaturalGradientGuide, dvi.NaturalGradientELBO),
}
familiar, strange = {}, {}  # predictions by method, and by method and kind


def show(name, model, guide, rule=None):
    familiar[name] = dvi.predict(model, guide, held_out, rule, seed=0)
    strange[name] = {
        kind: dvi.predict(model, guide, x, rule, seed=0) for kind, x in foreign.items()
    }


for name, (make_guide, make_elbo) in METHODS.items():
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    net = nn.Sequential(nn.Linear(64, 100), nn.Softplus(), nn.Linear(100, 8))
    model = dvi.classifier(
        dvi.to_bayesian_(net, prior_scale=dvi.bayesian.fan_in), num_data=500
    )
    guide = make_guide(model, kl_weight=KL_WEIGHT) if name == "MAP" else make_guide(model)
    adam = dvi.optim.Adam(dvi.optim.learning_rates(0.01))
    optimizer = dvi.VOGN({}) if name == "VOGN" else adam
    svi = SVI(model, guide, optimizer, make_elbo(kl_weight=KL_WEIGHT))
    dvi.fit(svi, loader, epochs=80, progress=False)
    show(name, model, guide, dvi.AtMean() if name == "MAP" else None)
    if name == "MAP":
        guide.polish(loader, subset="net.2.*", progress=False)  # to the minimum
        guide.fit(loader, Dense(), subset="net.2.*")
        show("Laplace, last layer", model, guide)

# %%
# Does it know what it knows?
# ---------------------------
#
# First the familiar images: the scores, and the error that is left when the most uncertain images go to a person. The
# area below that curve is AUMRC; low is good.

scores = pd.DataFrame(
    {name: prediction.metrics() for name, prediction in familiar.items()}
).T
print(
    scores[["nll", "nll_standard_error", "accuracy", "aumrc"]]
    .astype(float)
    .round(3)
    .to_string()
)
ax = dvi.plots.rejection_curve(familiar)
ax.set_xlim(0, 0.2)
plt.show()

# %%
# Does it notice what it does not know?
# -------------------------------------
#
# AUROC is the probability that a foreign image has a higher predictive entropy than a familiar one; 0.5 is chance. This
# is one training of each on some hundred images: differences of a hundredth or two may be gone with the next seed.

auroc = pd.DataFrame(
    {
        name: {
            kind: dvi.metrics.auroc(familiar[name].entropy, prediction.entropy)
            for kind, prediction in strange[name].items()
        }
        for name in familiar
    }
).T
print(auroc.round(3).to_string())
for kind in foreign:
    best, gain = auroc[kind].idxmax(), auroc[kind].max() - auroc[kind]["MAP"]
    print(f"{kind}: highest for {best}, {gain:+.3f} beside MAP")

# %%
# So the entropy of plain MAP is a detector already, and a posterior adds little to it where its data are so easy. What
# MAP cannot do is to tell two kinds of doubt apart.

# %%
# Two kinds of doubt
# ------------------
#
# VOGN predicts by draws of the weights. Its entropy is the sum of what each draw doubts, and of what the draws disagree
# about: the mutual information of label and weights, which more data would remove.

vogn = {"familiar": familiar["VOGN"], **strange["VOGN"]}
parts = pd.DataFrame(
    {
        kind: {
            "entropy": float(prediction.entropy.mean()),
            "of each draw": float(prediction.expected_entropy.mean()),
            "mutual information": float(prediction.mutual_information.mean()),
        }
        for kind, prediction in vogn.items()
    }
).T
print(parts.round(3).to_string())

doubts = {
    name: {
        kind: prediction.entropy
        for kind, prediction in {"familiar": familiar[name], **strange[name]}.items()
    }
    for name in ["MAP", "MNVI"]
}
doubts["VOGN"] = {
    kind: prediction.mutual_information for kind, prediction in vogn.items()
}
figure, axes = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
for ax, (name, sets) in zip(axes, doubts.items(), strict=True):
    ax.hist(list(sets.values()), bins=20, density=True, histtype="step", label=list(sets))
    ax.set(title=name, xlabel="predictive entropy (nats)")
axes[0].legend()
axes[2].set_xlabel("mutual information of label and weights (nats)")
plt.show()

# %%
# What slips through
# ------------------
#
# No score is as plain as the images. Above, the 8s and 9s whose entropy is lowest: VOGN takes them for the digit in the
# title, and nothing warns. Below, those whose entropy is highest.

prediction = strange["VOGN"]["8 and 9"]
order = prediction.entropy.argsort()
confidence, label = prediction.probabilities.max(-1)
figure, axes = plt.subplots(2, 8, figsize=(11, 3.4), layout="constrained")
for row, which in zip(axes, (order[:8], order[-8:]), strict=True):
    for ax, k in zip(row, which.tolist(), strict=True):
        ax.imshow(foreign["8 and 9"][k].reshape(8, 8).numpy(), cmap="gray_r")
        ax.set(xticks=[], yticks=[])
        ax.set_title(f"{label[k]}? {confidence[k]:.0%}", fontsize="medium")
axes[0, 0].set_ylabel("surest")
axes[1, 0].set_ylabel("least sure")
plt.show()
