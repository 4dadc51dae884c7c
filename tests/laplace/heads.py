# SPDX-License-Identifier: Apache-2.0
"""Observed distributions of every kind, as functions of linear outputs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.distributions import AffineTransform, ExpTransform

from pyro_dvi.laplace import Dense, LaplaceGuide
from tests.laplace.problems import guide_at, ragged

DRAWS = 40_000


@dataclass
class Head:
    """A model whose K outputs are linear in its weights.

    Attributes:
        distribution: the observed distribution for outputs ``[..., B, K]``.
        size: K.
        event_dim: of the distribution.
    """

    distribution: Callable[[Tensor], Any]
    size: int = 1
    event_dim: int = 0
    tolerance: float = 0.02
    weights: Tensor | None = None

    def model(self, x: Tensor, y: Tensor | None = None) -> Any:
        prior = dist.Normal(x.new_zeros(()), 1.0).expand([x.shape[1], self.size]).to_event(2)
        f = x @ pyro.sample("w", prior)
        with pyro.plate("data", 30, subsample_size=len(x)):
            return pyro.sample("y", self.distribution(f), obs=y)

    def data(self, num_rows: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(num_rows, 2, dtype=torch.float64, generator=generator)
        torch.manual_seed(seed)
        return x, self.distribution(x @ self.true()).sample()

    def true(self) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return 0.7 * torch.randn(2, self.size, dtype=torch.float64, generator=generator)

    def guide(self) -> LaplaceGuide:
        x, y = self.data(30, seed=2)
        guide = guide_at(self.model, (x[:4], y[:4]), {"w": self.true()})
        guide.fit(ragged(x, y, 12), Dense(), unconverged="accept")
        return guide


def _scale_tril() -> Tensor:
    return torch.tensor([[0.5, 0.0], [0.3, 0.4]], dtype=torch.float64)


HEADS = {
    "normal": Head(lambda f: dist.Normal(f[..., 0], 0.5)),
    "normal, vectors": Head(lambda f: dist.Normal(f, 0.5).to_event(1), 2, 1),
    "normal, two heads": Head(lambda f: dist.Normal(f[..., 0], (0.5 * f[..., 1]).exp()), 2),
    "normal, softplus": Head(
        lambda f: dist.Normal(f[..., 0], nn.functional.softplus(f[..., 1]) + 0.1), 2, 0, 0.1
    ),
    "normal, vectors and scales": Head(
        lambda f: dist.Normal(f[..., :2], (0.3 * f[..., 2:]).exp()).to_event(1), 4, 1
    ),
    "normal, same output": Head(lambda f: dist.Normal(f[..., 0], (0.5 * f[..., 0]).exp()), 1),
    "normal, matrices": Head(lambda f: dist.Normal(f.unflatten(-1, (2, 2)), 0.5).to_event(2), 4, 2),
    "normal, expanded": Head(
        lambda f: dist.Normal(f[..., :1], 0.5).expand((*f.shape[:-1], 3)).to_event(1), 1, 1
    ),
    "normal, scale only": Head(lambda f: dist.Normal(f.new_zeros(()), f[..., 0].exp())),
    "multivariate normal": Head(lambda f: dist.MultivariateNormal(f, scale_tril=_scale_tril()), 2, 1),
    "log-normal": Head(lambda f: dist.LogNormal(f[..., 0], 0.5)),
    "log-normal, two heads": Head(lambda f: dist.LogNormal(f[..., 0], (0.3 * f[..., 1]).exp()), 2),
    "transformed": Head(
        lambda f: dist.TransformedDistribution(
            dist.Normal(f[..., 0], 0.5), [AffineTransform(1.0, 2.0), ExpTransform()]
        )
    ),
    "bernoulli": Head(lambda f: dist.Bernoulli(logits=f[..., 0])),
    "bernoulli, probs": Head(lambda f: dist.Bernoulli(probs=torch.sigmoid(f[..., 0]))),
    "categorical": Head(lambda f: dist.Categorical(logits=f), 3),
    "one-hot": Head(lambda f: dist.OneHotCategorical(logits=f), 3, 1),
    "categorical, probs": Head(lambda f: dist.Categorical(probs=torch.softmax(f, -1)), 3, 0, 0.1),
    "poisson": Head(lambda f: dist.Poisson(f[..., 0].exp())),
    "binomial": Head(lambda f: dist.Binomial(5, logits=f[..., 0])),
    "negative binomial": Head(lambda f: dist.NegativeBinomial(torch.tensor(3.0).double(), logits=f[..., 0])),
    "negative binomial, mean": Head(
        lambda f: dist.GammaPoisson(torch.tensor(3.0).double(), 3.0 / f[..., 0].exp())
    ),
    "multinomial": Head(lambda f: dist.Multinomial(4, logits=f), 3, 1, 0.05),
    "student": Head(lambda f: dist.StudentT(torch.tensor(4.0).double(), f[..., 0], 0.5)),
    "student, two heads": Head(
        lambda f: dist.StudentT(torch.tensor(4.0).double(), f[..., 0], (0.3 * f[..., 1]).exp()), 2
    ),
    "gamma": Head(lambda f: dist.Gamma(f[..., 0].exp(), f[..., 1].exp()), 2),
    "beta": Head(lambda f: dist.Beta(f[..., 0].exp(), f[..., 1].exp()), 2),
    "laplace": Head(lambda f: dist.Laplace(f[..., 0], 0.5)),
    "zero-inflated": Head(
        lambda f: dist.ZeroInflatedPoisson(gate=torch.sigmoid(f[..., 1]), rate=f[..., 0].exp()), 2
    ),
}
