# SPDX-License-Identifier: Apache-2.0
"""
Posterior analysis
==================

We check the prior, convergence and predictions, and export to ArviZ, for three posteriors of one small network on data
with a gap. Everything here also works for classification; :doc:`out_of_distribution` shows the figures for classes.
"""

# sphinx_gallery_thumbnail_number = 2

import copy
import textwrap
import warnings

import arviz as az
import matplotlib.pyplot as plt
import pyro
import torch
from pyro.infer import SVI
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.analysis.diagnostics import compare_held_out

# %%
# Data, and a network with explicit priors
# ----------------------------------------

NOISE = 0.2
random = torch.Generator().manual_seed(0)
x = 4 * torch.rand(260, 1, generator=random) - 2
x = x + 0.5 * x.sign()  # nothing between -0.5 and 0.5
y = (
    0.5 * torch.sin(2 * x[:, 0])
    + 0.3 * x[:, 0]
    + NOISE * torch.randn(260, generator=random)
)
train, held_out = (x[:60], y[:60]), (x[60:], y[60:])

pyro.set_rng_seed(0)
network = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1))


def make_model(first=2.0, second=0.5):
    net = copy.deepcopy(network)  # every posterior starts from the same weights
    dvi.to_bayesian_(net, prior_scale={"0.*": first, "2.*": second})
    return dvi.regressor(net, num_data=60, noise_scale=NOISE)


# %%
# Before training: could the prior have produced these data?
# ----------------------------------------------------------
#
# We draw data sets from the prior predictive distribution, and compare their standard deviations with that of the data.
# A prior scale of 3 looks harmless for a single weight. Together, the weights produce functions that spread much
# further than the data.

print(f"standard deviation of the data: {train[1].std(correction=0):.2f}")
for scales in ((3.0, 3.0), (2.0, 0.5)):
    pyro.clear_param_store()
    model = make_model(*scales)
    guide = dvi.MeanFieldGuide(model)
    guide(*train)  # creates the parameters; nothing is trained yet
    prior = dvi.to_arviz(model, guide, train, 1, prior=200, seed=0)
    spread = prior["prior_predictive"]["obs"].std("data")
    low, median, high = spread.quantile([0.05, 0.5, 0.95]).values
    print(f"prior scales {scales}: {median:.2f} (from {low:.2f} to {high:.2f})")

# %%
# Three posteriors, and whether they have converged
# -------------------------------------------------
#
# The loss looks flat long before the variances have converged. ``scale_report`` compares posterior scales with the
# prior, with their initial values, and with an earlier snapshot. It is strict: here, the scales of single layers still
# change long after the predictions have converged.

METHODS = {
    "Variational Laplace": (
        dvi.MeanFieldGuide,
        dvi.TaylorELBO(curvature=dvi.curvature.GGNDiagonal()),
    ),
    "MNVI": (dvi.MultiplicativeNoiseGuide, dvi.MomentPropagationELBO()),
    "VOGN": (dvi.NaturalGradientGuide, dvi.NaturalGradientELBO()),
}
fitted = {}
for name, (make_guide, elbo) in METHODS.items():
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    model = make_model()
    guide = make_guide(model)
    adam = dvi.optim.Adam(0.03)
    svi = SVI(model, guide, dvi.VOGN({}) if name == "VOGN" else adam, elbo)
    history = dvi.fit(svi, [train], epochs=270, progress=False)
    earlier = dvi.diagnostics.scale_snapshot(guide)
    dvi.fit(svi, [train], epochs=30, history=history, progress=False)
    fitted[name] = model, guide
    report = dvi.diagnostics.scale_report(guide, earlier=earlier)
    print(f"{name}: scales still change by {max(report['change']):.1%}")

# %%
# Predictions, each with the rule of its guide
# --------------------------------------------
#
# The rule follows from how the guide was trained. ``compare_held_out`` compares the log scores on the same held-out
# points: ``elpd_diff`` is the difference from the best, and ``dse`` its standard error. Variational Laplace with
# sampled weights is a different predictor, and the library warns about it.

predictions = {
    name: dvi.predict(model, guide, held_out, seed=0, keep_draws=True)
    for name, (model, guide) in fitted.items()
}
for name, prediction in predictions.items():
    low, high = prediction.interval(0.9)
    inside = ((low <= held_out[1]) & (held_out[1] <= high)).float().mean()
    rule = type(prediction.method).__name__
    print(f"{name:19} {rule:8} {inside:.0%} of held-out points in the 90 % interval")

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    drawn = dvi.predict(
        *fitted["Variational Laplace"], held_out, dvi.Samples(500), seed=0
    )
print(textwrap.fill(str(caught[0].message)))
ranking = compare_held_out(predictions | {"Variational Laplace, sampled": drawn})
print(ranking[["rank", "elpd", "elpd_diff", "dse"]].round(1).to_string())

# %%
# Where is it uncertain?
# ----------------------
#
# The light band covers new observations. The dark band excludes the known noise; more data would narrow it. Variational
# Laplace predicts at the posterior mean and has no dark band. None of the three bands widens in the gap as it should;
# the band of Laplace with a full covariance does.

grid = torch.linspace(-3.5, 3.5, 141).unsqueeze(-1)
figure, axes = plt.subplots(1, 3, figsize=(13, 4.4), layout="constrained", sharey=True)
for ax, (name, (model, guide)) in zip(axes, fitted.items(), strict=True):
    band = dvi.predict(model, guide, grid, seed=0)
    epistemic = (band.variance - NOISE**2).clamp_min(0)
    parts = {"mean": band.mean, "variance": band.variance, "epistemic": epistemic}
    dvi.plots.regression_band(grid, parts, data=train, ax=ax)
    ax.get_legend().remove()
    ax.set_title(name, loc="left")
figure.legend(
    *ax.get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False
)
plt.show()

# %%
# Are the propagated moments right?
# ---------------------------------
#
# MNVI propagates means and variances through the network, and treats units as independent. A comparison with sampled
# weights shows where this approximation is poor: there, the ratio of the standard deviations is far from one.

print(
    dvi.diagnostics.compare_with_sampling(
        *fitted["MNVI"], held_out, num_samples=500, seed=0
    )
)

# %%
# ArviZ
# -----
#
# ``to_arviz`` exports draws, predictions and data: ``InferenceData`` with ArviZ 0.x, a ``DataTree`` with 1.x. There is
# one chain of independent draws, so ``r_hat`` is not informative.

dims = {"net.2.weight": ["output", "hidden"]}
posterior = dvi.to_arviz(*fitted["VOGN"], train, 300, prior=100, dims=dims, seed=0)
few = {"hidden": range(6)}  # of thirty units
print(
    az.summary(
        posterior, var_names=["net.2.weight"], coords=few, kind="stats"
    ).to_string()
)

# %%
# A posterior predictive check compares data sets drawn from the model with the training data.

if hasattr(az, "plot_ppc_dist"):
    az.plot_ppc_dist(posterior, num_samples=50)  # ArviZ 1.x
else:
    az.plot_ppc(posterior, num_pp_samples=50, random_seed=0)  # ArviZ 0.x
plt.show()

# %%
# Leave-one-out, or held-out data?
# --------------------------------
#
# ``az.loo`` estimates the score of new data from the training data, by reweighting posterior draws. It therefore needs
# a predictive distribution that averages over draws. For methods that predict with a single distribution, such as
# MNVI, the exported log-likelihood is that of sampled weights.

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about Pareto k; we count the large values instead
    loo = az.loo(posterior, pointwise=True)
estimate = float(getattr(loo, "elpd", None) or loo.elpd_loo) / len(train[0])
trusted = float((loo.pareto_k <= 0.7).mean())
print(f"VOGN, nats per example: LOO {estimate:.3f} ({trusted:.0%} of terms reliable);")
print(f"held-out data {predictions['VOGN'].log_likelihood().mean():.3f}")

# %%
# We recommend comparing methods on held-out data, each with the prediction rule that will be used. The figure shows the
# scores with their standard errors:

dvi.plots.compare(predictions, metrics=["nll", "rmse", "crps"])
plt.show()
