# SPDX-License-Identifier: Apache-2.0
"""Guides at their means, and the latents of a model paired with the Gaussians of a guide."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoGuideList,
    AutoLaplaceApproximation,
    AutoMultivariateNormal,
    AutoNormal,
)
from pyro.optim import Adam
from torch import Tensor
from torch.distributions import constraints

import pyro_dvi as dvi
from pyro_dvi.core.distributions import strip_event_dims
from pyro_dvi.curvature import GGNDiagonal
from pyro_dvi.errors import ModelError
from pyro_dvi.guides import MeanFieldGuide
from pyro_dvi.natural_gradients.updates import VOGN
from pyro_dvi.runs.divergences import kl_to_priors
from pyro_dvi.runs.latents import unconstraining_transform
from pyro_dvi.runs.posterior_run import Call, PosteriorMeans, run_at_means
from pyro_dvi.runs.structure import FirstRuns


def model() -> None:
    s = pyro.sample("s", dist.LogNormal(0.0, 0.5))
    w = pyro.sample("w", dist.Normal(torch.zeros(2, 3), s).to_event(2))
    p = pyro.sample("p", dist.Dirichlet(torch.ones(4)))
    with pyro.plate("rows", 5):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(z + w.sum() + p[0], 1.0), obs=torch.zeros(5))


def hand_written() -> None:
    pyro.sample("s", dist.LogNormal(torch.tensor(0.1, requires_grad=True), 0.2))
    pyro.sample("w", dist.Normal(torch.zeros(2, 3), 0.1).to_event(2))
    u = pyro.sample(
        "p_unconstrained", dist.Normal(torch.zeros(3), 0.1).to_event(1), infer={"is_auxiliary": True}
    )
    pyro.sample("p", dist.Delta(torch.distributions.biject_to(constraints.simplex)(u), event_dim=1))
    with pyro.plate("rows", 5):
        pyro.sample("z", dist.Normal(torch.zeros(5), 0.3))


GUIDES: dict[str, Callable] = {
    "MeanFieldGuide": MeanFieldGuide,
    "AutoNormal": AutoNormal,
    "AutoDiagonalNormal": AutoDiagonalNormal,
    "hand-written": lambda _: hand_written,
}


@pytest.mark.parametrize("make", GUIDES.values(), ids=GUIDES)
def test_every_latent_finds_its_marginal(make):
    guide = make(model)
    runs = FirstRuns()
    structure, first = runs.of(Call(model, guide))
    assert first and runs.of(Call(model, guide))[1] is False
    run = run_at_means(Call(model, guide))
    latents = {latent.name: latent for latent in run.latents}
    assert list(latents) == ["s", "w", "p", "z"]
    assert {k: tuple(v.loc.shape) for k, v in latents.items() if v.loc is not None} == {
        "s": (), "w": (2, 3), "p": (3,), "z": (5,),
    }  # fmt: skip
    for latent in latents.values():
        assert latent.scale is not None and latent.loc is not None
        transform = latent.transform
        expected = latent.loc if transform is None else transform(latent.loc)
        torch.testing.assert_close(latent.value, expected)
    # Only the scale sets another latent's prior; it is one element of a joint vector.
    sampled = structure.sampled
    assert len(sampled) == 1
    (name, elements), = sampled.items()  # fmt: skip
    if isinstance(elements, Tensor):
        assert name == "_AutoDiagonalNormal_latent" and elements.tolist() == [True] + [False] * 14
    else:
        assert name in ("s", "s_unconstrained") and elements is True


@pytest.mark.parametrize("make", GUIDES.values(), ids=GUIDES)
def test_sampled_elements_move_and_the_others_stay(make):
    guide = make(model)
    structure, _ = FirstRuns().of(Call(model, guide))
    runs = [run_at_means(Call(model, guide), structure.sampled) for _ in range(2)]
    first, second = ({latent.name: latent.value for latent in run.latents} for run in runs)
    assert not torch.equal(first["s"], second["s"])
    for name in ("w", "p", "z"):
        assert torch.equal(first[name], second[name])
    for gaussian in runs[0].gaussians:  # what was sampled is not expanded
        if gaussian.sampled is not False:
            assert (gaussian.expanded_scale() == 0).sum() == 1


def test_the_first_look_leaves_random_numbers_and_parameters_alone():
    guide = AutoNormal(model)
    state = torch.get_rng_state()
    FirstRuns().of(Call(model, guide))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("make", [AutoDelta, AutoLaplaceApproximation])
def test_point_masses_have_no_marginal(make):
    def simple() -> None:
        w = pyro.sample("w", dist.LogNormal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(w.sum(), 1.0), obs=torch.tensor(0.0))

    run = run_at_means(Call(simple, make(simple)))
    assert run.gaussians == [] and [latent.source for latent in run.latents] == [None]


def test_guides_in_a_list_keep_their_vectors_apart():
    guide = AutoGuideList(model)
    guide.append(AutoDiagonalNormal(poutine.block(model, expose=["s", "w"])))
    guide.append(AutoDiagonalNormal(poutine.block(model, expose=["p", "z"])))
    run = run_at_means(Call(model, guide))
    assert [g.loc.shape[0] for g in run.gaussians] == [7, 8]
    assert all(latent.source is not None for latent in run.latents)


def test_means_are_nodes_of_their_own():
    """The gradient with respect to a mean must not mix with other uses of the parameter."""
    loc = torch.zeros(3, requires_grad=True)
    with PosteriorMeans() as means:
        value = pyro.sample("w", dist.Normal(loc, 1.0).to_event(1))
    assert value is not loc and torch.equal(value, loc)
    (g,) = torch.autograd.grad((value * loc.exp()).sum(), means.gaussians["w"].value)
    torch.testing.assert_close(g, torch.ones(3))


def test_a_constant_mean_can_be_differentiated():
    with PosteriorMeans() as means:
        value = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    (g,) = torch.autograd.grad(value.sum(), means.gaussians["w"].value)
    torch.testing.assert_close(g, torch.ones(3))


def test_transforms_of_supports():
    assert unconstraining_transform(dist.Normal(0.0, 1.0).support) is None
    assert unconstraining_transform(dist.Normal(torch.zeros(2), 1.0).to_event(1).support) is None
    assert unconstraining_transform(dist.MultivariateNormal(torch.zeros(2), torch.eye(2)).support) is None
    for prior in (dist.Gamma(1.0, 1.0), dist.Beta(1.0, 1.0), dist.Dirichlet(torch.ones(3))):
        transform = unconstraining_transform(prior.support)
        value = prior.sample()
        torch.testing.assert_close(transform(transform.inv(value)), value)
    assert strip_event_dims(dist.Normal(torch.zeros(2, 2), 1.0).to_event(1).to_event(1)).batch_shape == (2, 2)


def test_the_density_of_a_point_mass_below_to_event_counts_once():
    def model(x):
        pyro.sample("b", dist.Normal(torch.zeros(3), 2.0).to_event(1))
        pyro.sample("obs", dist.Normal(0.0, 1.0), obs=x)

    def guide(x):
        pyro.sample("b", dist.Delta(torch.ones(3, requires_grad=True)).to_event(1))

    (latent,) = run_at_means(Call(model, guide, (torch.zeros(()),))).latents
    expected = -dist.Normal(0.0, 2.0).log_prob(torch.ones(3)).sum()
    torch.testing.assert_close(kl_to_priors([latent]), expected)


def in_event(n: int) -> Tensor:
    return pyro.sample("w", dist.Normal(torch.zeros(n), 1.0).to_event(1))


def in_plate(n: int) -> Tensor:
    with pyro.plate("rows", n):
        return pyro.sample("w", dist.Normal(0.0, 1.0))


METHODS = {
    "Taylor": (MeanFieldGuide, dvi.TaylorELBO, Adam),
    "moments": (MeanFieldGuide, dvi.MomentPropagationELBO, Adam),
    "point": (AutoDelta, dvi.SampledELBO, Adam),
    "not factorised": (AutoMultivariateNormal, dvi.SampledELBO, Adam),
    "VOGN": (dvi.NaturalGradientGuide, dvi.NaturalGradientELBO, VOGN),
    "Laplace": (dvi.LaplaceGuide, None, None),
}


@pytest.mark.parametrize("latent", [in_event, in_plate])
@pytest.mark.parametrize(("first", "then"), [(4, 2), (4, 1), (1, 4)])
@pytest.mark.parametrize("method", METHODS)
def test_a_latent_keeps_its_shape(method, first, then, latent):
    """Another would be broadcast against the prior, or count rows that are not there."""

    def local(n: int) -> None:
        level = latent(n).sum()
        with pyro.plate("data", 3):
            pyro.sample("y", dist.Normal(level, 1.0), obs=torch.zeros(3))

    guide_class, elbo, optimizer = METHODS[method]
    guide: Any = guide_class(local)
    with pytest.raises(ModelError, match=r"'w' has the shape .* in this call .* in the guide.*minibatch"):
        if elbo is None:
            guide.initialize(first)
            guide.diagnose([(then,)])
        else:
            svi = SVI(local, guide, optimizer({}), loss=elbo())
            for n in (first, then):
                svi.step(n)


EXACT = partial(dvi.TaylorELBO, curvature=GGNDiagonal())


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("elbo", [EXACT, dvi.MomentPropagationELBO, dvi.SampledELBO])
def test_leading_dimensions_of_size_one_make_no_difference(elbo, shape):
    """As in Pyro: the guide of many a tutorial has parameters of shape [1] for a scalar latent."""

    def scalar() -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 3):
            pyro.sample("y", dist.Normal(w, 1.0), obs=torch.zeros(3))

    def guide() -> None:
        loc = pyro.param("loc", torch.full(shape, 0.3))
        pyro.sample("w", dist.Normal(loc, 0.1).to_event(len(shape)))

    loss = elbo().loss(scalar, guide)
    if elbo is not dvi.SampledELBO:
        expected = 3 * (0.5 * math.log(2 * math.pi) + 0.5 * (0.3**2 + 0.1**2))
        divergence = 0.5 * (0.1**2 + 0.3**2 - 1) - math.log(0.1)
        assert loss == pytest.approx(expected + divergence, rel=1e-5)


@pytest.mark.parametrize("method", ["Taylor", "moments", "point", "not factorised"])
def test_a_latent_of_each_row_may_be_subsampled(method):
    def local(rows: Tensor) -> None:
        with pyro.plate("rows", 4, subsample=rows):
            pyro.sample(
                "y", dist.Normal(pyro.sample("w", dist.Normal(0.0, 1.0)), 1.0), obs=torch.zeros(len(rows))
            )

    guide_class, elbo, optimizer = METHODS[method]

    def plates(rows: Tensor) -> Any:
        return pyro.plate("rows", 4, subsample=rows)

    guide: Any = (
        guide_class(local, create_plates=plates) if method != "not factorised" else guide_class(local)
    )
    batches = (
        [torch.arange(4)]
        if method == "not factorised"
        else [torch.arange(4), torch.tensor([2]), torch.arange(2)]
    )
    svi = SVI(local, guide, optimizer({}), loss=elbo())
    assert all(svi.step(rows) > 0 for rows in batches)
