# SPDX-License-Identifier: Apache-2.0
"""The predictive distribution of one batch of examples."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.predictive.prediction.component import check_events, checked_log_prob, filled

__all__ = ["Part", "of_distributions"]


@dataclass(frozen=True)
class Part:
    """The predictive distribution of one batch; tensors have the examples in their first dimension.

    Attributes:
        kind: name of the components' distribution.
        mean: predictive mean, one-hot for classes; None where the distribution has none.
        aleatoric: mean of the components' variances; None where there are none.
        epistemic: variance of the components' means; None where there are none.
        log_probabilities: of each class in the last dimension; None if the response is no class.
        expected_entropy: mean of the components' entropies, for each label; None if the response is no class.
        log_likelihood: of the observed values, NaN where none counts; None if there were none.
        observed: the observed values; None if there were none.
        mask: which values of the observation count; None if all do.
        scored: which log-likelihoods count, those with any value that does; None if all do.
        distribution: the mixture as one distribution object; None where it has no such form, or was not kept.
        draws: statistics of every component, ``[K, N, ...]``; empty unless they were asked for.
        count: number of components.
        axis: the dimension of its batch shape that counts examples, negative.
        num_rows: number of examples.
    """

    kind: str
    mean: Tensor | None
    aleatoric: Tensor | None
    epistemic: Tensor | None
    log_probabilities: Tensor | None
    expected_entropy: Tensor | None
    log_likelihood: Tensor | None
    observed: Tensor | None
    mask: Tensor | None
    scored: Tensor | None
    distribution: Any
    draws: Mapping[str, Tensor]
    count: int
    axis: int
    num_rows: int

    @property
    def variance(self) -> Tensor | None:
        """Predictive variance; None where the distribution has none."""
        if self.aleatoric is None or self.epistemic is None:
            return None
        return self.aleatoric + self.epistemic

    def log_prob(self, values: Tensor, site: str) -> Tensor:
        """Log density of other values, examples first; NaN where the mask leaves an observation out."""
        if self.distribution is None:
            raise UnsupportedError(
                f"the prediction at site {site!r} averages several {self.kind} distributions and kept none of them: "
                "give predict the observed values, predict(model, guide, (x, y), ...), and they are scored on the way"
            )
        event_dim = len(self.distribution.event_shape)
        native = values.movedim(0, self.axis - event_dim) if values.dim() else values
        mask = None if self.mask is None else self.mask.movedim(0, self.axis - event_dim)
        check_events(self.distribution, mask, site)
        log_prob = checked_log_prob(self.distribution, filled(native, mask, self.distribution), site)
        log_prob = log_prob.movedim(self.axis, 0)
        return log_prob if self.scored is None else log_prob.masked_fill(~self.scored, math.nan)

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
            way_out = (
                "do not form one that is known: pyro_dvi.to_arviz(..., method=Samples(n)) draws from them"
            )
            if part.kind == "Normal":
                way_out = "were not kept: predict(..., keep_draws=True) keeps them"
            raise UnsupportedError(
                f"{what}: the prediction averages {part.count} distributions ({part.kind}) that {way_out}"
            )
        axis = part.axis - len(fn.event_shape)
        own = () if chunks is None else (chunks[i].movedim(0, axis),)
        try:
            found.append(read(fn, *own).movedim(axis, dim))
        except NotImplementedError as error:
            raise UnsupportedError(f"{what}: there are none for this distribution ({part.kind})") from error
    return torch.cat(found, dim)
