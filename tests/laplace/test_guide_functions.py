# SPDX-License-Identifier: Apache-2.0
"""Functions drawn from the linearised posterior: their covariance, and one draw of the latents at all inputs."""

import pytest
import torch

import pyro_dvi as dvi
from pyro_dvi.errors import GuideError, UnsupportedError
from pyro_dvi.laplace import ConjugateGradient, Dense, Functional, KroneckerFactored, LaplaceGuide, Method
from tests.laplace.problems import LinearRegression


@pytest.mark.parametrize("method", [Dense(), Functional()])
def test_functions_of_a_linear_regression_have_its_covariance(method: Method):
    problem, count = LinearRegression(), 4000
    guide = problem.guide()
    guide.fit(problem.batches, method)
    x = torch.linspace(-2, 2, 12, dtype=torch.float64).reshape(4, 3)
    drawn = guide.functions(count)(x)
    assert drawn.shape == (count, 4)
    expected = x @ torch.linalg.solve(problem.precision(), x.mT)
    variance = expected.diagonal()
    # 4 means and 16 covariances for each method: one false alarm in 20,000 seeds.
    z = (drawn.mean(0) - x @ problem.mode()) / (variance / count).sqrt()
    assert z.abs().max() < 5
    centred = drawn - x @ problem.mode()
    error = ((torch.outer(variance, variance) + expected**2) / count).sqrt()
    z = (centred.mT @ centred / count - expected) / error
    assert z.abs().max() < 5


def test_functions_have_the_same_latents_at_all_inputs_and_are_linear_in_them():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).double()
    x, y = torch.randn(20, 2).double(), torch.randint(3, (20,))
    model = dvi.classifier(dvi.to_bayesian_(net, prior_scale=1.0), num_data=20)
    guide = LaplaceGuide(model)
    guide.fit([(x, y)], KroneckerFactored(), unconverged="accept")
    functions = guide.functions(6, seed=2)
    whole = functions(x)
    assert whole.shape == (6, 20, 3)
    torch.testing.assert_close(torch.cat([functions(x[:7]), functions(x[7:])], 1), whole)
    assert torch.equal(guide.functions(6, seed=2)(x), whole)
    assert not torch.equal(guide.functions(6, seed=3)(x), whole)

    mode, plain = guide.posterior.mode, dvi.bayesian.to_deterministic(model, guide)
    shifts = guide.posterior.draw(6, torch.Generator().manual_seed(2)) - mode

    def outputs(point: torch.Tensor) -> torch.Tensor:
        torch.nn.utils.vector_to_parameters(point, plain.parameters())
        return plain(x).detach()

    for shift, found in zip(shifts, whole, strict=True):
        slope = (outputs(mode + 1e-5 * shift) - outputs(mode - 1e-5 * shift)) / 2e-5
        torch.testing.assert_close(found, outputs(mode) + slope, rtol=1e-6, atol=1e-6)

    guide.fit([(x, y)], Dense(), unconverged="accept")
    with pytest.raises(GuideError, match="draw them again"):
        functions(x)
    guide.fit([(x, y)], ConjugateGradient(), unconverged="accept")
    with pytest.raises(UnsupportedError, match="draws of the latents"):
        guide.functions(2)
