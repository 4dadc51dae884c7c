# SPDX-License-Identifier: Apache-2.0
"""What users hand to an objective: a row is a small model with data, and perhaps a guide."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from pyro.infer import config_enumerate
from pyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal
from torch import Tensor, nn

import pyro_dvi as dvi
from pyro_dvi.errors import (
    DataError,
    GuideError,
    ModelError,
    NonFiniteError,
    PyroDviError,
    UnsupportedError,
)

N = 8
X = torch.stack([torch.linspace(-1.5, 1.5, N), torch.cos(2.0 * torch.arange(N))], 1).double()
Y = X @ torch.tensor([1.0, -0.5], dtype=torch.float64) + 0.1 * torch.sin(5.0 * torch.arange(N))
LABELS = torch.arange(N) % 3


@dataclass
class Problem:
    """One model with data.

    Attributes:
        model: a Pyro model.
        data: its arguments.
        guide: in place of each method's own.
        options: of the objective.
        rough: whether some latents keep a spread of their own, or are drawn.
        random: whether the model draws numbers of its own.
        second_order: whether spread and squares are those of independent examples and weights used once.
    """

    model: Callable
    data: tuple = (X, Y)
    guide: Callable | None = None
    options: dict[str, Any] = field(default_factory=dict)
    rough: bool = False
    random: bool = False
    second_order: bool = True


@dataclass
class Row:
    """What becomes of a problem.

    Attributes:
        make: gives it.
        refused: by method (or "every"), the exception and its message.
        warned: by method (or "every"), what a warning says.
        without: methods that it does not concern.
    """

    make: Callable[[], Problem]
    refused: dict[str, tuple[type[Exception], str]] = field(default_factory=dict)
    warned: dict[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()


def every(exception: type[Exception], message: str) -> dict[str, tuple[type[Exception], str]]:
    return {"every": (exception, message)}


def linear(x: Tensor) -> Tensor:
    w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=x.dtype), 1.0).to_event(1))
    return x @ w


def observing(
    distribution: Callable[[Tensor], Any],
    predictor: Callable[[Tensor], Tensor] = linear,
    size: int | None = None,
) -> Callable:
    """A model of one observed site in a plate over the rows."""

    def model(x: Tensor, y: Tensor | None = None) -> Tensor:
        f = predictor(x)
        with pyro.plate("data", size or len(x), subsample_size=len(x)):
            return pyro.sample("y", distribution(f), obs=y)

    return model


def normal(f: Tensor) -> Any:
    return dist.Normal(f, 0.5)


def of_net(
    net: nn.Module, distribution: Callable[[Tensor], Any] = lambda f: dist.Normal(f[..., 0], 0.5)
) -> Any:
    """A module of a converted net."""

    class Net(pyro.nn.PyroModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = dvi.to_bayesian_(net.double(), prior_scale=1.0)

        def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
            f = self.net(x)
            with pyro.plate("data", len(x)):
                return pyro.sample("y", distribution(f), obs=y)

    torch.manual_seed(0)
    return Net()


def mlp(activation: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), activation, nn.Linear(3, 1))


def tied() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Linear(2, 1))
    net[2].weight = net[0].weight
    return net


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x[:, :1]) - self.head(x[:, 1:])


def with_nan(t: Tensor, value: float = float("nan")) -> Tensor:
    return t.clone().index_fill_(0, torch.tensor([3]), value)


def no_plate(x: Tensor, y: Tensor | None = None) -> Tensor:
    return pyro.sample("y", dist.Normal(linear(x), 0.5).to_event(1), obs=y)


def masked(x: Tensor, y: Tensor | None = None) -> Tensor:
    f = linear(x)
    with pyro.plate("data", len(x)), poutine.mask(mask=torch.arange(len(x)) % 2 == 0):
        return pyro.sample("y", normal(f), obs=y)


def by_factor(x: Tensor, y: Tensor) -> None:
    f = linear(x)
    with pyro.plate("data", len(x)):
        pyro.factor("y", -2 * (f - y) ** 2)


def discrete_latent(x: Tensor, y: Tensor | None = None) -> Tensor:
    f = linear(x)
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Bernoulli(0.3))
        return pyro.sample("y", dist.Normal(f, 0.5 + z), obs=y)


def improper(x: Tensor, y: Tensor | None = None) -> Tensor:
    w = pyro.sample("w", dist.ImproperUniform(dist.constraints.real, (), (2,)).mask(False))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", normal(x @ w), obs=y)


def flat_prior(x: Tensor, y: Tensor | None = None) -> Tensor:
    w = pyro.sample("w", dist.ImproperUniform(dist.constraints.real, (), (2,)))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", normal(x @ w), obs=y)


def latent_noise(x: Tensor, y: Tensor | None = None) -> Tensor:
    f = linear(x)
    noise = pyro.sample("noise", dist.LogNormal(torch.zeros((), dtype=x.dtype), 0.3))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f, noise), obs=y)


def sphere(x: Tensor, y: Tensor | None = None) -> Tensor:
    w = pyro.sample("w", dist.ProjectedNormal(torch.tensor([1.0, 0.5], dtype=x.dtype)))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", normal(x @ w), obs=y)


def simplex(x: Tensor, y: Tensor | None = None) -> Tensor:
    w = pyro.sample("w", dist.Dirichlet(torch.ones(2, dtype=x.dtype)))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", normal(x @ w), obs=y)


def local(x: Tensor, y: Tensor | None = None) -> Tensor:
    f = linear(x)
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(x.new_zeros(()), 0.5))
        return pyro.sample("y", normal(f + z), obs=y)


def two_sites(x: Tensor, y: Tensor | None = None) -> None:
    f = linear(x)
    with pyro.plate("data", 4 * len(x), subsample_size=len(x)):
        pyro.sample("y", normal(f), obs=y)
    with pyro.plate("labels", len(x)):
        pyro.sample("label", dist.Bernoulli(logits=f), obs=None if y is None else (y > 0).to(x.dtype))


def hierarchical(x: Tensor, y: Tensor | None = None) -> Tensor:
    s = pyro.sample("s", dist.LogNormal(x.new_zeros(()), 0.3))
    w = pyro.sample("w", dist.Normal(x.new_zeros(2), s).to_event(1))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", normal(x @ w), obs=y)


def not_finite() -> Problem:
    model = of_net(nn.Linear(2, 1))
    with torch.no_grad():
        model.net.weight_initial.fill_(float("nan"))
    return Problem(model)


def classes(f: Tensor) -> Any:
    return dist.Categorical(logits=f)


def three_logits(x: Tensor) -> Tensor:
    w = pyro.sample("w", dist.Normal(x.new_zeros(2, 3), 1.0).to_event(2))
    return x @ w


def weighted(x: Tensor, y: Tensor | None = None) -> Tensor:
    f = linear(x)
    with pyro.plate("data", len(x)), poutine.scale(scale=torch.linspace(0.5, 2, len(x), dtype=x.dtype)):
        return pyro.sample("y", normal(f), obs=y)


def partly_observed(x: Tensor, y: Tensor | None = None) -> Tensor:
    f = linear(x)
    with pyro.plate("data", len(x)):
        return pyro.sample("y", normal(f), obs=y, obs_mask=torch.arange(len(x)) % 2 == 0)


def learned_noise(x: Tensor, y: Tensor | None = None) -> Tensor:
    f = linear(x)
    noise = pyro.param("noise", lambda: x.new_full((), 0.5), constraint=dist.constraints.positive)
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f, noise), obs=y)


def two_heads(x: Tensor) -> Tensor:
    w = pyro.sample("w", dist.Normal(x.new_zeros(2, 2), 1.0).to_event(2))
    return x @ w


def two_parts(f: Tensor) -> Any:
    parts = dist.Normal(torch.stack([f, -f], -1), 0.5)
    return dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), parts)


BROADCAST = every(DataError, r"'y'.*would be broadcast.*shape of a draw")
NOT_THESE = every(DataError, r"'y': values of shape .* do not fit")
NO_CLASS = every(DataError, r"'y': labels from .* but outputs for 3 classes")
NOT_FINITE = every(DataError, "NaN or infinite values: argument 1 ")
NO_LOSS = every(NonFiniteError, "not finite: log_likelihood")
TYPES = every(DataError, r"fails on these data \(argument 1 torch\..*x.float\(\)")
NOT_SCALED = every(DataError, "'y' sees 8 of 32 examples.*subsample_size")
DISCRETE = every(ModelError, "'z' is discrete.*marginalise it")
IMPROPER = every(NotImplementedError, "does not support sampling")
ALL_ONCE = {"Laplace": (DataError, "all the data once")}
NATURAL_GUIDE = {m: (GuideError, "needs a NaturalGradientGuide, got Auto") for m in ("VOGN", "IVON")}
NORMAL_PRIOR = {m: (ModelError, "need a Normal prior, or a LogNormal") for m in ("VOGN", "IVON")}
FIXED_PRIOR = {m: (ModelError, "need priors with fixed parameters") for m in ("VOGN", "IVON")}
MIXTURE = {m: (UnsupportedError, "MixtureSameFamily.*mixture") for m in ("moments",)}
TWICE = {m: "along two paths" for m in ("multiplicative", "moments")}
HARDSIGMOID = {m: (UnsupportedError, "hardsigmoid_backward") for m in ("Taylor", "Laplace")}
DEPENDENT = {"Taylor": (GuideError, "not a factorised Gaussian")}
ROUNDED = {"Laplace": (UnsupportedError, "'w' is torch.*float16.*float\\(\\)")}
NO_LABELS = {m: (ModelError, "'y' has no distribution") for m in ("Taylor", "Laplace")}
UNBOUNDED = {"Laplace": (GuideError, "point estimates of 's' and 'w' is unbounded")}
UNUSUAL = {"Laplace": "Fisher information of .* has no closed form"}

ROWS: dict[str, Row] = {
    "as it should be": Row(lambda: Problem(observing(normal))),
    "targets in a column": Row(lambda: Problem(observing(normal), (X, Y[:, None])), BROADCAST),
    "means in a column": Row(lambda: Problem(observing(normal, lambda x: linear(x)[:, None])), BROADCAST),
    "one target for all": Row(lambda: Problem(observing(normal), (X, Y[:1])), BROADCAST),
    "whole numbers as targets": Row(lambda: Problem(observing(normal), (X, LABELS))),
    "targets of another float": Row(lambda: Problem(observing(normal), (X, Y.float()))),
    "classes as floats": Row(
        lambda: Problem(observing(classes, three_logits), (X, LABELS.double()), second_order=False)
    ),
    "classes in a column": Row(
        lambda: Problem(observing(classes, three_logits), (X, LABELS[:, None])), BROADCAST
    ),
    "a class too many": Row(lambda: Problem(observing(classes, three_logits), (X, LABELS + 1)), NO_CLASS),
    "a negative class": Row(lambda: Problem(observing(classes, three_logits), (X, LABELS - 1)), NO_CLASS),
    "truth values as targets": Row(
        lambda: Problem(observing(lambda f: dist.Bernoulli(logits=f)), (X, Y > 0)),
        every(DataError, "'y'.*do not fit Bernoulli.*bool"),
    ),
    "NaN inputs": Row(lambda: Problem(observing(normal), (with_nan(X), Y)), NOT_FINITE),
    "infinite inputs": Row(lambda: Problem(observing(normal), (with_nan(X, float("inf")), Y)), NOT_FINITE),
    "NaN targets": Row(
        lambda: Problem(observing(normal), (X, with_nan(Y))),
        every(DataError, "'y' contains 1 NaN or infinite"),
    ),
    "infinite targets": Row(lambda: Problem(observing(normal), (X, with_nan(Y, float("inf")))), NO_LOSS),
    "no observation": Row(lambda: Problem(observing(normal), (X,)), every(ModelError, "no observed site")),
    "no rows": Row(
        lambda: Problem(observing(normal), (X[:0], Y[:0])),
        every(DataError, "argument 1 of the model has no rows"),
    ),
    "one row": Row(lambda: Problem(observing(normal), (X[:1], Y[:1]))),
    "a minibatch": Row(lambda: Problem(observing(normal, size=4 * N)), ALL_ONCE),
    "more rows than the plate": Row(
        lambda: Problem(observing(normal, size=N // 2)), every(DataError, "more rows than the size")
    ),
    "another number of data": Row(
        lambda: Problem(observing(normal, size=N), options={"num_data": 4 * N}), NOT_SCALED
    ),
    "no plate": Row(lambda: Problem(no_plate)),
    "no plate, number of data": Row(lambda: Problem(no_plate, options={"num_data": 4 * N}), NOT_SCALED),
    "inputs of another float": Row(lambda: Problem(of_net(nn.Linear(2, 1)), (X.float(), Y)), TYPES),
    "whole numbers as inputs": Row(lambda: Problem(of_net(nn.Linear(2, 1)), (X.long(), Y)), TYPES),
    "half precision": Row(lambda: Problem(observing(normal), (X.half(), Y.half())), ROUNDED),
    "bfloat16": Row(lambda: Problem(observing(normal), (X.bfloat16(), Y.bfloat16())), ROUNDED),
    "tied weights": Row(lambda: Problem(of_net(tied()), second_order=False), warned=TWICE),
    "a net used twice": Row(lambda: Problem(of_net(Siamese()), second_order=False), warned=TWICE),
    "ReLU": Row(lambda: Problem(of_net(mlp(nn.ReLU()))), warned={"Taylor": "uses relu"}),
    "Hardsigmoid": Row(
        lambda: Problem(of_net(mlp(nn.Hardsigmoid()))), HARDSIGMOID, warned={"Taylor": "uses hardsigmoid"}
    ),
    "dropout": Row(lambda: Problem(of_net(mlp(nn.Dropout(0.5))), random=True), without=("Laplace",)),
    "dropout in evaluation": Row(
        lambda: Problem(of_net(mlp(nn.Sequential(nn.Tanh(), nn.Dropout(0.5))).eval()))
    ),
    "batch norm in training": Row(
        lambda: Problem(
            of_net(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))),
            second_order=False,
        )
    ),
    "Cauchy": Row(lambda: Problem(observing(lambda f: dist.Cauchy(f, 0.5))), warned=UNUSUAL),
    "heavy tails": Row(lambda: Problem(observing(lambda f: dist.StudentT(1.5, f, 0.5)))),
    "noise that is predicted": Row(
        lambda: Problem(observing(lambda f: dist.Normal(f[..., 0], (0.5 * f[..., 1]).exp()), two_heads))
    ),
    "noise that is learned": Row(lambda: Problem(learned_noise)),
    "a mixture": Row(lambda: Problem(observing(two_parts)), MIXTURE, warned=UNUSUAL),
    "counts": Row(lambda: Problem(observing(lambda f: dist.Poisson(f.exp())), (X, LABELS.double()))),
    "negative counts": Row(
        lambda: Problem(observing(lambda f: dist.Poisson(f.exp())), (X, LABELS - 1.0)), NOT_THESE
    ),
    "labels of one and minus one": Row(
        lambda: Problem(observing(lambda f: dist.Bernoulli(logits=f)), (X, Y.sign())), NOT_THESE
    ),
    "classes as bytes": Row(
        lambda: Problem(observing(classes, three_logits), (X, LABELS.to(torch.uint8)), second_order=False)
    ),
    "huge inputs": Row(lambda: Problem(observing(normal), (1e200 * X, Y)), NO_LOSS),
    "inputs with gradients": Row(lambda: Problem(observing(normal), (X.clone().requires_grad_(), Y))),
    "a shorter last batch": Row(lambda: Problem(observing(normal, size=N), (X[:3], Y[:3])), ALL_ONCE),
    "weighted rows": Row(lambda: Problem(weighted)),
    "rows that are not observed": Row(
        lambda: Problem(partly_observed), every(ModelError, r"'y_unobserved'.*poutine\.mask.*obs_mask")
    ),
    "masked rows": Row(lambda: Problem(masked)),
    "a factor": Row(lambda: Problem(by_factor), NO_LABELS),
    "two sites of different scale": Row(lambda: Problem(two_sites), ALL_ONCE),
    "a discrete latent": Row(lambda: Problem(discrete_latent), DISCRETE),
    "an enumerated latent": Row(lambda: Problem(config_enumerate(discrete_latent)), DISCRETE),
    "an improper prior": Row(lambda: Problem(improper), IMPROPER),
    "a flat prior": Row(lambda: Problem(flat_prior), IMPROPER),
    "a latent noise scale": Row(lambda: Problem(latent_noise, rough=True)),
    "a latent scale of the prior": Row(lambda: Problem(hierarchical), FIXED_PRIOR | UNBOUNDED),
    "a latent on a sphere": Row(
        lambda: Problem(sphere), every(PyroDviError, "'w'.*ProjectedNormal|[Ss]phere")
    ),
    "a latent on a simplex": Row(lambda: Problem(simplex, rough=True), NORMAL_PRIOR),
    "a latent for each row": Row(lambda: Problem(local, rough=True)),
    "weights that are NaN": Row(
        not_finite, every(ModelError, "'net.weight_initial' of the model contains NaN")
    ),
    "AutoNormal": Row(
        lambda: Problem(observing(normal), guide=AutoNormal(observing(normal), init_scale=1e-4)),
        NATURAL_GUIDE,
        without=("Laplace",),
    ),
    "AutoMultivariateNormal": Row(
        lambda: Problem(observing(normal), guide=AutoMultivariateNormal(observing(normal), init_scale=1e-6)),
        NATURAL_GUIDE | DEPENDENT,
        without=("Laplace",),
    ),
    "AutoDelta": Row(
        lambda: Problem(observing(normal), guide=AutoDelta(observing(normal))),
        NATURAL_GUIDE,
        without=("Laplace",),
    ),
}
