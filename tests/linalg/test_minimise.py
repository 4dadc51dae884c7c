# SPDX-License-Identifier: Apache-2.0
"""Minimisation of functions whose minima are known, and of a network's loss."""

import math
import zlib

import pytest
import torch
from torch import Tensor

from pyro_dvi.errors import NonFiniteError
from pyro_dvi.linalg.minimise import InMetric, minimise_newton
from tests.linalg.matrices import Root, rows, with_eigenvalues


class Differentiated:
    """A function with its derivatives by autograd, and the numbers of calls."""

    def __init__(self, function):
        self.function, self.evaluations, self.products = function, 0, 0
        self._at = None

    def value_and_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.evaluations += 1
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            value = self.function(x)
            return value.detach(), torch.autograd.grad(value, x)[0]

    def product(self, x: Tensor, vectors: Tensor) -> Tensor:
        self.products += len(vectors)
        with torch.enable_grad():
            if self._at is None or not torch.equal(self._at, x):
                self._at = x.detach().clone().requires_grad_()
                (self._gradient,) = torch.autograd.grad(self.function(self._at), self._at, create_graph=True)
            if not self._gradient.requires_grad:
                return torch.zeros_like(vectors)
            return torch.stack(
                [
                    torch.autograd.grad(
                        self._gradient, self._at, v, retain_graph=True, materialize_grads=True
                    )[0]
                    for v in vectors
                ]
            )


def quadratic(matrix: Tensor, b: Tensor) -> Differentiated:
    return Differentiated(lambda x: 0.5 * x @ matrix @ x - b @ x)


def double(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_quadratic_function():
    matrix, _ = with_eigenvalues(torch.logspace(0, 3, 40, dtype=torch.float64))
    b = rows(1, 40)[0]
    problem = quadratic(matrix, b)
    found = minimise_newton(problem, torch.zeros(40, dtype=torch.float64), tolerance=1e-12)
    torch.testing.assert_close(found.x, torch.linalg.solve(matrix, b), rtol=0, atol=2e-6)
    assert found.converged and found.smallest_eigenvalue.value == pytest.approx(1, rel=1e-2)
    assert found.newton_decrement <= 1e-12


def test_start_at_the_minimum_needs_only_the_proof():
    matrix, _ = with_eigenvalues(torch.linspace(1, 9, 9, dtype=torch.float64))
    problem = quadratic(matrix, torch.zeros(9, dtype=torch.float64))
    found = minimise_newton(problem, matrix.new_zeros(9))
    assert found.converged and found.steps == 1 and problem.products <= 9


def test_small_krylov_space_is_completed_by_conjugate_gradients():
    matrix, _ = with_eigenvalues(torch.logspace(0, 2, 60, dtype=torch.float64))
    b = rows(1, 60)[0]
    found = minimise_newton(quadratic(matrix, b), torch.zeros_like(b), krylov_steps=8, tolerance=1e-16)
    torch.testing.assert_close(found.x, torch.linalg.solve(matrix, b), rtol=1e-6, atol=1e-8)
    assert found.newton_decrement <= 1e-16 and found.steps < 20


@pytest.mark.parametrize("tolerance", [1e-2, 1e-8])
def test_decrement_is_a_bound_from_above(tolerance):
    matrix, _ = with_eigenvalues(torch.logspace(0, 4, 60, dtype=torch.float64))
    b = rows(1, 60)[0]
    found = minimise_newton(quadratic(matrix, b), torch.zeros_like(b), tolerance=tolerance)
    gradient = matrix @ found.x - b
    assert float(gradient @ torch.linalg.solve(matrix, gradient)) <= found.newton_decrement <= tolerance


def test_diagonal_metric_saves_products():
    scales = torch.logspace(0, 3, 50, dtype=torch.float64)
    core, _ = with_eigenvalues(torch.linspace(1, 3, 50, dtype=torch.float64))
    matrix = scales[:, None] * core * scales
    b, start = rows(1, 50)[0], torch.zeros(50, dtype=torch.float64)
    plain, counted = quadratic(matrix, b), quadratic(matrix, b)
    minimise_newton(plain, start, tolerance=1e-14)
    better = InMetric(counted, Root(matrix.diagonal().sqrt().diag()), start)
    scaled = minimise_newton(better, start, tolerance=1e-14)
    assert scaled.converged and counted.products < plain.products / 2
    torch.testing.assert_close(better.x(scaled.x), torch.linalg.solve(matrix, b), rtol=1e-6, atol=1e-10)


def rosenbrock(x: Tensor) -> Tensor:
    return (100 * (x[1:] - x[:-1].square()).square() + (1 - x[:-1]).square()).sum()


@pytest.mark.parametrize("dim", [2, 10])
def test_rosenbrock(dim):
    problem = Differentiated(rosenbrock)
    found = minimise_newton(problem, torch.full((dim,), -1.2, dtype=torch.float64), tolerance=1e-16)
    torch.testing.assert_close(
        problem.value_and_gradient(found.x)[1], torch.zeros_like(found.x), rtol=0, atol=1e-10
    )
    assert found.converged and found.steps < 100
    if dim == 2:
        torch.testing.assert_close(found.x, torch.ones_like(found.x))


def test_convergence_is_superlinear():
    sizes: list[float] = []
    minimise_newton(
        Differentiated(rosenbrock),
        double(-1.2, 1.0),
        tolerance=1e-25,
        callback=lambda value, decrement: sizes.append(decrement),
    )
    last = [s for s in sizes if s < 1e-2]
    assert any(after < before**1.4 for before, after in zip(last, last[1:], strict=False))


def test_start_on_a_saddle_goes_on_to_a_minimum():
    problem = Differentiated(lambda x: x[0] ** 2 - x[1] ** 2 + x[1] ** 4 / 4 + x[2] ** 2)
    found = minimise_newton(problem, double(0, 0, 0), tolerance=1e-18)
    torch.testing.assert_close(found.x.abs(), double(0, math.sqrt(2), 0), rtol=0, atol=1e-9)
    assert found.converged and found.smallest_eigenvalue.value > 0
    stable_manifold = minimise_newton(
        problem, double(1, 0, 0.3), tolerance=1e-18
    )  # the gradient leads to the saddle
    torch.testing.assert_close(stable_manifold.x.abs(), double(0, math.sqrt(2), 0), rtol=0, atol=1e-9)


def monkey_saddle(x: Tensor) -> Tensor:
    return x[0] ** 3 - 3 * x[0] * x[1] ** 2 + x.square().sum().square() / 4


@pytest.mark.parametrize("start", [(0.01, 0.003), (1e-3, 0.0), (-0.2, 0.5)])
def test_monkey_saddle_is_left_for_a_minimum(start):
    found = minimise_newton(Differentiated(monkey_saddle), double(*start), tolerance=1e-18)
    assert found.converged
    assert found.value == pytest.approx(-27 / 4, rel=1e-9)  # at distance three in one of three directions


def test_degenerate_points_are_not_called_minima():
    found = minimise_newton(Differentiated(monkey_saddle), double(0, 0))
    assert not found.converged and "singular" in found.reason
    flat = minimise_newton(Differentiated(lambda x: (x[0] - 1) ** 2 + 0 * x[1]), double(3, 4))
    assert not flat.converged and "singular" in flat.reason
    torch.testing.assert_close(flat.x, double(1, 4))


def test_unbounded_functions_end():
    found = minimise_newton(Differentiated(lambda x: -x.square().sum()), double(1, 2), max_steps=20)
    assert not found.converged and found.steps == 20 and "20 steps" in found.reason
    single = minimise_newton(Differentiated(lambda x: -x.square().sum()), torch.tensor([1.0, 2.0]))
    assert not single.converged and math.isfinite(single.value)


def test_undefined_regions_are_avoided():
    problem = Differentiated(
        lambda x: (x - x.log()).sum() + (1e4 * (x[0] - x[1])).square()
    )  # NaN where x < 0
    found = minimise_newton(problem, double(30, 0.1), tolerance=1e-14)
    torch.testing.assert_close(found.x, double(1, 1), rtol=1e-6, atol=0)
    with pytest.raises(NonFiniteError, match="start"):
        minimise_newton(problem, double(-1, 1))


class Rounded:
    """A quadratic function in float32 whose rounding errors have a chosen size, the same on every machine.

    A sum of products is off by about ``unit`` times the sum of their magnitudes. The errors are random numbers, the
    same ones whenever the same vector comes again.
    """

    def __init__(self, matrix: Tensor, b: Tensor, unit: float) -> None:
        self.matrix, self.b, self.unit = matrix.float().double(), b.float().double(), unit

    def error(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(x.numpy().tobytes()))
        return self.size(x) * torch.randn(x.shape, generator=generator, dtype=torch.float64)

    def size(self, x: Tensor) -> Tensor:
        """Standard deviations of the errors in the product with x."""
        return self.unit * (self.matrix.abs() @ x.double().abs())

    def value_and_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        product = self.matrix @ x.double()
        value = 0.5 * x.double() @ product - self.b @ x.double()
        return value.float(), (product - self.b + self.error(x)).float()

    def product(self, x: Tensor, vectors: Tensor) -> Tensor:
        return torch.stack([(self.matrix @ v.double() + self.error(v)).float() for v in vectors])


ILL_CONDITIONED, _ = with_eigenvalues(torch.logspace(0, 5, 50, dtype=torch.float64))
FAR = 100 * rows(1, 50)[0]  # the minimum is 280 standard deviations from the start


@pytest.mark.every(3)
@pytest.mark.parametrize("units", [0.1, 1.0, 10.0])
def test_it_ends_as_near_as_the_rounding_of_the_gradient_allows(units):
    problem = Rounded(ILL_CONDITIONED, FAR, units * torch.finfo(torch.float32).eps / 2)
    exact = torch.linalg.solve(problem.matrix, problem.b)
    found = minimise_newton(problem, torch.zeros(50), tolerance=1e-30, max_steps=20)
    assert not found.converged
    distance = found.x.double() - exact  # squared standard deviations
    # An exact Newton step from next to the minimum would end at P^-1 e: the mean of e'P^-1 e is the limit for anyone.
    limit = float(problem.size(exact).square() @ torch.linalg.inv(problem.matrix).diagonal())
    assert float(distance @ problem.matrix @ distance) < 4 * limit


@pytest.mark.slow
def test_float32_stops_at_its_rounding():
    problem = quadratic(ILL_CONDITIONED.float(), FAR.float())
    exact = torch.linalg.solve(ILL_CONDITIONED.float().double(), FAR.float().double())
    found = minimise_newton(problem, torch.zeros(50), tolerance=1e-30, max_steps=20)
    assert not found.converged
    distance = found.x.double() - exact
    # The error of a sum of n products is, with high probability, below the root of n times the unit roundoff times the
    # sum of magnitudes, in any order of summation (Higham & Mary, 2019). The smallest eigenvalue of the matrix is 1.
    unit = math.sqrt(50) * torch.finfo(torch.float32).eps / 2
    limit = (unit * (ILL_CONDITIONED.abs() @ exact.abs())).square().sum()
    assert float(distance @ ILL_CONDITIONED @ distance) < 4 * limit
    loose = minimise_newton(problem, torch.zeros(50), tolerance=1000.0)
    assert loose.converged and loose.x.dtype == torch.float32


def test_one_dimension_and_no_gradient_mode():
    with torch.no_grad():
        found = minimise_newton(Differentiated(lambda x: x.cosh().sum()), double(3.0), tolerance=1e-20)
    assert found.converged and abs(float(found.x)) < 1e-10


def network_loss(hidden: int, steps: int) -> tuple[Differentiated, Tensor]:
    """The negative log posterior of a tanh network on curved data, after some steps of Adam."""
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(100, 1, generator=generator, dtype=torch.float64) * 4 - 2
    noise = 0.1 * torch.randn(100, generator=generator, dtype=torch.float64)
    y = torch.sin(3 * x[:, 0]) + 0.3 * x[:, 0] ** 2 + noise

    def loss(w: Tensor) -> Tensor:
        inner, bias, outer, last = w.split([hidden, hidden, hidden, 1])
        output = torch.tanh(x * inner + bias) @ outer + last
        return 50 * (y - output).square().sum() + 0.5 * w.square().sum()

    weights = torch.randn(3 * hidden + 1, generator=generator, dtype=torch.float64).requires_grad_()
    optimizer = torch.optim.Adam([weights], 1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(weights).backward()
        optimizer.step()
    return Differentiated(loss), weights.detach()


@pytest.mark.slow
@pytest.mark.parametrize(("hidden", "steps"), [(10, 200), pytest.param(50, 2000, marks=pytest.mark.slow)])
def test_network_from_a_poor_maximum(hidden, steps):
    problem, start = network_loss(hidden, steps)
    before = torch.linalg.eigvalsh(torch.autograd.functional.hessian(problem.function, start))
    assert int((before < 0).sum()) > hidden // 2  # this is no minimum
    found = minimise_newton(problem, start, tolerance=1e-16)
    after = torch.linalg.eigvalsh(torch.autograd.functional.hessian(problem.function, found.x))
    assert found.converged
    assert float(after[0]) > 0.1
    assert found.smallest_eigenvalue.value == pytest.approx(float(after[0]), rel=1e-2)
    assert found.value < float(problem.function(start))
    assert problem.products < 3000 and problem.evaluations < 600


class Hidden:
    """600 - a^2 / 200 + a^4 / 16 + b^2 / 2: in float32 the wells at a = +-0.2 are shallower than 600 is rounded."""

    def value_and_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x
        value = 600 - a.square() / 200 + a**4 / 16 + b.square() / 2
        return value, torch.stack([-a / 100 + a**3 / 4, b])

    def product(self, x: Tensor, vectors: Tensor) -> Tensor:
        return vectors * torch.stack([-0.01 + 0.75 * x[0] ** 2, torch.ones(())])


def test_saddles_are_left_where_rounding_hides_how_far_the_function_falls():
    found = minimise_newton(Hidden(), torch.zeros(2), tolerance=1e-6)
    assert 0.1 < float(found.x[0].abs()) < 0.3, found.reason
    assert found.smallest_eigenvalue is not None and found.smallest_eigenvalue.value > 0
    assert found.newton_decrement < 1e-2
