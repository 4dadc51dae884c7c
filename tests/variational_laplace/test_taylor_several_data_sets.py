# SPDX-License-Identifier: Apache-2.0
"""Models whose sites have sizes, plates and vectors of their own."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDiagonalNormal, AutoNormal

import pyro_dvi as dvi
from pyro_dvi.curvature import HessianDiagonal
from pyro_dvi.errors import DataError


def two_data_sets(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    pyro.sample("known", dist.Normal(w, 1.0), obs=torch.tensor(0.5))
    with pyro.plate("other", 7):
        pyro.sample("z", dist.Normal(w, 1.0), obs=torch.ones(7))
    with pyro.plate("data", 40, subsample_size=len(x)):
        return pyro.sample("y", dist.Normal(w * x, 1.0), obs=y)


def test_a_second_data_set_of_another_size_is_no_mistake():
    x = torch.randn(10)
    guide = dvi.MeanFieldGuide(two_data_sets)
    assert dvi.TaylorELBO(num_data=40).loss(two_data_sets, guide, x, x) > 0
    with pytest.raises(DataError, match="size=41"):
        dvi.TaylorELBO(num_data=41).loss(two_data_sets, guide, x, x)


def test_an_unscaled_site_as_long_as_the_minibatch_is_a_mistake():
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("unscaled", len(x)):
            pyro.sample("z", dist.Normal(w, 1.0), obs=x)
        with pyro.plate("data", 40, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(w * x, 1.0), obs=y)

    x = torch.randn(10)
    with pytest.raises(DataError, match="'z' sees 10 of 40"):
        dvi.TaylorELBO(num_data=40).loss(model, dvi.MeanFieldGuide(model), x, x)


def test_the_clamp_of_a_joint_vector_is_that_of_its_sites():
    """A Hessian of the wrong sign everywhere: the clamp alone decides the penalty."""
    scales = torch.tensor([[0.5, 1.0], [2.0, 1.0], [1.0, 3.0]])

    def model():
        w = pyro.sample("w", dist.Normal(torch.zeros(3, 2), scales).to_event(2))
        v = pyro.sample("v", dist.Normal(0.0, 2.0))
        pyro.factor("convex", 50 * (w**2).sum() + 50 * v**2)

    losses = []
    for make in (AutoNormal, AutoDiagonalNormal):
        pyro.clear_param_store()
        guide = make(model, init_loc_fn=pyro.infer.autoguide.init_to_mean, init_scale=0.1)
        elbo = dvi.TaylorELBO(curvature=HessianDiagonal())
        elbo.loss(model, guide)
        losses.append(elbo.terms["penalty"].item())
    expected = -0.5 * 0.9 * 0.01 * ((1 / scales**2).sum().item() + 0.25)
    assert losses == pytest.approx([expected, expected], rel=1e-4)


def test_the_average_hessian_skips_latents_of_other_rows():
    def model(x, y=None):
        with pyro.plate("data", 20, subsample=x.long()):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            return pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    def rows(x, y=None):
        return pyro.plate("data", 20, subsample=x.long())

    guide = dvi.MeanFieldGuide(model, create_plates=rows)
    elbo = dvi.TaylorELBO(curvature=HessianDiagonal())
    for part in (torch.arange(10), torch.arange(5)):
        assert elbo.loss(model, guide, part.float(), torch.zeros(len(part))) > 0
    # The plate scale weighs the KL divergence, so it weighs the clamp as well: no error, and a finite loss.
    assert torch.isfinite(elbo.terms["penalty"])


@pytest.mark.parametrize("kink", [lambda h: h.clamp(min=0), lambda h: torch.maximum(h, torch.zeros(()))])
def test_functional_kinks_are_announced(kink):
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(kink(w * x), 1.0), obs=y)

    with pytest.warns(dvi.errors.DviWarning, match="second derivative is zero"):
        dvi.TaylorELBO().loss(model, dvi.MeanFieldGuide(model), torch.ones(4), torch.ones(4))
