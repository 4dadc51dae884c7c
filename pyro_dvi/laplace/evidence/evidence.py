# SPDX-License-Identifier: Apache-2.0
"""Laplace's approximation of the evidence, and the log determinant in it."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_choice
from pyro_dvi.core.autograd_graph import enters
from pyro_dvi.core.table import InNotebook
from pyro_dvi.core.undisturbed import widest
from pyro_dvi.errors import ArgumentError, UnsupportedError
from pyro_dvi.laplace.energy.energy import Energy, LocalEnergy
from pyro_dvi.laplace.energy.precision import PrecisionMatrix
from pyro_dvi.laplace.energy.query import Layout
from pyro_dvi.laplace.methods.full_and_low_rank import Dense
from pyro_dvi.laplace.methods.method import LaplacePosterior, Method
from pyro_dvi.laplace.mode.diagnosis import sound
from pyro_dvi.linalg.lanczos import TraceEstimate, trace_of_function
from pyro_dvi.runs.log_joint import JointRun, log_prior_of_entries

OfFactors = Callable[[float, float], TraceEstimate]
EXACT_SIZE = 1000
"""Number of latents up to which the exact matrix is used; at this size, Lanczos quadrature costs about the same."""


@dataclass(frozen=True)
class ByLanczos:
    r"""The log determinant of the precision, from stochastic Lanczos quadrature.

    The cost is ``2 * num_probes * steps`` full-data gradients. With the likelihood's contribution G to P, the diagonal
    prior precision D, and :math:`A = D^{-1/2} G D^{-1/2}`,

    .. math:: P = G + D, \qquad \log\det(aG + cD) = \log\det D + \operatorname{tr}\log(aA + c)

    Args:
        num_probes: number of random vectors; the standard error is inversely proportional to the square root of this
            number.
        steps: number of Lanczos steps. ``steps * D`` numbers are stored for each probe; as many probes as fit into 2
            GiB are processed together.
        seed: seed of the random vectors.

    Source: Ubaru, Chen & Saad (2017).
    """

    num_probes: int = 16
    steps: int = 60
    seed: int = 0

    def log_determinant(self, local: LocalEnergy, precision: PrecisionMatrix) -> OfFactors:
        """Return log det(a * G + c * D) as a function of a and c, from one set of eigenvalues.

        Factors other than 1 need a positive diagonal D. The function raises ``NotPositiveDefiniteError`` if an
        eigenvalue is not positive.
        """
        diagonal, half = local.prior_diagonal, local.prior_scale
        one = 0.0 if diagonal is None else 1.0
        found = trace_of_function(
            lambda vectors: half * precision.product(local, half * vectors) - one * vectors,
            local.point,
            torch.Generator().manual_seed(self.seed),
            num_probes=self.num_probes,
            steps=self.steps,
        )
        rounding = 64 * torch.finfo(local.point.dtype).eps * (1 + found.nodes.abs().max())
        nodes = torch.where((found.nodes < 0) & (found.nodes > -rounding), 0.0, found.nodes)
        found = replace(found, nodes=nodes)
        of_prior = -2 * float(half.cpu().double().log().sum())

        def log_determinant(likelihood: float, prior: float) -> TraceEstimate:
            trace = found.log_determinant(one * prior / likelihood)
            return replace(trace, value=trace.value + of_prior + found.dim * math.log(likelihood))

        return log_determinant


@dataclass(frozen=True)
class Evidence(InNotebook):
    r"""The log evidence and its parts, in nats.

    .. math:: \log p(D) \approx \log p(D \mid \hat u) + \log p(\hat u) + \tfrac{D}{2}\log 2\pi
        - \tfrac12 \log\det P

    Attributes:
        value: the log evidence.
        standard_error: standard error of the value, from the log determinant; zero if the log determinant is exact.
        log_likelihood: log-likelihood of all data at the mode.
        log_prior: log prior density of the mode, in unconstrained space.
        log_determinant: log determinant of the precision P.
        size: D, the number of latents.
        determinant: description of the source of the log determinant.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> from pyro_dvi.laplace import LaplaceGuide
        >>> def model(x, y=None):
        ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         return pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)
        >>> x = torch.ones(3)
        >>> guide = LaplaceGuide(model)
        >>> guide.initialize(x, x)
        >>> _ = guide.polish([(x, x)], progress=False)
        >>> round(
        ...     guide.log_evidence([(x, x)]).value, 4
        ... )  # of N(x; 0, 1 + x x'): -3/2 log 2 pi - 1/2 log 4 - 3/8
        -3.825
    """

    value: float
    standard_error: float
    log_likelihood: float
    log_prior: float
    log_determinant: float
    size: int
    determinant: str

    def __str__(self) -> str:
        error = f" ± {self.standard_error:.2g}" if self.standard_error else ""
        return (
            f"log evidence {self.value:.6g}{error} = log likelihood {self.log_likelihood:.6g} + log prior "
            f"{self.log_prior:.6g} + {self.size}/2 log 2 pi - 1/2 log det P {self.log_determinant:.6g} "
            f"({self.determinant})"
        )


def log_evidence(
    energy: Energy,
    precision: PrecisionMatrix,
    determinant: ByLanczos | None,
    posterior: LaplacePosterior | None = None,
) -> Evidence:
    """Estimate the log evidence around ``energy.start``.

    Status: exact for linear models with Gaussian noise; otherwise Laplace's approximation with a single mode. If some
    sites are fixed, the evidence is conditional on their values.

    Args:
        energy: U on all the data.
        precision: choice of the precision matrix.
        determinant: method for the log determinant of this matrix. None means the log determinant of the posterior, if
            available; otherwise, the exact one for D up to 1,000, and Lanczos quadrature for larger D.
        posterior: the Gaussian of a fit to the same data, whose log determinant is used if available. This log
            determinant is as accurate as the Gaussian's approximation of P.

    Raises:
        ArgumentError: ``kl_weight`` or ``temperature`` is not 1.
        ModelError: the model is random, or a latent is NaN.
        NonFiniteError: U is NaN or infinite.
        NotPositiveDefiniteError: the precision is not positive definite.
    """
    check_options(energy, determinant)
    local = energy.at(energy.start)
    log_likelihood = local.log_likelihood.item()
    found: TraceEstimate | None = None
    if determinant is None and posterior is not None:
        with suppress(UnsupportedError):
            found = TraceEstimate(float(posterior.log_determinant()), 0.0)
    if found is None:
        sound(energy)
        if determinant is None and energy.layout.size <= EXACT_SIZE:
            posterior = Dense(precision).fit(local)
            found = TraceEstimate(float(posterior.log_determinant()), 0.0)
        else:
            determinant = determinant or ByLanczos()
            found = determinant.log_determinant(local, precision)(1.0, 1.0)
    log_prior = free_terms(local.first.values, local.first.run, energy.layout).item()
    size = energy.layout.size
    return Evidence(
        value=log_likelihood + log_prior + 0.5 * size * math.log(2 * math.pi) - 0.5 * found.value,
        standard_error=0.5 * found.standard_error,
        log_likelihood=log_likelihood,
        log_prior=log_prior,
        log_determinant=found.value,
        size=size,
        determinant=repr(determinant) if determinant else type(posterior).__name__,
    )


@torch.enable_grad()
def differentiable_log_evidence(energy: Energy, method: Method) -> Tensor:
    """Return the log evidence around ``energy.start`` as a function of tensors of the model.

    Args:
        energy: U on all the data, differentiable.
        method: method for the log determinant.

    Raises:
        ArgumentError: ``kl_weight`` or ``temperature`` is not 1.
        UnsupportedError: the determinant of the method is not differentiable.
    """
    check_options(energy, None)
    local = energy.at(energy.start)
    log_determinant = method.fit(local, seed=0).log_determinant()
    log_prior = free_terms(local.first.values, local.first.run, energy.layout)
    constant = 0.5 * energy.layout.size * math.log(2 * math.pi)
    return local.log_likelihood + log_prior + constant - 0.5 * log_determinant


def check_options(energy: Energy, determinant: ByLanczos | None) -> None:
    """Raise an error for an unknown determinant, and for a tempered posterior, which has no evidence."""
    check_choice("determinant", determinant, (ByLanczos, type(None)), "ByLanczos(num_probes=32)")
    if (energy.likelihood_weight, energy.prior_weight) != (1, 1):
        raise ArgumentError(
            "a tempered posterior has no evidence: set kl_weight and temperature to 1, or use ByValidation(batches)"
        )


def free_terms(values: list[Tensor], run: JointRun, layout: Layout) -> Tensor:
    """Return the log prior of the latents that vary, given the fixed ones.

    The prior of a fixed site is included if it depends on a latent that varies. For example, the prior of fixed weights
    may depend on a scale that varies.

    Args:
        values: tensors of the latents that vary, in the graph of the run.
        run: the run of the model at these values.
        layout: order of the latents in flat vectors.

    Raises:
        UnsupportedError: the prior couples the entries of a site, and only some of these entries vary.
    """
    found = []
    for name, term in run.log_priors.items():
        others = [value for site, value in zip(layout.shapes, values, strict=True) if site != name]
        if (name in layout.shapes and name not in layout.chosen) or any(enters(others, [term])):
            found.append(term)
        elif name in layout.chosen:
            found.append(log_prior_of_entries(run.trace.nodes[name], layout.chosen[name]))
    total = values[0].new_zeros((), dtype=widest(values[0].device))
    return sum((term.to(total) for term in found), total)
