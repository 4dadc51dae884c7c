# SPDX-License-Identifier: Apache-2.0
"""The equations of VOGN, OGN and IVON in NumPy, and a logistic regression on which the optimizers must follow them."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI

from pyro_dvi.natural_gradients.natural_elbo import NaturalGradientELBO
from pyro_dvi.natural_gradients.precision_guide import NaturalGradientGuide

N, M = 40, 10


PRIORS = {"w": (0.2, 0.7), "b": (-0.1, 2.0)}  # mean and standard deviation


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(N, 2, generator=generator)
    return x, (x.sum(1) + 0.3 * torch.randn(N, generator=generator) > 0).double()


def model(x, y=None):
    """Logistic regression with two sites."""
    w = pyro.sample("w", dist.Normal(*map(torch.tensor, PRIORS["w"])).expand([2]).to_event(1))
    b = pyro.sample("b", dist.Normal(*map(torch.tensor, PRIORS["b"])))
    with pyro.plate("data", N, subsample=torch.arange(len(x))):  # which draws nothing
        return pyro.sample("y", dist.Bernoulli(logits=x @ w + b), obs=y)


class Reference:
    """The equations, on the stacked vector (w, b)."""

    def __init__(self, loc: np.ndarray, precision: np.ndarray) -> None:
        self.loc, self.precision = loc.copy(), precision.copy()
        self.prior_loc = np.array([PRIORS["w"][0]] * 2 + [PRIORS["b"][0]])
        self.delta = np.array([PRIORS["w"][1]] * 2 + [PRIORS["b"][1]]) ** -2.0
        spread = max(self.loc[:2].std(), 0.1 * PRIORS["w"][1])
        self.unit = np.array([spread] * 2 + [0.1 * PRIORS["b"][1]])
        self.momentum, self.s, self.t = np.zeros(3), np.zeros(3), 0

    def gradients(self, x: np.ndarray, y: np.ndarray, theta: np.ndarray) -> np.ndarray:
        """Gradient of minus the log-likelihood of each example."""
        design = np.concatenate([x, np.ones((len(x), 1))], 1)
        p = 1 / (1 + np.exp(-design @ theta))
        return (p - y)[:, None] * design

    def measure(
        self, x: np.ndarray, y: np.ndarray, noises: list[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        scale = self.precision**-0.5
        g = [self.gradients(x, y, self.loc + scale * noise) for noise in noises]
        return np.mean([k.mean(0) for k in g], 0), np.mean([(k**2).mean(0) for k in g], 0)

    def vogn(
        self, x, y, noises, *, lr, betas, damping, rho, tau, printed=0, forgetting=2.0, radius=np.inf
    ) -> None:
        n = rho * N
        delta = tau * self.delta / n
        self.t += 1
        if (
            printed and self.t <= printed
        ):  # before the loop of Algorithm 1: s_0, and the precision of the first draws
            h = (self.gradients(x, y, self.loc) ** 2).mean(0)
            self.s += (h - self.s) / self.t
            self.precision = n * (self.s + delta + damping)
            return
        g, h = self.measure(x, y, noises)
        total = g + delta * (self.loc - self.prior_loc)
        if printed:
            self.momentum = betas[0] * self.momentum + total
            direction = self.momentum
        else:
            self.momentum = betas[0] * self.momentum + (1 - betas[0]) * total
            direction = self.momentum / (1 - betas[0] ** self.t)
        if not printed:
            rate = 1 - betas[1]
            if forgetting is not None:
                rate = max(rate, (forgetting + 1) / (forgetting + self.t))  # 1 in the first step
            self.s = (1 - rate) * self.s + rate * h
        else:
            self.s = (1 - tau * (1 - betas[1])) * self.s + (1 - betas[1]) * h
        bound = radius * self.unit
        self.loc = self.loc - lr * np.clip(direction / (self.s + delta + damping), -bound, bound)
        self.precision = n * (self.s + delta + damping) if printed else n / tau * (self.s + delta)

    def ivon(self, x, y, noise, *, lr, betas, rho, tau, radius=np.inf) -> None:
        g, h = self.measure(x, y, [noise])
        n = rho * N
        delta = tau * self.delta / n
        self.t += 1
        if self.t == 1:
            self.s = h
        else:
            estimate = g * noise * self.precision**0.5
            rest = 0.5 * (1 - betas[1]) ** 2 * (self.s - estimate) ** 2 / (self.s + delta)
            self.s = betas[1] * self.s + (1 - betas[1]) * estimate + rest
        self.momentum = betas[0] * self.momentum + (1 - betas[0]) * g
        direction = self.momentum / (1 - betas[0] ** self.t) + delta * (self.loc - self.prior_loc)
        bound = radius * self.unit
        self.loc = self.loc - lr * np.clip(direction / (self.s + delta), -bound, bound)
        self.precision = n / tau * (self.s + delta)


def state(guide) -> tuple[np.ndarray, np.ndarray]:
    def stacked(part):
        return torch.cat([part.w.detach(), part.b.detach().reshape(1)]).numpy()

    return stacked(guide.locs), stacked(guide.precisions)


def drawn(count: int, seed: int) -> list[np.ndarray]:
    """The noise that the objective will draw."""
    torch.manual_seed(seed)
    return [torch.cat([torch.randn(2), torch.randn(())[None]]).numpy() for _ in range(count)]


def run(optimizer, step, *, tau: float, particles: int = 1, steps: int = 25) -> None:
    x, y = data()
    guide = NaturalGradientGuide(model)
    guide.initialize(x[:M], y[:M])
    elbo = NaturalGradientELBO(kl_weight=tau, num_particles=particles, num_data=N)
    elbo.prepare(guide, optimizer)
    svi = SVI(model, guide, optimizer, loss=elbo)
    reference = Reference(*state(guide))
    for t in range(steps):
        rows = slice(M * (t % 4), M * (t % 4) + M)
        noises = drawn(particles, seed=t)
        torch.manual_seed(t)
        svi.step(x[rows], y[rows])
        step(reference, x[rows].numpy(), y[rows].numpy(), noises, t)
        loc, precision = state(guide)
        np.testing.assert_allclose(loc, reference.loc, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(precision, reference.precision, rtol=1e-10, atol=1e-12)


SETTINGS = {"lr": 0.05, "betas": (0.8, 0.9), "damping": 1e-2, "rho": 3.0}


OPTIONS = {k: v for k, v in SETTINGS.items() if k != "rho"}
OPTIONS |= {"data_augmentation": 3.0, "warmup_steps": 0, "max_step": None}
