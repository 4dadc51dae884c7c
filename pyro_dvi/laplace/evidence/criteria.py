# SPDX-License-Identifier: Apache-2.0
"""Criteria by which a scale is tuned: the evidence, held-out data, or the fit to the training data."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_dvi.core.arguments import by_position, check_positive
from pyro_dvi.core.batches import tensors_in
from pyro_dvi.curvature.linearisation import ObservedSite
from pyro_dvi.errors import DataError
from pyro_dvi.laplace.energy.energy import Energy
from pyro_dvi.laplace.energy.passes import Passes
from pyro_dvi.laplace.energy.query import Query
from pyro_dvi.laplace.evidence.candidates import Candidates
from pyro_dvi.laplace.evidence.evidence import EXACT_SIZE, ByLanczos, check_options
from pyro_dvi.laplace.methods.full_and_low_rank import Dense
from pyro_dvi.laplace.methods.method import GaussianOutputs
from pyro_dvi.links import GaussHermite, Probit
from pyro_dvi.links.class_links import ClassLink
from pyro_dvi.runs.log_joint import rescaled_model
from pyro_dvi.runs.observed import observed_sites
from pyro_dvi.runs.predictive_of_outputs import integrated

_ELEMENTS = 1 << 21  # number of elements of inputs and gradients up to which batches are joined
REFUSED = -1e3  # scores of values that are out of the question are at most this number


class Criterion(ABC):
    """A score of the values of a scale.

    Attributes:
        has_threshold: whether scores are above ``REFUSED`` from some value on, and decrease from there; this value is
            then searched by bisection.
    """

    has_threshold: ClassVar[bool] = False

    @abstractmethod
    def score(self, candidates: Candidates) -> Callable[[float], float]:
        """Return the score as a function of the value; tuning maximises it.

        The function raises ``NotPositiveDefiniteError`` if the precision at a value is not positive definite.
        """


@dataclass(frozen=True)
class ByEvidence(Criterion):
    r"""The log evidence, with the mode kept fixed.

    .. math:: \log p_c(D) \approx \log p(D \mid \hat u) + \log p_c(\hat u) + \tfrac D2 \log 2\pi
        - \tfrac12 \log\det(G + \Pi_c)

    The determinant is computed from the precision that predictions use: the full matrix for ``Dense()`` and
    ``Functional()``, the diagonal for ``Diagonal()``, the factors for ``KroneckerFactored()``, and the retained
    directions for ``TopEigen(rank)``. These methods fit once for all values if possible. Methods based on solves or
    draws use the full matrix up to D = 1,000. For larger D, they compute eigenvalues of the matrix: once if the scale
    is a common multiplier of all priors or the scale of constant Gaussian noise, otherwise for each value.

    Status: Laplace's approximation at the current mode, which is not the mode for another c. For a joint optimum, train
    or polish again with the chosen scale, and repeat. The evidence scores the model, not its predictions: class
    probabilities are under-confident after tuning with any method. For a network on digits, the test NLL was 0.28 to
    0.58, compared with 0.06 at its mode and after tuning with :class:`ByValidation`. If possible, tune a classifier on
    validation data.

    Args:
        determinant: ``ByLanczos(num_probes, steps)`` for the full matrix with any method. None means the determinant of
            the method; for methods based on solves or draws, the full matrix up to D = 1,000, and Lanczos quadrature
            for larger D.

    Source: MacKay (1992); Immer et al. (2021), "Scalable marginal likelihood estimation".
    """

    determinant: ByLanczos | None = None

    def score(self, candidates: Candidates) -> Callable[[float], float]:
        """Return the log evidence in nats."""
        energy = candidates.energy
        check_options(energy, self.determinant)
        log_determinant = self._log_determinant(candidates)
        constant = 0.5 * energy.layout.size * math.log(2 * math.pi)

        def score(value: float) -> float:
            fit = candidates.log_likelihood(value) + candidates.log_prior(value)
            return fit + constant - 0.5 * log_determinant(value)

        return score

    def _log_determinant(self, candidates: Candidates) -> Callable[[float], float]:
        energy, method, by = candidates.energy, candidates.first.method, self.determinant
        if by is None and method.by_spectrum:
            if energy.layout.size > EXACT_SIZE:
                by = ByLanczos()
            else:
                dense = replace(candidates.first, method=Dense(method.precision))
                candidates = replace(candidates, first=dense)
        if by is None:
            return lambda value: float(candidates.posterior(value).log_determinant())
        if candidates.prior_is_proportional and candidates.likelihood_is_proportional:
            of_factors = by.log_determinant(candidates.here, method.precision)
            return lambda value: of_factors(*candidates.scale.proportions(value)).value
        return lambda value: by.log_determinant(candidates.local(value), method.precision)(1.0, 1.0).value


@dataclass(frozen=True)
class ByValidation(Criterion):
    r"""The mean log predictive density of held-out data, for ``guide.tune``.

    .. math:: \frac1M \sum_{j} \log \int p(y_j \mid f)\, \mathcal N\bigl(f; f(x_j; \hat u), J_j P^{-1} J_j^\top\bigr)\,
        \mathrm df

    Each value costs a prediction; its gradients are reused for the next prior if memory allows. Each value also costs a
    fit, unless the Gaussian can be converted to the new prior or noise. ``Diagonal()``, ``KroneckerFactored()`` and
    ``TopEigen(k)`` are fitted only once for a multiplier of all priors. ``Dense()`` computes its matrix once and
    factorises it for each value.

    Status: scores the predictions of :class:`~pyro_dvi.predictive.Linearised`.

    Args:
        batches: held-out data with observations, as tuples or mappings of the model's arguments.
        link: function that maps Gaussian logits to class probabilities.
        site: the observed site that is predicted; None for the only observed site.

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
        >>> curve = guide.tune(
        ...     [(x, x)],
        ...     criterion=ByValidation(held_out),
        ...     values=[1.0, 10.0, 100.0],
        ...     progress=False,
        ... )
        >>> round(curve.best, -1)
        10.0
    """

    batches: Iterable[Any] = field(repr=False)
    link: ClassLink = field(default_factory=Probit)
    site: str | None = None

    def score(self, candidates: Candidates) -> Callable[[float], float]:
        """Return the mean log predictive density as a function of the value."""
        return self._mean_log_density(candidates)

    def _mean_log_density(self, candidates: Candidates) -> Callable[[float | None], float]:
        """Return the mean log density as a function of the value; of None, that of the mode without uncertainty."""
        passes = Passes(self.batches, candidates.energy.start.device)
        kept: dict[int, tuple[Query, ObservedSite]] = {}  # the scale of a prior does not change outputs

        def mean(value: float | None) -> float:
            posterior, total, count = candidates.posterior(value or 1.0), 0.0, 0
            energy = candidates.energy if candidates.scale.of_prior else candidates.local(value or 1.0).energy
            for index, batch in enumerate(passes):
                known = None if passes.reordered else kept.get(index)
                query, site = known or self._read(energy, by_position(energy.model, *batch))
                found = GaussianOutputs.of(posterior, query, link=self.link)
                if value is None:
                    found = replace(found, full_covariance=torch.zeros_like(found.full_covariance))
                log_density = self._log_density(found, site)
                total, count = total + float(log_density.sum()), count + log_density.numel()
                room = energy.memory - sum(query.bytes_held for query, _ in kept.values())
                if candidates.scale.of_prior and query.bytes_held <= room:
                    kept[index] = query, site
            return total / count

        return mean

    @torch.no_grad()
    def _read(self, energy: Energy, args: tuple) -> tuple[Query, ObservedSite]:
        """Return the outputs of a batch and its observed site."""
        model = rescaled_model(energy.model, energy.scale_factors)
        query = Query(model, args, energy.locs, energy.layout, site=self.site)
        run = observed_sites(query.outputs.trace)
        found = [site for site in run.sites if site.name == query.outputs.site]
        if not found:
            raise DataError("validation batches need observations: pass (x, y)")
        run.log_likelihood()  # raises an error for values outside the support
        return query, found[0]

    @torch.no_grad()
    def _log_density(self, gaussian: GaussianOutputs, site: ObservedSite) -> Tensor:
        """Return the log predictive density of every unmasked observation of a batch."""
        outputs, covariance = gaussian.outputs, gaussian.full_covariance
        distribution = integrated(outputs, covariance, self.link, GaussHermite(20), num_points=256)
        log_density: Tensor = distribution.log_prob(site.value)
        return log_density[(site.weights > 0).expand_as(log_density)]


@dataclass(frozen=True)
class ByTrainingLoss(Criterion):
    r"""The widest Gaussian that fits the training data almost as well as the mode, for ``guide.tune``.

    .. math:: \frac1N \sum_i \Bigl[\log p(y_i \mid \hat f_i) - \log \int p(y_i \mid f)\,
        \mathcal N\bigl(f; \hat f_i, J_i P_c^{-1} J_i^\top\bigr)\, \mathrm df\Bigr] \le \epsilon

    The smallest value that satisfies this bound does little harm to the predictions of a classifier that has no
    validation data: where the network is right about the data, it stays so, and where it is too sure of itself, its
    probabilities become less extreme. The evidence chooses scales that are far too wide.

    Status: a heuristic, with one number that is the same for all data; ``benchmarks/results/laplace_first_call.md``
    compares it with the evidence.

    Args:
        tolerance: :math:`\epsilon`, the mean loss of log density in nats.
        rows: number of training examples to predict, the first ones of the batches.
        link: function that maps Gaussian logits to class probabilities.
        site: the observed site that is predicted; None for the only observed site.

    Raises:
        ArgumentError: the tolerance is not positive.

    Example:
        >>> import pyro_dvi as dvi
        >>> from pyro_dvi.laplace import LaplaceGuide
        >>> x = torch.linspace(-2, 2, 40)[:, None]
        >>> net = torch.nn.Linear(1, 2, bias=False)
        >>> _ = net.load_state_dict({"weight": torch.tensor([[-10.0], [10.0]])})
        >>> guide = LaplaceGuide(dvi.classifier(dvi.to_bayesian_(net), num_data=40))
        >>> data = [(x, (x[:, 0] > 0).long())]
        >>> options = {"unconverged": "accept", "progress": False}
        >>> _ = guide.tune(data, criterion=ByTrainingLoss(0.01), **options)
        >>> wide, mode = (
        ...     dvi.predict(guide.model, guide, data, rule).metrics()["nll"]
        ...     for rule in (dvi.Linearised(), dvi.AtMean())
        ... )
        >>> round(wide - mode, 2)
        0.01
    """

    tolerance: float = 0.01
    rows: int = 500
    link: ClassLink = field(default_factory=Probit)
    site: str | None = None

    has_threshold = True

    def __post_init__(self) -> None:
        check_positive("tolerance", self.tolerance)

    def score(self, candidates: Candidates) -> Callable[[float], float]:
        """Return a score that is larger for smaller values, among those whose loss is within the tolerance."""
        batches, found = list[Any](), 0
        for batch in candidates.energy.passes.batches:
            batches.append(batch)
            found += max((len(t) for t in tensors_in(batch) if t.dim()), default=1)
            if found >= self.rows:
                break
        parts = _joined(batches, candidates.energy.layout.size)
        density = ByValidation(parts, self.link, self.site)._mean_log_density(candidates)
        mode = density(None)

        def score(value: float) -> float:
            loss = mode - density(value)
            return -math.log(value) if loss <= self.tolerance else REFUSED * (1 + loss)

        return score


def _joined(batches: list[Any], size: int) -> list[Any]:
    """Return one batch with the rows of all, so that each value costs one evaluation, if their tensors are small.

    Args:
        batches: the batches.
        size: D, the number of latents, for which each row has gradients.
    """
    elements = 0
    for batch in batches:
        rows = isinstance(batch, tuple | list) and all(
            isinstance(part, Tensor) and part.dim() for part in batch
        )
        if not rows or len({*map(len, batch)}) != 1:
            return batches
        elements += len(batch[0]) * size + sum(part.numel() for part in batch)
    if elements > _ELEMENTS:
        return batches
    try:
        return [tuple(map(torch.cat, zip(*batches, strict=True)))]
    except (RuntimeError, ValueError):  # such as sequences of different lengths
        return batches
