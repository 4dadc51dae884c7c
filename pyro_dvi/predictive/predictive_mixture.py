# SPDX-License-Identifier: Apache-2.0
r"""Two readers of a mixture's components: one averages them, the other draws observations from them.

Components can be added one by one or many at a time. The memory for averages does not grow with the number of
components. Moments are accumulated with Welford's and Chan's updates and the law of total variance,

.. math::
    \mathrm{E}[y] = \tfrac1K\textstyle\sum_k m_k, \qquad
    \mathrm{Var}[y] = \underbrace{\tfrac1K\textstyle\sum_k v_k}_{\text{aleatoric}}
        + \underbrace{\tfrac1K\textstyle\sum_k (m_k - \mathrm{E}[y])^2}_{\text{epistemic}},

and class probabilities and densities of observed values are accumulated with log-sum-exp. The statistics of each
component are kept only on request. For regression, the components are kept for quantiles, up to a memory limit.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, distributions as td

from pyro_dvi.core.densities import untransformed, with_any
from pyro_dvi.core.distributions import tensors_of, with_tensors
from pyro_dvi.core.undisturbed import seeder
from pyro_dvi.errors import ModelError, UnsupportedError
from pyro_dvi.links.noise_links import EqualMixture
from pyro_dvi.predictive.engine.model_runs import Response
from pyro_dvi.predictive.predictive_distribution import (
    as_drawn,
    both_masks,
    checked_log_prob,
    class_log_probabilities,
    filled,
    scoring_parts,
    statistics,
)
from pyro_dvi.runs.sites import counted


@dataclass(frozen=True)
class Part:
    """The predictive distribution of one batch.

    Attributes:
        site: the observed site.
        kind: name of the components' distribution.
        values: available quantities by name, with examples in the first dimension. ``mean`` is the predictive mean (for
            classes, of the one-hot encoding), ``aleatoric`` is the mean of the components' variances, and ``epistemic``
            is the variance of their means. ``function_variance`` is the part of a component's variance that is due to
            the posterior, averaged over the components; it exists only if all components provide it, and it is included
            in ``epistemic``. ``log_probabilities`` has classes in the last dimension. ``expected_entropy`` is the mean
            of the components' entropies, for each label. ``observed`` contains the observed values, and ``mask`` is
            True for those to score. Their ``log_likelihood`` is NaN for observations that are masked completely.
        draws: statistics of every component, ``[K, N, ...]``; empty unless requested.
        distribution: the mixture as one distribution object; None if there is no such object, or it was not kept.
        count: number of components.
        axis: the dimension of the distribution's batch shape that indexes examples (negative).
        num_rows: number of examples.
        within: computes, for class labels, the mutual information and the variances of the probabilities that the
            posterior causes within the components, averaged over them; None unless all components provide them.
    """

    site: str
    kind: str
    values: dict[str, Tensor]
    draws: Mapping[str, Tensor]
    distribution: Any
    count: int
    axis: int
    num_rows: int
    within: Callable[[], list[Tensor]] | None = None


def _averages_within(reads: Sequence[Callable[[], Any]], dims: Sequence[int]) -> list[Tensor]:
    """Average tensors over components, and move the dimension of the examples to the front."""
    each = zip(*(read() for read in reads), strict=True)
    return [torch.stack(values).mean(0).movedim(dim, 0) for values, dim in zip(each, dims, strict=True)]


class _Reader:
    """Base class that rebuilds, from their parameters, the components of a run with many draws."""

    _made: Any  # a component of an unchecked run; all components have its structure

    def _parameters(self, fn: Any) -> dict[str, Tensor]:
        """Return the tensors of a component, with numbers as their names."""
        self._made = fn
        return {str(i): tensor for i, tensor in enumerate(tensors_of(fn, strict=True))}

    def _rebuilt(self, many: Mapping[str, Tensor], count: int) -> list[Any]:
        """Return the components of a run with many draws; empty if their parameters were not read."""
        tensors = [value for name, value in many.items() if name.isdigit()]
        return [with_tensors(self._made, [t[k] for t in tensors]) for k in range(count if tensors else 0)]


def _form(response: Response) -> tuple[str, tuple[int, ...]]:
    """Return the site and the shape of its values or class probabilities."""
    fn = response.distribution
    classes = class_log_probabilities(fn)
    return response.site, tuple(fn.batch_shape + fn.event_shape if classes is None else classes.shape)


_LOG = ("log_probabilities", "log_likelihood")  # the probabilities are averaged, not their logarithms
_AVERAGES = {"variance": "aleatoric", "entropy": "expected_entropy"}  # names of the averaged statistics


class Mixture(_Reader):
    """Running summary of the components that are added.

    Args:
        observed: values to score as components are added, or None.
        num_rows: number of examples.
        mask: True for the observed values to score; None to score all, or to read the mask from the components.
        room: largest number of predicted values in all kept components together; if it is exceeded, no components are
            kept. If it is infinite, the statistics of each component are kept as well.
    """

    def __init__(
        self, observed: Tensor | None, num_rows: int, mask: Tensor | None = None, *, room: float = 0
    ) -> None:
        self.observed = observed
        self.num_rows = num_rows
        self.mask = mask
        self.count = 0
        self.averages: dict[str, Tensor] = {}  # "log_...": log of the sum over components; others: the mean
        # Sum over components of squared distances of their means from the mean.
        self.between: Tensor | None = None
        self.last: Response | None = None
        self.room = room
        self._kept: list[dict[str, Tensor]] = []
        self._components: list[Any] = []
        self._within: list[Callable[[], Any]] = []
        # The observed values, with values from the support in place of masked ones.
        self._scored: Tensor | None = None

    def add(self, response: Response) -> None:
        """Add a component, after checking the observed values.

        Raises:
            DataError: if observed values have the wrong shape, or lie outside the support of this component.
            ModelError: if members of an ensemble predict different sites or shapes.
            UnsupportedError: if a mask excludes parts of observations that the distribution scores as a whole.
        """
        fn = response.distribution
        if self.last is None:
            if self.observed is None and response.is_observed:
                self.observed = response.value
            self.mask = both_masks(self.mask, response.mask)
            if self.observed is not None:
                self._scored = filled(self.observed, self.mask, fn)
        elif _form(response) != _form(self.last):
            raise ModelError(
                "members of the ensemble predict different sites or shapes: choose a site that all have. The first "
                f"member predicts (site, shape) {_form(self.last)}, another {_form(response)}"
            )
        self.last = response
        if self._scored is not None:
            checked_log_prob(scoring_parts(fn, self.mask, response.site), self._scored, response.site)
        found = self._statistics(fn, response.site)
        if "log_probabilities" not in found:
            self._keep_component(fn)
        elif (within := getattr(untransformed(fn), "of_posterior", None)) is not None:
            self._within.append(within)
        self.add_statistics({name: value.unsqueeze(0) for name, value in found.items()}, 1)

    def _statistics(self, fn: Any, site: str) -> dict[str, Tensor]:
        return statistics(fn if self._scored is None else scoring_parts(fn, self.mask, site), self._scored)

    def statistics(self, node: Any) -> dict[str, Tensor]:
        """Return the statistics and parameters of a component, which is read from its site in an unchecked run."""
        found = self._statistics(node["fn"], node["name"])
        if self.room <= 0 or "log_probabilities" in found:
            return found
        return found | self._parameters(node["fn"])

    def add_statistics(self, many: Mapping[str, Tensor], count: int) -> None:
        """Add ``count`` components, given their statistics, which are stacked along the first dimension."""
        for fn in self._rebuilt(many, count):
            self._keep_component(fn)
        many = {name: value for name, value in many.items() if not name.isdigit()}
        is_first, self.count = self.count == 0, self.count + count
        added = count / self.count
        if "function_variance" not in many:  # averaged only if all components provide it
            self.averages.pop("function_variance", None)
        if "mean" in many:
            mean = many["mean"].mean(0)
            between = (many["mean"] - mean).square().sum(0) if count > 1 else torch.zeros_like(mean)
            if self.between is not None:
                step = mean - self.averages["mean"]
                between = self.between + between + step.square() * (self.count - count) * added
            self.between = between
        for name, values in many.items():
            old, new = self.averages.get(name), values.logsumexp(0) if name in _LOG else values.mean(0)
            if is_first:
                self.averages[name] = new
            elif old is not None:  # the formula written so that infinite variances stay infinite
                is_log = name in _LOG
                self.averages[name] = torch.logaddexp(old, new) if is_log else old * (1 - added) + new * added
        if self.room == math.inf:
            self._kept.append(many)

    def _keep_component(self, fn: Any) -> None:
        self.room -= (fn.batch_shape + fn.event_shape).numel()
        self._components = [*self._components, fn] if self.room >= 0 else []

    def finish(self) -> Part:
        """Return the summary of all added components."""
        assert self.last is not None, "the rule returned no components"
        fn, axis = self.last.distribution, self.last.axis
        base, event_dim = untransformed(fn), len(fn.event_shape)
        # Number of dimensions to the right of the batch shape. Moments of a Categorical have one more, because they
        # are those of the one-hot encoding.
        of_moments = event_dim + isinstance(base, td.Categorical)
        of_labels = event_dim - isinstance(base, td.OneHotCategorical)
        right = {"log_probabilities": of_labels + 1, "entropy": of_labels, "log_likelihood": 0}
        right |= {"observed": event_dim, "mask": event_dim}
        log_count = math.log(self.count)
        found = {name: value - log_count if name in _LOG else value for name, value in self.averages.items()}
        kept = {name: torch.cat([k[name] for k in self._kept]) for name in found} if self._kept else {}
        between = None if self.between is None else self.between / self.count
        kept.pop("function_variance", None)
        if between is not None and (within := found.get("function_variance")) is not None:
            # Where the noise variance is far smaller than the other, rounding can make the difference negative.
            between, found["variance"] = between + within, (found["variance"] - within).clamp_min(0)
        everything = {**found, "epistemic": between, "observed": self.observed, "mask": self.mask}
        values = {
            _AVERAGES.get(name, name): value.movedim(axis - right.get(name, of_moments), 0)
            for name, value in everything.items()
            if value is not None
        }
        draws = {name: value.movedim(axis - right.get(name, of_moments), 1) for name, value in kept.items()}
        if "mask" in values:
            left_out = ~with_any(values["mask"], event_dim)
            for each in (values, draws):
                if "log_likelihood" in each:
                    each["log_likelihood"] = each["log_likelihood"].masked_fill(left_out, math.nan)
        distribution = self._distribution(fn, found.get("log_probabilities"))
        kind, dims = type(base).__name__, (axis - of_labels, axis - of_moments)
        reads = partial(_averages_within, self._within, dims) if len(self._within) == self.count else None
        return Part(self.last.site, kind, values, draws, distribution, self.count, axis, self.num_rows, reads)

    def _distribution(self, fn: Any, log_probabilities: Tensor | None) -> Any:
        """Return the mixture as one distribution, which for classes is again a distribution over classes."""
        if self.count == 1:
            return fn
        if log_probabilities is None:
            return EqualMixture(self._components) if len(self._components) == self.count else None
        base = untransformed(fn)
        is_one_hot = isinstance(base, td.OneHotCategorical)
        if len(fn.event_shape) > is_one_hot:
            return None  # labels of one example are dependent under the mixture
        if isinstance(base, td.Bernoulli):
            return dist.Bernoulli(logits=log_probabilities[..., 1] - log_probabilities[..., 0])
        return (dist.OneHotCategorical if is_one_hot else dist.Categorical)(logits=log_probabilities)


class ObservationDraws(_Reader):
    """Draws observations from the components of one batch, the same number from each, and stores them on the CPU.

    A component of a vectorised run is rebuilt from its parameters; its draws use the seed that they would have in a
    loop.

    Args:
        count: total number of draws.
        num_components: number of distributions, each of which contributes the same number of draws.
        seeds: generates the seed of each component's draws.
        observed: the observed site in a run in which the model sees the observations; the log density of the observed
            values is then computed. None if there are no observations.

    Attributes:
        values: the draws, ``[count, N, ...]``.
        log_prob: log density of the observed values under each component, ``[num_components, N, ...]``.
        counts: True for the observed values to score, in the shape of one draw; None if all are scored.
        first: the first component.
    """

    first: Response
    values: Tensor
    log_prob: Tensor

    def __init__(self, count: int, num_components: int, seeds: torch.Generator, observed: Any = None) -> None:
        self.observed = observed
        self.counts = None if observed is None else counted(observed)
        self._count, self._num_components, self._seeds = count, num_components, seeds
        self._seed_all = seeder()
        self._added = 0
        self._scored: Tensor | None = None

    def add(self, response: Response) -> None:
        """Add a component.

        Raises:
            DataError: if observed values do not have the shape of a draw, or lie outside the support.
            UnsupportedError: if the mask depends on the draw, or excludes parts of observations that the distribution
                scores as a whole.
        """
        fn = response.distribution
        if self._added == 0:
            self.first = response
            self.counts = both_masks(self.counts, response.mask)
        if self.observed is not None:  # masked values may lie outside the support of the component
            self._scored = filled(self.observed["value"], self.counts, fn)
        self.sample(fn)
        if self._scored is not None:
            parts = scoring_parts(fn, self.counts, response.site)
            log_prob = checked_log_prob(parts, self._scored, response.site)
            self._score(log_prob[None], self._whole(response.mask, fn))
        self._added += 1

    def statistics(self, node: Any) -> dict[str, Tensor]:
        """Return the parameters of a component, its mask, and the log density of the observed values."""
        fn, found = node["fn"], {}
        if self._scored is not None:
            found["mask"] = self._whole(counted(node), fn)
            parts = scoring_parts(fn, self.counts, node["name"])
            found["log_prob"] = parts.log_prob(as_drawn(fn, self._scored))
        # Last, because computing a density may store further tensors in the distribution.
        return found | self._parameters(fn)

    def add_statistics(self, many: Mapping[str, Tensor], count: int) -> None:
        """Add components, given their results of :meth:`statistics`, which are stacked along the first dimension."""
        if self._scored is not None:
            self._score(many["log_prob"], many["mask"])
        for fn in self._rebuilt(many, count):
            self.sample(fn)
            self._added += 1

    def sample(self, fn: Any) -> None:
        """Draw from a component."""
        self._seed_all(int(torch.randint(2**31 - 1, (), generator=self._seeds)))
        share = self._count // self._num_components
        rows = fn.sample((share,)).movedim(self.first.axis - len(fn.event_shape), 1)
        if self._added == 0:
            self.values = torch.empty((self._count, *rows.shape[1:]), dtype=rows.dtype)
        self.values[self._added * share : (self._added + 1) * share] = rows

    def _score(self, log_prob: Tensor, masks: Tensor) -> None:
        if not bool((masks == self._whole(self.first.mask, self.first.distribution)).all()):
            raise UnsupportedError(
                f"the mask of site {self.first.site!r} depends on the latent values, so log_likelihood would have a "
                "different length for each draw: export predictions without observations"
            )
        rows = log_prob.movedim(self.first.axis, 1)
        if self._added == 0:
            self.log_prob = torch.empty((self._num_components, *rows.shape[1:]), dtype=rows.dtype)
        self.log_prob[self._added : self._added + len(rows)] = rows

    def _whole(self, mask: Tensor | None, fn: Any) -> Tensor:
        assert self._scored is not None
        shape, device = fn.batch_shape + fn.event_shape, self._scored.device
        return torch.ones(shape, dtype=torch.bool, device=device) if mask is None else mask
