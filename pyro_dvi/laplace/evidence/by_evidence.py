# SPDX-License-Identifier: Apache-2.0
"""Tune by the evidence."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from pyro_dvi.choice import check_choice
from pyro_dvi.errors import NotPositiveDefiniteError
from pyro_dvi.laplace.evidence.candidates import Candidates
from pyro_dvi.laplace.evidence.evidence import check_untempered
from pyro_dvi.laplace.evidence.spectrum import Determinant, default_determinant
from pyro_dvi.laplace.evidence.tuning import Criterion, Tuning

__all__ = ["ByEvidence"]


@dataclass(frozen=True)
class ByEvidence(Criterion):
    r"""The log evidence, with the mode kept fixed.

    .. math:: \log p_c(D) \approx \log p(D \mid \hat u) + \log p_c(\hat u) + \tfrac D2 \log 2\pi
        - \tfrac12 \log\det(G + \Pi_c)

    The determinant is that of the precision which the method predicts with: of the diagonal for ``Diagonal()``, of the
    Kronecker factors for ``KroneckerFactored()``, of the directions that are kept for ``TopEigen(k)``; these fit once
    for all values where their Gaussian allows it. For methods whose precision is the matrix itself, a common multiplier
    of all priors, and the scale of a constant Gaussian noise, need its eigenvalues once; anything else needs them for
    each value.

    Status: Laplace's approximation for the mode as it is, which is no mode for another c; train again, or polish, with
    the scale that was found, and repeat, for a joint optimum.

    Args:
        determinant: ``Exactly()`` or ``ByLanczos(probes, steps)`` of the matrix itself, whatever the method makes of
            it. None: that of the method; where its precision is the matrix itself, exactly up to D = 1,000, and by
            Lanczos beyond.

    Source: MacKay (1992); Immer et al. (2021), "Scalable marginal likelihood estimation".
    """

    determinant: Determinant | None = None

    def score(self, tuning: Tuning) -> Callable[[float], float]:
        """Return the log evidence in nats."""
        energy = tuning.energy
        check_untempered(energy)
        candidates = Candidates(tuning)
        log_determinant = self._log_determinant(candidates)
        likelihood_changes = tuning.scale.proportions(2.0)[0] != 1
        log_likelihood = float(energy.log_joint(energy.start)[0])
        constant = 0.5 * energy.layout.size * math.log(2 * math.pi)

        def score(value: float) -> float:
            fit = log_likelihood
            if likelihood_changes:
                fit = float(candidates.energy(value).log_joint(energy.start)[0])
            try:
                return fit + candidates.log_prior(value) + constant - 0.5 * log_determinant(value)
            except NotPositiveDefiniteError:
                return math.nan

        return score

    def _log_determinant(self, candidates: Candidates) -> Callable[[float], float]:
        tuning = candidates.tuning
        if self.determinant is None and not tuning.method.exact:
            return lambda value: float(candidates.posterior(value).log_determinant())
        energy, curvature = tuning.energy, tuning.method.curvature
        determinant = (
            default_determinant(energy.layout.size) if self.determinant is None else self.determinant
        )
        check_choice("determinant", determinant, Determinant, "Exactly() or ByLanczos()")
        spectrum = determinant.spectrum(energy.at(energy.start), curvature)
        proportional = (
            spectrum.log_prior_determinant is not None
            and candidates.prior_is_proportional()
            and candidates.likelihood_is_proportional
        )

        def of(value: float) -> float:
            if proportional:
                return spectrum.log_determinant(*tuning.scale.proportions(value)).value
            candidate = candidates.energy(value)
            return determinant.spectrum(candidate.at(candidate.start), curvature).log_determinant().value

        return of
