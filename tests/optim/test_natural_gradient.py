# SPDX-License-Identifier: Apache-2.0
"""VOGN, OGN and IVON against their equations in NumPy, step by step."""

import copy
import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import nn

from pyro_dvi.elbos.natural_gradient import NaturalGradientELBO
from pyro_dvi.errors import ArgumentError, GuideError
from pyro_dvi.guides import MeanFieldGuide
from pyro_dvi.guides.natural_gradient import NaturalGradientGuide
from pyro_dvi.optim import IVON, OGN, VOGN, AsPrinted, Consistent, VOGNOptimizer
from pyro_dvi.training import fit

N, M = 40, 10
PRIORS = {"w": (0.2, 0.7), "b": (-0.1, 2.0)}  # mean and standard deviation


@pytest.fixture(autouse=True)
def _double():
    torch.set_default_dtype(torch.float64)


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
        self, x, y, noises, *, lr, betas, damping, rho, tau, printed=False, forgetting=2.0, radius=np.inf
    ) -> None:
        g, h = self.measure(x, y, noises)
        n = rho * N
        delta = tau * self.delta / n
        self.t += 1
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
        elif self.t == 1:
            self.s = h
        else:
            self.s = (1 - tau * (1 - betas[1])) * self.s + (1 - betas[1]) * h
        bound = radius * self.delta**-0.5
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
        bound = radius * self.delta**-0.5
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
    elbo.serve(optimizer)
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
OPTIONS |= {"data_augmentation": 3.0, "warmup_steps": 0, "clip_radius": None}


@pytest.mark.parametrize("tau", [1.0, 0.1])
@pytest.mark.parametrize("particles", [1, 3])
@pytest.mark.parametrize("formulation", [Consistent(), AsPrinted()], ids=lambda f: type(f).__name__)
def test_vogn_is_algorithm_1(tau, particles, formulation):
    printed = isinstance(formulation, AsPrinted)

    def step(reference, x, y, noises, t):
        reference.vogn(x, y, noises, tau=tau, printed=printed, **SETTINGS)

    run(VOGN({**OPTIONS, "formulation": formulation}), step, tau=tau, particles=particles)


@pytest.mark.parametrize("forgetting", [0.0, 0.7])
def test_how_fast_curvature_is_forgotten_early(forgetting):
    def step(reference, x, y, noises, t):
        reference.vogn(x, y, noises, tau=0.5, forgetting=forgetting, **SETTINGS)

    run(VOGN({**OPTIONS, "formulation": Consistent(forgetting)}), step, tau=0.5, steps=15)


def test_a_given_curvature_is_forgotten_at_the_final_rate_only():
    def step(reference, x, y, noises, t):
        if t == 0:
            reference.s = np.full(3, 0.2)
        reference.vogn(x, y, noises, tau=0.5, forgetting=None, **SETTINGS)

    run(VOGN({**OPTIONS, "initial_curvature": 0.2}), step, tau=0.5, steps=10)


def test_learning_rate_and_temperature_rise_over_the_first_steps():
    def step(reference, x, y, noises, t):
        rise = min(1, (t + 1) / 8)
        reference.vogn(x, y, noises, tau=0.5 * rise, **{**SETTINGS, "lr": rise * SETTINGS["lr"]})

    run(VOGN({**OPTIONS, "warmup_steps": 8}), step, tau=0.5, steps=20)


@pytest.mark.parametrize("radius", [0.3, 1.0])
def test_a_step_is_bounded_in_units_of_the_prior_scale(radius):
    bounded = []

    def step(reference, x, y, noises, t):
        before = reference.loc
        reference.vogn(x, y, noises, tau=0.5, radius=radius, **SETTINGS)
        length = np.abs(reference.loc - before) * reference.delta**0.5 / (radius * SETTINGS["lr"])
        bounded.append(length > 1 - 1e-6)

    run(VOGN({**OPTIONS, "clip_radius": radius}), step, tau=0.5, steps=20)
    assert 0 < np.mean(bounded) < 1  # of some weights in some steps


def test_so_are_those_of_ivon():
    settings = {k: v for k, v in SETTINGS.items() if k != "damping"}

    def step(reference, x, y, noises, t):
        reference.ivon(x, y, noises[0], tau=0.5, radius=0.05, **settings)

    run(IVON({k: v for k, v in OPTIONS.items() if k != "damping"} | {"clip_radius": 0.05}), step, tau=0.5)


def test_ogn_measures_at_the_mean():
    def step(reference, x, y, noises, t):
        reference.vogn(x, y, [np.zeros(3)], tau=0.5, **SETTINGS)

    run(OGN(OPTIONS), step, tau=0.5)


def test_ivon_is_its_equations():
    settings = {k: v for k, v in SETTINGS.items() if k != "damping"}

    def step(reference, x, y, noises, t):
        reference.ivon(x, y, noises[0], tau=0.5, **settings)

    run(IVON({k: v for k, v in OPTIONS.items() if k != "damping"}), step, tau=0.5)


def test_both_formulations_agree_at_temperature_one_but_for_the_length_of_the_step():
    x, y = data()
    results = []
    for formulation, lr in ((Consistent(), 0.1), (AsPrinted(), 0.1)):
        pyro.clear_param_store()
        torch.manual_seed(0)
        guide = NaturalGradientGuide(model)
        # With a curvature to start from both forget at the same rate.
        options = {"lr": lr, "betas": (0.0, 0.9), "initial_curvature": 0.2, "formulation": formulation}
        options["warmup_steps"] = 0
        svi = SVI(model, guide, VOGN(options), loss=NaturalGradientELBO())
        for _ in range(30):
            svi.step(x, y)
        results.append(np.concatenate(state(guide)))
    np.testing.assert_allclose(*results, rtol=1e-8)


def test_the_learning_rate_falls_over_the_length_that_fit_announces():
    x, y = data()
    batches = [(x[k : k + M], y[k : k + M]) for k in range(0, N, M)]
    guide = NaturalGradientGuide(model)
    optimizer = VOGN({})
    svi = SVI(model, guide, optimizer, loss=NaturalGradientELBO(kl_weight=0.1))
    history = fit(svi, batches, epochs=5, progress=False)
    assert optimizer.total_steps == 20
    before = guide.locs.w.detach().clone()
    svi.step(*batches[0])  # one step after the end
    assert torch.equal(before, guide.locs.w.detach())
    fit(svi, batches, epochs=5, progress=False, history=history)
    assert optimizer.total_steps == 40
    assert not torch.equal(before, guide.locs.w.detach())


def test_a_saved_optimizer_goes_on_as_if_never_stopped():
    x, y = data()

    def started():
        pyro.clear_param_store()
        guide = NaturalGradientGuide(model)
        guide.initialize(x, y)
        return guide, SVI(model, guide, VOGN({"lr": 0.05}), loss=NaturalGradientELBO(kl_weight=0.3))

    torch.manual_seed(0)
    guide, svi = started()
    for _ in range(5):
        svi.step(x, y)
    weights, memory = copy.deepcopy((guide.state_dict(), svi.optim.get_state()))
    torch.manual_seed(1)
    for _ in range(5):
        svi.step(x, y)
    expected = np.concatenate(state(guide))
    guide, svi = started()
    guide.load_state_dict(weights)
    svi.optim.set_state(memory)
    torch.manual_seed(1)
    for _ in range(5):
        svi.step(x, y)
    np.testing.assert_allclose(np.concatenate(state(guide)), expected, rtol=1e-12)


def test_parameters_that_are_no_latents_get_adam():
    class Net(pyro.nn.PyroModule):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(()))
            self.w = pyro.nn.PyroSample(dist.Normal(0.0, 1.0).expand([2]).to_event(1))

        def forward(self, x, y=None):
            logits = x @ self.w + self.shift
            with pyro.plate("data", len(x)):
                return pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)

    x, y = data()
    net = Net()
    guide = NaturalGradientGuide(net)
    svi = SVI(net, guide, VOGN({"deterministic_lr": 0.01}), loss=NaturalGradientELBO())
    svi.step(x, y)
    assert net.shift.item() == pytest.approx(math.copysign(0.01, net.shift.item()), rel=1e-4)


def test_elbo_modules_train_with_the_torch_optimizer():
    x, y = data()
    with pyro.settings.context(module_local_params=True):
        net = pyro.nn.PyroModule[nn.Linear](2, 1)
        net.weight = pyro.nn.PyroSample(dist.Normal(0.0, 1.0).expand([1, 2]).to_event(2))
        net.bias = pyro.nn.PyroSample(dist.Normal(0.0, 1.0).expand([1]).to_event(1))

        class Model(pyro.nn.PyroModule):
            def __init__(self):
                super().__init__()
                self.net = net

            def forward(self, x, y=None):
                logits = self.net(x)[:, 0]
                with pyro.plate("data", len(x)):
                    return pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)

        module_model = Model()
        guide = NaturalGradientGuide(module_model)
        guide.initialize(x, y)
        module = NaturalGradientELBO(kl_weight=0.5)(module_model, guide)
        optimizer = VOGNOptimizer(module.parameters(), lr=0.1)
        losses = []
        for _ in range(60):
            optimizer.zero_grad()
            loss = module(x, y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert sum(losses[-10:]) < sum(losses[:10])


# Mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.0},
        {"betas": (1.0, 0.9)},
        {"damping": -1.0},
        {"data_augmentation": 0},
        {"initial_curvature": -1.0},
        {"total_steps": 0},
        {"deterministic_lr": float("nan")},
    ],
    ids=str,
)
def test_options_out_of_range(options):
    with pytest.raises(ArgumentError, match=next(iter(options))):
        VOGNOptimizer([torch.zeros(1, requires_grad=True)], **options)


@pytest.mark.parametrize("forgetting", [-0.5, math.inf, math.nan])
def test_forgetting_out_of_range(forgetting):
    with pytest.raises(ArgumentError, match="forgetting"):
        Consistent(forgetting)


def test_options_of_the_wrong_type():
    with pytest.raises(TypeError, match="Consistent"):
        VOGNOptimizer([torch.zeros(1, requires_grad=True)], formulation="printed")
    with pytest.raises(ArgumentError, match="VOGN"):
        VOGN(0.1)


def test_another_optimizer_is_found_out():
    x, y = data()
    guide = NaturalGradientGuide(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), loss=NaturalGradientELBO())
    svi.step(x, y)
    for _ in range(2):
        before = guide.locs.w.detach().clone()
        with pytest.raises(GuideError, match=r"not used by a natural-gradient optimizer.*VOGN.*serve"):
            svi.step(x, y)
        assert torch.equal(guide.locs.w.detach(), before)
    elbo = svi.loss.__self__
    with pytest.raises(GuideError, match=r"Adam.*VOGN"):
        elbo.serve(svi.optim)
    with pytest.raises(GuideError, match=r"Adam.*VOGN"):
        fit(svi, [(x, y)], epochs=1, progress=False)
    optimizer = VOGN({})
    elbo.serve(optimizer)
    assert math.isfinite(SVI(model, guide, optimizer, loss=elbo).step(x, y))


def test_another_objective_is_found_out():
    x, y = data()
    guide = NaturalGradientGuide(model)
    elbo = NaturalGradientELBO()
    SVI(model, guide, VOGN({}), loss=elbo).step(x, y)
    with pytest.raises(GuideError, match="no curvature"):
        SVI(model, guide, VOGN({}), loss=pyro.infer.Trace_ELBO()).step(x, y)


def test_training_may_change_to_ivon():
    x, y = data()
    guide, elbo = NaturalGradientGuide(model), NaturalGradientELBO()
    SVI(model, guide, VOGN({}), loss=elbo).step(x, y)
    svi = SVI(model, guide, IVON({}), loss=elbo)
    losses = [svi.step(x, y) for _ in range(3)]
    assert all(math.isfinite(loss) for loss in losses)
    assert (state(guide)[1] > 0).all()


@pytest.mark.parametrize("last", [VOGN, OGN])
@pytest.mark.parametrize("formulation", [Consistent(), AsPrinted()], ids=lambda f: type(f).__name__)
def test_training_may_change_from_ivon(last, formulation):
    """The curvature goes on from the posterior as it stands."""
    x, y = data()
    guide, elbo = NaturalGradientGuide(model), NaturalGradientELBO(kl_weight=0.5)
    svi = SVI(model, guide, IVON({"lr": 0.05}), loss=elbo)
    for _ in range(20):
        svi.step(x, y)
    before = state(guide)[1]
    svi = SVI(model, guide, last({"lr": 0.05, "formulation": formulation}), loss=elbo)
    svi.step(x, y)
    if isinstance(formulation, Consistent):
        np.testing.assert_allclose(state(guide)[1], before, rtol=1e-10)
    losses = [svi.step(x, y) for _ in range(3)]
    assert all(math.isfinite(loss) for loss in losses)
    assert not np.allclose(state(guide)[1], before)


def test_another_guide_is_found_out():
    x, y = data()
    with pytest.raises(GuideError, match="NaturalGradientGuide"):
        NaturalGradientELBO().loss(model, MeanFieldGuide(model), x, y)


def test_a_temperature_of_zero():
    x, y = data()
    guide = NaturalGradientGuide(model)
    with pytest.raises(ArgumentError, match="temperature"):
        NaturalGradientELBO(kl_weight=0.0).loss_and_grads(model, guide, x, y)


def test_counts_that_are_never_inflated_train_as_poisson_counts():
    """Zero-inflated distributions of Pyro give their batch shape as a plain tuple."""
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    counts = torch.tensor([0.0, 1.0, 3.0, 0.0, 2.0, 1.0])

    def trained(likelihood):
        def model(x, y=None):
            w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
            with pyro.plate("data", 20, subsample_size=len(x)):
                return pyro.sample("y", likelihood((x @ w).exp()), obs=y)

        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        svi = SVI(model, NaturalGradientGuide(model), VOGN({}), NaturalGradientELBO())
        return [svi.step(x, counts) for _ in range(3)], svi.guide.median()["w"]

    losses, loc = trained(dist.Poisson)
    inflated, same_loc = trained(lambda rate: dist.ZeroInflatedPoisson(rate, gate=torch.zeros(())))
    assert inflated == pytest.approx(losses)
    torch.testing.assert_close(same_loc, loc)
