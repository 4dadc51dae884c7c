# SPDX-License-Identifier: Apache-2.0
"""Which class defines a density, and what follows for everything that dispatches on the class of a distribution."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import distributions as td

import pyro_dvi as dvi
from pyro_dvi import curvature, laplace
from pyro_dvi.core.densities import keeps, mask_of, parent_in

X = torch.linspace(-1, 1, 200).double()
Y = (X + torch.randn(200, generator=torch.Generator().manual_seed(0)).double()).clamp_min(0)


class Tobit(dist.Normal):
    """Observations below zero are recorded as zero; drawn values are not."""

    def log_prob(self, value):
        below = torch.special.log_ndtr(-self.loc / self.scale)
        return torch.where(value <= 0, below, super().log_prob(value.clamp_min(0)))


class DrawnTobit(Tobit):
    """The same density with its own draws."""

    def sample(self, sample_shape=()):
        return super().sample(sample_shape).clamp_min(0)


class Renamed(dist.Normal):
    """A subclass with the density of its parent."""


class Doubled(dist.Normal):
    """Twice the log density, as of a Normal whose variance is half as large."""

    def log_prob(self, value):
        return 2 * super().log_prob(value)


def model_of(family, prior=dist.Normal):
    def model(x, y=None):
        w = pyro.sample("w", prior(torch.zeros((), dtype=x.dtype), 1.0))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", family(w * x, 1.0), obs=y)

    return model


def test_pyros_classes_and_plain_subclasses_have_the_density_of_their_parents():
    for family in (dist.Normal, Renamed, dist.NanMaskedNormal):
        assert parent_in([td.Normal], family) is td.Normal
    assert parent_in([td.Normal], Tobit) is None
    assert [keeps(family(0.0, 1.0), "sample") for family in (Renamed, Tobit, DrawnTobit)] == [
        True,
        False,
        True,
    ]


@pytest.mark.filterwarnings("ignore:the Fisher information of Tobit")
def test_a_density_of_its_own_is_not_taken_for_its_parents():
    model = model_of(Tobit)
    guide, run = dvi.MeanFieldGuide(model), dvi.TaylorELBO
    refused = {curvature.GGNDiagonal: "no closed-form Fisher", curvature.Fisher: r"Tobit has no sample\(\)"}
    for kind, message in refused.items():
        with pytest.raises(dvi.errors.UnsupportedError, match=message):
            run(curvature=kind()).loss(model, guide, X, Y)
    laplace_guide = dvi.LaplaceGuide(model)
    laplace_guide.polish([(X, Y)], progress=False)
    with pytest.raises(dvi.errors.UnsupportedError, match=r"'y': Tobit has no sample\(\).*Hessian\(\)"):
        laplace_guide.fit([(X, Y)], laplace.Dense())
    scores = dvi.predict(model, guide, (X, Y), method=dvi.AtMean()).metrics()
    assert not {"crps", "coverage_95"} & scores.keys()  # a Normal's quantiles would be wrong


@pytest.mark.filterwarnings("ignore:the Fisher information of DrawnTobit")
def test_the_information_of_a_density_with_draws_is_its_own():
    model = model_of(DrawnTobit)
    guide = dvi.LaplaceGuide(model)
    guide.polish([(X, Y)], progress=False)
    ggn = float(guide.fit([(X, Y)], laplace.Dense()).precision)
    hessian = float(guide.fit([(X, Y)], laplace.Dense(laplace.Hessian())).precision)
    assert ggn == pytest.approx(hessian, rel=0.25)
    assert ggn < 0.9 * float(X.square().sum() + 1)  # a Normal's


def test_a_prior_with_a_density_of_its_own_enters_the_divergence():
    model, x = model_of(dist.Normal, Doubled), X[:3]
    guide, elbo = dvi.MeanFieldGuide(model), dvi.TaylorELBO()
    elbo.loss(model, guide, x, x)
    q = guide.get_posterior()["w"]
    cross = td.Normal(q.loc, 1.0).log_prob(torch.zeros_like(q.loc)) - q.scale**2 / 2
    assert float(elbo.terms["kl"]) == pytest.approx(float((-q.entropy() - 2 * cross).detach()), rel=1e-4)


def test_the_mask_of_a_draw():
    keep = torch.tensor([True, False])
    fn = dist.Normal(torch.zeros(3, 2), 1.0).mask(keep).to_event(1)
    assert mask_of(dist.Normal(0.0, 1.0)) is None
    assert mask_of(fn).equal(keep.expand(3, 2))
    rows = torch.tensor([True, True, False])
    assert mask_of(fn, rows).equal(keep & rows.unsqueeze(-1))


@pytest.mark.parametrize("order", [1, -1], ids=["False inside", "False outside"])
@pytest.mark.parametrize("by_poutine", [False, True])
def test_a_mask_of_python_joins_one_of_the_device(by_poutine, order, device):
    rows = torch.tensor([True, True, False], device=device)
    inner, outer = (False, rows)[::order]
    fn = dist.Normal(torch.zeros(3, 2, device=device), 1.0).to_event(1).mask(inner)
    found = mask_of(fn, outer) if by_poutine else mask_of(fn.mask(outer))
    assert found is not None and found.device == device
    assert found.shape == (3, 2) and not found.any()


@pytest.mark.parametrize("place", ["site", "distribution"])
def test_a_site_that_is_left_out_beside_one_with_a_mask_of_the_device(place, device):
    """Kronecker factors of the first site alone, and scores of no value of the second."""

    def model(x, y=None, both=True):
        w = pyro.sample("w", dist.Normal(x.new_zeros(1, 2), 1.0).to_event(2))
        f = torch.nn.functional.linear(x, w).squeeze(-1)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, 0.5).mask(x[:, 0] > 0), obs=y)
            if both:
                fn = dist.Normal(2 * f, 0.5).mask(x[:, 0] < 0)
                with pyro.poutine.mask(mask=place != "site"):
                    pyro.sample("z", fn if place == "site" else fn.mask(False), obs=y)

    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)).to(device)
    factors = []
    for both in (True, False):
        torch.manual_seed(0)
        guide = dvi.KroneckerGuide(model)
        svi = pyro.infer.SVI(model, guide, dvi.NoisyKFAC({}), loss=dvi.NaturalGradientELBO())
        svi.step(x, x[:, 0], both)
        factors.append([root.cpu() for root in guide.roots("w")])
        pyro.clear_param_store()
    torch.testing.assert_close(factors[0], factors[1])
    scores = dvi.predict(model, guide, (x, x[:, 0]), site="y").metrics()
    assert torch.tensor(scores["rmse"]).isfinite()
