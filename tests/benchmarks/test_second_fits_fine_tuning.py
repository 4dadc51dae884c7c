# SPDX-License-Identifier: Apache-2.0
"""Second fits with gradients only against closed forms, plain loops without Pyro, and the dense Hessian."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.laplace.hessian_free.second_fits import Pointwise, SecondFits, parameter_uncertainty
from benchmarks.laplace.hessian_free.solvers import SGD, Adam, gradient_of
from benchmarks.laplace.hessian_free.training_modes import InSample, LabelShift
from pyro_dvi.errors import ArgumentError, DataError, UnconvergedError
from pyro_dvi.laplace import Dense, Hessian, LaplaceGuide
from pyro_dvi.laplace.energy.batch_graph import BatchGraph
from pyro_dvi.laplace.energy.energy import LocalEnergy
from tests.laplace.minima import pretrained
from tests.laplace.problems import LinearRegression, SineRegression, guide_at

GRID = torch.linspace(-5, 5, 3, dtype=torch.float64).unsqueeze(-1)


# --- the way to the minimum ----------------------------------------------------------------------------------


@pytest.mark.parametrize("less", ["opposite", "untilted"])
def test_gradient_descent_gives_its_closed_form_from_anywhere(less: str) -> None:
    problem = LinearRegression()
    start = torch.tensor([3.0, -2.0, 5.0], dtype=torch.float64)  # not the mode
    guide = guide_at(problem.model, problem.batches[0], {"weight": start})
    precision, rate, steps = problem.precision(), 2e-3, 40
    solver = SGD(strength=0.7, learning_rate=rate, epochs=steps)
    guide.fit([(problem.x, problem.y)], SecondFits(solver=solver, less=less), unconverged="accept")
    x = torch.randn(2, problem.num_features, dtype=torch.float64)
    eye = torch.eye(problem.num_features, dtype=torch.float64)
    left = torch.linalg.matrix_power(eye - rate * precision, steps)
    exact = x @ torch.linalg.solve(precision, eye - left) @ x.T
    torch.testing.assert_close(guide.predictive(x).variance, exact.diagonal(), rtol=1e-9, atol=0)
    below = x @ torch.linalg.inv(precision) @ x.T
    assert bool((exact.diagonal() < 0.99 * below.diagonal()).all())  # what the docstring says of it


# --- the difference that the paper prints --------------------------------------------------------------------

RATE, STEPS = 2e-3, 40


@pytest.mark.every(2)
@pytest.mark.parametrize("off", [0.0, 0.3])
def test_less_the_mode_as_it_is(off: float) -> None:
    """The variance where the mode is the minimum; elsewhere what was left to train is added, over the strength."""
    problem, solver = LinearRegression(), SGD(0.7, RATE, STEPS)
    precision = problem.precision()
    eye = torch.eye(problem.num_features, dtype=torch.float64)
    done = eye - torch.linalg.matrix_power(eye - RATE * precision, STEPS)
    start = problem.mode() - off * torch.ones(problem.num_features, dtype=torch.float64)
    guide = guide_at(problem.model, problem.batches[0], {"weight": start})
    x = torch.randn(2, problem.num_features, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    variance = (x @ torch.linalg.solve(precision, done) @ x.T).diagonal()
    bias = x @ done @ (problem.mode() - start) / solver.strength
    for less, expected in (("mode", variance + bias), ("untilted", variance)):
        posterior: Any = guide.fit(
            [(problem.x, problem.y)], SecondFits(solver=solver, less=less), unconverged="accept"
        )
        found = posterior.responses(guide.query(x))[:, 0, 0]
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


# --- minibatches ---------------------------------------------------------------------------------------------


class Shuffled:
    """Minibatches in another order in each pass, which is kept."""

    def __init__(self, x: Tensor, y: Tensor, size: int) -> None:
        self.x, self.y, self.size = x, y, size
        self.generator = torch.Generator().manual_seed(0)
        self.passes: list[list[tuple[Tensor, Tensor]]] = []

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.x), generator=self.generator)
        self.passes.append([(self.x[rows], self.y[rows]) for rows in order.split(self.size)])
        return iter(self.passes[-1])


def sine_output(locs: dict[str, Tensor], x: Tensor) -> Tensor:
    hidden = torch.tanh(x @ locs["w1"] + locs["b1"])
    return hidden @ locs["w2"] / math.sqrt(len(locs["w2"])) + locs["b2"]


def fine_tuned(
    problem: SineRegression, start: dict[str, Tensor], passes: list, pull: Callable, optimizer: Callable
) -> dict[str, Tensor]:
    """The same by a loop over minibatches, without Pyro."""
    locs = {name: u.clone().requires_grad_() for name, u in start.items()}
    stepping = optimizer(list(locs.values()))
    for batches in passes:
        for x, y in batches:
            residual = (y - sine_output(locs, x)) / problem.noise
            squares = sum(u.square().sum() for u in locs.values())
            loss = 0.5 * len(batches) * residual.square().sum() + 0.5 * squares / problem.prior_scale**2
            stepping.zero_grad()
            (loss - pull(locs, x, len(batches))).backward()
            stepping.step()
    return locs


@pytest.mark.every(4)
@pretrained
@pytest.mark.parametrize("mode", [Pointwise(), InSample(), LabelShift()], ids=type)
@pytest.mark.parametrize(
    "solver, optimizer",
    [
        (Adam(0.8, learning_rate=0.01, epochs=6), lambda us: torch.optim.Adam(us, lr=0.01)),
        (SGD(0.8, 1e-3, epochs=6, momentum=0.5), lambda us: torch.optim.SGD(us, lr=1e-3, momentum=0.5)),
    ],
    ids=["Adam", "SGD"],
)
def test_minibatches_are_those_of_a_plain_loop(mode: Any, solver: Any, optimizer: Callable) -> None:
    problem = SineRegression(hidden=4, num_data=23)
    guide = problem.trained(steps=20)
    start = guide.unconstrained_mode()
    loader = Shuffled(problem.x, problem.y, 10)
    posterior: Any = guide.fit(loader, SecondFits(mode, solver), unconverged="accept")
    before = len(loader.passes)
    query = guide.query(GRID[:1])
    found = posterior.responses(query)[0, 0, 0]
    passes = loader.passes[-solver.epochs :]
    assert len(loader.passes) - before <= solver.epochs + 3  # both fits take the same minibatches
    ends = []
    for strength in (0.8, -0.8):

        def pull(locs: dict[str, Tensor], x: Tensor, count: int, strength: float = strength) -> Tensor:
            if isinstance(mode, Pointwise):
                return strength * sine_output(locs, GRID[:1]).sum()
            return strength * count * sine_output(locs, x).sum() / problem.num_data

        ends.append(sine_output(fine_tuned(problem, start, passes, pull, optimizer), GRID[:1]))
    torch.testing.assert_close(found, (ends[0] - ends[1])[0].detach() / 1.6, rtol=1e-7, atol=0)


def test_gradients_of_minibatches_have_the_right_mean() -> None:
    problem = SineRegression(hidden=4, num_data=23)  # 10, 10 and 3 rows
    energy = problem.trained(steps=5).energy(problem.batches)
    local = energy.at(energy.start)
    whole = local.gradient
    parts = [gradient_of(energy, energy.start, batch) for batch in energy.passes]
    torch.testing.assert_close(torch.stack(parts).mean(0), whole, rtol=1e-12, atol=1e-12)


# --- no Hessian, no minimum ----------------------------------------------------------------------------------


@pytest.mark.every(3)
@pytest.mark.parametrize("solver", [Adam(1.0, epochs=3), SGD(1.0, 1e-4, epochs=3)], ids=type)
@pytest.mark.parametrize("less", ["opposite", "untilted"])
def test_there_is_no_product_with_a_matrix(solver: Any, less: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = SineRegression(hidden=4, num_data=15)
    guide = problem.trained(steps=10)
    with pytest.raises(UnconvergedError):
        guide.fit(problem.batches, SecondFits())

    def refuse(*args: Any) -> Any:
        raise AssertionError("a product")

    for kind, names in (
        (LocalEnergy, "hessian ggn prior_hessian"),
        (BatchGraph, "hessian ggn prior_hessian"),
    ):
        for name in names.split():
            monkeypatch.setattr(kind, name, refuse)
    with pytest.raises(AssertionError, match="a product"):
        guide.fit(problem.batches, Dense(Hessian()))
    guide.fit(problem.batches, SecondFits(solver=solver, less=less), unconverged="accept")
    assert bool((guide.predictive(GRID).variance > 0).all())
    assert parameter_uncertainty(guide, problem.batches, solver=solver)


# --- mistakes ------------------------------------------------------------------------------------------------


def test_rows_that_are_missing_are_noticed() -> None:
    problem = SineRegression(hidden=4, num_data=15)
    guide: LaplaceGuide = problem.trained(steps=5)
    with pytest.raises(DataError, match="the batches contain 10 rows of plate 'data', whose size is 15"):
        guide.fit(problem.batches[:1], SecondFits(solver=Adam(1.0, epochs=1)), unconverged="accept")


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Adam(-1.0), "^strength must be a positive number"),
        (lambda: Adam(math.nan), "^strength must be a positive number"),
        (lambda: SGD(1.0, 0.0), "^learning_rate must be a positive number"),
        (lambda: Adam(1.0, epochs=0), "^epochs must be a positive whole number"),
        (lambda: SecondFits(less="central"), '^less must be "opposite", "untilted" or "mode"'),
    ],
)
def test_options_out_of_range(make: Callable, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()
