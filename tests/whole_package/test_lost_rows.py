# SPDX-License-Identifier: Apache-2.0
"""Every way to leave out observations gives, in every engine, what the same model gives without these rows."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Sampler, Subset, TensorDataset

import pyro_dvi as dvi
from pyro_dvi import curvature, laplace
from pyro_dvi.natural_gradients import LayerFisher

ROWS, KEPT = 12, [1, 5, 8]
KEEP = torch.zeros(ROWS, dtype=torch.bool).index_fill_(0, torch.tensor(KEPT), True)


class Regression(nn.Module):
    """A perceptron whose likelihood leaves out rows in one of several ways."""

    def __init__(self, way: str, keep: torch.Tensor, share: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)]
        self.net = dvi.to_bayesian_(nn.Sequential(*layers).double())
        self.way, self.keep, self.share = way, keep, share

    def forward(self, x, y=None):
        f = self.net(x).squeeze(-1)
        n, keep, way = len(x), self.keep, self.way
        fn = dist.Normal(f, 0.7)
        if way == "NaN":
            fn = dist.NanMaskedNormal(f, 0.7)
        elif way == "vectors with NaN":
            f, y = f.unsqueeze(-1), None if y is None else y.unsqueeze(-1)
            fn = dist.NanMaskedMultivariateNormal(f, 0.49 * torch.eye(1).to(f))
        elif way == "masked":
            fn = fn.mask(keep)
        elif way == "masked event":
            f, y = f.unsqueeze(-1), None if y is None else y.unsqueeze(-1)
            fn = dist.Normal(f, 0.7).mask(keep.unsqueeze(-1)).to_event(1)
        rows = {"subsample": torch.tensor(KEPT)} if way == "rows" else {"subsample": torch.arange(n)}
        if way == "size":
            rows = {"subsample_size": n}
        with pyro.plate("data", self.share * n, **rows):
            if way == "mask":
                with poutine.mask(mask=keep):
                    return pyro.sample("y", fn, obs=y)
            if way == "weights":
                with poutine.scale(scale=keep.double()):
                    return pyro.sample("y", fn, obs=y)
            return pyro.sample("y", fn, obs=y, obs_mask=keep if way == "obs_mask" else None)


WAYS = ("mask", "masked", "masked event", "weights", "NaN", "vectors with NaN")


def problem(way, keep=KEEP, share=1, seed=1):
    """Return the model and its data."""
    pyro.clear_param_store()
    x, y = torch.randn(2, ROWS, 2, generator=torch.Generator().manual_seed(seed)).double()
    y = y[:, 0].clone()
    if way in ("removed", "rows", "size"):
        x, y = x[keep], y[keep]
    elif "NaN" in way:
        y = y.masked_fill(~keep, math.nan)
    return Regression(way, keep, share), x, y


def penalty(kind):
    """Return a function that gives the loss and the penalty of a curvature."""

    def run(model, x, y):
        guide, elbo = dvi.MeanFieldGuide(model), dvi.TaylorELBO(curvature=kind)
        guide.initialize(x, y)
        return [elbo.loss(model, guide, x, y), *(float(v) for v in elbo.terms.values())]

    return run


def fisher(model, x, y):
    """Average over labels."""
    torch.manual_seed(0)
    guide, elbo = dvi.MeanFieldGuide(model), dvi.TaylorELBO(curvature=curvature.Fisher(200))
    elbo.loss(model, guide, x, y)
    return [float(elbo.terms["penalty"])]


def moments(guide_class, **options):
    def run(model, x, y):
        torch.manual_seed(0)
        guide, elbo = guide_class(model), dvi.MomentPropagationELBO(**options)
        guide.initialize(x, y)
        torch.manual_seed(0)
        return [float(elbo.differentiable_loss(model, guide, x, y))]

    return run


def natural(optimizer, guide_class=dvi.NaturalGradientGuide):
    """Return a function that gives means and spreads after four steps.

    Damping and initial curvature are in units of one row. The rows of the plate count, also masked ones, so that steps
    read no masks. The optimizer is therefore made for a share of its units: in sum over rows, all ways have the same.
    """

    def run(model, x, y):
        guide = guide_class(model)
        whole = model.way in ("removed", "weights", "rows", "size")
        share = 1.0 if whole else len(x[model.keep]) / len(x)
        svi = SVI(model, guide, optimizer(share), loss=dvi.NaturalGradientELBO())
        guide.initialize(x, y)
        torch.manual_seed(0)
        for _ in range(4):
            svi.step(x, y)
        return [float(p.detach().sum()) for p in guide.parameters()]

    return run


def gaussian(method):
    """Return a function that gives the covariance of outputs at the mode."""

    def run(model, x, y):
        guide = dvi.LaplaceGuide(model)
        guide.polish([(x, y)], progress=False)
        guide.fit([(x, y)], method)
        model.keep = model.keep.new_ones(4)
        model.way = model.way if "NaN" in model.way else "removed"  # the family stays
        query = torch.randn(4, 2, generator=torch.Generator().manual_seed(2)).double()
        return guide.predictive(query).full_covariance.flatten().tolist()

    return run


def scores(method):
    def run(model, x, y):
        guide = dvi.MeanFieldGuide(model)
        guide.initialize(x, y)
        return list(dvi.predict(model, guide, (x, y), method=method).metrics().values())

    return run


KFAC = {"lr": 0.1, "factor_interval": 1, "inverse_interval": 1}
ENGINES = {
    "GGN diagonal": penalty(curvature.GGNDiagonal()),
    "empirical Fisher": penalty(curvature.EmpiricalFisher()),
    "gradient of the minibatch": penalty(curvature.MinibatchGradient()),
    "Hessian diagonal": penalty(curvature.HessianDiagonal()),
    "Fisher": fisher,
    "moments": moments(dvi.MeanFieldGuide),
    "MNVI": moments(dvi.MultiplicativeNoiseGuide),
    "weighted moments": moments(dvi.MeanFieldGuide, weighting=dvi.moment_propagation.VarianceWeighted(0.5)),
    "VOGN": natural(lambda unit: dvi.VOGN({"lr": 0.1, "damping": 0.1 * unit, "initial_curvature": unit})),
    "OGN": natural(lambda unit: dvi.OGN({"lr": 0.1})),
    "IVON": natural(lambda unit: dvi.IVON({"lr": 0.1, "damping": 0.1 * unit})),
    "noisy K-FAC": natural(
        lambda unit: dvi.NoisyKFAC(
            {**KFAC, "damping": 0.1 * unit, "estimate": LayerFisher(at_mean=True, observed=True)}
        ),
        dvi.KroneckerGuide,
    ),
    "Dense": gaussian(laplace.Dense()),
    "Dense Hessian": gaussian(laplace.Dense(laplace.Hessian())),
    "Diagonal": gaussian(laplace.Diagonal()),
    "Kronecker": gaussian(laplace.KroneckerFactored()),
    "Functional": gaussian(laplace.Functional()),
    "scores": scores(dvi.AtMean()),
    "scores of moments": scores(dvi.Moments()),
}

# A weight of zero leaves out a row from the likelihood, but its value is still predicted and scored.
DIFFERENT = {(name, "weights") for name in ("scores", "scores of moments", "weighted moments")}


def check(name, way, expected, **options):
    """Compare an engine's result with the result without the rows."""
    with pyro.validation_enabled(way != "weights"):  # Pyro accepts weights of zero only without checks
        found = ENGINES[name](*problem(way, **options))
    close = {"rel": 0.35} if name == "Fisher" else {"rel": 1e-6, "abs": 1e-8}
    assert found is None or found == pytest.approx(expected, **close), way


@pytest.mark.every(8)
@pytest.mark.filterwarnings("ignore")  # of the few rows
@pytest.mark.parametrize("name", ENGINES)
def test_rows_that_are_left_out_do_not_count(name):
    expected = ENGINES[name](*problem("removed"))
    for way in WAYS:
        if (name, way) not in DIFFERENT:
            check(name, way, expected)


MINIBATCHES = [
    name for name, run in ENGINES.items() if run.__qualname__.split(".")[0] not in ("gaussian", "scores")
]


@pytest.mark.every(4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MINIBATCHES)
def test_rows_that_are_left_out_of_a_minibatch_do_not_count(name):
    expected = ENGINES[name](*problem("removed", share=2))
    for way in ("mask", "NaN"):
        check(name, way, expected, share=2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MINIBATCHES)
def test_a_plate_counts_its_rows_however_they_are_given(name):
    expected = ENGINES[name](*problem("removed", share=3))
    for way in ("rows", "size"):
        if way == "rows" or name not in ("VOGN", "IVON"):  # Pyro draws rows and shifts the random numbers
            check(name, way, expected, share=3)


METHODS = {
    "VariationalLaplace": dvi.VariationalLaplace(),
    "moments": dvi.MomentPropagation(posterior=dvi.MeanFieldGuide),
    "MNVI": dvi.MomentPropagation(),
    **{by.__name__: dvi.NaturalGradients(by=by) for by in (dvi.VOGN, dvi.IVON, dvi.NoisyKFAC)},
    "MAP": dvi.MAP(),
    "Laplace": dvi.Laplace(),
}


class Own(Sampler):
    """A sampler of which only an epoch shows the rows."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


LOADERS = {
    "indices": lambda data: DataLoader(data, 2, sampler=[1, 5, 8, 9]),
    "batches of indices": lambda data: DataLoader(data, batch_sampler=[[1, 5], [8, 9]]),
    "batch sampler": lambda data: DataLoader(data, batch_sampler=BatchSampler(Own([1, 5, 8, 9]), 2, False)),
    "own sampler": lambda data: DataLoader(data, 2, sampler=Own([1, 5, 8, 9])),
    "subset": lambda data: DataLoader(Subset(data, [1, 5, 8, 9]), 2),
    "dropped": lambda data: DataLoader(Subset(data, [1, 5, 8, 9, 3]), 2, drop_last=True),
}


@pytest.mark.filterwarnings("ignore")  # of the few rows
@pytest.mark.parametrize("method", METHODS)
def test_rows_that_a_loader_never_yields_do_not_count(method):
    """Networks, so that the size of the data set is the one that the loader gives."""
    x, y = torch.randn(2, ROWS, 2, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, y[:, :1])

    def outputs(loader):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        posterior = METHODS[method].fit(net, loader, epochs=3, progress=False)
        prediction = posterior.predict(x, seed=0)
        return torch.stack([prediction.mean, prediction.variance])

    expected = outputs(DataLoader(TensorDataset(*data[[1, 5, 8, 9]]), 2))
    for way, make in LOADERS.items():
        torch.testing.assert_close(outputs(make(data)), expected, rtol=1e-4, atol=1e-5, msg=way)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ENGINES)
def test_latents_in_the_place_of_rows_are_refused_in_training(name):
    """With ``obs_mask``, a factorised posterior would have the precision of all rows."""
    if "scores" in name:
        return check(name, "obs_mask", ENGINES[name](*problem("removed")))
    with pytest.raises(dvi.errors.ModelError, match=r"'y_unobserved', .*poutine\.mask.*obs_mask"):
        ENGINES[name](*problem("obs_mask"))


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(20))
def test_any_rows_may_be_left_out(seed):
    keep = torch.rand(ROWS, generator=torch.Generator().manual_seed(seed)) < 0.5
    keep[seed % ROWS] = True
    for name in ENGINES:
        expected = ENGINES[name](*problem("removed", keep, seed=seed))
        for way in WAYS:
            if (name, way) not in DIFFERENT and name != "Fisher":
                check(name, way, expected, keep=keep, seed=seed)
