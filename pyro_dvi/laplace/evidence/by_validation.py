# SPDX-License-Identifier: Apache-2.0
"""Tune a Laplace approximation by what it predicts."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from pyro_dvi.errors import ArgumentError, DataError, NotPositiveDefiniteError
from pyro_dvi.handlers.log_joint import run_joint
from pyro_dvi.laplace.energy.energy import Energy
from pyro_dvi.laplace.energy.passes import Passes
from pyro_dvi.laplace.energy.query import Query
from pyro_dvi.laplace.evidence.by_evidence import Candidates
from pyro_dvi.laplace.evidence.tuning import Criterion, Tuning
from pyro_dvi.laplace.methods.posterior import LaplacePosterior
from pyro_dvi.laplace.outputs import GaussianOutputs
from pyro_dvi.links import ClassLink, GaussHermite, NoiseLink, Probit
from pyro_dvi.links.outputs import integrated
from pyro_dvi.undisturbed import evaluating

__all__ = ["ByValidation"]


@dataclass(frozen=True)
class ByValidation(Criterion):
    r"""The mean log predictive density of data that were held out, for ``guide.tune``.

    .. math:: \frac1M \sum_{j} \log \int p(y_j \mid f)\, \mathcal N\bigl(f; f(x_j; \hat u), J_j P^{-1} J_j^\top\bigr)\,
        \mathrm df

    Each value that is tried costs a prediction, and a fit unless the Gaussian can take another prior or noise:
    ``Diagonal()``, ``KroneckerFactored()`` and ``TopEigen(k)`` fit once for a multiplier of all priors, ``Dense()``
    builds its matrix once and factorises it for each value.

    Status: as :class:`~pyro_dvi.predictive.Linearised`, whose predictions are scored.

    Args:
        batches: held-out data, positional arguments of the model with the observations.
        link: from Gaussian logits to class probabilities.
        noise: from an uncertain noise scale to a predictive.
        num_points: Sobol points where there is no closed form.
        site: the observed site that is predicted; None for the one that the model has.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> from pyro_dvi.laplace import LaplaceGuide
        >>> def model(x, y=None):
        ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         return pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)
        >>> x = torch.linspace(-2, 2, 5)
        >>> guide = LaplaceGuide(model)
        >>> guide.initialize(x, x)
        >>> _ = guide.polish([(x, x)], progress=False)
        >>> held_out = [(x[[0, 4]], torch.tensor([-2.9, 2.9]))]
        >>> curve = guide.tune([(x, x)], criterion=ByValidation(held_out), values=[1.0, 10.0, 100.0], progress=False)
        >>> round(curve.best, -1)
        10.0
    """

    batches: Iterable[Any] = field(repr=False)
    link: ClassLink = field(default_factory=Probit)
    noise: NoiseLink = field(default_factory=lambda: GaussHermite(20))
    num_points: int = 256
    site: str | None = None

    def score(self, tuning: Tuning) -> Callable[[float], float]:
        """Return the mean log predictive density as a function of the value."""
        passes = Passes(self.batches, tuning.energy.start.device)
        candidates = Candidates(tuning)

        def score(value: float) -> float:
            candidate = candidates.energy(value)
            try:
                posterior = candidates.posterior(value)
            except NotPositiveDefiniteError:
                return math.nan
            total, count = 0.0, 0
            for args, kwargs in passes:
                if kwargs:
                    raise ArgumentError(
                        "validation batches are tuples of positional arguments, such as (x, y), not mappings"
                    )
                log_density = self._log_density(candidate, args, posterior)
                total, count = total + float(log_density.sum()), count + log_density.numel()
            return total / count

        return score

    @torch.no_grad()
    def _log_density(self, energy: Energy, args: tuple, posterior: LaplacePosterior) -> torch.Tensor:
        """Log predictive density of every observation of a batch that is not masked."""
        query = Query(energy.model, args, energy.locs, energy.layout, site=self.site)
        gaussian = GaussianOutputs.of(posterior, query)
        distribution = integrated(
            gaussian.outputs, gaussian.full_covariance, self.link, self.noise, self.num_points
        )
        with evaluating(energy.model):
            run = run_joint(energy.model, args, {}, energy.locs)
        found = [site for site in run.sites if site.name == gaussian.outputs.site]
        if not found:
            raise DataError("validation batches need the observations as well: (x, y)")
        (site,) = found
        log_density: torch.Tensor = distribution.log_prob(site.value)
        if site.mask is not None and site.mask is not True:
            log_density = log_density[torch.as_tensor(site.mask).expand_as(log_density)]
        return log_density
