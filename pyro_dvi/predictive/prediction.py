# SPDX-License-Identifier: Apache-2.0
"""The result of a prediction."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_dvi import metrics
from pyro_dvi.errors import DataError, UnsupportedError
from pyro_dvi.predictive.mixture import Part
from pyro_dvi.predictive.rules import PredictionRule
from pyro_dvi.predictive.run import refuse_mask

__all__ = ["Prediction"]


class Prediction:
    """Predictive distributions of a set of examples.

    Every tensor has the examples in its first dimension, in the order of the data, and lies on the model's device.
    Made by :func:`~pyro_dvi.predict`.

    Attributes:
        site: the observed site that is predicted.
        method: the rule of prediction.
    """

    def __init__(self, site: str, method: PredictionRule, parts: Sequence[Part], *, shuffled: bool) -> None:
        self.site = site
        self.method = method
        self._parts = tuple(parts)
        self._shuffled = shuffled

    def __len__(self) -> int:
        return sum(part.num_rows for part in self._parts)

    def __repr__(self) -> str:
        kind = self._parts[0].kind
        return f"Prediction({kind} site {self.site!r}, {len(self)} examples, method={self.method})"

    @cached_property
    def mean(self) -> Tensor:
        """Predictive mean, shape ``[N, ...]`` of one observation each; for classes the probabilities.

        Raises:
            UnsupportedError: the observed distribution has no mean.
        """
        return self._collect(lambda part: part.mean, "mean")

    @cached_property
    def variance(self) -> Tensor:
        """Predictive variance, noise and posterior together, in squared units of the observation.

        For classes it is that of the one-hot code, ``p (1 - p)``.

        Raises:
            UnsupportedError: the observed distribution has no variance.
        """
        return self._collect(lambda part: part.variance, "variance")

    @cached_property
    def probabilities(self) -> Tensor:
        """Class probabilities ``[N, ..., C]``; for Bernoulli those of label 1, of the observation's shape.

        Raises:
            UnsupportedError: the observed distribution is not over classes.
        """
        log_p = self._collect(lambda part: part.log_probabilities, "class probabilities")
        return log_p[..., 1].exp() if self._parts[0].kind.startswith("Bernoulli") else log_p.exp()

    @cached_property
    def entropy(self) -> Tensor:
        """Entropy of each predictive distribution, in nats.

        Raises:
            UnsupportedError: it has no closed form.
        """
        return torch.cat([part.entropy(self.site) for part in self._parts])

    @cached_property
    def observed(self) -> Tensor | None:
        """The observed values that came with the data, or None."""
        values = [part.observed for part in self._parts if part.observed is not None]
        return torch.cat(values) if len(values) == len(self._parts) else None

    def log_likelihood(self, y: Any = None) -> Tensor:
        """Log predictive density of each observation.

        Args:
            y: observed values, examples first; by default those that came with the data.

        Returns:
            Shape ``[N, ...]``, one value for each observation, in nats.

        Raises:
            DataError: no observed values, of another shape, or impossible ones.
            UnsupportedError: ``y`` comes only now, and a mixture of such distributions was not kept; or the model
                masks some of the values.
        """
        if any(part.is_masked for part in self._parts):
            raise refuse_mask(self.site)
        if y is None:
            if self.observed is None:
                raise DataError("no observed values: pass y, or predict from data that hold them: (x, y)")
            return self._collect(lambda part: part.log_likelihood, "log-likelihood")
        values = self._aligned(y)
        chunks = values.split([part.num_rows for part in self._parts])
        return torch.cat([part.log_prob(c, self.site) for part, c in zip(self._parts, chunks, strict=True)])

    def metrics(self, y: Any = None) -> dict[str, float]:
        """Score the predictions.

        Args:
            y: observed values, examples first; by default those that came with the data.

        Returns:
            ``nll`` and ``nll_standard_error``; for classes also ``accuracy``, ``brier`` and ``ece`` (15 equally wide
            bins); for numbers also ``rmse``. Definitions: :mod:`pyro_dvi.metrics`.

        Raises:
            DataError: no observed values, of another shape, or impossible ones.
            UnsupportedError: as in :meth:`log_likelihood`.
        """
        score = metrics.nll(self.log_likelihood(y))
        scores = {"nll": score.value, "nll_standard_error": score.standard_error}
        values = self.observed if y is None else self._aligned(y)
        assert values is not None, "the log-likelihood has checked it"
        if self._parts[0].log_probabilities is not None:
            if self._parts[0].kind.startswith("OneHot"):
                values = values.argmax(-1)
            scores["accuracy"] = metrics.accuracy(self.probabilities, values)
            scores["brier"] = metrics.brier(self.probabilities, values)
            scores["ece"] = metrics.expected_calibration_error(self.probabilities, values)
        elif self._parts[0].mean is not None:
            scores["rmse"] = metrics.rmse(self.mean, values)
        return scores

    def _aligned(self, y: Any) -> Tensor:
        """Return ``y`` on the predictions' device; one row for each example."""
        if self._shuffled:
            raise DataError(
                "the loader shuffles, so these values do not belong to the predictions in order: use a loader with "
                "shuffle=False, or the values that it returned itself (leave out y)"
            )
        values = torch.as_tensor(y)
        if values.dim() == 0 or len(values) != len(self):
            raise DataError(
                f"{len(self)} predictions need as many observed values, not {tuple(values.shape)}"
            )
        reference = next(
            t for p in self._parts for t in (p.log_probabilities, p.mean, values) if t is not None
        )
        return values.to(reference.device)

    def _collect(self, read: Callable[[Part], Tensor | None], what: str) -> Tensor:
        values = [value for part in self._parts if (value := read(part)) is not None]
        if len(values) < len(self._parts):
            raise UnsupportedError(f"site {self.site!r} is {self._parts[0].kind}, which has no {what}")
        return torch.cat(values)
