# SPDX-License-Identifier: Apache-2.0
"""
Posterior analysis of a classifier
==================================

Calibration, rejection and foreign inputs, for four posteriors of one small network on handwritten digits: does it know
what it does not know? Checks of convergence, drawn weights and ArviZ are explained in
``posterior_analysis.py`` and used here.

As a script, the file writes the figures and the posteriors into a folder. With
``--data-dir``, a folder with ``small/notmnist_small.npz`` (letters of 28 x 28 pixels, in the array ``x_test``), letters
are shown to the networks, too.
"""

# sphinx_gallery_thumbnail_number = 5

import argparse
import copy
import os
import textwrap
import warnings
from functools import partial
from pathlib import Path

import arviz as az
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pyro
import torch
import torch.nn.functional as F
from pyro.infer import SVI
from pyro.optim import ClippedAdam
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi as dvi
from pyro_dvi.diagnostics import compare_held_out
from pyro_dvi.laplace import ByValidation, Dense

parser = argparse.ArgumentParser(description="Compare four posteriors of a classifier.")
parser.add_argument(
    "--epochs", type=int, default=60, help="passes over the training data (default: 60)"
)
parser.add_argument(
    "--output-dir",
    type=Path,
    default=Path("posterior_analysis_output"),
    help="for the files",
)
parser.add_argument(
    "--data-dir",
    type=Path,
    default=os.environ.get("PYRO_DVI_DATA"),
    help="with small/notmnist_small.npz; by default the variable PYRO_DVI_DATA; the digits need none",
)
options = parser.parse_args()
if options.epochs < 1:
    parser.error("--epochs must be positive")
options.output_dir.mkdir(parents=True, exist_ok=True)
plt.rcParams["figure.max_open_warning"] = 0  # a gallery shows all of them


def save(name: str) -> None:
    """Write the last figure into the folder."""
    plt.gcf().savefig(options.output_dir / f"classes_{name}.png", dpi=100)


# %%
# Data and model
# --------------
#
# Scikit-learn's digits of 8 x 8 pixels: 300 to train with, 300 to choose with, the rest held out. Few data leave
# room for doubt. The networks have softplus units, since Variational Laplace differentiates twice.

KL_WEIGHT = 0.02

images, labels = load_digits(return_X_y=True)
shuffled = np.random.default_rng(0).permutation(len(images))
x = torch.tensor(images[shuffled] / 16, dtype=torch.float32)
y = torch.tensor(labels[shuffled])
train, validation, held_out = (
    (x[part], y[part]) for part in (slice(300), slice(300, 600), slice(600, None))
)
loader = DataLoader(TensorDataset(*train), batch_size=50, shuffle=True)

pyro.set_rng_seed(0)
network = nn.Sequential(nn.Linear(64, 40), nn.Softplus(), nn.Linear(40, 10))


def make_model(prior_scale=dvi.fan_in):
    """A Bayesian copy of the network, so that all methods start from the same weights."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    return dvi.classifier(
        dvi.to_bayesian_(copy.deepcopy(network), prior_scale=prior_scale), num_data=300
    )


# %%
# The prior, before any training
# ------------------------------
#
# Each class should be as likely as the others, and a network from the prior should not be sure of anything. With a
# standard deviation of 1 for each weight it is:

print(dvi.prior_predictive_check(make_model(1.0), train, seed=0).verdict)

# %%
# A variance that falls with the number of inputs does better, and still expects one class to be more common than it is:

check = dvi.prior_predictive_check(make_model(), train, seed=0)
print(check)

# %%
# Four posteriors
# ---------------
#
# A KL weight of 0.02 for all of them: at 1, mean-field posteriors of so few data stay near their prior. Laplace covers
# the last layer only, and the scale of its prior is tuned on the validation images.

METHODS = {
    "Variational Laplace": (dvi.MeanFieldGuide, dvi.TaylorELBO(kl_weight=KL_WEIGHT)),
    "MNVI": (
        dvi.MultiplicativeNoiseGuide,
        dvi.MomentPropagationELBO(kl_weight=KL_WEIGHT),
    ),
    "VOGN": (dvi.NaturalGradientGuide, dvi.NaturalGradientELBO(kl_weight=KL_WEIGHT)),
    "Laplace": (
        partial(dvi.LaplaceGuide, kl_weight=KL_WEIGHT),
        dvi.TaylorELBO(kl_weight=KL_WEIGHT),
    ),
}


def fit(name):
    """Train one method; return its model, its guide and the history."""
    model = make_model()
    make_guide, elbo = METHODS[name]
    guide = make_guide(model)
    decay = 0.05 ** (1 / (options.epochs * len(loader)))
    adam = ClippedAdam(dvi.learning_rates(0.01, scale_multiplier=10, lrd=decay))
    history = dvi.fit(
        SVI(model, guide, dvi.VOGN({}) if name == "VOGN" else adam, elbo),
        loader,
        options.epochs,
        progress=False,
    )
    if name == "Laplace":  # to the minimum, where the Gaussian belongs
        guide.polish(loader, subset="net.2.*", progress=False)
        guide.fit(loader, Dense(), subset="net.2.*")
        guide.tune(loader, criterion=ByValidation([validation]), progress=False)
    return model, guide, history


fitted = {name: fit(name) for name in METHODS}
for name, (_, guide, history) in fitted.items():
    report = dvi.scale_report(guide, history=None if name == "Laplace" else history)
    print(textwrap.fill(f"{name}: {report.verdict}"), end="\n\n")

dvi.plots.training_history(fitted["MNVI"][2])
save("training_history")

# %%
# Scores
# ------
#
# ``predict`` takes the rule that suits the guide. ``nll`` has a standard error over the held-out images.

predictions = {
    name: dvi.predict(model, guide, held_out, seed=0)
    for name, (model, guide, _) in fitted.items()
}
columns = ["nll", "nll_standard_error", "accuracy", "brier", "ece", "aumrc", "entropy"]
scores = pd.DataFrame(
    {name: prediction.metrics() for name, prediction in predictions.items()}
).T
print(scores[columns].astype(float).round(3).to_string())

dvi.plots.compare(predictions, metrics=["nll", "accuracy", "ece"])
save("scores")

# %%
# The same pair by pair, and with drawn weights for each:

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of drawn weights of Laplace, which is the point
    drawn = {
        f"{name}, drawn weights": dvi.predict(
            model, guide, held_out, dvi.Samples(100), seed=0
        )
        for name, (model, guide, _) in fitted.items()
    }
ranking = compare_held_out(
    {f"{name}, own rule": p for name, p in predictions.items()} | drawn
)
print(ranking.round(1).to_string())

# %%
# Variational Laplace loses when its weights are drawn. Laplace does not, since it covers the last layer only: there the
# network is linear in its weights and draws stay where the Gaussian holds, while the logits' way to
# probabilities in ``Linearised()`` is an approximation. Drawing the weights of all layers is another matter, as the
# regression shows. All differences are between single trainings, at one KL weight, which suits some better than
# others.

# %%
# Calibration
# -----------
#
# Points on the diagonal are calibrated, below it overconfident, above it too cautious. Below are the numbers of images
# in each bin: most are in the last one, and bins with few say little.

_, axes = plt.subplots(1, 4, figsize=(14, 4.2), layout="constrained")
for ax, (name, prediction) in zip(axes, predictions.items(), strict=True):
    dvi.plots.reliability_diagram(
        prediction.probabilities, held_out[1], num_bins=10, title=name, ax=ax
    )
save("reliability")

# %%
# Rejection
# ---------
#
# If the most uncertain images go to a person, how many errors are left?

dvi.plots.rejection_curve(predictions)
save("rejection")

# %%
# Foreign inputs
# --------------
#
# Digits with their pixels in a random order have the right amount of ink and no meaning; noise has not even that. Both
# should have a higher predictive entropy than digits.

random = torch.Generator().manual_seed(0)
digits = held_out[0]
foreign = {
    "shuffled pixels": torch.stack(
        [image[torch.randperm(64, generator=random)] for image in digits]
    ),
    "noise": torch.rand(digits.shape, generator=random),
}
letters = options.data_dir and options.data_dir / "small" / "notmnist_small.npz"
if letters and letters.exists():
    pixels = (
        torch.from_numpy(np.load(letters)["x_test"]).float().reshape(-1, 1, 28, 28) / 255
    )
    foreign["letters"] = F.avg_pool2d(F.pad(pixels, (2, 2, 2, 2)), 4).flatten(1)

_, axes = plt.subplots(2, 2, figsize=(11, 8.5), layout="constrained")
rows = {}
for ax, (name, (model, guide, _)) in zip(axes.flat, fitted.items(), strict=True):
    inside = predictions[name]
    outside = {
        kind: dvi.predict(model, guide, inputs, seed=0)
        for kind, inputs in foreign.items()
    }
    dvi.plots.entropy_histogram(inside, outside, title=name, ax=ax)
    rows[name] = {
        f"{kind}: {what}": float(score(inside.entropy, prediction.entropy))
        for kind, prediction in outside.items()
        for what, score in {
            "AUROC": dvi.metrics.auroc,
            "FPR95": dvi.metrics.fpr_at_tpr,
        }.items()
    }
save("foreign")
print(pd.DataFrame(rows).T.round(3).to_string())

# %%
# What is doubt about the weights, and what is in the image?
# ----------------------------------------------------------
#
# Where predictions average over draws, entropy splits: the mutual information of label and weights is what the draws
# disagree about, and the rest is doubt that each of them has. More data would remove the first. Among digits the most
# informative images are those that active learning would ask for; foreign inputs should have more of it.

model, guide, _ = fitted["VOGN"]
samples = dvi.Samples(100)
information = {
    kind: dvi.predict(model, guide, inputs, samples, seed=0).mutual_information
    for kind, inputs in {"digits": digits, **foreign}.items()
}
print(
    pd.Series({kind: float(values.mean()) for kind, values in information.items()})
    .round(3)
    .to_string()
)

inside = information.pop("digits")
ax = dvi.plots.entropy_histogram(inside, information)
ax.set_xlabel("mutual information of label and weights (nats)")
save("mutual_information")

_, axes = plt.subplots(2, 8, figsize=(10, 3), layout="constrained")
order = inside.argsort()
for row, which, what in zip(
    axes, (order.flip(0)[:8], order[:8]), ("most", "least"), strict=True
):
    for ax, k in zip(row, which, strict=True):
        ax.imshow(digits[k].reshape(8, 8).numpy(), cmap="gray_r")
        ax.set(xticks=[], yticks=[])
        ax.set_title(f"{held_out[1][k]}: {inside[k]:.2f}", fontsize="small")
    row[0].set_ylabel(what)
save("informative")

# %%
# What did the data determine?
# ----------------------------

_, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
dvi.plots.posterior_scales(guide, ax=axes[0])
dvi.plots.signal_to_noise(guide, ax=axes[1])
save("posterior_scales")
print(dvi.signal_to_noise(guide))

# %%
# ArviZ
# -----
#
# Weights of more than 1,000 values are left out by default; ``summarise`` lets a number stand for them. Noise goes
# along as ``predictions``, and every object says which method it predicts by.

posteriors = {
    name: dvi.to_arviz(
        model,
        guide,
        held_out,
        sites="net.2.bias" if name != "MNVI" else "net.2.weight",
        summarise={"norm": torch.norm},
        predictions=foreign["noise"][:50],
        dims={"net.2.bias": ["digit"]},
        seed=0,
    )
    for name, (model, guide, _) in fitted.items()
}
for name, posterior in posteriors.items():
    posterior.to_netcdf(
        options.output_dir / f"classes_{name.lower().replace(' ', '_')}.nc"
    )
    print(f"{name:20} {posterior.attrs['method']}")

print(
    az.summary(
        posteriors["VOGN"], var_names=["net.2.bias", "net.0.weight_norm"], kind="stats"
    ).to_string()
)
az.plot_forest(posteriors["VOGN"], var_names=["net.2.bias"], combined=True)
save("forest")
