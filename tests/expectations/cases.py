# SPDX-License-Identifier: Apache-2.0
"""Likelihoods with uncertain parameters, and their expectation by brute-force quadrature."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, distributions as td

from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.value import Link

Function = Callable[[Tensor], Tensor] | None


@dataclass(frozen=True)
class Uncertain:
    """A parameter that is ``function`` of a Gaussian (the Gaussian itself for None)."""

    loc: tuple[float, ...]
    variance: tuple[float, ...]
    function: Function = None
    name: str | None = None

    def moments(self, loc: Tensor, variance: Tensor) -> GaussianMoments:
        if self.function is None:
            return GaussianMoments(loc, variance)
        inner = GaussianMoments(loc, variance)
        mean, spread = linked_moments(inner, self.function)
        elementwise = self.name not in ("softmax", "log_softmax")
        return GaussianMoments(mean, spread, Link(inner, self.function, self.name, elementwise))


def linked_moments(inner: GaussianMoments, function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """First-order moments: what a rule would give does not matter where the link decides."""
    return function(inner.loc), inner.variance.clone()


@dataclass(frozen=True)
class Case:
    """A family, its parameters, observed values, and how near to quadrature the rule has to come."""

    family: Any
    parameters: dict[str, Any]
    value: Any
    tolerance: float = 1e-8
    label: str = ""
    event_size: int = 0  # how many Gaussians of an uncertain parameter belong to one density; 0: one
    extra: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.family.__name__}-{self.label or '-'.join(self.uncertain)}"

    @property
    def uncertain(self) -> dict[str, Uncertain]:
        return {k: p for k, p in self.parameters.items() if isinstance(p, Uncertain)}

    def gaussians(self, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        """Means and variances, in turn, of the uncertain parameters."""
        return [
            torch.tensor(part, dtype=dtype) for p in self.uncertain.values() for part in (p.loc, p.variance)
        ]

    def build(self, *gaussians: Tensor) -> dict[str, Any]:
        """Parameters with moments made of the given means and variances."""
        pairs = iter(zip(gaussians[::2], gaussians[1::2], strict=True))
        return {
            k: p.moments(*next(pairs)) if isinstance(p, Uncertain) else self.certain(p, gaussians[0])
            for k, p in self.parameters.items()
        }

    def certain(self, p: Any, like: Tensor) -> Any:
        return torch.tensor(p, dtype=like.dtype, device=like.device) if isinstance(p, tuple | list) else p

    def observed(self, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor(self.value, dtype=dtype)

    def plain(self, samples: list[Tensor]) -> Any:
        """The distribution at values of its Gaussians."""
        values = iter(samples)
        made = {}
        for k, p in self.parameters.items():
            if isinstance(p, Uncertain):
                h = next(values)
                made[k] = h if p.function is None else p.function(h)
            else:
                made[k] = self.certain(p, samples[0])
        return self.family(**made, validate_args=False)

    def quadrature(self) -> Tensor:
        """The expected log density."""
        weights, log_prob = self.nodes()
        return torch.tensordot(weights, log_prob, 1)

    def nodes(self) -> tuple[Tensor, Tensor]:
        """Weights and log densities on a fine grid over every Gaussian of one density."""
        means, variances = self.gaussians()[::2], self.gaussians()[1::2]
        size = max(self.event_size, 1)
        count = len(means) * size
        num, radius = {1: (2001, 10.0), 2: (201, 9.0), 3: (49, 7.0)}[count]
        line = np.linspace(-radius, radius, num)
        weight = np.exp(-0.5 * line**2)
        weight /= weight.sum()
        nodes = torch.tensor(np.stack(np.meshgrid(*[line] * count, indexing="ij"), -1).reshape(-1, count))
        weights = torch.tensor(
            np.prod(np.stack(np.meshgrid(*[weight] * count, indexing="ij"), -1).reshape(-1, count), -1)
        )
        samples = []
        for k, (m, v) in enumerate(zip(means, variances, strict=True)):
            z = nodes[:, k * size : (k + 1) * size] if self.event_size else nodes[:, k : k + 1]
            z = z.reshape(len(nodes), *(1,) * (m.dim() - 1), z.shape[-1])
            samples.append(m + v.sqrt() * z)
        return weights, self.plain(samples).log_prob(self.observed())


def exp(name: str | None = "exp") -> dict[str, Any]:
    return {"function": torch.exp, "name": name}


def softplus() -> dict[str, Any]:
    return {"function": F.softplus, "name": "softplus"}


def shifted(h: Tensor) -> Tensor:
    return F.softplus(h) + 0.1


def last_softmax(h: Tensor) -> Tensor:
    return torch.softmax(h, -1)


LOC = Uncertain((0.3, -1.0, 2.0), (0.5, 1.3, 0.2))
LOG_SCALE = ((-0.5, 0.2, 0.4), (0.3, 0.1, 0.6))
REALS = (0.5, -2.5, 1.0)
POSITIVE = (0.5, 2.5, 1.0)
SCALES = {
    "certain": (0.4, 1.5, 2.0),
    "number": 0.7,
    "exp": Uncertain(*LOG_SCALE, **exp()),
    "softplus": Uncertain(*LOG_SCALE, **softplus()),
    "shifted": Uncertain(*LOG_SCALE, shifted),
}
LOGITS = Uncertain(
    ((0.4, -1.0, 0.3), (2.0, 0.1, -3.0)),  # type: ignore[arg-type]
    ((1.0, 0.3, 0.6), (0.5, 2.0, 0.2)),  # type: ignore[arg-type]
)
LOGIT = ((0.4, -6.0, 2.0), (1.0, 9.0, 0.2))
SIGMOID = {"function": torch.sigmoid, "name": "sigmoid"}
COVARIANCE = ((1.5, 0.3, 0.1), (0.3, 0.8, 0.0), (0.1, 0.0, 0.5))


def location_scale() -> list[Case]:
    made = []
    for family, value in ((td.Normal, REALS), (td.LogNormal, POSITIVE), (td.Laplace, REALS)):
        tolerance = 2e-3 if family is td.Laplace else 1e-8  # the oracle steps over the kink; see test_laplace
        for label, scale in SCALES.items():
            made.append(
                Case(family, {"loc": LOC, "scale": scale}, value, tolerance, f"loc and {label} scale")
            )
            if isinstance(scale, Uncertain):
                made.append(Case(family, {"loc": REALS[::-1], "scale": scale}, value, 1e-8, f"{label} scale"))
    return made


def single_logits() -> list[Case]:
    made = []
    for family, value, extra in (
        (td.Bernoulli, (1.0, 0.0, 1.0), {}),
        (td.Binomial, (3.0, 0.0, 7.0), {"total_count": 7}),
        (td.NegativeBinomial, (3.0, 0.0, 7.0), {"total_count": 4}),
        (td.Geometric, (3.0, 0.0, 7.0), {}),
    ):
        made.append(Case(family, {**extra, "logits": Uncertain(*LOGIT)}, value, label="logits"))
        # the plain density clamps probabilities, hence a moderate logit
        probs = Uncertain((0.4, -1.0, 1.0), (1.0, 0.5, 0.2), **SIGMOID)
        made.append(Case(family, {**extra, "probs": probs}, value, 1e-7, label="probs"))
    return made


def rates() -> list[Case]:
    made = []
    for label in ("exp", "softplus", "shifted"):
        rate = SCALES[label]
        made += [
            Case(td.Poisson, {"rate": rate}, (0.0, 3.0, 1.0), label=label),
            Case(td.Exponential, {"rate": rate}, POSITIVE, label=label),
            Case(td.Gamma, {"concentration": (0.5, 2.0, 3.0), "rate": rate}, POSITIVE, label=label),
        ]
    return made


MULTIVARIATE = [
    Case(
        td.MultivariateNormal,
        {"loc": Uncertain(((0.3, -1.0, 2.0),), ((0.5, 1.3, 0.2),)), name: matrix},  # type: ignore[arg-type]
        (REALS,),
        label=name,
        event_size=3,
    )
    for name, matrix in (
        ("covariance_matrix", COVARIANCE),
        ("precision_matrix", COVARIANCE),
        ("scale_tril", ((1.5, 0.0, 0.0), (0.3, 0.8, 0.0), (0.1, 0.0, 0.5))),
    )
]

# Exact up to rounding, or as their docstring says.
BY_POINTS = (td.Binomial, td.NegativeBinomial, td.Geometric, td.Exponential, td.Gamma)
COUNTS = [*single_logits(), *rates()]
RULES = [*location_scale(), *(case for case in COUNTS if case.family not in BY_POINTS), *MULTIVARIATE]

# Served by log_prob at points.
NUMERICAL = [
    *(case for case in COUNTS if case.family in BY_POINTS),
    Case(td.StudentT, {"df": 4.0, "loc": LOC, "scale": 1.0}, REALS, 1e-7, "loc"),
    Case(td.StudentT, {"df": 4.0, "loc": LOC, "scale": SCALES["exp"]}, REALS, 5e-4),
    Case(td.Cauchy, {"loc": LOC, "scale": 1.0}, REALS, 1e-6, "loc"),
    Case(td.HalfNormal, {"scale": SCALES["softplus"]}, POSITIVE, 1e-7),
    Case(td.Weibull, {"scale": 1.5, "concentration": SCALES["shifted"]}, POSITIVE, 1e-7),
    Case(td.Beta, {"concentration1": SCALES["shifted"], "concentration0": 2.0}, (0.2, 0.5, 0.9), 1e-8),
    Case(td.Gamma, {"concentration": SCALES["softplus"], "rate": SCALES["exp"]}, POSITIVE, 1e-3),
    Case(td.VonMises, {"loc": LOC, "concentration": 2.0}, REALS, 1e-8),
    Case(td.Gumbel, {"loc": LOC, "scale": 2.0}, REALS, 1e-8),
    Case(
        td.NegativeBinomial, {"total_count": SCALES["softplus"], "logits": (0.1, -1.0, 0.3)}, (3.0, 0.0, 7.0)
    ),
    Case(td.Bernoulli, {"logits": Uncertain(*LOGIT, torch.tanh, "tanh")}, (1.0, 0.0, 1.0), 1e-4),
    Case(td.Laplace, {"loc": Uncertain(*LOG_SCALE, torch.tanh, "tanh"), "scale": 1.0}, REALS, 2e-3, "tanh"),
]

# Classes: (family, parameters, value); every estimator.
CLASSES = [
    Case(td.Categorical, {"logits": LOGITS}, (1.0, 0.0), event_size=3, label="logits"),
    Case(
        td.Categorical,
        {"logits": Uncertain(LOGITS.loc, LOGITS.variance, lambda h: torch.log_softmax(h, -1), "log_softmax")},
        (1.0, 0.0),
        event_size=3,
        label="log_softmax",
    ),
    Case(
        td.Categorical,
        {"probs": Uncertain(LOGITS.loc, LOGITS.variance, last_softmax, "softmax")},
        (1.0, 0.0),
        event_size=3,
        label="probs",
    ),
    Case(
        td.OneHotCategorical,
        {"logits": LOGITS},
        ((0.0, 1.0, 0.0), (1.0, 0.0, 0.0)),
        event_size=3,
        label="logits",
    ),
    Case(
        td.Multinomial,
        {"total_count": 5, "logits": LOGITS},
        ((0.0, 4.0, 1.0), (1.0, 2.0, 2.0)),
        event_size=3,
        label="logits",
    ),
]

CASES = list(itertools.chain(RULES, CLASSES, NUMERICAL))
