# SPDX-License-Identifier: Apache-2.0
"""The smallest variance that a nonlinearity sees."""

import threading

import pytest
import torch
import torch.nn.functional as F

from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.dispatch import observed_by
from pyro_dvi.moments.value import floored, variance_floor


def certain() -> GaussianMoments:
    return GaussianMoments(torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize("function", [F.relu, F.silu, F.hardtanh, F.elu], ids=lambda f: f.__name__)
def test_nonlinearities_see_the_floor(function) -> None:
    expected = function(GaussianMoments(certain().loc, torch.full((2,), 0.25, dtype=torch.float64)))
    with variance_floor(0.25):
        y = function(certain())
    torch.testing.assert_close(y.loc, expected.loc, rtol=0, atol=0)
    torch.testing.assert_close(y.variance, expected.variance, rtol=0, atol=0)
    assert function(certain()).variance.max() < 1e-30


def test_larger_variances_are_left_alone() -> None:
    variance = torch.tensor([0.1, 2.0])
    with variance_floor(1.0):
        assert floored(variance).tolist() == [1.0, 2.0]
    torch.testing.assert_close(floored(variance), variance, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_by_default_the_square_of_rounding(dtype: torch.dtype) -> None:
    zero = torch.zeros((), dtype=dtype)
    assert floored(zero) == torch.tensor(torch.finfo(dtype).eps, dtype=dtype) ** 2
    with variance_floor(0.0):  # never below it: slopes stay finite
        assert floored(zero) > 0


def test_contexts_nest_and_end_with_an_error() -> None:
    zero = torch.zeros(())
    with variance_floor(1.0):
        with pytest.raises(RuntimeError), variance_floor(2.0):
            assert floored(zero) == 2
            raise RuntimeError
        assert floored(zero) == 1
    assert floored(zero) < 1e-10


def test_the_slope_at_a_kink_is_tamed() -> None:
    variance = torch.zeros(1, requires_grad=True)
    with variance_floor(1e-4):
        F.relu(GaussianMoments(torch.zeros(1), variance)).loc.sum().backward()
    assert variance.grad.abs().max() < 1e3


def test_another_thread_has_a_floor_of_its_own() -> None:
    found = []
    with variance_floor(1.0):
        thread = threading.Thread(target=lambda: found.append(floored(torch.zeros(())).item()))
        thread.start()
        thread.join()
    assert found[0] < 1e-10


def test_another_thread_has_observers_of_its_own() -> None:
    seen: list = []

    def observer(func, args, kwargs, result):
        seen.append(func)
        return result

    with observed_by(observer):
        thread = threading.Thread(target=lambda: certain() + 1)
        thread.start()
        thread.join()
        assert not seen
        certain() * 2
    assert seen == [torch.mul]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo of torch 2.8
def test_a_floor_is_compiled_without_breaks() -> None:
    def network(loc: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        return floored(GaussianMoments(loc, variance).variance)

    compiled = torch.compile(network, fullgraph=True, backend="eager")
    loc, variance = torch.ones(2), torch.zeros(2)
    assert compiled(loc, variance).equal(floored(variance))
    with variance_floor(0.5):
        assert compiled(loc, variance).equal(torch.full((2,), 0.5))
