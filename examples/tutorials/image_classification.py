# SPDX-License-Identifier: Apache-2.0
"""
Image classification and calibration
====================================

A small network learns handwritten digits from 600 images with three methods: maximum a posteriori (MAP), Variational
Laplace, and moment propagation. The KL weight of each is chosen on validation data. Then we check whether their
confidence is justified.
"""

# %%
# Data
# ----
#
# scikit-learn's digits have 8 x 8 pixels. We use 600 images for training, 400 for validation, and 797 for testing.

from functools import partial

import matplotlib.pyplot as plt
import pandas as pd
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi as dvi

images, labels = load_digits(return_X_y=True)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
x = torch.tensor(images / 16).float().reshape(-1, 1, 8, 8)[order]
y = torch.tensor(labels)[order]
validation, test = (x[600:1000], y[600:1000]), (x[1000:], y[1000:])
loader = DataLoader(TensorDataset(x[:600], y[:600]), batch_size=100, shuffle=True)

# %%
# Training one model
# ------------------
#
# Any torch network will do, including convolutional ones. Variational Laplace requires smooth activations such as Tanh.
# ``to_bayesian_`` puts a prior on the weights, ``classifier`` turns the network into a Pyro model, and the choice of
# guide and ELBO determines the method.

EPOCHS = 40


def train(kl_weight, make_guide, make_elbo):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.Tanh(), nn.Linear(50, 10))
    model = dvi.classifier(dvi.to_bayesian_(net, prior_scale=1.0), num_data=600)
    guide = make_guide(model)
    decay = partial(ExponentialLR, gamma=0.03 ** (1 / EPOCHS))
    adam = dvi.optim.Adam(0.05, scheduler=decay)
    svi = SVI(model, guide, adam, loss=make_elbo(kl_weight=kl_weight))
    dvi.fit(svi, loader, EPOCHS, progress=False)
    return model, guide


# %%
# Choosing the KL weight on validation data
# -----------------------------------------
#
# The KL weight sets how much the prior counts relative to the data; 1 is Bayes' rule. Each method has its own best
# weight, so a fair comparison tunes all of them. ``tune`` trains once with each weight and chooses the largest weight
# whose validation NLL is within one standard error of the lowest, because a larger weight keeps more of the posterior
# uncertainty. If the best weight is the smallest or largest candidate, the search continues beyond it. Several settings
# are searched one after the other: pass ``{"lr": (...), "kl_weight": (...)}`` to tune a function that takes both.

most_probable = partial(AutoDelta, init_loc_fn=dvi.bayesian.init_to_module)
methods = {
    "MAP": (most_probable, dvi.SampledELBO, (0.1, 0.3, 1)),
    "Variational Laplace": (dvi.MeanFieldGuide, dvi.TaylorELBO, (0.003, 0.01, 0.03)),
    "Moment propagation": (
        dvi.MultiplicativeNoiseGuide,
        dvi.MomentPropagationELBO,
        (0.003, 0.01, 0.03),
    ),
}
predictions = {}
for name, (make_guide, make_elbo, kl_weights) in methods.items():
    one_training = partial(train, make_guide=make_guide, make_elbo=make_elbo)
    tuned = dvi.tune(
        one_training,
        validation,
        {"kl_weight": kl_weights},
        max_trainings=5,
        progress=False,
    )
    predictions[name] = dvi.predict(tuned.model, tuned.guide, test)
    print(name, tuned, sep="\n", end="\n\n")

# %%
# Scores on the test images
# -------------------------

scores = pd.DataFrame(
    {name: prediction.metrics() for name, prediction in predictions.items()}
).T
print(
    scores[["nll", "nll_standard_error", "accuracy", "brier", "ece"]].round(3).to_string()
)

# %%
# All methods are tested on the same 797 images, so the differences between their scores are known more precisely than
# the scores themselves. ``elpd_diff`` is the difference from the best method, summed over the images, and ``dse`` its
# standard error. Differences below two standard errors are not significant. The learning rate was not tuned here; a
# well-tuned MAP network is hard to beat.

comparison = dvi.diagnostics.compare_held_out(predictions)
print(comparison[["elpd_diff", "dse"]].round(1).to_string())

# %%
# Is the confidence justified?
# ----------------------------
#
# Of the images predicted with 80 % confidence, 80 % should be classified correctly. Points below the diagonal are
# overconfident; open circles are bins with fewer than five images. The ECE in the titles uses these ten bins; the ECE
# in the table uses fifteen.

figure, axes = plt.subplots(1, 3, figsize=(12, 4.6), layout="constrained")
for ax, (name, prediction) in zip(axes, predictions.items(), strict=True):
    dvi.plots.reliability_diagram(prediction, num_bins=10, title=name, ax=ax)
plt.show()

# %%
# Which images are uncertain?
# ---------------------------
#
# Images with uncertain predictions can be passed to a human. How many of the mistakes are among the tenth of the images
# with the highest predictive entropy?

prediction = predictions["Moment propagation"]
wrong = prediction.probabilities.argmax(-1) != test[1]
least_certain = prediction.entropy.argsort(descending=True)
found = wrong[least_certain[:80]].sum()
print(f"{wrong.sum()} mistakes, {found} of them among the 80 most uncertain images")

# %%
# The twelve most uncertain images, with their two most probable classes. Misclassified images have red labels.

figure, axes = plt.subplots(2, 6, figsize=(12, 4.8), layout="constrained")
for ax, i in zip(axes.flat, least_certain, strict=False):
    ax.imshow(test[0][i, 0], cmap="gray_r")
    p, guess = prediction.probabilities[i].topk(2)
    ax.set_title(f"{guess[0]} ({p[0]:.0%}) or {guess[1]} ({p[1]:.0%})", fontsize="medium")
    ax.set_xlabel(
        f"label: {test[1][i]}", color="black" if guess[0] == test[1][i] else "tab:red"
    )
    ax.set(xticks=[], yticks=[])
plt.show()
