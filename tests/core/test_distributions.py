# SPDX-License-Identifier: Apache-2.0
"""A distribution that is taken apart and put together again is the same, whatever it is made of."""

import pyro.distributions as dist
import pytest
import torch

from pyro_dvi.core.distributions import tensors_of, with_tensors

ZEROS, ONES = torch.zeros(4), torch.ones(4)
MADE = {
    "Normal": lambda a: dist.Normal(a, 1.0 + a.square()),
    "events": lambda a: dist.Normal(a, 1.0).to_event(1),
    "masked": lambda a: dist.Normal(a, 1.0).mask(ZEROS < torch.arange(4)),
    "expanded": lambda a: dist.Laplace(a, 1.0).expand([3, 4]),
    "Bernoulli": lambda a: dist.Bernoulli(a.sigmoid()),
    "Categorical": lambda a: dist.Categorical(logits=torch.stack([a, -a], -1)),
    "LogNormal": lambda a: dist.LogNormal(a, 0.5),
    "transforms": lambda a: dist.TransformedDistribution(
        dist.Normal(a, 1.0), [dist.transforms.AffineTransform(a, 2.0), dist.transforms.SigmoidTransform()]
    ),
    "inverse": lambda a: dist.TransformedDistribution(
        dist.Gamma(ONES + a.square(), 1.0), [dist.transforms.AffineTransform(0.0, 1.0 + a.square()).inv]
    ),
    "MultivariateNormal": lambda a: dist.MultivariateNormal(torch.stack([a, -a], -1), torch.eye(2)),
    "mixture": lambda a: dist.MixtureSameFamily(
        dist.Categorical(logits=torch.stack([a, -a], -1)), dist.Normal(torch.stack([a, -a], -1), 1.0)
    ),
    "StudentT": lambda a: dist.StudentT(4.0, a, 1.0),
    "zero-inflated": lambda a: dist.ZeroInflatedPoisson(a.exp(), gate=0.3 * ONES),
    "OrderedLogistic": lambda a: dist.OrderedLogistic(a, torch.arange(3.0)),
}


@pytest.mark.parametrize("name", MADE)
def test_the_tensors_make_it_again(name):
    """Also after draws and densities, which leave further tensors in a distribution."""
    first, second = MADE[name](0.3 * torch.arange(4.0)), MADE[name](0.5 - torch.arange(4.0))
    with torch.no_grad():
        for fn in (first, second):
            fn.log_prob(fn.sample())
        again = with_tensors(first, tensors_of(second))
        draws = []
        for fn in (second, again):
            torch.manual_seed(1)
            draws.append(fn.sample((5,)))
        assert torch.equal(*draws)
        torch.testing.assert_close(again.log_prob(draws[0]), second.log_prob(draws[0]), rtol=0, atol=0)
    assert again is not first and again.batch_shape == second.batch_shape


def test_what_may_hide_tensors_is_refused():
    class Own(dist.Normal):
        def __init__(self, loc):
            super().__init__(loc, 1.0)
            self.mean_of = lambda: loc

    with pytest.raises(TypeError, match="object of type function"):
        tensors_of(Own(ZEROS), strict=True)
