# SPDX-License-Identifier: Apache-2.0
"""Mistakes that users make, the exception each raises, and what its message says to do."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro.infer import SVI
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from torch import Tensor
from torch.distributions import constraints

from pyro_dvi.bayesian import classifier, smooth_activations_, to_bayesian_
from pyro_dvi.curvature import (
    Curvature,
    EmpiricalFisher,
    Fisher,
    GGNDiagonal,
    HessianDiagonal,
    MinibatchGradient,
)
from pyro_dvi.errors import (
    CheckpointError,
    DataError,
    DviWarning,
    GuideError,
    ModelError,
    NonFiniteError,
    ParameterError,
    PyroDviError,
    UnsupportedError,
)
from pyro_dvi.guides import MeanFieldGuide, PerSite, PerWeight, SGDStepSize
from pyro_dvi.laplace import LaplaceGuide, PosteriorSamples
from pyro_dvi.variational_laplace.taylor import TaylorELBO

X = torch.linspace(-1, 1, 6)[:, None] * torch.tensor([1.0, -0.5])
Y = X.sum(1)


def regression(x: Tensor, y: Tensor | None = None, size: int | None = None) -> Tensor:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("data", size or len(x), subsample_size=len(x)):
        return pyro.sample("y", dist.Normal(x @ w + b, 0.5), obs=y)


def likelihood(make: Callable[[Tensor], dist.TorchDistribution]) -> Callable:
    """A model with one latent vector and this observed distribution of x @ w."""

    def model(x: Tensor, y: Tensor | None = None) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", make(x @ w), obs=y)

    return model


def evaluate(
    model: Callable = regression, guide: Any = MeanFieldGuide, args: tuple = (X, Y), **options: Any
) -> None:
    guide = guide(model) if isinstance(guide, type) else guide
    TaylorELBO(**options).loss_and_grads(model, guide, *args)


def unobserved(x: Tensor, y: Tensor) -> None:
    pyro.sample("w", dist.Normal(0.0, 1.0))


def forgotten_obs(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(w * x[:, 0], 1.0))


def hand_written(x: Tensor, y: Tensor | None = None) -> None:
    for name, shape in (("w", [2]), ("b", [])):
        loc = pyro.param(f"{name}_loc", torch.zeros(shape))
        pyro.sample(name, dist.Normal(loc, 0.1).to_event(len(shape)))


def no_plate(x: Tensor, y: Tensor | None = None) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    pyro.sample("y", dist.Normal(x @ w, 0.5).to_event(1), obs=y)


def autoregressive(x: Tensor, y: Tensor | None = None) -> None:
    w = pyro.sample("w", dist.Normal(pyro.param("m", torch.zeros(2)), 0.1).to_event(1))
    pyro.sample("b", dist.Normal(w.sum() * pyro.param("a", torch.ones(())), 0.1))


def student_guide(x: Tensor, y: Tensor | None = None) -> None:
    pyro.sample("w", dist.StudentT(3.0, pyro.param("m", torch.zeros(2)), 0.1).to_event(1))
    pyro.sample("b", dist.Normal(0.0, 0.1))


def incomplete_guide(x: Tensor, y: Tensor | None = None) -> None:
    pyro.sample("w", dist.Normal(pyro.param("m", torch.zeros(2)), 0.1).to_event(1))


def shared_cause(x: Tensor, y: Tensor | None = None) -> None:
    z = pyro.sample(
        "z", dist.Normal(pyro.param("m", torch.zeros(2)), 0.1).to_event(1), infer={"is_auxiliary": True}
    )
    pyro.sample("w", dist.Delta(2 * z).to_event(1))
    pyro.sample("b", dist.Delta(z.sum()))


def discrete_model(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    k = pyro.sample("k", dist.Bernoulli(0.5))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(w * x[:, 0] + k, 1.0), obs=y)


def discrete_guide(x: Tensor, y: Tensor) -> None:
    pyro.sample("w", dist.Normal(pyro.param("m", torch.zeros(())), 0.1))
    pyro.sample("k", dist.Bernoulli(pyro.param("p", torch.tensor(0.5), constraint=constraints.unit_interval)))


def centred(x: Tensor, y: Tensor) -> None:
    s = pyro.sample("s", dist.LogNormal(0.0, 1.0))
    w = pyro.sample("w", dist.Normal(0.0, s).expand([2]).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)


def factor_model(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    pyro.factor("contrast", -((w - 1) ** 2))


def mixed_factor(x: Tensor, y: Tensor) -> None:
    regression(x, y)
    pyro.factor("contrast", torch.zeros(()))


def forgotten_event(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(2, 3), 1.0).to_event(2))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)


def scale_without_plate(x: Tensor, y: Tensor) -> None:
    """Rows can be left out, but the likelihood's weight does not follow."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    pyro.sample("y", dist.Normal(x @ w, 1.0).to_event(1), obs=y)


class Unsampled(dist.TorchDistribution):
    arg_constraints: dict = {}
    support = constraints.real

    def __init__(self, loc: Tensor) -> None:
        self.loc = loc
        super().__init__(loc.shape, validate_args=False)

    def expand(self, batch_shape: torch.Size, _instance: Any = None) -> "Unsampled":
        return Unsampled(self.loc.expand(batch_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        return -((value - self.loc) ** 2)


def with_nan(t: Tensor) -> Tensor:
    t = t.clone()
    t.view(-1)[1] = float("nan")
    return t


def learned_df(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    df = pyro.sample("df", dist.Gamma(2.0, 0.1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.StudentT(df, x @ w, 0.5), obs=y)


def inference_mode() -> None:
    with torch.inference_mode():
        TaylorELBO().loss(regression, MeanFieldGuide(regression), X, Y)


def negative_noise(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, torch.tensor(-1.0)), obs=y)


def deterministic(x: Tensor, y: Tensor) -> None:
    pyro.sample("y", dist.Normal(x.sum(1), 1.0).to_event(1), obs=y)


def three_classes(f: Tensor) -> dist.TorchDistribution:
    return dist.Categorical(logits=torch.stack([f, -f, 2 * f], -1))


@dataclass(frozen=True)
class Mistake:
    name: str
    make: Callable[[], Any]
    error: type[Exception]
    message: str


MISTAKES = [
    # The model
    Mistake(
        "nothing observed",
        lambda: evaluate(unobserved),
        ModelError,
        r"no observed site: pass the observed values.*obs=",
    ),
    Mistake(
        "y is None",
        lambda: evaluate(guide=hand_written, args=(X,)),
        ModelError,
        r"site 'y' is neither observed nor in the guide.*y was None",
    ),
    Mistake("y is None, own guide", lambda: evaluate(args=(X,)), ModelError, r"no observed site"),
    Mistake(
        "obs= forgotten",
        lambda: evaluate(forgotten_obs, lambda x, y: pyro.sample("w", dist.Normal(0.0, 1.0))),
        ModelError,
        r"site 'y' is neither observed nor in the guide",
    ),
    Mistake(
        "to_event forgotten",
        lambda: evaluate(forgotten_event, args=(X, torch.zeros(6, 3))),
        ModelError,
        r"site y.*to_event",
    ),
    Mistake(
        "discrete latent",
        lambda: evaluate(discrete_model),
        ModelError,
        r"latent site 'k' is discrete \(Bernoulli\).*marginalise it",
    ),
    Mistake(
        "negative noise",
        lambda: evaluate(negative_noise),
        ParameterError,
        r"(?s)parameter scale .* of distribution Normal.*GreaterThan.*softplus",
    ),
    Mistake("no latent", lambda: evaluate(deterministic), ModelError, r"no latent site.*to_bayesian_"),
    Mistake(
        "factor has no labels",
        lambda: evaluate(mixed_factor),
        ModelError,
        r"pyro.factor site 'contrast'.*MinibatchGradient",
    ),
    Mistake("only a factor", lambda: evaluate(factor_model), ModelError, r"pyro.factor site 'contrast'"),
    Mistake(
        "factor under GGNDiagonal",
        lambda: evaluate(mixed_factor, curvature=GGNDiagonal()),
        ModelError,
        r"pyro.factor site 'contrast'.*GGNDiagonal",
    ),
    # The guide
    Mistake(
        "full covariance",
        lambda: evaluate(guide=AutoMultivariateNormal),
        GuideError,
        r"'_AutoMultivariateNormal_latent' is MultivariateNormal.*MeanFieldGuide",
    ),
    Mistake(
        "low rank",
        lambda: evaluate(guide=AutoLowRankMultivariateNormal),
        GuideError,
        r"LowRankMultivariateNormal.*not a factorised Gaussian",
    ),
    Mistake(
        "autoregressive",
        lambda: evaluate(guide=autoregressive),
        GuideError,
        r"'b' depends on the value of 'w'.*factorise",
    ),
    Mistake(
        "not Gaussian", lambda: evaluate(guide=student_guide), GuideError, r"'w' is StudentT.*Normal sites"
    ),
    Mistake(
        "discrete guide site",
        lambda: evaluate(discrete_model, discrete_guide),
        GuideError,
        r"'k' is discrete \(Bernoulli\).*TraceEnum_ELBO",
    ),
    Mistake(
        "site missing",
        lambda: evaluate(guide=incomplete_guide),
        ModelError,
        r"site 'b' is neither observed nor in the guide.*add pyro.sample\('b'",
    ),
    Mistake(
        "shared cause",
        lambda: evaluate(guide=shared_cause),
        GuideError,
        r"'z' is a Normal that matches no latent site.*\['w', 'b'\]",
    ),
    Mistake(
        "centred MAP",
        lambda: evaluate(centred, AutoDelta),
        GuideError,
        r"point estimates of 's' and 'w' is unbounded.*non-centred",
    ),
    Mistake(
        "guide of nothing", lambda: MeanFieldGuide(None), TypeError, r"model must be callable, got NoneType"
    ),  # type: ignore[arg-type]
    Mistake(
        "scale as a string",
        lambda: MeanFieldGuide(regression, scale="diag"),
        ValueError,
        r"PerWeight\(\), PerSite\(\).*'diag'",
    ),  # type: ignore[arg-type]
    Mistake("offset", lambda: PerWeight(30.0), ValueError, r"log_offset.*got 30.*try -3"),
    Mistake("offset per site", lambda: PerSite(float("nan")), ValueError, r"log_offset"),
    Mistake(
        "negative step size",
        lambda: SGDStepSize(-1.0, 4),
        ValueError,
        r"lr must be a positive number, not -1.0",
    ),
    Mistake(
        "median too early",
        lambda: MeanFieldGuide(regression).median(),
        GuideError,
        r"guide.initialize\(\*args",
    ),
    Mistake("quantile", lambda: initialised().quantiles([1.5]), ValueError, r"between 0 and 1"),
    # The data
    Mistake(
        "NaN label",
        lambda: evaluate(args=(X, with_nan(Y))),
        DataError,
        r"site 'y' contains 1 NaN or infinite.*drop or mask these rows .*NanMaskedNormal",
    ),
    Mistake(
        "NaN input",
        lambda: evaluate(args=(with_nan(X), Y)),
        DataError,
        r"NaN or infinite values: argument 1 .*Drop these rows",
    ),
    Mistake(
        "label out of range",
        lambda: evaluate(likelihood(three_classes), args=(X, torch.tensor([0, 1, 2, 3, 0, 1]))),
        DataError,
        r"site 'y': labels from 0 to 3, but outputs for 3 classes",
    ),
    Mistake(
        "negative count",
        lambda: evaluate(likelihood(lambda f: dist.Poisson(f.exp())), args=(X, -Y.abs().round() - 1)),
        DataError,
        r"site 'y': values .* do not fit Poisson",
    ),
    Mistake("labels of the wrong length", lambda: evaluate(args=(X, Y[:4])), DataError, r"site 'y'.*shape"),
    Mistake("labels with a column", lambda: evaluate(args=(X, Y[:, None])), PyroDviError, r"y.*shape"),
    Mistake(
        "one-hot labels",
        lambda: evaluate(likelihood(three_classes), args=(X, torch.eye(6, 3))),
        PyroDviError,
        r"y.*shape",
    ),
    Mistake(
        "minibatch without plate",
        lambda: evaluate(no_plate, num_data=600),
        DataError,
        r"site 'y' sees 6 of 600 examples.*pyro.plate",
    ),
    Mistake(
        "plate of the wrong size",
        lambda: evaluate(args=(X, Y, 300), num_data=600),
        DataError,
        r"site 'y' sees 6 of 600 .* scaled to 300 examples. Write pyro.plate.*or correct num_data",
    ),
    # Options
    Mistake(
        "negative KL weight",
        lambda: TaylorELBO(kl_weight=-0.1),
        ValueError,
        r"kl_weight must be a finite number >= 0.*-0.1",
    ),
    Mistake("KL weight as text", lambda: TaylorELBO(kl_weight="0.1"), ValueError, r"kl_weight.*'0.1'"),  # type: ignore[arg-type]
    Mistake(
        "schedule gives NaN",
        lambda: evaluate(kl_weight=lambda step: float("nan")),
        ValueError,
        r"schedule.*nan",
    ),
    Mistake(
        "curvature as text",
        lambda: TaylorELBO(curvature="fisher"),
        ValueError,
        r"Fisher\(\) or GGNDiagonal\(\), not 'fisher'",
    ),  # type: ignore[arg-type]
    Mistake(
        "curvature class",
        lambda: TaylorELBO(curvature=GGNDiagonal),
        ValueError,
        r"must be an object such as Fisher\(\)",
    ),  # type: ignore[arg-type]
    Mistake(
        "no particles",
        lambda: TaylorELBO(num_particles=0),
        ValueError,
        "num_particles must be a positive",
    ),
    Mistake(
        "no data",
        lambda: TaylorELBO(num_data=0),
        ValueError,
        "num_data must be a positive whole number, not 0",
    ),
    Mistake("every=0", lambda: Fisher(every=0), ValueError, "every must be a positive whole number, not 0"),
    Mistake("no label draws", lambda: Fisher(num_label_samples=0), ValueError, "num_label_samples must be"),
    Mistake(
        "no probes",
        lambda: HessianDiagonal(num_probes=0),
        ValueError,
        "num_probes must be a positive",
    ),
    Mistake("margin", lambda: HessianDiagonal(margin=1.0), ValueError, r"margin must lie in \[0, 1\)"),
    Mistake(
        "foreign state",
        lambda: TaylorELBO().load_state_dict({}),
        CheckpointError,
        r"TaylorELBO.*'step' is missing",
    ),
    # Likelihoods
    Mistake(
        "cannot be sampled",
        lambda: evaluate(likelihood(Unsampled)),
        UnsupportedError,
        r"site 'y': Unsampled has no sample.*EmpiricalFisher",
    ),
    Mistake(
        "no closed form",
        lambda: evaluate(likelihood(lambda f: dist.VonMises(f, 1.0)), curvature=GGNDiagonal()),
        UnsupportedError,
        r"VonMises at site 'y'.*Fisher\(\)",
    ),
    Mistake(
        "learned degrees of freedom",
        lambda: evaluate(learned_df, curvature=GGNDiagonal()),
        UnsupportedError,
        r"degrees of freedom.*Fisher\(\)",
    ),
    Mistake(
        "inference mode",
        inference_mode,
        PyroDviError,
        r"use torch.no_grad\(\), not torch.inference_mode\(\)",
    ),
    Mistake(
        "infinite loss",
        lambda: evaluate(args=(X, Y * 1e30)),
        NonFiniteError,
        r"loss is inf in step .*log_likelihood.*No update was made",
    ),
    Mistake(
        "sampling traces",
        lambda: next(TaylorELBO()._get_traces(regression, initialised(), (X, Y), {})),
        UnsupportedError,
        r"does not sample traces",
    ),
]


def initialised() -> MeanFieldGuide:
    guide = MeanFieldGuide(regression)
    guide.initialize(X, Y)
    return guide


def test_the_table_is_long_enough():
    assert len(MISTAKES) >= 20
    assert len({m.name for m in MISTAKES}) == len(MISTAKES)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.name)
def test_mistake(mistake):
    with pytest.raises(mistake.error, match=f"(?s){mistake.message}"):
        mistake.make()


@pytest.mark.parametrize("curvature", [MinibatchGradient(), HessianDiagonal(), EmpiricalFisher()], ids=repr)
def test_factors_count_where_no_labels_are_needed(curvature):
    guide = MeanFieldGuide(factor_model)
    guide.initialize(X, Y)
    elbo = TaylorELBO(curvature=curvature)
    elbo.loss(factor_model, guide, X, Y)
    w, s = guide.locs.w.detach(), guide.scales.w.detach()
    slope = -2 * (w - 1)
    expected = s**2 if isinstance(curvature, HessianDiagonal) else 0.5 * s**2 * slope**2
    torch.testing.assert_close(elbo.terms["penalty"], expected)
    torch.testing.assert_close(elbo.terms["log_likelihood"], -((w - 1) ** 2))


@pytest.mark.parametrize("guide", [MeanFieldGuide, AutoNormal, AutoDiagonalNormal])
def test_a_failed_step_leaves_parameters_and_gradients_clean(guide):
    elbo = TaylorELBO()
    guide = guide(regression)
    svi = SVI(regression, guide, pyro.optim.Adam({"lr": 0.1}), loss=elbo)
    svi.step(X, Y)
    before = {k: v.clone() for k, v in pyro.get_param_store().items()}
    with pytest.raises(NonFiniteError):
        svi.step(X, Y * 1e30)
    for name, value in pyro.get_param_store().items():
        assert torch.equal(value, before[name])
    for _, parameter in pyro.get_param_store().named_parameters():
        assert parameter.grad is None or not parameter.grad.any()
    assert svi.step(X, Y) < float("inf")


@pytest.mark.parametrize("validate", [True, False])
def test_nan_data_without_validation_still_stops_the_step(validate):
    with pyro.validation_enabled(validate):
        with pytest.raises((DataError, NonFiniteError)):
            evaluate(args=(X, with_nan(Y)))
        pyro.clear_param_store()
        with pytest.raises((DataError, NonFiniteError)):
            evaluate(args=(with_nan(X), Y))


@pytest.mark.parametrize("guide", [MeanFieldGuide, AutoNormal, AutoDiagonalNormal, AutoDelta])
def test_a_corrected_call_after_a_mistake_works(guide):
    guide = guide(regression)
    elbo = TaylorELBO()
    with pytest.raises(ModelError, match="no observed site"):
        elbo.loss(regression, guide, X)
    assert elbo.loss(regression, guide, X, Y) > 0
    assert sorted(guide.median()) == ["b", "w"]


def test_a_shared_parameter_store_is_announced():
    MeanFieldGuide(regression)(X, Y)
    with pytest.warns(DviWarning, match=r"already holds MeanFieldGuide.locs.*clear_param_store"):
        MeanFieldGuide(regression).initialize(X, Y)


KINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "leaky_relu": F.leaky_relu,
    "hardtanh": F.relu6,
    "prelu": lambda h: F.prelu(h, torch.tensor(0.1)),
    "threshold": lambda h: F.threshold(h, 0.1, 0.0),
    "hardsigmoid": F.hardsigmoid,
    "abs": torch.abs,
}


@pytest.mark.parametrize("function", KINKS.values(), ids=KINKS)
def test_piecewise_linear_activations_are_announced_once(function, request):
    model = likelihood(lambda f: dist.Normal(function(f), 0.5))
    guide = MeanFieldGuide(model)
    elbo = TaylorELBO()
    name = request.node.callspec.id
    with pytest.warns(DviWarning, match=rf"the model uses .*{name}.*softplus"):
        elbo.loss(model, guide, X, Y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        elbo.loss(model, guide, X, Y)


PROBABILITIES: dict[str, Callable[[Tensor], Any]] = {
    "Bernoulli": lambda f: dist.Bernoulli(probs=torch.sigmoid(f)),
    "Categorical": lambda f: dist.Categorical(probs=F.softmax(torch.stack([f, -f], -1), -1)),
    "OrderedLogistic": lambda f: dist.OrderedLogistic(f, torch.tensor([-1.0, 1.0])),
    "Geometric": lambda f: dist.Geometric(probs=torch.sigmoid(f)),
}


@pytest.mark.parametrize("likely", PROBABILITIES.values(), ids=PROBABILITIES)
def test_a_clamp_of_the_distribution_itself_is_not_announced(likely):
    """It keeps probabilities a rounding away from zero and one."""
    model = likelihood(likely)
    TaylorELBO(curvature=EmpiricalFisher()).loss(model, MeanFieldGuide(model), X, (Y > 0).float())
    pyro.clear_param_store()
    model = likelihood(lambda f: dist.Bernoulli(probs=torch.sigmoid(f).clamp(0.01, 0.99)))
    with pytest.warns(DviWarning, match="the model uses clamp"):
        TaylorELBO().loss(model, MeanFieldGuide(model), X, (Y > 0).float())


def test_smooth_activations_are_not_announced():
    for function in (F.softplus, F.gelu, F.silu, torch.tanh, torch.sigmoid):
        pyro.clear_param_store()
        model = likelihood(lambda f, function=function: dist.Normal(function(f), 0.5))
        TaylorELBO().loss(model, MeanFieldGuide(model), X, Y)


def test_a_point_mass_has_no_penalty_to_warn_of():
    model = likelihood(lambda f: dist.Normal(torch.relu(f), 0.5))
    TaylorELBO().loss(model, AutoDelta(model), X, Y)


class Halved(Curvature):
    """What a user would write."""

    def penalty(self, likelihood: Any) -> Tensor:
        return 0.5 * GGNDiagonal().penalty(likelihood)


def test_a_users_own_curvature():
    guide = initialised()
    mine, whole = TaylorELBO(curvature=Halved()), TaylorELBO(curvature=GGNDiagonal())
    mine.loss(regression, guide, X, Y)
    whole.loss(regression, guide, X, Y)
    torch.testing.assert_close(2 * mine.terms["penalty"], whole.terms["penalty"])


def test_a_function_without_second_derivative_is_refused_with_another():
    net = to_bayesian_(torch.nn.Sequential(torch.nn.EmbeddingBag(3, 2), torch.nn.Linear(2, 2)))
    model = classifier(net, num_data=2)
    tokens, labels = torch.tensor([[0, 1], [1, 2]]), torch.tensor([0, 1])
    guide = MeanFieldGuide(model)
    guide.initialize(tokens, labels)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), loss=TaylorELBO())
    with pytest.raises(UnsupportedError, match=r"_embedding_bag_backward.*nn\.Embedding and a sum"):
        svi.step(tokens, labels)
    laplace = LaplaceGuide(model)
    laplace.initialize(tokens, labels)
    energy = laplace.energy([(tokens, labels)])
    with pytest.raises(UnsupportedError, match=r"_embedding_bag_backward.*nn\.Embedding and a sum"):
        energy.at(energy.start).hessian(torch.ones(1, len(energy.start)))


@pytest.mark.filterwarnings("ignore:the model uses Hardsigmoid")
@pytest.mark.parametrize("smooth", [False, True])
def test_activations_without_second_derivative_are_smoothed_by_the_function_that_the_error_names(smooth):
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Hardsigmoid(), torch.nn.Hardswish())
    model = classifier(to_bayesian_(smooth_activations_(net) if smooth else net), num_data=2)
    x, labels = torch.eye(2), torch.tensor([0, 1])
    svi = SVI(model, MeanFieldGuide(model), pyro.optim.Adam({"lr": 0.01}), loss=TaylorELBO())
    laplace = LaplaceGuide(model)
    laplace.initialize(x, labels)
    for run in (
        lambda: svi.step(x, labels),
        lambda: laplace.fit([(x, labels)], PosteriorSamples(2), unconverged="accept"),
    ):
        refused = pytest.raises(UnsupportedError, match="hardsi.*smooth_activations_ replaces nn.Hardsigmoid")
        with nullcontext() if smooth else refused:
            run()


def test_a_function_that_torch_differentiates_only_twice_is_refused_with_a_way_out():
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 1, 1),
        torch.nn.Tanh(),
        torch.nn.ConvTranspose2d(1, 1, 3, stride=2, output_padding=1),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 2),
    )
    model = classifier(to_bayesian_(net), num_data=2)
    svi = SVI(
        model,
        MeanFieldGuide(model),
        pyro.optim.Adam({"lr": 0.01}),
        loss=TaylorELBO(curvature=HessianDiagonal(num_probes=1)),
    )
    with pytest.raises(UnsupportedError, match="output_padding.*a curvature other than HessianDiagonal"):
        svi.step(torch.randn(2, 1, 3, 3), torch.tensor([0, 1]))


class Once(torch.autograd.Function):
    """The identity with a gradient like that of torchvision's roi_align and deform_conv2d."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return OnceBackward.apply(gradient)


class OnceBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradient):
        return gradient.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("double backwards on roi_align not supported")


def test_a_function_without_a_second_derivative_of_torchvision_is_refused_with_a_way_out():
    net = to_bayesian_(torch.nn.Linear(2, 2))

    def model(x, y=None):
        logits = Once.apply(net(x).tanh())
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Categorical(logits=logits), obs=y)

    svi = SVI(model, MeanFieldGuide(model), pyro.optim.Adam({"lr": 0.01}), loss=TaylorELBO())
    with pytest.raises(
        UnsupportedError, match=r"roi_align.*more than once.*NaturalGradientELBO or SampledELBO"
    ):
        svi.step(torch.eye(2), torch.tensor([0, 1]))
