# SPDX-License-Identifier: Apache-2.0
"""Nothing that the library does keeps tensors alive when it is done: every public entry, again and again.

The networks have functions that save their own output for the backward pass (tanh, sigmoid), whose node and output keep
each other alive where the output is saved as it is.
"""

import io
from collections.abc import Callable
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import pyro
import pytest
import torch
from pyro.infer import SVI, Predictive
from pyro.infer.autoguide import AutoDelta, init_to_value
from torch import Tensor, nn

import pyro_dvi as dvi
from pyro_dvi import bayesian, curvature, diagnostics, guides, laplace, training
from tests.whole_package.live_tensors import growth

Call = Callable[[], object]
ENTRIES: dict[str, Callable[[], Call]] = {}
ROWS = 8


def entry(name: str, *options: Any) -> Callable[[Callable[..., Call]], Callable[..., Call]]:
    """Add what the function returns, which is called again and again, to the table."""

    def decorator(make: Callable[..., Call]) -> Callable[..., Call]:
        assert name not in ENTRIES
        ENTRIES[name] = lambda: make(*options)
        return make

    return decorator


def entries(table: dict[str, Any]) -> Callable[[Callable[..., Call]], Callable[..., Call]]:
    """Add one entry for each row of a table."""

    def decorator(make: Callable[..., Call]) -> Callable[..., Call]:
        for name, option in table.items():
            entry(name, option)(make)
        return make

    return decorator


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, 2, generator=generator), torch.arange(ROWS) % 3


def batches() -> list[tuple[Tensor, Tensor]]:
    return [(x.clone(), y.clone()) for x, y in zip(*(part.split(4) for part in data()), strict=True)]


def classifier() -> Any:
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 3))
    return dvi.classifier(dvi.to_bayesian_(net), num_data=ROWS)


def regressor(**noise: Any) -> tuple[Any, tuple[Tensor, Tensor]]:
    net = dvi.to_bayesian_(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1), nn.Flatten(0)))
    return dvi.regressor(net, num_data=ROWS, **noise), (data()[0], data()[0].sum(1))


# Objectives ---------------------------------------------------------------------------------------------------------


def taylor(kind: Any) -> Callable[[Any], tuple[Any, Any, Any]]:
    return lambda model: (
        dvi.MeanFieldGuide(model),
        dvi.optim.Adam({"lr": 0.01}),
        dvi.TaylorELBO(curvature=kind),
    )


def moments(guide: Any) -> Callable[[Any], tuple[Any, Any, Any]]:
    return lambda model: (guide(model), pyro.optim.Adam({"lr": 0.01}), dvi.MomentPropagationELBO())


def natural(optimizer: Any) -> Callable[[Any], tuple[Any, Any, Any]]:
    return lambda model: (dvi.NaturalGradientGuide(model), optimizer({"lr": 0.05}), dvi.NaturalGradientELBO())


def sampled(guide: Any) -> Callable[[Any], tuple[Any, Any, Any]]:
    return lambda model: (guide(model), dvi.optim.Adam({"lr": 0.01}), dvi.SampledELBO())


def parallel(model: Any) -> tuple[Any, Any, Any]:
    return dvi.MeanFieldGuide(model), dvi.optim.Adam({"lr": 0.01}), training.DataParallel(dvi.TaylorELBO())


OBJECTIVES = {
    "Taylor, empirical Fisher": taylor(curvature.EmpiricalFisher()),
    "Taylor, Fisher": taylor(curvature.Fisher()),
    "Taylor, Gauss-Newton": taylor(curvature.GGNDiagonal()),
    "Taylor, Hessian": taylor(curvature.HessianDiagonal()),
    "Taylor, minibatch gradient": taylor(curvature.MinibatchGradient()),
    "moments, mean field": moments(dvi.MeanFieldGuide),
    "moments, multiplicative noise": moments(dvi.MultiplicativeNoiseGuide),
    "moments, last layer": moments(lambda model: dvi.LastLayerGuide(model, "net.4")),
    "draws": sampled(dvi.MeanFieldGuide),
    "MAP": sampled(AutoDelta),
    "VOGN": natural(dvi.VOGN),
    "OGN": natural(dvi.OGN),
    "IVON": natural(dvi.IVON),
    "several processes": parallel,
}


def svi_of(parts: Callable[[Any], tuple[Any, Any, Any]]) -> SVI:
    model = classifier()
    return SVI(model, *parts(model))


@entries({f"{name}: step": parts for name, parts in OBJECTIVES.items()})
def step(parts: Any) -> Call:
    svi, batch = svi_of(parts), data()
    return lambda: svi.step(*batch)


@entries({f"{name}: evaluate_loss": parts for name, parts in OBJECTIVES.items()})
def evaluate(parts: Any) -> Call:
    svi, batch = svi_of(parts), data()
    return lambda: svi.evaluate_loss(*batch)


@entries({f"{name}: ELBOModule": parts for name, parts in OBJECTIVES.items()})
def elbo_module(parts: Any) -> Call:
    def make() -> Any:
        model = classifier()
        guide, _, elbo = parts(model)
        guide(*data())
        return elbo(model, guide)

    local = pyro.settings.context(module_local_params=True)
    module = local(make)()

    def call() -> None:
        module.zero_grad()
        module(*data()).backward()

    return local(call)


@entries({f"{name}: a loss without its backward pass": parts for name, parts in OBJECTIVES.items()})
def loss_alone(parts: Any) -> Call:
    svi, batch = svi_of(parts), data()
    elbo = svi.loss.__self__
    return lambda: elbo.differentiable_loss(svi.model, svi.guide, *batch)


@entries({f"{name}: fit": OBJECTIVES[name] for name in ("Taylor, Fisher", "moments, mean field", "VOGN")})
def fit(parts: Any) -> Call:
    svi, loader = svi_of(parts), batches()
    stopping = training.EarlyStopping(patience=9)
    return lambda: dvi.fit(svi, loader, epochs=1, validate=loader, early_stopping=stopping, progress=False)


@entry("a learned noise, weighted examples: step")
def heteroscedastic() -> Call:
    net = dvi.to_bayesian_(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)))
    model, batch = dvi.regressor(net, num_data=ROWS, noise_scale=bayesian.Heteroscedastic()), regressor()[1]
    guide = dvi.MeanFieldGuide(model)
    elbo = dvi.MomentPropagationELBO(weighting=dvi.moment_propagation.VarianceWeighted())
    svi = SVI(model, guide, dvi.optim.Adam({"lr": 0.01}), elbo)
    return lambda: svi.step(*batch)


# Guides -------------------------------------------------------------------------------------------------------------

GUIDES = {
    "MeanFieldGuide": dvi.MeanFieldGuide,
    "MeanFieldGuide, per site": lambda model: dvi.MeanFieldGuide(model, scale=dvi.guides.PerSite()),
    "MultiplicativeNoiseGuide": dvi.MultiplicativeNoiseGuide,
    "NaturalGradientGuide": dvi.NaturalGradientGuide,
    "LastLayerGuide": lambda model: dvi.LastLayerGuide(model, "net.4", rest=dvi.MeanFieldGuide),
    "LaplaceGuide": lambda model: fitted(laplace.Diagonal())[0],
}


@entries(GUIDES)
def guide_methods(make: Any) -> Call:
    model = classifier()
    guide, batch = make(model), data()
    guide(*batch)

    def call() -> None:
        guide(*batch), guide.median(*batch), guide.quantiles([0.1, 0.9], *batch)
        if isinstance(guide, guides.FactorisedGuide):
            guide.sample((3,)), guide.initial_scales()
            guide.get_posterior(*batch) if not isinstance(guide, dvi.LaplaceGuide) else None
        file = io.BytesIO()
        torch.save(guide.state_dict(), file)
        file.seek(0)
        guide.load_state_dict(torch.load(file))
        diagnostics.signal_to_noise(guide)
        dvi.diagnostics.scale_report(guide, earlier=dvi.diagnostics.scale_snapshot(guide))

    return call


@entry("a posterior as the next prior")
def as_prior() -> Call:
    model = classifier()
    guide = dvi.MeanFieldGuide(model)
    guide(*data())
    batch = data()

    def call() -> None:
        pyro.clear_param_store()
        next_model = guide.as_prior()(model)
        SVI(next_model, dvi.MeanFieldGuide(next_model), dvi.optim.Adam({"lr": 0.01}), dvi.TaylorELBO()).step(
            *batch
        )

    return call


# Laplace ------------------------------------------------------------------------------------------------------------

METHODS = {
    "Dense": laplace.Dense(),
    "Dense, Hessian": laplace.Dense(laplace.Hessian()),
    "Diagonal": laplace.Diagonal(),
    "Diagonal, Hessian": laplace.Diagonal(laplace.Hessian()),
    "KroneckerFactored": laplace.KroneckerFactored(),
    "Functional": laplace.Functional(),
    "TopEigen": laplace.TopEigen(5),
    "ConjugateGradient": laplace.ConjugateGradient(),
    "PosteriorSamples": laplace.PosteriorSamples(3),
}
ACCEPT = "accept"


def known_noise() -> Any:
    return regressor(noise_scale=0.5)[0]


def laplace_guide(make: Any = classifier, mode: Any = None) -> tuple[Any, Any, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = make()
    start = {} if mode is None else {"init_loc_fn": init_to_value(values=mode)}
    guide = dvi.LaplaceGuide(model, **start)
    guide.initialize(*data())
    return guide, model, batches()


@cache
def mode_of(make: Any) -> dict[str, Tensor]:
    guide, _, loader = laplace_guide(make)
    guide.polish(loader, progress=False)
    return guide.median()


def polished(make: Any = classifier) -> tuple[Any, Any, list[tuple[Tensor, Tensor]]]:
    return laplace_guide(make, mode_of(make))


def fitted(method: Any) -> tuple[Any, Any, list[tuple[Tensor, Tensor]]]:
    guide, model, loader = polished()
    guide.fit(loader, method, unconverged=ACCEPT)
    return guide, model, loader


@entries({f"LaplaceGuide.fit, {name}": method for name, method in METHODS.items()})
def laplace_fit(method: Any) -> Call:
    guide, _, loader = polished()
    return lambda: guide.fit(loader, method, unconverged=ACCEPT)


@entries({f"LaplaceGuide: predictions, {name}": method for name, method in METHODS.items()})
def laplace_predictions(method: Any) -> Call:
    guide, model, _ = fitted(method)
    x = data()[0]

    def call() -> None:
        guide.predictive(x)
        guide.predictive(x[:4], joint=True)
        dvi.predict(model, guide, x)

    return call


@entry("HessianFree")
def laplace_hessian_free() -> Call:
    guide, _, loader = polished(known_noise)
    x = data()[0][:1]

    def call() -> None:
        guide.fit(loader, laplace.HessianFree(), unconverged=ACCEPT)
        guide.predictive(x)

    return call


@entry("LaplaceGuide.polish")
def polish() -> Call:
    guide, _, loader = polished()

    def call() -> None:
        with torch.no_grad():
            next(guide.parameters()).add_(0.01)
        guide.polish(loader, progress=False)

    return call


CALLS: dict[str, Callable[..., object]] = {
    "diagnose": lambda guide, loader: guide.diagnose(loader),
    "log_evidence": lambda guide, loader: guide.log_evidence(loader),
    "log_evidence, exactly": lambda guide, loader: guide.log_evidence(loader),
    "log_evidence, by Lanczos": lambda guide, loader: guide.log_evidence(
        loader, determinant=laplace.ByLanczos(2, 5)
    ),
    "tune by evidence": lambda guide, loader: guide.tune(
        loader, values=[0.5, 1.0, 2.0], refinements=1, unconverged=ACCEPT, progress=False
    ),
    "tune by validation": lambda guide, loader: guide.tune(
        loader,
        criterion=laplace.ByValidation(loader),
        values=[0.5, 1.0, 2.0],
        refinements=1,
        unconverged=ACCEPT,
        progress=False,
    ),
    "energy": lambda guide, loader: guide.energy(loader).at(guide.energy(loader).start).gradient,
    "query": lambda guide, loader: list(guide.query(loader[0][0]).rows()),
    "largest_variance": lambda guide, loader: laplace.largest_variance(guide, 3),
}


@entries({f"LaplaceGuide: {name}": call for name, call in CALLS.items()})
def laplace_call(call: Any) -> Call:
    guide, _, loader = fitted(laplace.Diagonal())
    return lambda: call(guide, loader)


@entry("OnlineEvidence")
def online_evidence() -> Call:
    guide, _, loader = laplace_guide()
    online = laplace.OnlineEvidence(guide, loader, every=1)
    svi = SVI(online.model, guide, dvi.optim.Adam({"lr": 0.01}), dvi.SampledELBO())
    return lambda: dvi.fit(svi, loader, epochs=1, callbacks=[online], progress=False)


# Predictions --------------------------------------------------------------------------------------------------------

RULES = {
    "AtMean": dvi.AtMean(),
    "Samples": dvi.Samples(3),
    "Moments": dvi.Moments(),
    "ReverseDelta": dvi.Moments(propagation=dvi.ReverseDelta()),
}


def posterior() -> tuple[Any, Any]:
    model = classifier()
    guide = dvi.MeanFieldGuide(model)
    guide(*data())
    return model, guide


@entries({f"predict, {name}": rule for name, rule in RULES.items()})
def predict(rule: Any) -> Call:
    model, guide = posterior()
    return lambda: dvi.predict(model, guide, data(), rule, batch_size=4).metrics()


@entries({f"predict with gradients, {name}": rule for name, rule in RULES.items()})
def predict_with_gradients(rule: Any) -> Call:
    model, guide = posterior()
    x = data()[0].requires_grad_()
    return lambda: dvi.predict(model, guide, x, rule)


@entries(
    {f"predictor, {name}": rule for name, rule in RULES.items() if name in ("AtMean", "Samples", "Moments")}
)
def predictor(rule: Any) -> Call:
    model, guide = posterior()
    x = data()[0]
    return lambda: dvi.predictor(model, guide, x, rule, seed=0)(x)


@entry("to_arviz")
def to_arviz() -> Call:
    model, guide = posterior()
    return lambda: dvi.to_arviz(model, guide, data(), 5, prior=5)


@entry("Prediction: everything it is asked for")
def prediction() -> Call:
    model, batch = regressor()
    guide = dvi.MeanFieldGuide(model)
    guide(*batch)

    def call() -> None:
        found = dvi.predict(model, guide, batch, dvi.Samples(5), keep_draws=True)
        found.metrics(), found.quantiles([0.1, 0.9]), found.interval(), found.sample(5), found.crps()
        found.log_likelihood(), found.to_dataframe(), found.draws

    return call


@entry("Pyro's Predictive")
def predictive_of_pyro() -> Call:
    model, guide = posterior()
    return lambda: Predictive(model, guide=guide, num_samples=3)(data()[0])


# Training around it, diagnostics --------------------------------------------------------------------------------------


def train(kl_weight: float = 1.0) -> tuple[Any, Any]:
    model = classifier()
    guide = dvi.MeanFieldGuide(model)
    svi = SVI(model, guide, dvi.optim.Adam({"lr": 0.01}), dvi.TaylorELBO(kl_weight=kl_weight))
    dvi.fit(svi, batches(), epochs=1, progress=False)
    return model, guide


@entry("train_ensemble")
def train_ensemble() -> Call:
    return lambda: dvi.predict(*dvi.train_ensemble(train, num_members=2, progress=False), data()[0])


@entry("tune")
def tune() -> Call:
    return lambda: dvi.tune(train, data(), {"kl_weight": (0.1, 0.3, 1.0)}, max_trainings=3, progress=False)


@entry("train_apart")
def train_apart() -> Call:
    return lambda: training.ensemble.train_apart(train, seed=0)


@entry("save and load")
def save_and_load() -> Call:
    svi, loader = svi_of(OBJECTIVES["VOGN"]), batches()
    dvi.fit(svi, loader, epochs=1, progress=False)

    def call() -> None:
        with TemporaryDirectory() as folder:
            dvi.save(f"{folder}/checkpoint", svi)
            dvi.load(f"{folder}/checkpoint", svi)

    return call


@entry("compare_with_sampling")
def compare_with_sampling() -> Call:
    model, guide = posterior()
    return lambda: dvi.diagnostics.compare_with_sampling(model, guide, data()[0], num_samples=5)


@entry("compare_held_out")
def compare_held_out() -> Call:
    model, guide = posterior()
    return lambda: diagnostics.compare_held_out({"mean": dvi.predict(model, guide, data(), dvi.AtMean())})


@entry("a network made Bayesian, looked at and made deterministic")
def conversion() -> Call:
    def call() -> None:
        model = classifier()
        guide = dvi.MeanFieldGuide(model)
        guide(*data())
        dvi.summary(model, guide, *data()), dvi.bayesian.to_deterministic(model, guide)
        pyro.clear_param_store()

    return call


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pyro_dvi.errors.DviWarning")  # of tiny problems, and modes that are none
@pytest.mark.parametrize("name", ENTRIES)
def test_live_tensors_do_not_grow(name):
    # What torch records, and the trees of ArviZ 1.x, are cycles that only the garbage collector frees.
    found = growth(ENTRIES[name](), collected=name.startswith(("predictor", "tune", "to_arviz")))
    assert (found.storages, found.tensors) == (0, 0), f"{name}: {found}"


def test_a_tensor_that_only_the_graph_holds_is_counted():
    def call() -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            torch.zeros(100, requires_grad=True).tanh()

    assert growth(call, collected=True).storages == 4
