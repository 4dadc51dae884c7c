# SPDX-License-Identifier: Apache-2.0
"""
A trained network made Bayesian
===============================

You have a trained network and want to know how uncertain its predictions are. Two methods keep its features and make
the last layer Bayesian: Laplace's approximation puts a Gaussian around the trained weights, and IVON trains a posterior
that starts from them.
"""

# %%
# A trained network
# -----------------
#
# To avoid a download, we train one ourselves: a small DenseNet from torchvision, with batch normalisation and ReLUs, on
# 600 handwritten digits, enlarged to 32 x 32 pixels. If you have a network of your own, start at the next section.

import copy

import matplotlib.pyplot as plt
import pandas as pd
import pyro
import torch
from pyro.infer import SVI
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy, interpolate
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import DenseNet

import pyro_dvi as dvi

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
order = torch.randperm(len(images))
x = interpolate(
    torch.tensor(images / 16).float().reshape(-1, 1, 8, 8), 32, mode="bilinear"
)
x, y = x.expand(-1, 3, -1, -1)[order], torch.tensor(labels)[order]
loader = DataLoader(TensorDataset(x[:600], y[:600]), batch_size=100, shuffle=True)
test_x, test_y = x[-300:], y[-300:]

trained = DenseNet(
    growth_rate=8, block_config=(2, 2, 2), num_init_features=16, num_classes=10
)
adam = torch.optim.Adam(trained.parameters(), lr=0.01)
decay = torch.optim.lr_scheduler.OneCycleLR(
    adam, 0.01, epochs=20, steps_per_epoch=len(loader)
)
for _ in range(20):
    for images, labels in loader:
        adam.zero_grad()
        cross_entropy(trained(images), labels).backward()
        adam.step()
        decay.step()
trained.eval()

# %%
# The last layer becomes Bayesian
# -------------------------------
#
# ``include`` selects the parameters that get a prior; the features are frozen. We copy the network so that both methods
# below start from the same weights; your own network may be changed in place.


def make_model():
    net = copy.deepcopy(trained)
    net.features.requires_grad_(False)
    dvi.to_bayesian_(net, prior_scale=1.0, include="classifier.*")
    return dvi.classifier(net, num_data=600).eval()


laplace_model = make_model()
print(dvi.summary(laplace_model))

# %%
# First method: Laplace
# ---------------------
#
# ``polish`` moves the last layer to the optimum under the prior, ``fit`` puts a Gaussian there, and ``tune`` chooses
# the scale of the prior on validation data. The validation images should resemble the images that the network will
# meet. Here, some of the images that it meets will be noisy, so half of the validation images get noise. (On clean
# images alone, the best Gaussian has no width: the network is almost always right there.)

validation_x, validation_y = x[600:900].clone(), y[600:900]
validation_x[150:] += 0.2 * torch.randn(150, 1, 32, 32)

laplace = dvi.LaplaceGuide(laplace_model)
print(laplace.polish(loader, progress=False))
laplace.fit(loader, dvi.laplace.Dense())
by_validation = dvi.laplace.ByValidation([(validation_x, validation_y)])
print(laplace.tune(loader, criterion=by_validation, progress=False).best)

# %%
# Second method: continue training with IVON
# ------------------------------------------
#
# A guide starts from the weights of the network, so any method can continue from here. IVON costs one gradient per step
# and works with ReLUs. 20 epochs are 120 steps.

ivon_model = make_model()
ivon_model.net.classifier.train()  # the features stay in evaluation mode
ivon = dvi.NaturalGradientGuide(ivon_model)
svi = SVI(ivon_model, ivon, dvi.IVON({}), loss=dvi.NaturalGradientELBO())
pyro.set_rng_seed(0)
dvi.fit(svi, loader, epochs=20, progress=False)

# %%
# Before and after
# ----------------
#
# A posterior should be compared with :doc:`temperature scaling </how_to/calibration>`, which divides the logits of the
# trained network by one number, chosen on the same validation images. ``predict`` linearises the network around the
# mode for Laplace, and averages over posterior samples for IVON.

with torch.no_grad():
    logits = trained(validation_x)
temperatures = torch.linspace(0.5, 5, 91).tolist()
temperature = min(temperatures, key=lambda t: cross_entropy(logits / t, validation_y))


def probabilities(name, x):
    scales = {"trained network": 1.0, "temperature scaling": temperature}
    if name in scales:
        with torch.no_grad():
            return (trained(x) / scales[name]).softmax(-1)
    posterior = {"Laplace": (laplace_model, laplace), "IVON": (ivon_model, ivon)}[name]
    return dvi.predict(*posterior, x, seed=0).probabilities


def score(name, x):
    p = probabilities(name, x)
    confidence, guess = p.max(-1)
    return {
        "nll": cross_entropy(p.log(), test_y).item(),
        "accuracy": (guess == test_y).float().mean().item(),
        "confidence": confidence.mean().item(),
    }


names = ("trained network", "temperature scaling", "Laplace", "IVON")
print(pd.DataFrame({name: score(name, test_x) for name in names}).T.round(3).to_string())

# %%
# The trained network is best on clean images, where nearly all predictions are correct and uncertainty only increases
# the NLL. Next, we add noise of growing standard deviation to the pixels:

noise = torch.randn(300, 1, 32, 32)
levels = (0.0, 0.1, 0.2, 0.3, 0.45, 0.6)
curves = {
    name: pd.DataFrame([score(name, test_x + level * noise) for level in levels], levels)
    for name in names
}
print(
    pd.concat({name: curve["nll"] for name, curve in curves.items()}, axis=1)
    .round(2)
    .to_string()
)

# %%
# The trained network stays confident even where its accuracy is close to chance. Temperature scaling lowers the
# confidence on all images alike. Laplace lowers the confidence most where images differ from the training data. Its NLL
# is therefore lower than with temperature scaling at every level of noise, clean images included. IVON was trained on
# clean images and is not tuned. Under strong noise, IVON is the least confident of the four, but it gives the true
# class little probability, so its NLL is about as high as the NLL of the trained network.

figure, axes = plt.subplots(
    1, 5, figsize=(15, 3.4), layout="constrained", sharex=True, sharey=True
)
for ax, (name, curve) in zip(axes, curves.items(), strict=False):
    ax.plot(curve["confidence"], "o-", color="tab:red", label="mean confidence")
    ax.plot(curve["accuracy"], "o-", color="tab:blue", label="accuracy")
    ax.fill_between(
        levels, curve["accuracy"], curve["confidence"], color="tab:red", alpha=0.12
    )
    ax.set(title=name, xlabel="noise in the pixels", ylim=(0, 1))
axes[0].legend(frameon=False)
axes[4].remove()
for i, level in enumerate(levels):
    ax = figure.add_subplot(3, 10, 9 + 10 * (i // 2) + i % 2)
    ax.imshow((test_x + level * noise)[0, 0], cmap="gray_r", vmin=-0.5, vmax=1.5)
    ax.set(xticks=[], yticks=[], xlabel=f"noise {level:g}")
plt.show()
