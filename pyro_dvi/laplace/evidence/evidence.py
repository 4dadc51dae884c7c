# SPDX-License-Identifier: Apache-2.0
"""The evidence of a model by Laplace's method."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dvi.autograd_graph import enters
from pyro_dvi.choice import check_choice
from pyro_dvi.errors import ArgumentError, UnsupportedError
from pyro_dvi.handlers.log_joint import JointRun
from pyro_dvi.laplace.energy.energy import Energy, Layout
from pyro_dvi.laplace.energy.passes import same_data
from pyro_dvi.laplace.energy.precision import PrecisionMatrix
from pyro_dvi.laplace.evidence.spectrum import Determinant, Exactly
from pyro_dvi.laplace.methods.posterior import LaplacePosterior
from pyro_dvi.linalg import TraceEstimate

__all__ = ["Evidence", "check_untempered", "free_terms", "log_evidence"]


@dataclass(frozen=True)
class Evidence:
    r"""The log evidence and its parts, in nats.

    .. math:: \log p(D) \approx \log p(D \mid \hat u) + \log p(\hat u) + \tfrac{D}{2}\log 2\pi
        - \tfrac12 \log\det P

    Attributes:
        value: the log evidence.
        standard_error: of the value, from the log determinant; zero where that is exact.
        log_likelihood: of all data at the mode.
        log_prior: of the mode in unconstrained space.
        log_determinant: of the precision P.
        size: D, the number of latents.
        determinant: where the log determinant comes from.

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
        >>> round(guide.log_evidence([(x, x)]).value, 4)  # of N(x; 0, 1 + x x'): -3/2 log 2 pi - 1/2 log 4 - 3/8
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
    curvature: PrecisionMatrix,
    determinant: Determinant,
    posterior: LaplacePosterior | None = None,
    data: float | None = None,
) -> Evidence:
    """Estimate the log evidence around ``energy.start``.

    Status: exact for linear models with Gaussian noise; elsewhere Laplace's approximation, which counts one mode.
    With sites that stay fixed it is the evidence given their values.

    Args:
        energy: U around the mode.
        curvature: the precision.
        determinant: how its log determinant is found, unless the posterior knows it.
        posterior: the Gaussian of a fit; its own log determinant is taken where it has one, which is as good as its
            approximation of P.
        data: checksum of the batches of that fit; with others the posterior is of no use.

    Raises:
        ArgumentError: ``kl_weight`` is not 1.
        NotPositiveDefiniteError: the precision is not positive definite.
    """
    check_choice("determinant", determinant, Determinant, "Exactly() or ByLanczos()")
    check_untempered(energy)
    log_likelihood = float(energy.log_joint(energy.start)[0])
    found, source = None, ""
    if posterior is not None and same_data(data, energy.passes.checksum):
        try:
            found = TraceEstimate(float(posterior.log_determinant()), 0.0)
            source = type(posterior).__name__
        except UnsupportedError:
            pass
    if found is None:
        found = determinant.spectrum(energy.at(energy.start), curvature).log_determinant()
        source = "exact" if isinstance(determinant, Exactly) else repr(determinant)
    with torch.enable_grad():
        log_prior = free_terms(*energy.first_run(energy.start), energy.layout)
    size = energy.layout.size
    return Evidence(
        value=log_likelihood + log_prior + 0.5 * size * math.log(2 * math.pi) - 0.5 * found.value,
        standard_error=0.5 * found.standard_error,
        log_likelihood=log_likelihood,
        log_prior=log_prior,
        log_determinant=found.value,
        size=size,
        determinant=source,
    )


def check_untempered(energy: Energy) -> None:
    """Refuse a tempered likelihood, whose normaliser is no probability of the data."""
    if energy.kl_weight != 1:
        raise ArgumentError(
            f"the evidence is that of kl_weight=1, and this guide has {energy.kl_weight:g}: the normaliser of a "
            "tempered posterior is no probability of the data. Train with kl_weight=1, or compare models by the "
            "validation likelihood: ByValidation(batches)"
        )


def free_terms(values: list[Tensor], run: JointRun, layout: Layout) -> float:
    """Return the log prior of the sites that vary, given those that do not.

    Where the prior of a fixed site depends on one that varies, as weights do on their scale, it says something about
    the latter and counts as well.

    Args:
        values: tensors of the sites that vary, in the graph of the run.
        run: the model at them.
        layout: these sites.
    """
    return math.fsum(
        float(term.detach())
        for name, term in run.log_priors.items()
        if name in layout.shapes or any(enters(values, [term]))
    )
