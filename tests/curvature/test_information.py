# SPDX-License-Identifier: Apache-2.0
"""Closed-form Fisher information against the definition: the expectation of squared gradients over labels."""

from collections.abc import Callable
from dataclasses import dataclass

import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.curvature import EmpiricalFisher, GGNDiagonal, Linearisation, information
from pyro_dvi.curvature.information import expected_information, information_rule
from pyro_dvi.curvature.linearisation import ObservedSite
from pyro_dvi.errors import ModelError, UnsupportedError

M = 3


@dataclass(frozen=True)
class Case:
    """A distribution of M labels given latents u of shape [4], and labels (with weights) that cover its support.

    ``labels(u)`` returns values ``y`` of shape [L, M, *event] and, for continuous ones, quadrature weights dy.
    """

    name: str
    make: Callable[[Tensor, Tensor], dist.TorchDistribution]
    labels: Callable[[], tuple[Tensor, Tensor]]
    rule: type | None = None
    tolerance: float = 1e-6  # of the quadrature


def counts(largest: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (
        torch.arange(largest + 1.0).double()[:, None].expand(-1, M),
        torch.ones(largest + 1).double(),
    )


def reals() -> tuple[Tensor, Tensor]:
    # y = sinh(t): dense in the middle, and far enough out for Student's tails.
    t = torch.linspace(-14, 14, 20001, dtype=torch.float64)
    return torch.sinh(t)[:, None].expand(-1, M), torch.cosh(t) * (t[1] - t[0])


def positive() -> tuple[Tensor, Tensor]:
    t = torch.linspace(-30, 6, 10001, dtype=torch.float64)
    return t.exp()[:, None].expand(-1, M), t.exp() * (t[1] - t[0])


def log_positive() -> tuple[Tensor, Tensor]:
    t = torch.linspace(-15, 15, 4001, dtype=torch.float64)
    return t.exp()[:, None].expand(-1, M), t.exp() * (t[1] - t[0])


def interval() -> tuple[Tensor, Tensor]:
    y = torch.linspace(-30, 30, 4001, dtype=torch.float64).sigmoid()
    return y[:, None].expand(-1, M), y * (1 - y) * 60 / 4000


def plane() -> tuple[Tensor, Tensor]:
    t = torch.linspace(-9, 9, 91, dtype=torch.float64)
    y = torch.cartesian_prod(t, t)
    return y[:, None].expand(-1, M, -1), torch.full((len(y),), 0.04, dtype=torch.float64)


def two_of_three() -> tuple[Tensor, Tensor]:
    """Counts of three classes that sum to two."""
    y = torch.cartesian_prod(*[torch.arange(3.0)] * 3).double()
    y = y[y.sum(-1) == 2]
    return y[:, None].expand(-1, M, -1), torch.ones(len(y)).double()


def pairs() -> tuple[Tensor, Tensor]:
    y = torch.cartesian_prod(torch.arange(2.0), torch.arange(2.0), torch.arange(2.0)).double()
    return y[:, None].expand(-1, M, -1), torch.ones(len(y)).double()


def one_hot() -> tuple[Tensor, Tensor]:
    return torch.eye(3).double()[:, None].expand(-1, M, -1), torch.ones(3).double()


COVARIANCE = torch.tensor([[1.0, 0.6], [0.6, 0.8]], dtype=torch.float64)
KEEP = torch.tensor([True, False, True])
KEEP_ELEMENTS = torch.tensor([[True, False, True], [True, True, False], [False, True, True]])


def logits(u: Tensor, x: Tensor) -> Tensor:
    """Three non-linear outputs per example."""
    return torch.stack([torch.tanh(x @ u), torch.sin(x @ u[[1, 2, 3, 0]]), x @ u.square()], -1)


CASES = [
    Case("Normal", lambda u, x: dist.Normal(torch.tanh(x @ u), 0.7), reals, torch.distributions.Normal),
    Case(
        "Normal, both parameters",
        lambda u, x: dist.Normal(torch.tanh(x @ u), F.softplus(x @ u[[1, 0, 3, 2]])),
        reals,
    ),
    Case(
        "Laplace",
        lambda u, x: dist.Laplace(x @ u, F.softplus(x @ u.square())),
        reals,
        torch.distributions.Laplace,
        1e-2,
    ),
    Case(
        "StudentT",
        lambda u, x: dist.StudentT(4.0, x @ u, F.softplus(x @ u.square())),
        reals,
        torch.distributions.StudentT,
    ),
    Case("Poisson", lambda u, x: dist.Poisson(F.softplus(x @ u)), counts(80), torch.distributions.Poisson),
    Case(
        "Exponential",
        lambda u, x: dist.Exponential(F.softplus(x @ u) + 0.2),
        positive,
        torch.distributions.Exponential,
    ),
    Case("Bernoulli", lambda u, x: dist.Bernoulli(logits=x @ u), counts(1)),
    Case("Bernoulli of probs", lambda u, x: dist.Bernoulli(torch.sigmoid(x @ u)), counts(1)),
    Case("Categorical", lambda u, x: dist.Categorical(logits=logits(u, x)), counts(2)),
    Case("Categorical of probs", lambda u, x: dist.Categorical(logits(u, x).softmax(-1)), counts(2)),
    Case("OneHotCategorical", lambda u, x: dist.OneHotCategorical(logits=logits(u, x)), one_hot),
    Case("Binomial", lambda u, x: dist.Binomial(5, logits=x @ u), counts(5), torch.distributions.Binomial),
    Case("Binomial of probs", lambda u, x: dist.Binomial(5, torch.sigmoid(x @ u)), counts(5)),
    Case(
        "Multinomial",
        lambda u, x: dist.Multinomial(2, logits=logits(u, x)),
        two_of_three,
        torch.distributions.Multinomial,
    ),
    Case("Multinomial of probs", lambda u, x: dist.Multinomial(2, logits(u, x).softmax(-1)), two_of_three),
    Case(
        "NegativeBinomial",
        lambda u, x: dist.NegativeBinomial(3.5, logits=torch.tanh(x @ u) - 1),
        counts(200),
        torch.distributions.NegativeBinomial,
    ),
    Case(
        "NegativeBinomial of probs",
        lambda u, x: dist.NegativeBinomial(2.0, torch.sigmoid(torch.tanh(x @ u) - 1)),
        counts(200),
    ),
    Case(
        "Geometric",
        lambda u, x: dist.Geometric(logits=torch.tanh(x @ u)),
        counts(200),
        torch.distributions.Geometric,
    ),
    Case(
        "LogNormal",
        lambda u, x: dist.LogNormal(torch.tanh(x @ u), 0.3 + torch.sigmoid(x @ u.square())),
        log_positive,
        torch.distributions.LogNormal,
    ),
    Case(
        "Gamma",
        lambda u, x: dist.Gamma(F.softplus(x @ u) + 1, F.softplus(x @ u.square()) + 0.5),
        positive,
        torch.distributions.Gamma,
    ),
    Case(
        "Beta",
        lambda u, x: dist.Beta(F.softplus(x @ u) + 1, F.softplus(x @ u.square()) + 1),
        interval,
        torch.distributions.Beta,
    ),
    Case(
        "MultivariateNormal",
        lambda u, x: dist.MultivariateNormal(logits(u, x)[..., :2].tanh(), COVARIANCE),
        plane,
        torch.distributions.MultivariateNormal,
    ),
    Case("events", lambda u, x: dist.Bernoulli(logits=logits(u, x)).to_event(1), pairs),
    Case("mask", lambda u, x: dist.Bernoulli(logits=x @ u).mask(KEEP), counts(1)),
    Case("no mask", lambda u, x: dist.Bernoulli(logits=x @ u).mask(True), counts(1)),
    Case("mask over events", lambda u, x: dist.Bernoulli(logits=logits(u, x)).to_event(1).mask(KEEP), pairs),
    Case(
        "mask inside events",
        lambda u, x: dist.Bernoulli(logits=logits(u, x)).mask(KEEP_ELEMENTS).to_event(1),
        pairs,
    ),
    Case("Categorical, masked", lambda u, x: dist.Categorical(logits=logits(u, x)).mask(KEEP), counts(2)),
    Case("expanded", lambda u, x: dist.Poisson(F.softplus(x[0] @ u)).expand([M]), counts(80)),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


def latents() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    u, x = (
        torch.randn(4, dtype=torch.float64, generator=generator),
        torch.randn(M, 4, dtype=torch.float64, generator=generator),
    )
    return 0.5 * u.requires_grad_(), x


def expected_squares(case: Case, u: Tensor, x: Tensor) -> Tensor:
    """E over labels of the squared gradient, example by example: the definition.

    The gradient goes through the unmasked distribution's own probabilities and the masked log-likelihood.
    """
    y, dy = case.labels()
    make = case.make

    def log_prob(v: Tensor) -> Tensor:
        return make(v, x).log_prob(y)  # [L, M]

    unmasked = make(u, x)
    while isinstance(unmasked, (torch.distributions.Independent, dist.MaskedDistribution)):
        unmasked = unmasked.base_dist
    density = unmasked.log_prob(y).exp()
    if density.dim() == 3:
        density = density.prod(-1)
    jacobian = _jacobian(log_prob, u)
    return (density[..., None] * dy[:, None, None] * jacobian.square()).sum((0, 1))


def _jacobian(function: Callable[[Tensor], Tensor], u: Tensor) -> Tensor:
    """Few inputs, many outputs: columns by differentiating the backward pass in its seed, where it is linear."""
    u = u.detach().requires_grad_()
    y = function(u)
    seed = torch.zeros_like(y, requires_grad=True)
    (g,) = torch.autograd.grad(y, u, seed, create_graph=True)
    columns = [
        torch.autograd.grad(g, seed, e, retain_graph=True)[0] for e in torch.eye(len(u), dtype=u.dtype)
    ]
    return torch.stack(columns, -1)


def test_every_rule_has_a_case():
    assert {case.rule for case in CASES} - {None} == set(information._RULES)


@every_case
def test_information_is_the_expected_squared_gradient(case):
    u, x = latents()
    u = u.detach().requires_grad_()
    fn = case.make(u, x)
    total = torch.zeros_like(u)
    for f, w in expected_information(fn, "y"):
        assert f.shape[:-1] == fn.batch_shape and w.expand_as(f).shape == f.shape
        for output, weight in zip(f.reshape(-1), w.expand_as(f).reshape(-1), strict=True):
            (g,) = (
                torch.autograd.grad(output, u, retain_graph=True, allow_unused=True)
                if output.requires_grad
                else (None,)
            )
            total = total + (0 if g is None else (weight * g).square())
    torch.testing.assert_close(
        total.detach(), expected_squares(case, u.detach(), x), rtol=case.tolerance, atol=1e-9
    )


@every_case
def test_ggn_is_the_expected_empirical_fisher_over_labels(case):
    """The penalty with plate scale and site mask, and its gradient in the means by finite differences."""
    u, x = latents()
    u = u.detach().requires_grad_()
    scale = torch.linspace(0.1, 0.4, 4, dtype=torch.float64)
    keep = torch.tensor([True, True, False])

    def penalty(v: Tensor) -> Tensor:
        fn = case.make(v, x)
        site = ObservedSite("y", fn, fn.sample(), scale=2.5, mask=keep)
        return GGNDiagonal().penalty(Linearisation(["u"], [v], [scale], [site]))

    part = Case(case.name, lambda v, x: case.make(v, x).mask(keep), case.labels)
    expected = 0.5 * 2.5 * (scale.square() * expected_squares(part, u.detach(), x)).sum()
    torch.testing.assert_close(penalty(u).detach(), expected, rtol=case.tolerance, atol=1e-9)
    assert torch.autograd.gradcheck(penalty, (u,), atol=1e-5)


def test_weights_per_example_scale_the_information():
    u, x = latents()
    u = u.detach().requires_grad_()
    scales = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)

    def penalty(scale: Tensor | float, rows: slice) -> Tensor:
        fn = dist.Bernoulli(logits=x[rows] @ u)
        site = ObservedSite("y", fn, fn.sample(), scale)
        return GGNDiagonal().penalty(Linearisation(["u"], [u], [torch.ones(4, dtype=torch.float64)], [site]))

    parts = [penalty(float(s), slice(k, k + 1)) for k, s in enumerate(scales)]
    torch.testing.assert_close(penalty(scales, slice(None)), torch.stack(parts).sum())


def test_a_fixed_parameter_costs_nothing_and_gives_no_curvature():
    u = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    fn = dist.Normal(torch.zeros(M, dtype=torch.float64), torch.ones(M, dtype=torch.float64))
    penalty = GGNDiagonal().penalty(
        Linearisation(["u"], [u], [torch.ones(1)], [ObservedSite("y", fn, fn.sample())])
    )
    assert penalty == 0


def test_missing_rule_names_site_and_remedies():
    fn = dist.VonMises(torch.zeros(M), 1.0)
    with pytest.raises(UnsupportedError, match=r"VonMises at site 'angle'.*Fisher\(\).*information_rule"):
        expected_information(fn, "angle")


def test_learned_degrees_of_freedom_are_refused():
    df = torch.tensor(3.0, requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"degrees of freedom.*Fisher\(\)"):
        expected_information(dist.StudentT(df, 0.0, 1.0), "y")


def test_a_learned_covariance_or_count_is_refused():
    learned = torch.ones((), requires_grad=True)
    with pytest.raises(UnsupportedError, match="covariance"):
        expected_information(dist.MultivariateNormal(torch.zeros(2), torch.eye(2) * learned), "y")
    with pytest.raises(UnsupportedError, match="total_count"):
        expected_information(dist.NegativeBinomial(learned, logits=torch.zeros(())), "y")


def test_counts_of_their_own_for_each_example():
    counts, u = torch.tensor([2.0, 0.0, 5.0]), torch.linspace(-1, 1, 3, requires_grad=True)
    ((f, w),) = expected_information(dist.Binomial(counts, logits=u), "y")
    p = torch.sigmoid(u)
    torch.testing.assert_close(w.squeeze(-1), (counts * p * (1 - p)).sqrt())
    with pytest.raises(UnsupportedError, match="BetaBinomial at site 'y'"):
        expected_information(dist.BetaBinomial(u.exp(), 1.0, counts), "y")


def test_large_shapes_keep_their_information_in_single_precision():
    """Normal approximations: information 1 / (2 a²) of a Gamma's shape, and finite for a Beta."""
    a = torch.tensor([1e5], requires_grad=True)
    _, (_, weight) = expected_information(dist.Gamma(a, 1.0), "y")
    torch.testing.assert_close(weight.squeeze(-1), 0.5**0.5 / a, rtol=1e-3, atol=0)
    for _, weight in expected_information(dist.Beta(a, 3 * a), "y"):
        assert bool(torch.isfinite(weight).all()) and bool((weight > 0).all())


def test_a_second_rule_for_a_class_is_refused():
    with pytest.raises(ValueError, match="Normal already has the rule _normal"):
        information_rule(torch.distributions.Normal)(lambda fn: [])


def test_factors_have_no_labels():
    site = ObservedSite("y", dist.Normal(torch.zeros(1, requires_grad=True), 1.0), torch.zeros(1))
    factor = ObservedSite("penalty_term", dist.Unit(torch.zeros(1)), torch.zeros(1, 0))
    likelihood = Linearisation(["u"], [torch.zeros(1)], [torch.ones(1)], [site], factors=[factor])
    with pytest.raises(ModelError, match=r"pyro.factor site 'penalty_term'"):
        GGNDiagonal().penalty(likelihood)
    assert repr(GGNDiagonal()) == "GGNDiagonal()" and repr(EmpiricalFisher()) == "EmpiricalFisher()"
