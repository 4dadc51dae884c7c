# SPDX-License-Identifier: Apache-2.0
"""What people get wrong when they make a model Bayesian: the exception, and that its message names place and remedy."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive
from pyro.infer.autoguide import AutoDelta, AutoNormal
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

from pyro_dvi import TaylorELBO, errors
from pyro_dvi.bayesian import (
    Heteroscedastic,
    HierarchicalScale,
    LearnedScale,
    classifier,
    fan_in,
    regressor,
    to_bayesian_,
    to_deterministic,
)
from pyro_dvi.bayesian.priors import FanIn


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Softplus(), nn.Linear(5, 2))


def tied() -> nn.Module:
    net = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 3))
    net[1].weight = net[0].weight
    return net


def with_parameter(value: torch.Tensor, **options: Any) -> nn.Module:
    net = nn.Linear(2, 2)
    net.extra = nn.Parameter(value, **options)
    return net


def compiled_in_place() -> nn.Module:
    net = nn.Linear(2, 2)
    net.compile()
    return net


def nan_weights() -> nn.Module:
    net = nn.Linear(2, 2)
    nn.init.constant_(net.weight, float("nan"))
    return net


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces its end
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(2, 2)))


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


def nothing(name: str, parameter: torch.Tensor) -> None:
    return None


A, M, U = errors.ArgumentError, errors.ModelError, errors.UnsupportedError

CONVERSIONS: list[tuple[str, Callable[[], Any], dict[str, Any], type[Exception], str]] = [
    # what is wrong, module, options, exception, message
    ("zero scale", mlp, {"prior_scale": 0.0}, A, "prior_scale is 0.0.*positive.*exclude="),
    ("negative scale", mlp, {"prior_scale": -1}, A, "prior_scale is -1.*positive"),
    ("infinite scale", mlp, {"prior_scale": float("inf")}, A, "prior_scale is inf"),
    ("NaN scale", mlp, {"prior_scale": float("nan")}, A, "prior_scale is nan"),
    ("flag as scale", mlp, {"prior_scale": True}, A, "prior_scale is True"),
    (
        "name as scale",
        mlp,
        {"prior_scale": "fan_in"},
        A,
        "prior_scale is 'fan_in'.*fan_in, LearnedScale.*OptimalScale",
    ),
    ("class as prior", mlp, {"prior_scale": LearnedScale}, A, r"prior_scale is <class.*LearnedScale\(\)"),
    ("None as prior", mlp, {"prior_scale": None}, A, "prior_scale is None"),
    (
        "tensor as scale",
        mlp,
        {"prior_scale": torch.ones(3)},
        A,
        "is tensor.*a distribution of pyro.distributions",
    ),
    ("torch's Normal", mlp, {"prior_scale": torch.distributions.Normal(0, 1)}, A, "pyro.distributions"),
    (
        "trained tensor",
        mlp,
        {"prior_scale": dist.Normal(0.0, torch.ones((), requires_grad=True))},
        A,
        "LearnedScale",
    ),
    ("rule without answer", mlp, {"prior_scale": nothing}, A, "nothing for '0.weight' is None"),
    ("rule with a bad answer", mlp, {"prior_scale": lambda n, p: -1.0}, A, "'0.weight' is -1.0"),
    ("empty mapping", mlp, {"prior_scale": {}}, M, "No pattern.*'0.weight'"),
    ("mapping by type", mlp, {"prior_scale": {nn.Linear: 1.0}}, A, "name patterns"),
    ("bad value in a mapping", mlp, {"prior_scale": {"*": 0}}, A, r"prior_scale\['\*'\] is 0"),
    ("mapping misses one", mlp, {"prior_scale": {"0.*": 1.0}}, M, "No pattern.*'3.weight'.*'\\*'"),
    (
        "mapping misspelt",
        mlp,
        {"prior_scale": {"1.*": 1.0, "*": 1.0}},
        M,
        r"'1.\*' of prior_scale matches no",
    ),
    (
        "wrong shape",
        mlp,
        {"prior_scale": dist.Normal(torch.zeros(7), 1.0)},
        M,
        r"'0.weight'.*\(7,\).*\(5, 4\)",
    ),
    ("discrete prior", mlp, {"prior_scale": dist.Poisson(1.0)}, M, "Poisson of '0.weight' is discrete"),
    (
        "positive prior",
        mlp,
        {"prior_scale": dist.LogNormal(0.0, 1.0)},
        M,
        "'0.weight' is outside the support",
    ),
    (
        "negative learned rule",
        mlp,
        {"prior_scale": LearnedScale(lambda n, p: 0.0)},
        A,
        "init of '0.weight' is 0.0",
    ),
    ("no gain", mlp, {"prior_scale": FanIn(gain=0.0)}, A, "FanIn.* of '0.weight' is 0.0"),
    ("negative bias", mlp, {"prior_scale": FanIn(bias=-1.0)}, A, "FanIn.* of '0.bias' is -1.0"),
    (
        "negative start",
        mlp,
        {"prior_scale": LearnedScale(-1.0)},
        A,
        "LearnedScale: init of '0.weight' is -1.0",
    ),
    ("no unit", mlp, {"prior_scale": HierarchicalScale(unit=0)}, A, "unit of '0.weight' is 0"),
    ("no such type", mlp, {"include": nn.Conv2d}, M, "Conv2d'> in include= or exclude= matches no parameter"),
    ("None", mlp, {"include": None}, A, "take types of modules, patterns of names, .*, not None"),
    ("a module", mlp, {"exclude": [nn.ReLU()]}, A, r"take types of modules, .*, not ReLU\(\)"),
    ("no such name", mlp, {"include": "fc.*"}, M, r"'fc.\*'.*named like '0.weight'"),
    ("name of a module", mlp, {"include": "0"}, M, "'0'.*named like '0.weight'"),
    ("misspelt exclude", mlp, {"exclude": "3.weigth"}, M, "'3.weigth'.*'3.weight'"),
    (
        "predicate says no",
        mlp,
        {"include": lambda *_: False},
        M,
        "No parameter would become Bayesian.*BatchNorm1d, Linear.*matches 0",
    ),
    ("everything excluded", mlp, {"exclude": "*"}, M, "include= matches 4, exclude= 4"),
    (
        "only norms",
        lambda: nn.BatchNorm1d(2),
        {},
        M,
        "2 parameters \\(BatchNorm1d\\), include= matches 0",
    ),
    ("no parameters", nn.ReLU, {}, M, "Of 0 parameters \\(no module\\)"),
    ("frozen", frozen, {}, M, "2 are frozen.*requires_grad_"),
    ("converted before", lambda: to_bayesian_(mlp()), {}, M, "'0.weight'.*already Bayesian"),
    (
        "one of two ties",
        tied,
        {"exclude": "1.weight"},
        M,
        "'0.weight' and '1.weight' share a parameter",
    ),
    (
        "lazy",
        lambda: nn.Sequential(nn.LazyLinear(2)),
        {},
        M,
        "'0', a LazyLinear, is lazy.*run the network once",
    ),
    (
        "parametrized",
        lambda: parametrizations.orthogonal(nn.Linear(2, 2)),
        {},
        M,
        "'weight'.*remove_parametrizations",
    ),
    ("weight_norm", old_weight_norm, {}, M, "'0.bias'.*remove_weight_norm"),
    ("spectral_norm", lambda: spectral_norm(nn.Linear(2, 2)), {}, M, "'bias'.*remove_spectral_norm"),
    ("complex", lambda: nn.Linear(2, 2, dtype=torch.complex64), {}, U, "'weight'.*complex"),
    (
        "integer",
        lambda: with_parameter(torch.ones(2).int(), requires_grad=False),
        {},
        U,
        "'extra'.*torch.int32",
    ),
    ("meta", lambda: nn.Linear(2, 2, device="meta"), {}, M, "'weight'.*meta device.*to_empty"),
    ("NaN weights", nan_weights, {}, M, "'weight'.*not finite"),
    ("DataParallel", lambda: nn.DataParallel(mlp()), {}, U, "DataParallel.*convert the plain module"),
    ("torch.compile", lambda: torch.compile(mlp()), {}, U, "OptimizedModule.*then wrap or compile"),
    ("compile()", compiled_in_place, {}, U, "Linear.*then wrap or compile"),
    ("TorchScript", lambda: torch.jit.script(nn.Linear(2, 2)), {}, U, "RecursiveScriptModule.*plain module"),
    ("a class", lambda: nn.Linear, {}, TypeError, "named_modules"),
    ("a function", lambda: len, {}, AttributeError, "named_modules"),
]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*:FutureWarning")
@pytest.mark.parametrize(
    ("make", "options", "exception", "message"),
    [
        pytest.param(*case, id=name, marks=pytest.mark.slow if name == "torch.compile" else ())
        for name, *case in CONVERSIONS
    ],
)
def test_to_bayesian(make, options, exception, message):
    module = make()
    before = list(module.state_dict()) if isinstance(module, nn.Module) else None
    kind = type(module)
    with pytest.raises(exception, match="(?s)" + message):
        to_bayesian_(module, **options)
    assert type(module) is kind
    if before is not None:  # a refused module is left as it was
        assert list(module.state_dict()) == before


def test_a_row_of_padding_that_would_be_drawn_is_named():
    """Torch keeps it from learning, so draws of its prior would enter the network wherever a token is missing."""
    with pytest.warns(errors.DviWarning, match=r"'0\.weight' has a padding row \(padding_idx=0\).*Mask"):
        to_bayesian_(nn.Sequential(nn.Embedding(3, 4, padding_idx=0), nn.Linear(4, 3)))


CONSTRUCTORS = [
    (lambda: HierarchicalScale(1.0), "HierarchicalScale: prior is 1.0.*dist.LogNormal"),
    (lambda: HierarchicalScale(dist.Normal(0.0, 1.0)), r"prior is Normal.*LogNormal\(0., 1.\) or"),
    (lambda: HierarchicalScale(dist.Uniform(-1.0, 1.0)), "Uniform.*positive"),
    (lambda: HierarchicalScale(dist.Poisson(1.0)), "Poisson.*positive"),
    (lambda: HierarchicalScale(dist.HalfNormal(torch.ones(2))), r"shape \(2,\).*scalar"),
    (lambda: HierarchicalScale(dist.HalfNormal(torch.ones((), requires_grad=True))), "requires gradients"),
    (
        lambda: classifier(mlp(), 0),
        "num_data, len\\(loader.dataset\\), must be a positive whole number, not 0",
    ),
    (lambda: classifier(mlp(), 2.0), "num_data.* not 2.0"),
    (lambda: classifier(lambda x: x, 2), "net is a function"),
    (lambda: regressor(mlp(), 9, noise_scale=0.0), "noise_scale is 0.0"),
    (lambda: regressor(mlp(), 9, noise_scale="learned"), "noise_scale.*Heteroscedastic.* is learned"),
    (lambda: regressor(mlp(), 9, noise_scale=dist.Normal(0.0, 1.0)), "noise_scale.* is Normal"),
    (
        lambda: regressor(mlp(), 9, noise_scale=LearnedScale(fan_in)),
        "noise_scale is FanIn",
    ),
]


@pytest.mark.parametrize(("make", "message"), CONSTRUCTORS)
def test_options(make, message):
    with pytest.raises(errors.ArgumentError, match="(?s)" + message):
        make()


X, Y = torch.zeros(6, 4), torch.zeros(6, dtype=torch.long)


def run_in_a_plate() -> None:
    net = to_bayesian_(mlp())
    with pyro.poutine.trace(), pyro.plate("data", 6):
        net(X)


def read_outside_a_call() -> None:
    net = to_bayesian_(mlp())
    with pyro.poutine.trace():
        _ = net[0].weight


def predict_in_parallel() -> None:
    model = classifier(to_bayesian_(mlp()), 6)
    Predictive(model, num_samples=3, parallel=True)(X)


def observe(y: Any, x: torch.Tensor = X, num_data: int = 100, net: Callable[[], nn.Module] = mlp) -> None:
    classifier(net(), num_data)(x, y)


def train_on(y: torch.Tensor, model: Any = None) -> None:
    model = model or classifier(mlp(), 6)
    TaylorELBO().loss(model, AutoDelta(poutine.block(model)), X, y)


def regress(y: Any, net: nn.Module | None = None, **options: Any) -> None:
    regressor(net or nn.Linear(4, 1), 100, **options)(X, y)


def export(guide: Any, model: Callable[[], nn.Module] = lambda: to_bayesian_(mlp())) -> None:
    to_deterministic(model(), guide)


class ManyOutputs(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return {"scores": super().forward(x)}


class Handwritten(pyro.nn.PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()


D, G = errors.DataError, errors.GuideError

RUNS: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    (
        "classifier of a dict",
        lambda: observe(Y, net=ManyOutputs),
        M,
        "returned a dict: it must return a tensor",
    ),
    (
        "regressor of a dict",
        lambda: regress(torch.zeros(6), ManyOutputs()),
        M,
        "returned a dict: it must return a tensor",
    ),
    (
        "network inside a plate",
        run_in_a_plate,
        M,
        "'0.weight' is sampled inside the plate 'data'.*before entering",
    ),
    (
        "parallel predictions",
        predict_in_parallel,
        M,
        "'net.0.weight' is sampled inside the plate.*parallel=True",
    ),
    (
        "weight outside a call",
        read_outside_a_call,
        M,
        "'weight' of a PyroLinear is read outside a call.*pyro_method",
    ),
    (
        "labels out of range",
        lambda: train_on(Y + 2),
        D,
        r"'obs': labels from 2 to \d, but outputs for 2 classes, from 0 to 1",
    ),
    ("negative labels", lambda: train_on(Y - 1), D, "labels from -1 to .*, but outputs for 2 classes"),
    (
        "labels of two columns",
        lambda: observe(Y[:, None].expand(6, 3)),
        D,
        r"shape \(6, 3\).*\(6, 2\).*class indices need the shape \(6,\)",
    ),
    ("one-hot labels", lambda: observe(torch.ones(6, 2).long()), D, r"shape \(6, 2\).*need the shape \(6,\)"),
    ("too few labels", lambda: observe(Y[:5]), D, r"shape \(5,\)"),
    ("list of labels", lambda: observe([0] * 6), D, "y is a list"),
    (
        "batch above num_data",
        lambda: observe(Y, num_data=5),
        D,
        r"batch has 6 examples, but num_data is 5: pass len\(loader.dataset\)",
    ),
    (
        "flat logits",
        lambda: observe(Y, net=lambda: nn.Flatten(0)),
        D,
        r"shape \(6,\).*need the shape \(24,\)",
    ),
    (
        "targets broadcast",
        lambda: regress(torch.zeros(6, 2)),
        D,
        r"shape \(6, 2\).*targets .*need the shape \(6,\)",
    ),
    (
        "NaN targets",
        lambda: train_on(torch.full((6,), float("nan")), regressor(nn.Linear(4, 1), 6)),
        D,
        "'obs' contains 6 NaN or infinite values",
    ),
    ("images as means", lambda: regress(Y, nn.Unflatten(1, (2, 2))), M, r"\(6, 2, 2\), not \[batch\]"),
    (
        "odd outputs",
        lambda: regress(Y.float(), noise_scale=Heteroscedastic()),
        M,
        "each column of y, not 1 outputs",
    ),
    ("untrained guide", lambda: export(AutoNormal(mlp())), G, "AutoNormal is not initialised"),
    ("guide belongs to another model", lambda: export({"a": torch.ones(1)}), KeyError, "0.weight"),
    (
        "wrong shape",
        lambda: export({"0.weight": torch.ones(1)}),
        G,
        r"'0.weight' has the shape \(1,\).*\(5, 4\)",
    ),
    ("nothing Bayesian", lambda: export({}, mlp), M, "Sequential contains 0 networks"),
    ("no network", lambda: export({}, Handwritten), M, "Handwritten contains 0 networks"),
]


@pytest.mark.parametrize(("run", "exception", "message"), [r[1:] for r in RUNS], ids=[r[0] for r in RUNS])
def test_runs(run, exception, message):
    with pytest.raises(exception, match="(?s)" + message):
        run()


def test_two_networks_are_exported_one_by_one():
    class Two(pyro.nn.PyroModule):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = to_bayesian_(mlp()), to_bayesian_(mlp())

    with pytest.raises(M, match="contains 2 networks.*pass one"):
        to_deterministic(Two(), {})


def test_exceptions_are_also_the_built_in_ones():
    with pytest.raises(ValueError, match="prior_scale"):
        to_bayesian_(copy.deepcopy(mlp()), -1.0)
    with pytest.raises(NotImplementedError, match="complex"):
        to_bayesian_(nn.Linear(2, 2, dtype=torch.complex64))
