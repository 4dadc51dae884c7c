# SPDX-License-Identifier: Apache-2.0
"""Every kind of input with every method: it works, by brute force, or it is refused, or a warning names the gap."""

import copy
import math
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from typing import Any

import pyro
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor
from torch.distributions import biject_to

import pyro_dvi as dvi
from pyro_dvi.curvature import HessianDiagonal
from pyro_dvi.laplace import Dense
from pyro_dvi.natural_gradients.ivon import IVON
from pyro_dvi.natural_gradients.updates import VOGN
from tests.whole_package.inputs import ROWS, Problem

TINY = 1e-4


class NoTruth(Exception):
    """The model draws numbers, and no run is like another."""


class Truth:
    """Likelihood and prior of a model at the posterior's median, with derivatives, by Pyro and autograd alone."""

    def __init__(self, problem: Problem, median: dict[str, Tensor]) -> None:
        if problem.random:
            raise NoTruth
        self.values = {name: v.detach().clone().requires_grad_() for name, v in median.items()}
        model = copy.deepcopy(problem.model)  # running statistics stay where they are
        trace = poutine.trace(poutine.condition(model, data=self.values)).get_trace(*problem.data)
        trace.compute_log_prob()
        sites = {name: site for name, site in trace.nodes.items() if site["type"] == "sample"}
        observed = [
            site for name, site in sites.items()
            if name not in self.values and site["is_observed"] and not site["infer"].get("_deterministic")
        ]  # fmt: skip
        self.likelihood = sum(site["log_prob_sum"] for site in observed)
        self.prior = torch.zeros(())
        self.real = True
        for name, value in self.values.items():
            transform = biject_to(sites[name]["fn"].support)
            with torch.no_grad():
                start = transform.inv(value)
                shift = (
                    transform.log_abs_det_jacobian(start, value).sum() if value.dtype.is_floating_point else 0
                )
            self.real &= bool((start == value).all()) if start.shape == value.shape else False
            self.prior = self.prior + sites[name]["log_prob_sum"] + shift
        self.squares = sum(
            gradients(e, self.values).square() / scale
            for site in observed
            for e, scale in zip(
                site["log_prob"].reshape(-1),
                torch.as_tensor(site["scale"]).expand_as(site["log_prob"]).reshape(-1),
                strict=True,
            )
        )  # fmt: skip
        slope = gradients(self.likelihood, self.values, create_graph=True)
        try:
            rows = [gradients(e, self.values)[k] if e.requires_grad else e for k, e in enumerate(slope)]
            self.hessian_diagonal = torch.stack(rows).detach()
        except RuntimeError:  # torch has no second derivative
            self.hessian_diagonal = torch.full_like(slope, float("nan"))


def gradients(output: Tensor, values: dict[str, Tensor], **options: Any) -> Tensor:
    found = torch.autograd.grad(
        output, list(values.values()), retain_graph=True, allow_unused=True, **options
    )
    pairs = zip(found, values.values(), strict=True)
    return torch.cat([(torch.zeros_like(v) if g is None else g).reshape(-1) for g, v in pairs])


def assert_close(what: str, found: Tensor, expected: Tensor, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    if found.dtype != torch.float64 or expected.dtype != torch.float64:
        rtol = atol = 0.05
    found, expected = found.double(), expected.detach().double()
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, msg=lambda m: f"{what}: {m}")


def entropy(scales: list[Tensor]) -> Tensor:
    return sum(((2 * math.pi * math.e) ** 0.5 * s).log().sum() for s in scales)


def trained(elbo: Any, guide: Any, optimizer: Any, problem: Problem) -> None:
    """One step of training."""
    SVI(problem.model, guide, optimizer, loss=elbo).step(*problem.data)
    numbers = [v for _, v in pyro.get_param_store().named_parameters()]
    assert all(bool(v.isfinite().all()) for v in numbers), "parameters are not finite after a step"


def step_size() -> Any:
    return pyro.optim.Adam({"lr": 1e-6})


def taylor(problem: Problem) -> None:
    guide = problem.guide or dvi.MeanFieldGuide(
        problem.model, scale=dvi.guides.PerWeight(log_offset=math.log(TINY))
    )
    trained(dvi.TaylorELBO(**problem.options), guide, step_size(), problem)
    elbo = dvi.TaylorELBO(curvature=HessianDiagonal(), **problem.options)
    elbo.loss(problem.model, guide, *problem.data)
    check_parts(elbo, guide, problem, lambda truth: -elbo.terms["penalty"], limit=0.9)


def multiplicative(problem: Problem) -> None:
    guide = problem.guide or dvi.MultiplicativeNoiseGuide(problem.model, initial_rho=2 * math.log(TINY))
    elbo = dvi.MomentPropagationELBO(**problem.options)
    trained(elbo, guide, step_size(), problem)
    truth = Truth(problem, guide.median(*problem.data))
    # What is no weight keeps a spread of its own.
    rough = {} if truth.real and not problem.rough else {"rtol": 0.1}
    assert_close("log-likelihood", elbo.terms["log_likelihood"], truth.likelihood, **rough)


def moments(problem: Problem) -> None:
    guide = problem.guide or dvi.MeanFieldGuide(
        problem.model, scale=dvi.guides.PerWeight(log_offset=math.log(TINY))
    )
    elbo = dvi.MomentPropagationELBO(**problem.options)
    trained(elbo, guide, step_size(), problem)
    elbo.loss(problem.model, guide, *problem.data)
    check_parts(elbo, guide, problem, lambda truth: elbo.terms["log_likelihood"] - truth.likelihood)


def check_parts(
    elbo: Any,
    guide: Any,
    problem: Problem,
    spread: Callable[[Truth], Tensor],
    limit: float = math.inf,
) -> None:
    """Compare likelihood and KL with those at the median, and ``spread`` with what second derivatives add.

    Positive second derivatives are clamped at ``limit``; the prior has variance one.
    """
    truth = Truth(problem, guide.median(*problem.data))
    rough = {"rtol": 0.01} if problem.rough else {}
    assert_close("log-likelihood", elbo.terms["log_likelihood"], truth.likelihood, **rough)
    if not hasattr(guide, "scales") or problem.rough:
        return  # a point mass, say
    scales = [attrgetter(name)(guide.scales).detach() for name in truth.values]
    expected = (-truth.prior - entropy(scales)).to(truth.squares.dtype)  # of the weights
    assert_close("KL", elbo.terms["kl"], expected, atol=1e-3)
    second = truth.hessian_diagonal
    if truth.real and second.dtype == torch.float64 and problem.second_order and not second.isnan().any():
        flat = torch.cat([s.reshape(-1) for s in scales])
        expected = 0.5 * (flat.square() * second.clamp(max=limit)).sum()
        assert_close("spread", spread(truth) / TINY**2, expected / TINY**2, rtol=1e-2, atol=1e-2)


def natural(problem: Problem, optimizer: Any, squares: bool) -> None:
    half = problem.data[0].dtype in (torch.float16, torch.bfloat16)
    guide = problem.guide or dvi.NaturalGradientGuide(problem.model, initial_scale=1e-2 if half else 1e-6)
    elbo = dvi.NaturalGradientELBO(**problem.options)
    elbo.prepare(guide, optimizer)
    elbo.loss_and_grads(problem.model, guide, *problem.data)
    truth = Truth(problem, guide.median(*problem.data))
    assert_close("log-likelihood", elbo.terms["log_likelihood"], truth.likelihood, atol=1e-2, rtol=1e-4)
    if squares and truth.real and problem.second_order:
        found = torch.cat([guide.precision_parameter(name).grad.reshape(-1) for name in truth.values])
        assert_close("squares", found, truth.squares, rtol=1e-3, atol=1e-3)
    elbo.prepare(guide, optimizer)
    trained(elbo, guide, optimizer, problem)


def vogn(problem: Problem) -> None:
    natural(problem, VOGN({}), squares=True)


def ivon(problem: Problem) -> None:
    natural(problem, IVON({}), squares=False)


def laplace(problem: Problem) -> None:
    guide = problem.guide or dvi.LaplaceGuide(problem.model)
    if problem.guide is not None:
        return trained(pyro.infer.Trace_ELBO(), guide, step_size(), problem)
    trained(dvi.TaylorELBO(**problem.options), guide, step_size(), problem)
    energy = guide.energy([problem.data])
    value = energy.at(energy.start).value
    problem.model.eval() if hasattr(problem.model, "eval") else None
    truth = Truth(problem, guide.median())
    assert_close("energy", value, -truth.likelihood - truth.prior)
    if truth.real and not truth.hessian_diagonal.isnan().any():
        eye = torch.eye(len(energy.start), dtype=energy.start.dtype)
        diagonal = (
            energy.at(energy.start).hessian(eye) - energy.at(energy.start).prior_hessian(eye)
        ).diagonal()
        assert_close("Hessian", diagonal, -truth.hessian_diagonal)
    guide.polish([problem.data])
    guide.fit([problem.data], Dense())


METHODS: dict[str, Callable[[Problem], None]] = {
    "Taylor": taylor,
    "multiplicative": multiplicative,
    "moments": moments,
    "VOGN": vogn,
    "IVON": ivon,
    "Laplace": laplace,
}


CELLS = [(row, method) for row in ROWS for method in METHODS if method not in ROWS[row].without]


@pytest.mark.every(3)
@pytest.mark.parametrize(("row", "method"), CELLS, ids=[f"{row}-{method}" for row, method in CELLS])
def test_an_input_works_or_is_refused_by_name(row, method):
    torch.set_default_dtype(torch.float64)
    expected = ROWS[row]
    exception, message = expected.refused.get(method, expected.refused.get("every", (NoTruth, "")))
    said = expected.warned.get(method, expected.warned.get("every", ""))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if exception is NoTruth:
            with suppress(NoTruth):
                METHODS[method](expected.make())
        else:
            with pytest.raises(exception, match=f"(?s){message}"):
                METHODS[method](expected.make())
    messages = [str(warning.message) for warning in caught]
    assert bool(said) == bool(messages), messages
    assert all(re.search(said, text) for text in messages), messages
