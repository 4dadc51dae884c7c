# SPDX-License-Identifier: Apache-2.0
"""
Posterior analysis of a regression
==================================

What comes after training: checks of the prior, of convergence and of the predictions, scores, bands, and ArviZ. Four
posteriors of one small network are compared on one-dimensional data with a gap, where everything can be seen.

As a script, ``python examples/tutorials/posterior_analysis.py`` writes the figures and the posteriors into a folder.
"""

# sphinx_gallery_thumbnail_number = 5

import argparse
import copy
import textwrap
import warnings
from pathlib import Path

import arviz as az
import matplotlib.pyplot as plt
import pandas as pd
import pyro
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import ClippedAdam
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.diagnostics import compare_held_out
from pyro_dvi.laplace import Dense

parser = argparse.ArgumentParser(description="Compare four posteriors of a regression.")
parser.add_argument(
    "--epochs", type=int, default=300, help="steps of training (default: 300)"
)
parser.add_argument(
    "--output-dir",
    type=Path,
    default=Path("posterior_analysis_output"),
    help="for the files",
)
options = parser.parse_args()
if options.epochs < 1:
    parser.error("--epochs must be positive")
options.output_dir.mkdir(parents=True, exist_ok=True)
plt.rcParams["figure.max_open_warning"] = 0  # a gallery shows all of them


def save(name: str) -> None:
    """Write the last figure into the folder."""
    plt.gcf().savefig(options.output_dir / f"{name}.png", dpi=100)


# %%
# Data and model
# --------------
#
# Sixty points of a smooth function with noise of a known standard deviation, 0.1, and none between -0.5 and 0.5. Two
# hundred more points of the same kind are held out: no posterior sees them, and they decide which one is good.

NOISE = 0.1


def function(x):
    """Return what the noise is added to."""
    return 0.5 * torch.sin(2 * x) + 0.3 * x


def draw(count, seed):
    """Return inputs outside of the gap, and observations."""
    random = torch.Generator().manual_seed(seed)
    side = torch.where(torch.rand(count, generator=random) < 0.5, -1.0, 1.0)
    x = side * (0.5 + 2 * torch.rand(count, generator=random))
    return x.unsqueeze(-1), function(x) + NOISE * torch.randn(count, generator=random)


train, held_out = draw(60, seed=0), draw(200, seed=1)
grid = torch.linspace(-4, 4, 161).unsqueeze(-1)

pyro.set_rng_seed(0)
network = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1))


def make_model(first_layer=2.0, second_layer=0.5):
    """A Bayesian copy of the network, so that all methods start from the same weights."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    net = copy.deepcopy(network)
    dvi.to_bayesian_(net, prior_scale={"0.*": first_layer, "2.*": second_layer})
    return dvi.regressor(net, num_data=len(train[0]), noise_scale=NOISE)


# %%
# The prior, before any training
# ------------------------------
#
# Could the prior have produced these data? It draws data sets at the inputs of the training set and compares a few of
# their statistics. Priors of scale 3, which look harmless weight by weight, add up to functions that spread much
# further than the data do:

print(dvi.prior_predictive_check(make_model(3.0, 3.0), train, seed=0))

# %%
# Scales of 2 and 0.5 keep the data possible and expect less of what they are not:

check = dvi.prior_predictive_check(make_model(), train, seed=0)
print(check)
dvi.plots.prior_predictive(check)
save("prior_check")


# %%
# Four posteriors
# ---------------
#
# *Variational Laplace* penalises squared gradients at the mean, *MNVI* passes moments through the network, *VOGN*
# reads the precision off squared gradients at draws, *Laplace* puts the Gaussian of the dense Gauss-Newton matrix
# around the mode. The KL weight is 1 throughout, which is Bayes' rule.

METHODS = {
    "Variational Laplace": (
        dvi.MeanFieldGuide,
        dvi.TaylorELBO(curvature=dvi.curvature.GGNDiagonal()),
    ),
    "MNVI": (dvi.MultiplicativeNoiseGuide, dvi.MomentPropagationELBO()),
    "VOGN": (dvi.NaturalGradientGuide, dvi.NaturalGradientELBO()),
    "Laplace": (dvi.LaplaceGuide, Trace_ELBO()),
}
batches = [train]  # sixty points are one minibatch; any DataLoader will do


def fit(name, epochs):
    """Train one method; return model, guide, history, and the posterior scales of a tenth of the training ago."""
    model = make_model()
    make_guide, elbo = METHODS[name]
    guide = make_guide(model)
    decay = 0.1 ** (1 / epochs)
    adam = ClippedAdam(dvi.learning_rates(0.02, scale_multiplier=10, lrd=decay))
    optimizer = dvi.VOGN({"lr": 0.3}) if name == "VOGN" else adam
    earlier = {}

    def remember(state):
        if name != "Laplace" and state.epoch == epochs - max(1, epochs // 10):
            earlier.update(dvi.scale_snapshot(guide))

    svi = SVI(model, guide, optimizer, elbo)
    history = dvi.fit(svi, batches, epochs, callbacks=[remember], progress=False)
    if name == "Laplace":
        guide.polish(
            batches, progress=False
        )  # to the minimum, where the Gaussian belongs
        guide.fit(batches, Dense())
    return model, guide, history, earlier or None


# First a training that is too short, for the next section. (Pyro's parameter store knows guides of one class by the
# same names: predict with the first before the second is trained, or train the one that you keep last.)
_, hasty, _, hasty_earlier = fit("Variational Laplace", max(3, options.epochs // 10))
hasty_report = dvi.scale_report(hasty, earlier=hasty_earlier)
fitted = {name: fit(name, options.epochs) for name in METHODS}

# %%
# Has training ended?
# -------------------
#
# The loss looks flat long before the variances have arrived. The report compares the posterior scales with the
# prior, with their start, and with those of a tenth of the training ago. Here is Variational Laplace, stopped early:

print(hasty_report)

# %%
# And the full training of each, where less moves. Variational Laplace, MNVI and VOGN are near their rest, not
# quite at it.

for name, (_, guide, _, earlier) in fitted.items():
    print(
        textwrap.fill(f"{name}: {dvi.scale_report(guide, earlier=earlier).verdict}"),
        end="\n\n",
    )

dvi.plots.training_history(fitted["Variational Laplace"][2])
save("training_history")

# %%
# Which weights have the data determined? At one, on the dashed line, a weight is as uncertain as its prior. Weights
# with a mean well below their standard deviation could as well be zero.

_, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
dvi.plots.posterior_scales(fitted["Variational Laplace"][1], ax=axes[0])
dvi.plots.signal_to_noise(fitted["Variational Laplace"][1], ax=axes[1])
save("posterior_scales")
print(dvi.signal_to_noise(fitted["Variational Laplace"][1]))

# %%
# Predictions by the rule of each guide
# -------------------------------------
#
# Without ``method=``, ``predict`` takes the rule that suits the guide: the posterior mean for Variational Laplace,
# propagated moments for MNVI, draws for VOGN, linearisation for Laplace. Draws are kept, so that mixtures have
# quantiles and exact scores.

own = {
    name: dvi.predict(model, guide, held_out, seed=0, keep_draws=True)
    for name, (model, guide, *_) in fitted.items()
}
for name, prediction in own.items():
    print(f"{name:20} {prediction.method}")

scores = pd.DataFrame({name: prediction.metrics() for name, prediction in own.items()}).T
print(scores.round(3).to_string())

# %%
# Bars of one standard error overlap, but scores on the same data are correlated: the table of pairs below says more.

dvi.plots.compare(own, metrics=["nll", "rmse", "crps"])
save("scores")

# %%
# A prediction is a table, too:

print(own["VOGN"].to_dataframe().head().round(3).to_string())

# %%
# Bands
# -----
#
# The dark band is what more data could tell (epistemic), the light one adds the noise. Draws give both parts. Where one
# distribution stands for both, and the noise is known, the difference is the epistemic part. The dotted line is the
# function that made the data.

figure, axes = plt.subplots(
    2, 2, figsize=(10, 7), layout="constrained", sharex=True, sharey=True
)
for ax, (name, (model, guide, *_)) in zip(axes.flat, fitted.items(), strict=True):
    band = dvi.predict(model, guide, grid, seed=0)
    parts = {
        "mean": band.mean,
        "variance": band.variance,
        "epistemic": (band.variance - NOISE**2).clamp_min(0),
    }
    dvi.plots.regression_band(grid, parts, data=train, ax=ax)
    ax.plot(grid, function(grid), color="black", linestyle=":")
    ax.get_legend().remove()
    ax.set_title(name, loc="left")
    ax.label_outer()
figure.legend(
    *axes[0, 0].get_legend_handles_labels(),
    loc="outside upper center",
    ncols=4,
    frameon=False,
)
save("bands")

# %%
# At the mean, Variational Laplace has no epistemic part: its gap looks like any other place. MNVI and VOGN have one, of
# about the same width everywhere: weights that are independent can hardly be surer among the data than beside them.
# Laplace's dense Gaussian knows that weights depend on each other, and is the one that opens in the gap and outside.
# Outside, none of them reaches the function, and none can know.

# %%
# Why not simply draw weights?
# ----------------------------
#
# Every posterior can be sampled. Whether the draws *predict* well is another matter: the Gaussians of Variational
# Laplace and Laplace describe the loss near one point, to second order, and independent or linearised draws leave that
# neighbourhood. The library says so where it knows:

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    raw = {
        name: dvi.predict(model, guide, held_out, dvi.Samples(500), seed=0)
        for name, (model, guide, *_) in fitted.items()
    }
print(
    *(textwrap.fill(text) for text in {str(warning.message) for warning in caught}),
    sep="\n",
)

# %%
# Held-out log scores of both, pair by pair with the best; ``dse`` is the standard error of the difference:

both = {f"{name}, own rule": prediction for name, prediction in own.items()}
both |= {f"{name}, drawn weights": prediction for name, prediction in raw.items()}
ranking = compare_held_out(both)
print(ranking.round(1).to_string())

# %%
# ArviZ
# -----
#
# ``to_arviz`` returns ``InferenceData`` (ArviZ 0.x) or a ``DataTree`` (1.x) with the posterior, predictive draws and
# data. Predictions are those of the rule: here each guide's own.

dims = {"net.2.weight": ["output", "hidden"]}
posteriors = {
    name: dvi.to_arviz(model, guide, train, prior=200, history=history, dims=dims, seed=0)
    for name, (model, guide, history, _) in fitted.items()
}
posteriors["Variational Laplace"].to_netcdf(options.output_dir / "variational_laplace.nc")
again = az.from_netcdf(options.output_dir / "variational_laplace.nc")
for group in (
    "posterior",
    "prior",
    "posterior_predictive",
    "observed_data",
    "constant_data",
):
    print(f"{group:21} {dict(again[group].sizes)}")

# %%
# Summaries and plots of ArviZ take it as it is. There is one chain of independent draws: ``r_hat`` has nothing to say,
# and effective sizes are near the number of draws.

few = {"hidden": range(10)}  # of thirty units
print(az.summary(again, var_names=["net.2.weight"], coords=few, kind="stats").to_string())

az.plot_forest(again, var_names=["net.2.weight"], coords=few, combined=True)
save("forest")


# %%
# Posterior predictive checks: could the model, with its rule, have produced the data of the training?


def predictive_check(posterior):
    """Draw data sets of the posterior and that of the training."""
    if hasattr(az, "plot_ppc_dist"):  # ArviZ 1.x
        return az.plot_ppc_dist(posterior, num_samples=50)
    return az.plot_ppc(posterior, num_pp_samples=50, random_seed=0)


predictive_check(posteriors["Variational Laplace"])
save("predictive_check")

# %%
# Leave-one-out, and what it compares
# -----------------------------------
#
# ``az.loo`` estimates from the data of the *training* what the score of new data would be, by reweighting draws of the
# posterior. It needs a predictive that averages over draws that differ. One distribution (at the mean, by moments,
# linearised) would give every draw the same weight. Its export therefore leaves ``log_likelihood`` out and says so:

print(posteriors["Variational Laplace"].attrs["log_likelihood_left_out"])

# %%
# So each is exported once more, as what it is when its weights are drawn. For VOGN that is its own rule; for the others
# it is something else, and that is what LOO ranks.

with warnings.catch_warnings():
    warnings.simplefilter(
        "ignore"
    )  # of drawn weights, as above, and of Pareto k, counted below
    drawn = {
        name: dvi.to_arviz(
            model, guide, train, method=dvi.Samples(500), sites="net.2.weight", seed=0
        )
        for name, (model, guide, *_) in fitted.items()
    }
    print(az.compare(drawn).to_string())
    loo = {name: az.loo(posterior, pointwise=True) for name, posterior in drawn.items()}

# %%
# Three answers to one question, in nats for each example: LOO of drawn weights, with the share of points where the
# estimate can be trusted (a Pareto k of at most 0.7), held-out scores of the same draws, and held-out scores of the
# rule that belongs to the guide.

answers = pd.DataFrame(
    {
        "LOO": {
            name: float(r.elpd if hasattr(r, "elpd") else r.elpd_loo) / len(train[0])
            for name, r in loo.items()
        },
        "trusted": {name: float((r.pareto_k <= 0.7).mean()) for name, r in loo.items()},
        "held out, drawn": {
            name: -prediction.metrics()["nll"] for name, prediction in raw.items()
        },
        "held out, own rule": {
            name: -prediction.metrics()["nll"] for name, prediction in own.items()
        },
    }
)
print(answers.round(2).to_string())
answers.to_csv(options.output_dir / "answers.csv")

# %%
# Held-out data put Laplace and Variational Laplace first, by their own rules, and last by far if their weights are
# drawn. LOO sees the draws only: it would throw out the two best predictors, and even for VOGN, which is trained by
# draws and predicted by them, about half of its terms cannot be trusted. Compare what you will use: the
# rule, on data that no posterior has seen.
