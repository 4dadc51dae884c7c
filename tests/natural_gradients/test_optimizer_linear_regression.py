# SPDX-License-Identifier: Apache-2.0
r"""Where the optimizers come to rest on linear regression, whose answers have closed forms.

The Hessian of an example is :math:`x_{ij}^2/\sigma^2`, whatever its residual, so the optimum of the mean-field ELBO is
:math:`\Lambda_j = \sum_i x_{ij}^2/\sigma^2 + \delta`: IVON's. Squared gradients hold the residuals of the data,

.. math:: \Lambda_j = \sum_i \frac{x_{ij}^2}{\sigma^4}\,\mathrm E_q (y_i - x_i^\top w)^2 + \delta
    = \sum_i \frac{x_{ij}^2}{\sigma^4} \Bigl(r_i^2 + \sum_k \frac{x_{ik}^2}{\Lambda_k}\Bigr) + \delta,

with :math:`r_i` at the mean: VOGN's, which agrees where residuals are as large as the noise says. OGN leaves out
the last sum. Many posteriors of the same data are trained beside each other, as rows of one weight, and averaged over.
"""

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro.infer import SVI
from torch import Tensor

import pyro_dvi as dvi
from pyro_dvi.natural_gradients.ivon import IVON
from pyro_dvi.natural_gradients.updates import OGN, VOGN

N, D, COPIES = 30, 3, 400
NOISE, PRIOR = 0.5, 0.7
DELTA = PRIOR**-2


pytestmark = pytest.mark.usefixtures("double")


def data(noise: float = NOISE) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(N, D, generator=generator) * torch.tensor([0.5, 1.0, 2.0])
    return x, x.sum(1) + noise * torch.randn(N, generator=generator)


def model(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, PRIOR).expand([COPIES, D]).to_event(2))
    f = F.linear(x, w)
    with pyro.plate("data", N, subsample=torch.arange(len(x))):
        pyro.sample("y", dist.Normal(f, NOISE).to_event(1), obs=y[:, None].expand_as(f))


def exact_mean(x: Tensor, y: Tensor) -> Tensor:
    return torch.linalg.solve(x.T @ x / NOISE**2 + DELTA * torch.eye(D), x.T @ y / NOISE**2)


def rest_of_squares(x: Tensor, residuals: Tensor, draws: bool) -> Tensor:
    """The fixed point of the precisions of VOGN (with draws) or OGN."""
    precision = torch.full((D,), 100.0)
    for _ in range(500):
        spread = (x**2 / precision).sum(1) if draws else torch.zeros(())
        precision = (x**2 * (residuals**2 + spread)[:, None]).sum(0) / NOISE**4 + DELTA
    return precision


def trained(
    optimizer, x: Tensor, y: Tensor, steps: int, start: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and precision of the posterior, averaged over copies and the last third of the steps.

    Args:
        optimizer: a natural-gradient optimizer.
        x: inputs.
        y: targets.
        steps: steps of training.
        start: precisions after the first step, in place of those by its squares.
    """
    guide = dvi.NaturalGradientGuide(model)
    guide.initialize(x, y)
    elbo = dvi.NaturalGradientELBO()
    with torch.no_grad():
        guide.locs.w.copy_(exact_mean(x, y).expand(COPIES, D))
    svi = SVI(model, guide, optimizer, loss=elbo)
    means, precisions = [], []
    for t in range(steps):
        svi.step(x, y)
        if t == 0 and start is not None:
            memory = svi.optim.optim_objs[guide.locs.w_unconstrained].state[guide.locs.w_unconstrained]
            memory["curvature"].copy_((start - DELTA).expand(COPIES, D))
            with torch.no_grad():
                guide.precisions.w.copy_(start.expand(COPIES, D))
        if 3 * t >= 2 * steps:
            means.append(guide.locs.w.detach().mean(0))
            precisions.append(guide.precisions.w.detach().mean(0))
    return torch.stack(means).mean(0), torch.stack(precisions).mean(0)


OPTIONS = {
    "warmup_steps": 0,
    "lr": 0.005,
    "betas": (0.9, 0.98),
}  # a small rate: the means hardly jitter, which would add to residuals


@pytest.mark.slow
def test_ivon_finds_the_optimum_of_the_elbo():
    """From ten per cent off; a slow average, since its positivity term has a bias of about twice its rate."""
    x, y = data(noise=2 * NOISE)  # more noise than the model thinks, which moves squared gradients
    exact = (x**2).sum(0) / NOISE**2 + DELTA
    mean, precision = trained(
        IVON({"warmup_steps": 0, "lr": 0.005, "betas": (0.9, 0.995)}), x, y, 600, 1.1 * exact
    )
    torch.testing.assert_close(precision, exact, rtol=0.02, atol=0)
    assert ((mean - exact_mean(x, y)).abs() * exact.sqrt()).max() < 0.1  # of posterior standard deviations


@pytest.mark.every(2)
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_vogn_finds_the_precision_of_squared_residuals(factor):
    x, y = data(noise=factor * NOISE)
    residuals = y - x @ exact_mean(x, y)
    mean, precision = trained(VOGN(OPTIONS), x, y, 250)
    expected = rest_of_squares(x, residuals, draws=True)
    torch.testing.assert_close(precision, expected, rtol=0.02, atol=0)
    exact = (x**2).sum(0) / NOISE**2 + DELTA
    assert ((mean - exact_mean(x, y)).abs() * exact.sqrt()).max() < 0.1
    ratio = expected / exact
    assert ratio.min() > 2 if factor == 2.0 else (ratio - 1).abs().max() < 0.4


def test_ogn_finds_that_of_the_residuals_at_the_mean():
    x, y = data(noise=2 * NOISE)
    mean, precision = trained(OGN({"warmup_steps": 0, "lr": 0.2, "betas": (0.5, 0.8)}), x, y, 150)
    torch.testing.assert_close(mean, exact_mean(x, y), rtol=1e-6, atol=1e-8)
    expected = rest_of_squares(x, y - x @ exact_mean(x, y), draws=False)
    torch.testing.assert_close(precision, expected, rtol=1e-6, atol=0)


@pytest.mark.every(2)
@pytest.mark.parametrize("tau", [0.3, 2.0])
def test_a_tempered_posterior_is_that_of_tempered_data(tau):
    """At temperature tau the optimum has the precision N h / tau + delta, and so the mean of tempered data."""
    x, y = data()
    guide = dvi.NaturalGradientGuide(model)
    options = {"lr": 0.3, "betas": (0.5, 0.8), "warmup_steps": 0}
    svi = SVI(model, guide, OGN(options), loss=dvi.NaturalGradientELBO(kl_weight=tau))
    for _ in range(250):
        svi.step(x, y)
    eye = torch.eye(D)
    mean = torch.linalg.solve(x.T @ x / NOISE**2 + tau * DELTA * eye, x.T @ y / NOISE**2)
    torch.testing.assert_close(guide.locs.w.detach()[0], mean, rtol=1e-6, atol=1e-8)
    squares = (x**2 * (y - x @ mean)[:, None] ** 2).sum(0) / NOISE**4
    torch.testing.assert_close(guide.precisions.w.detach()[0], squares / tau + DELTA, rtol=1e-6, atol=0)
