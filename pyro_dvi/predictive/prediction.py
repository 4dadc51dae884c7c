# SPDX-License-Identifier: Apache-2.0
"""The result of a prediction."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_count
from pyro_dvi.core.densities import with_any
from pyro_dvi.errors import DataError, MissingQuantityError
from pyro_dvi.predictive import prediction_summaries as summaries
from pyro_dvi.predictive.engine.model_runs import seeded
from pyro_dvi.predictive.predictive_distribution import crps, mixture_log_prob, probabilities, quantile
from pyro_dvi.predictive.predictive_mixture import Part
from pyro_dvi.predictive.rules.rule import PredictionRule

if TYPE_CHECKING:
    import pandas


class Prediction:
    """Predictive distributions of a set of examples.

    This is the result of :func:`~pyro_dvi.predict`. Every tensor has the examples in its first dimension, in the order
    of the data, and is on the model's device. Reading a quantity that the observed distribution does not have raises an
    :class:`~pyro_dvi.errors.MissingQuantityError`. The same holds for the aleatoric and epistemic parts if the rule
    returns one distribution for noise and posterior together: ``Moments()`` unless the noise is Gaussian, and
    ``Linearised()`` unless it is Gaussian or labels are predicted.

    Attributes:
        site: the observed site that is predicted.
        method: the prediction rule.
        num_components: number of distributions that are averaged.
        draws: mapping from names to quantities of each draw, ``[K, N, ...]``. They are ``mean`` and ``variance`` of the
            observation (for classes, of its one-hot encoding), ``log_likelihood`` of the observed values, and, for
            classes, ``probabilities`` (for a Bernoulli, of label 1) and ``entropy``. The mapping is empty unless
            ``predict`` was called with ``keep_draws=True``, or the members of an ensemble predict with one distribution
            each.
    """

    def __init__(self, method: PredictionRule, parts: Sequence[Part], *, ordered: bool) -> None:
        self.site, self.method = parts[0].site, method
        self._ordered = ordered
        self._kind, self.num_components = parts[0].kind, parts[0].count
        for like in [part.values["mask"] for part in parts if "mask" in part.values][:1]:
            for part in parts:  # a model may mask only some batches
                part.values.setdefault("mask", like.new_ones(part.num_rows, *like.shape[1:]))
        self._values = {
            name: torch.cat([part.values[name] for part in parts])
            for name in parts[0].values
            if all(name in part.values for part in parts)
        }
        names = parts[0].draws
        self.draws = {name: torch.cat([part.draws[name] for part in parts], 1) for name in names}
        # The tensors are dropped from the parts, because they would otherwise be stored twice.
        self._parts = [replace(part, values={}, draws={}) for part in parts]
        if "log_probabilities" in self.draws:
            self.draws["probabilities"] = self._of_labels(self.draws.pop("log_probabilities").exp())

    def __len__(self) -> int:
        return sum(part.num_rows for part in self._parts)

    def __repr__(self) -> str:
        return f"Prediction({self._kind} site {self.site!r}, {len(self)} examples, method={self.method})"

    @cached_property
    def mean(self) -> Tensor:
        """Predictive mean, ``[N, ...]``, with one observation per row; for classes, the class probabilities."""
        return self._value("mean", "mean")

    @cached_property
    def variance(self) -> Tensor:
        """Predictive variance due to noise and posterior together, in squared units of the observation.

        It is the sum of :attr:`aleatoric` and :attr:`epistemic`. For classes, it is the variance of the one-hot
        encoding, ``p (1 - p)``.
        """
        return self._value("aleatoric", "variance") + self._value("epistemic", "variance")

    @property
    def std(self) -> Tensor:
        """Predictive standard deviation, the root of :attr:`variance`, in units of the observation."""
        return self.variance.sqrt()

    @cached_property
    def aleatoric(self) -> Tensor:
        r"""Variance that more data would not reduce, :math:`\mathrm E_k[\mathrm{Var}[y \mid \theta_k]]`.

        It is the noise variance, averaged over draws, in squared units of the observation.
        """
        self._check_is_split()
        return (self._value("aleatoric", "variance") - self._of_logits[1]).clamp_min(0)

    @cached_property
    def epistemic(self) -> Tensor:
        r"""Variance of the posterior's predictions, :math:`\mathrm{Var}_k[\mathrm E[y \mid \theta_k]]`.

        It is zero for ``AtMean()``, which uses a single point of the posterior.
        """
        self._check_is_split()
        return self._value("epistemic", "variance") + self._of_logits[1]

    @cached_property
    def probabilities(self) -> Tensor:
        """Class probabilities ``[N, ..., C]``; for a Bernoulli, of label 1 only, in the shape of the observation."""
        return self._of_labels(self._value("log_probabilities", "class probabilities").exp())

    @cached_property
    def entropy(self) -> Tensor:
        """Entropy of each predictive distribution, in nats."""
        return self._of_distributions(lambda fn: fn.entropy(), "entropy in closed form", whole=True)

    @cached_property
    def expected_entropy(self) -> Tensor:
        r"""Aleatoric part of each label's entropy: its mean over the draws, :math:`\tfrac1K \sum_k H(p_k)`, in nats."""
        self._check_is_split()
        return (self._value("expected_entropy", "class probabilities") - self._of_logits[0]).clamp_min(0)

    @cached_property
    def mutual_information(self) -> Tensor:
        r"""Information that a label would give about the weights, :math:`H(\bar p) - \tfrac1K \sum_k H(p_k)`, in nats.

        It is the epistemic part of the entropy of each label, known as BALD. It is high if the draws are confident in
        different classes, and zero for ``AtMean()``.

        Status: with ``Linearised()``, also of the members of an ensemble, it is exact up to rounding for two classes,
        and otherwise an average over ``num_points`` fixed points of the Gaussian logits. The expected entropy is the
        entropy of the predictive probabilities less this information, so it is as accurate as ``link``.

        Source: Houlsby et al. (2011), Eq. 2.
        """
        log_p = self._value("log_probabilities", "class probabilities")
        return (torch.special.entr(log_p.exp()).sum(-1) - self.expected_entropy).clamp_min(0)

    def quantiles(self, q: float | Sequence[float]) -> Tensor:
        """Quantiles of the predictive distribution, for each element of an observation separately.

        Status: exact up to rounding, also for mixtures and counts, because the distribution function is inverted. If
        the distribution function is not available (StudentT, Beta), quantiles are computed from at least about 4,000
        draws.

        Args:
            q: one probability or several, between 0 and 1.

        Returns:
            Shape ``[N, ...]``; for several probabilities ``[Q, N, ...]``.

        Raises:
            ArgumentError: if a probability is not between 0 and 1.
            UnsupportedError: for classes, or if the components of a mixture were discarded to save memory.
        """
        levels = probabilities("q", q)
        found = [
            self._of_distributions(lambda fn, level=level: quantile(fn, level), "quantiles")
            for level in levels.reshape(-1).tolist()
        ]
        return torch.stack(found) if levels.dim() else found[0]

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Lower and upper limits of the central interval that contains an observation with probability ``level``.

        Raises:
            ArgumentError: if ``level`` is not between 0 and 1.
            UnsupportedError: as for :meth:`quantiles`.
        """
        (level,) = probabilities("level", [level]).tolist()
        low, high = self.quantiles([(1 - level) / 2, (1 + level) / 2])
        return low, high

    def crps(self, y: Any = None) -> Tensor:
        """Continuous ranked probability score of each element, in units of the observation; NaN for masked elements.

        Status: exact for a Normal and for a mixture of K Normals, at a cost of K² per element.

        Args:
            y: observed values, with examples in the first dimension; by default those that came with the data.

        Raises:
            DataError: if there are no observed values, or they have the wrong shape.
            UnsupportedError: for another distribution, or if the components of a mixture were not kept.
        """
        score = self._of_distributions(crps, "CRPS", self._observed(y))
        return score if self.mask is None else score.masked_fill(~self.mask, math.nan)

    def sample(self, num_samples: int = 500, *, seed: int | None = None) -> Tensor:
        """Draw observations from the predictive distributions, independently for each example.

        Args:
            num_samples: number of draws S.
            seed: seed of the draws; by default drawn from the global generator.

        Returns:
            Shape ``[S, N, ...]``.

        Raises:
            ArgumentError: if ``num_samples`` is less than one.
            UnsupportedError: if the components of a mixture were not kept.
        """
        check_count("num_samples", num_samples)
        with seeded(seed, self._device) as used:
            torch.manual_seed(used)
            return self._of_distributions(
                lambda fn: fn.sample((int(num_samples),)), "draws of observations", dim=1
            )

    @property
    def is_of_classes(self) -> bool:
        """True if labels are predicted, that is, at a Bernoulli, Categorical or OneHotCategorical site."""
        return "log_probabilities" in self._values

    @property
    def is_one_hot(self) -> bool:
        """True if labels are one-hot encoded."""
        return self._kind.startswith("OneHot")

    @property
    def has_moments(self) -> bool:
        """True if the predictive distribution has a mean and a variance."""
        return "mean" in self._values

    @property
    def mask(self) -> Tensor | None:
        """True for observed values that the model does not mask, ``[N, ...]``; None if no value is masked."""
        return self._values.get("mask")

    @property
    def observed(self) -> Tensor | None:
        """The observed values that came with the data, or None if there were none."""
        return self._values.get("observed")

    def log_likelihood(self, y: Any = None) -> Tensor:
        """Log predictive density of each observation.

        Args:
            y: observed values, with examples in the first dimension; by default those that came with the data.

        Returns:
            Shape ``[N, ...]``, one value for each observation, in nats; NaN for observations that the model masks.

        Raises:
            DataError: if there are no observed values, or they have the wrong shape or lie outside the support.
            UnsupportedError: if ``y`` was not passed to ``predict`` and the components of the mixture were not kept.
        """
        values = self._observed(y)
        if y is None:
            return self._value("log_likelihood", "log-likelihood")
        rows = [values] if self.mask is None else [values, self.mask]
        found = self._of_distributions(partial(mixture_log_prob, self.site), "log density", *rows, whole=True)
        if self.mask is None:
            return found
        return found.masked_fill(~with_any(self.mask, self.mask.dim() - found.dim()), math.nan)

    def metrics(self, y: Any = None) -> dict[str, float]:
        """Score the predictions.

        Args:
            y: observed values, with examples in the first dimension; by default those that came with the data.

        Returns:
            A flat mapping of scores, which are defined in :mod:`pyro_dvi.predictive.metrics`. It always contains
            ``nll`` and ``nll_standard_error``. Observations that the model masks are not scored.

            For classification, it also contains ``accuracy``, ``brier``, ``ece`` (15 bins), ``aumrc`` (ranked by the
            predictive entropy), and the mean ``entropy``. The mean ``mutual_information`` is included only if the rule
            separates noise from posterior uncertainty.

            For regression and counts with a finite mean, it also contains ``rmse``, and ``coverage_95`` and
            ``width_95`` of the central 95 % interval. The ``crps`` is included for a Normal or a mixture of Normals; if
            there are more than 100 draws, it needs ``keep_draws=True``.

        Raises:
            DataError: if there are no observed values, if they have the wrong shape or dtype or lie outside the
                support, or if all of them are masked.
            UnsupportedError: as for :meth:`log_likelihood`.
        """
        return summaries.metrics_of(self, self._observed(y), y)

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return a ``pandas.DataFrame`` with one row per example.

        The columns are ``mean``, ``std``, ``aleatoric`` and ``epistemic``; for classes, ``probabilities[0]``, ... ,
        ``entropy`` and ``mutual_information``; and ``observed`` and ``log_likelihood`` if observed values came with the
        data. If an example has several values, each value has its own column, such as ``mean[0]``. Quantities that the
        rule does not provide are omitted.
        """
        return summaries.dataframe(summaries.columns_of(self), len(self))

    def _observed(self, y: Any) -> Tensor:
        if y is not None:
            return self._aligned(y)
        if self.observed is None:
            raise DataError("there are no observed values: pass y, or predict from data (x, y)")
        return self.observed

    @cached_property
    def _of_logits(self) -> list[Any]:
        """Mutual information and variances of the probabilities due to Gaussian logits; zero if there are none."""
        reads = [part.within for part in self._parts if part.within is not None]
        if len(reads) < len(self._parts):
            return [0.0, 0.0]
        return [torch.cat(each) for each in zip(*(read() for read in reads), strict=True)]

    def _check_is_split(self) -> None:
        is_told = self.method.tells_noise_apart or "function_variance" in self._values
        if not is_told and not torch.is_tensor(self._of_logits[0]):
            raise MissingQuantityError(
                f"{type(self.method).__name__}() cannot separate noise and posterior of {self.site!r}: use Samples(n)"
            )

    def _of_distributions(
        self, read: Callable[..., Tensor], what: str, *rows: Tensor, dim: int = 0, whole: bool = False
    ) -> Tensor:
        """Compute a quantity from the distributions of all batches.

        Args:
            read: computes the quantity from a distribution and its rows, in the shape of draws.
            what: name of the quantity, for error messages.
            rows: further arguments of ``read``, with examples in the first dimension.
            dim: the dimension of the result that indexes examples.
            whole: True if the result has one value per event, False if it has one per element.
        """
        found, start = [], 0
        for part in self._parts:
            fn, end = part.distribution, start + part.num_rows
            if fn is None:
                raise MissingQuantityError(
                    f"{what} at site {self.site!r} cannot be computed, because its {self.num_components} distributions "
                    f"({self._kind}) were not kept: predict with keep_draws=True, from (x, y), or use to_arviz"
                )
            axis = part.axis - len(fn.event_shape)
            own = [row[start:end].movedim(0, axis) for row in rows]
            try:
                found.append(read(fn, *own).movedim(part.axis if whole else axis, dim))
            except NotImplementedError as error:
                raise MissingQuantityError(
                    f"{what} at site {self.site!r} cannot be computed for this distribution ({self._kind})"
                ) from error
            start = end
        return torch.cat(found, dim)

    @property
    def _device(self) -> torch.device | None:
        return next((value.device for value in self._values.values()), None)

    def _aligned(self, y: Any) -> Tensor:
        """Return ``y`` on the device of the predictions; it must have one row per example."""
        if not self._ordered:
            raise DataError("the loader shuffles or has its own sampler: use shuffle=False, or omit y")
        values = torch.as_tensor(y)
        if values.dim() == 0 or len(values) != len(self):
            raise DataError(
                f"{len(self)} predictions need as many observed values; their shape is {tuple(values.shape)}"
            )
        return values.to(self._device)

    def _value(self, name: str, what: str) -> Tensor:
        if name not in self._values:
            raise MissingQuantityError(f"the distribution of site {self.site!r} ({self._kind}) has no {what}")
        return self._values[name]

    def _of_labels(self, p: Tensor) -> Tensor:
        """Return class probabilities as they are reported: for binary labels, only the probability of label 1."""
        return p[..., 1] if self._kind.startswith("Bernoulli") else p
