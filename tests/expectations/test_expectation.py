# SPDX-License-Identifier: Apache-2.0
"""Expected log-likelihoods against brute-force quadrature of the plain log density."""

import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributions as td

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.expectations import Sobol, TiltedBound, expectation, expectation_rule
from pyro_dvi.expectations.expectation import expected_log_prob, numerical_expectation
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.value import Link
from tests.expectations.cases import CASES, CLASSES, LOGITS, NUMERICAL, RULES

exact_or_numerical = pytest.mark.parametrize("case", RULES + NUMERICAL, ids=str)
POINTS = Sobol(2**14)


def test_every_rule_has_a_case():
    assert {case.family for case in RULES + CLASSES} == {
        f for f in expectation.RULES if f.__module__.startswith("torch.")
    }


@exact_or_numerical
def test_against_quadrature(case):
    ours = expected_log_prob(case.family, case.build(*case.gaussians()), case.observed())
    torch.testing.assert_close(ours, case.quadrature(), atol=case.tolerance, rtol=case.tolerance)


@pytest.mark.parametrize("case", CLASSES, ids=str)
def test_classes_against_quadrature(case):
    ours = expected_log_prob(case.family, case.build(*case.gaussians()), case.observed(), POINTS)
    torch.testing.assert_close(ours, case.quadrature(), atol=5e-4, rtol=0)


@pytest.mark.parametrize("case", RULES, ids=str)
def test_a_rule_is_used_and_agrees_with_the_numerical_route(case):
    parameters, value = case.build(*case.gaussians()), case.observed()
    ours = expected_log_prob(case.family, parameters, value)
    points = numerical_expectation(case.family, parameters, value)
    worst = 3e-2 if case.family in (td.Laplace, td.MultivariateNormal) else 2e-3
    torch.testing.assert_close(ours, points, atol=worst, rtol=1e-3)
    assert not torch.equal(ours, points)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_without_variance_it_is_the_log_density(case):
    means = case.gaussians()[::2]
    flat = [part for m in means for part in (m, torch.zeros_like(m))]
    flat = [part.requires_grad_() for part in flat]
    ours = expected_log_prob(case.family, case.build(*flat), case.observed())
    plain = case.plain(means).log_prob(case.observed())
    torch.testing.assert_close(ours, plain, atol=1e-9, rtol=1e-9)
    for g in torch.autograd.grad(ours.sum(), flat):
        assert g.isfinite().all()


@exact_or_numerical
def test_gradients(case):
    gaussians = [g.requires_grad_() for g in case.gaussians()]

    def total(*gaussians: Tensor) -> Tensor:
        return expected_log_prob(case.family, case.build(*gaussians), case.observed())

    assert torch.autograd.gradcheck(total, gaussians, atol=1e-5)


@exact_or_numerical
def test_float32(case):
    ours = expected_log_prob(
        case.family, case.build(*case.gaussians(torch.float32)), case.observed(torch.float32)
    )
    double = expected_log_prob(case.family, case.build(*case.gaussians()), case.observed())
    assert ours.dtype is torch.float32
    torch.testing.assert_close(ours.double(), double, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", [c for c in CASES if hasattr(dist, c.family.__name__)], ids=str)
def test_the_classes_of_pyro_have_the_same_expectation(case):
    arguments = case.build(*case.gaussians()), case.observed()
    estimator = TiltedBound()
    theirs = expected_log_prob(getattr(dist, case.family.__name__), *arguments, estimator)
    torch.testing.assert_close(theirs, expected_log_prob(case.family, *arguments, estimator))


def test_shapes_broadcast_as_those_of_the_distribution():
    loc = GaussianMoments(torch.zeros(4, 1, 3), torch.ones(4, 1, 3))
    h = GaussianMoments(torch.zeros(3), torch.ones(3))
    scale = GaussianMoments(h.loc.exp(), h.variance, Link(h, torch.exp, "exp"))
    for family, extra in ((td.Normal, {}), (td.StudentT, {"df": torch.tensor([[3.0], [4.0]])})):
        parameters = {"loc": loc, "scale": scale, **extra}
        assert expected_log_prob(family, parameters, torch.zeros(2, 3)).shape == (4, 2, 3)
        assert expected_log_prob(family, parameters, torch.zeros(5, 1, 1, 3)).shape == (
            5,
            4,
            2 if extra else 1,
            3,
        )
    logits = GaussianMoments(torch.zeros(4, 1, 3), torch.ones(4, 1, 3))
    assert expected_log_prob(td.Categorical, {"logits": logits}, torch.zeros(2)).shape == (4, 2)
    assert expected_log_prob(td.OneHotCategorical, {"logits": logits}, torch.zeros(2, 3)).shape == (4, 2)
    concentration = GaussianMoments(torch.full((4, 1, 3), 9.0), torch.full((4, 1, 3), 0.1))
    value = torch.full((2, 3), 1 / 3)
    assert expected_log_prob(td.Dirichlet, {"concentration": concentration}, value).shape == (4, 2)


def test_softmax_over_another_dimension_is_not_taken_for_classes():
    inner = GaussianMoments(torch.randn(2, 3, 3).double(), torch.full((2, 3, 3), 0.5).double())
    over_first = Link(inner, lambda h: torch.softmax(h, 1), "softmax", elementwise=False)
    probs = GaussianMoments(torch.softmax(inner.loc, 1), inner.variance, over_first)
    y = torch.tensor([0, 1, 2])
    ours = expected_log_prob(td.Categorical, {"probs": probs}, y)
    samples = torch.softmax(inner.loc + 0.5**0.5 * torch.randn(100_000, 2, 3, 3).double(), 2)
    brute = td.Categorical(probs=samples).log_prob(y).mean(0)
    torch.testing.assert_close(ours, brute, atol=0.03, rtol=0)


SHARED = {
    "exp": lambda h: (h, h.exp()),
    "softplus": lambda h: (h, F.softplus(h) + 0.1),
    "one function each": lambda h: (torch.tanh(h), torch.exp(h) + 0.5),
    "views": lambda h: (h.unsqueeze(-1).squeeze(-1), (F.softplus(h.unsqueeze(-1)) + 0.1).squeeze(-1)),
    "a factor for each": lambda h: (h, h.exp() * torch.ones(1, dtype=torch.float64)),
}


@pytest.mark.parametrize("kind", SHARED)
def test_parameters_that_share_a_gaussian_are_not_taken_as_independent(kind):
    h = GaussianMoments(torch.tensor([0.3], dtype=torch.float64), torch.tensor([0.4], dtype=torch.float64))
    loc, scale = SHARED[kind](h)
    ours = expected_log_prob(td.Normal, {"loc": loc, "scale": scale}, torch.tensor([0.5]).double())
    z = torch.linspace(-10, 10, 4001, dtype=torch.float64)
    w = torch.softmax(-0.5 * z**2, 0)
    loc, scale = SHARED[kind](h.loc + h.variance.sqrt() * z)
    exact = (w * td.Normal(loc, scale).log_prob(torch.tensor(0.5, dtype=torch.float64))).sum()
    torch.testing.assert_close(ours, exact[None], atol=1e-8, rtol=0)


def test_both_parameters_of_a_gamma_from_one_gaussian():
    a = GaussianMoments(torch.zeros(3).double(), torch.full((3,), 0.5).double())
    y = torch.tensor([0.5, 1.0, 2.0]).double()
    ours = expected_log_prob(td.Gamma, {"concentration": a.exp(), "rate": a.exp()}, y)
    z = torch.linspace(-10, 10, 4001, dtype=torch.float64)
    w = torch.softmax(-0.5 * z**2, 0)
    values = (0.5**0.5 * z).exp()[:, None]
    torch.testing.assert_close(ours, w @ td.Gamma(values, values).log_prob(y), atol=1e-7, rtol=0)


def test_dropout_of_a_gaussian_is_another_one():
    h = GaussianMoments(torch.tensor([0.3]), torch.tensor([0.8]))
    y = torch.tensor([0.5])
    copy = GaussianMoments(h.loc.clone(), h.variance.clone())
    ours = expected_log_prob(td.Normal, {"loc": F.dropout(h), "scale": h.exp()}, y)
    apart = expected_log_prob(td.Normal, {"loc": F.dropout(copy), "scale": h.exp()}, y)
    torch.testing.assert_close(ours, apart)


def test_parameters_that_share_a_gaussian_need_not_have_points_of_the_same_shape():
    """The softmax needs points for each class, the mean one: it takes those of its class."""
    h = GaussianMoments(torch.tensor([[0.3, -0.5]]).double(), torch.tensor([[0.8, 0.4]]).double())
    y = torch.tensor([[0.5, 0.1]]).double()
    for order in ("loc scale", "scale loc"):
        made = {"loc": h, "scale": torch.softmax(h, -1) + 0.5}
        ours = expected_log_prob(td.Normal, {k: made[k] for k in order.split()}, y)
        values = h.loc + h.variance.sqrt() * torch.randn(200_000, 1, 2, dtype=torch.float64)
        brute = td.Normal(values, torch.softmax(values, -1) + 0.5).log_prob(y)
        assert ((ours - brute.mean(0)).abs() < 0.01 + 4 * brute.std(0) / len(values) ** 0.5).all()


def test_a_scale_that_mixes_elements_is_averaged_over_all_of_them():
    h = GaussianMoments(torch.tensor([[0.3, -0.5, 1.0]]).double(), torch.full((1, 3), 0.8).double())
    y = torch.tensor([[0.5, 0.1, 0.2]]).double()
    ours = expected_log_prob(td.Normal, {"loc": 0.0, "scale": torch.softmax(h, -1) + 0.3}, y)
    values = h.loc + h.variance.sqrt() * torch.randn(200_000, 1, 3, dtype=torch.float64)
    brute = td.Normal(0.0, torch.softmax(values, -1) + 0.3).log_prob(y)
    assert ((ours - brute.mean(0)).abs() < 0.005 + 4 * brute.std(0) / len(values) ** 0.5).all()


@pytest.mark.parametrize(
    "move", [lambda x: x.squeeze(-1), lambda x: x[0], lambda x: x.flip(0)], ids=["squeeze", "row", "flip"]
)
def test_a_scale_with_a_factor_for_each_element_may_move(move):
    h = GaussianMoments(torch.tensor([[0.3], [-0.5]]).double(), torch.tensor([[0.8], [0.4]]).double())
    factor = torch.tensor([[1.0], [3.0]]).double()
    y = torch.tensor(0.7).double()
    ours = expected_log_prob(td.Normal, {"loc": 0.0, "scale": move(F.softplus(h) * factor)}, y)
    whole = expected_log_prob(td.Normal, {"loc": 0.0, "scale": F.softplus(h) * factor}, y)
    torch.testing.assert_close(ours, move(whole))
    rate = move(h.exp() * factor)
    ours = expected_log_prob(td.Gamma, {"concentration": 2.0, "rate": rate}, y)
    whole = expected_log_prob(td.Gamma, {"concentration": 2.0, "rate": h.exp() * factor}, y)
    torch.testing.assert_close(ours, move(whole))


def test_a_mask_may_choose_among_scales_with_a_factor_each():
    h = GaussianMoments(torch.tensor([0.3, -0.5]).double(), torch.tensor([0.8, 0.4]).double())
    scale = (h.exp() * torch.tensor([1.0, 3.0]).double())[torch.tensor([False, True])]
    y = torch.tensor([0.7]).double()
    alone = expected_log_prob(td.Normal, {"loc": 0.0, "scale": 3 * h[1:].exp()}, y)
    torch.testing.assert_close(expected_log_prob(td.Normal, {"loc": 0.0, "scale": scale}, y), alone)


@pytest.mark.parametrize(
    "lose",
    [lambda s: s * s.clone(), lambda s: s.__setitem__(0, 1.0) or s, lambda s: torch.stack([s, s])],
    ids=["product", "written by index", "stack"],
)
def test_the_refusal_of_a_scale_says_which_step_may_have_lost_its_gaussian(lose):
    scale = lose(F.softplus(GaussianMoments(torch.zeros(2), torch.ones(2))))
    with pytest.raises(UnsupportedError, match=r"as the last step .*two uncertain.*by index.* may follow"):
        expected_log_prob(td.Normal, {"loc": 0.0, "scale": scale}, torch.zeros(2))


def test_memory_in_parts_changes_nothing(monkeypatch):
    case = NUMERICAL[1]
    gaussians = [g.requires_grad_() for g in case.gaussians()]
    whole = expected_log_prob(case.family, case.build(*gaussians), case.observed())
    gradients = torch.autograd.grad(whole.sum(), gaussians)
    monkeypatch.setattr("pyro_dvi.expectations.expectation._CHUNK", 600)
    parts = expected_log_prob(case.family, case.build(*gaussians), case.observed())
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(torch.autograd.grad(parts.sum(), gaussians), gradients)


def test_certain_parameters_need_no_rule():
    assert expected_log_prob(td.Normal, {"loc": 0.0, "scale": 1.0}, torch.tensor(1.0)) == td.Normal(
        0.0, 1.0
    ).log_prob(torch.tensor(1.0))


def test_a_subclass_with_another_density_does_not_inherit_the_rule():
    class Wider(td.Normal):
        def log_prob(self, value: Tensor) -> Tensor:
            return td.Normal(self.loc, 2 * self.scale).log_prob(value)

    class Named(td.Normal):
        pass

    loc, y = GaussianMoments(torch.zeros(1), torch.ones(1)), torch.ones(1)
    wide = expected_log_prob(td.Normal, {"loc": loc, "scale": 2.0}, y)
    torch.testing.assert_close(expected_log_prob(Wider, {"loc": loc, "scale": 1.0}, y), wide)
    assert torch.equal(expected_log_prob(Named, {"loc": loc, "scale": 2.0}, y), wide)
    masked = expected_log_prob(
        dist.NanMaskedNormal, {"loc": loc, "scale": 2.0}, torch.tensor([1.0, float("nan")])
    )
    torch.testing.assert_close(masked, torch.tensor([wide.item(), 0.0]))


def test_a_second_rule_is_refused():
    with pytest.raises(ValueError, match="Normal already has the rule normal"):
        expectation_rule(td.Normal)(lambda value, loc, scale: value)


@pytest.mark.parametrize(
    ("family", "parameters", "name"),
    [
        (td.Normal, {"loc": 0.0, "scale": 1.0}, "scale"),
        (td.Gamma, {"concentration": 2.0, "rate": 1.0}, "concentration"),
        (td.Poisson, {"rate": 1.0}, "rate"),
        (td.StudentT, {"df": 3.0, "loc": 0.0, "scale": 1.0}, "scale"),
        (td.Dirichlet, {"concentration": (1.0, 2.0)}, "concentration"),
    ],
)
def test_a_gaussian_that_leaves_the_domain_is_refused(family, parameters, name):
    mean = torch.as_tensor(parameters[name])
    uncertain = {**parameters, name: GaussianMoments(mean, torch.ones_like(mean))}
    with pytest.raises(UnsupportedError, match=rf"{family.__name__}\({name}=.*softplus"):
        expected_log_prob(family, uncertain, torch.full(mean.shape, 0.5))


@pytest.mark.parametrize(
    "family", [td.Bernoulli, td.Geometric, td.Categorical, td.OneHotCategorical, td.Multinomial]
)
def test_probabilities_without_a_gaussian_behind_them_are_refused(family):
    probs = GaussianMoments(torch.full((3,), 0.3), torch.full((3,), 0.1))
    with pytest.raises(UnsupportedError, match=rf"{family.__name__}\(probs=.*Pass logits="):
        expected_log_prob(family, {"probs": probs}, torch.ones(3))


def test_the_printed_form_of_equation_15_is_a_slip():
    """exp(-c + v_c) in the paper; quadrature says exp(-c + v_c/2)."""
    case = next(c for c in RULES if c.family is td.Normal and c.label == "loc and exp scale")
    m, v, h, vh = case.gaussians()
    c, vc = 2 * h, 4 * vh
    gap = v + (m - case.observed()) ** 2
    log_2pi = torch.log(torch.tensor(2 * torch.pi))
    torch.testing.assert_close(
        case.quadrature(), -0.5 * (log_2pi + c + torch.exp(-c + vc / 2) * gap), check_dtype=False
    )
    printed = -0.5 * (log_2pi + c + torch.exp(-c + vc) * gap)
    assert ((printed - case.quadrature()).abs() > 0.01).all()


def test_laplace_distance_against_its_integral():
    """The distance in closed form, by its two halves, which have no kink."""
    m, v, y = 0.3, 1.3, -0.4
    s, line = v**0.5, torch.linspace(0, 14, 200_001, dtype=torch.float64)
    density = td.Normal(0.0, 1.0)
    halves = [
        torch.trapezoid(line * density.log_prob((y + side * line - m) / s).exp() / s, line)
        for side in (-1, 1)
    ]
    loc = GaussianMoments(torch.tensor(m).double(), torch.tensor(v).double())
    ours = expected_log_prob(td.Laplace, {"loc": loc, "scale": 2.0}, torch.tensor(y).double())
    exact = -(halves[0] + halves[1]) / 2 - torch.log(torch.tensor(4.0).double())
    torch.testing.assert_close(ours, exact, atol=1e-8, rtol=0)


def test_logits_are_those_of_the_softmax():
    inner = LOGITS.moments(*(torch.tensor(p).double() for p in (LOGITS.loc, LOGITS.variance)))
    probs = GaussianMoments(
        torch.softmax(inner.loc, -1),
        inner.variance,
        Link(inner, lambda h: torch.softmax(h, -1), "softmax", False),
    )
    y, bound = torch.tensor([1, 0]), TiltedBound()
    by_probs = expected_log_prob(td.Categorical, {"probs": probs}, y, bound)
    assert torch.equal(by_probs, expected_log_prob(td.Categorical, {"logits": inner}, y, bound))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_the_device_of_the_moments(case, device):
    gaussians = [g.to(device) for g in case.gaussians()]
    ours = expected_log_prob(case.family, case.build(*gaussians), case.observed().to(device), TiltedBound())
    assert ours.device == device
    here = expected_log_prob(case.family, case.build(*case.gaussians()), case.observed(), TiltedBound())
    torch.testing.assert_close(ours.cpu(), here)
