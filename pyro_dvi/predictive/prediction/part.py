# SPDX-License-Identifier: Apache-2.0
"""The predictive distribution of one batch of examples."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.predictive.prediction.component import check_events, checked_log_prob, filled, with_any


@dataclass(frozen=True)
class Part:
    """The predictive distribution of one batch.

    Attributes:
        kind: name of the components' distribution.
        values: what is known, by name, examples first; what there is not is left out. ``mean``, one-hot for classes;
            ``aleatoric``, the mean of the components' variances, and ``epistemic``, the variance of their means;
            ``function_variance``, the mean part of those variances that is the posterior's, where all components tell
            it: it counts as ``epistemic``;
            ``log_probabilities`` of each class in the last dimension; ``expected_entropy``, the mean of the
            components' entropies, for each label; ``observed`` values, the ``mask`` of those that count, and their
            ``log_likelihood``, NaN where none of an observation counts.
        draws: statistics of every component, ``[K, N, ...]``; empty unless they were asked for.
        distribution: the mixture as one distribution object; None where it has no such form, or was not kept.
        count: number of components.
        axis: the dimension of its batch shape that counts examples, negative.
        num_rows: number of examples.
    """

    kind: str
    values: Mapping[str, Tensor]
    draws: Mapping[str, Tensor]
    distribution: Any
    count: int
    axis: int
    num_rows: int

    def log_prob(self, values: Tensor, site: str) -> Tensor:
        """Log density of other values, examples first; NaN where the mask leaves an observation out."""
        if self.distribution is None:
            raise UnsupportedError(
                f"the prediction at site {site!r} averages several {self.kind} distributions and kept none of them: "
                "give predict the observed values, predict(model, guide, (x, y), ...), and they are scored on the way"
            )
        event_dim = len(self.distribution.event_shape)
        native = values.movedim(0, self.axis - event_dim) if values.dim() else values
        mask = self.values.get("mask")
        scored = None if mask is None else with_any(mask, event_dim)
        mask = None if mask is None else mask.movedim(0, self.axis - event_dim)
        each = getattr(self.distribution, "each", [self.distribution])
        check_events(each[0], mask, site)
        native = filled(native, mask, each[0])
        log_probs = torch.stack([checked_log_prob(fn, native, site) for fn in each])
        log_prob = (log_probs.logsumexp(0) - math.log(len(each))).movedim(self.axis, 0)
        return log_prob if scored is None else log_prob.masked_fill(~scored, math.nan)

    def entropy(self, site: str) -> Tensor:
        """Entropy of the predictive distribution in nats, examples first."""
        try:
            if self.distribution is None:
                raise NotImplementedError
            entropy: Tensor = self.distribution.entropy()
        except NotImplementedError as error:
            raise UnsupportedError(
                f"the entropy of the predictive distribution at site {site!r} ({self.kind}) has no closed form; it "
                "has for classes, and for one component (AtMean) of a distribution with an entropy() of its own"
            ) from error
        return entropy.movedim(self.axis, 0)


def of_distributions(
    parts: Sequence[Part],
    read: Callable[..., Tensor],
    what: str,
    chunks: Sequence[Tensor] | None = None,
    dim: int = 0,
) -> Tensor:
    """Collect something of each part's distribution.

    Args:
        parts: the batches.
        read: gives it, in the shape of draws; raises NotImplementedError where there is none.
        what: it is, for errors.
        chunks: further arguments, examples first.
        dim: where the examples of the result are to be.

    Raises:
        UnsupportedError: a mixture that was not kept, or a distribution that does not have it.
    """
    found = []
    for i, part in enumerate(parts):
        fn = part.distribution
        if fn is None:
            raise UnsupportedError(
                f"{what}: the prediction averages {part.count} distributions ({part.kind}) that were not kept. "
                "predict(..., keep_draws=True) keeps those of numbers, also where they take much memory; "
                "pyro_dvi.to_arviz(..., method=Samples(n)) draws from any"
            )
        axis = part.axis - len(fn.event_shape)
        own = () if chunks is None else (chunks[i].movedim(0, axis),)
        try:
            found.append(read(fn, *own).movedim(axis, dim))
        except NotImplementedError as error:
            raise UnsupportedError(f"{what}: there are none for this distribution ({part.kind})") from error
    return torch.cat(found, dim)
