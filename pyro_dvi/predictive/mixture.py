# SPDX-License-Identifier: Apache-2.0
r"""Accumulate an equally weighted mixture of distributions, one component at a time.

Nothing grows with the number of components: moments by Welford's updates and the law of total variance,

.. math::
    \mathrm{E}[y] = \tfrac1K\textstyle\sum_k m_k, \qquad
    \mathrm{Var}[y] = \tfrac1K\sum_k v_k + \tfrac1K\sum_k (m_k - \mathrm{E}[y])^2,

class probabilities and densities of observed values by log-sum-exp.
"""

import math
from dataclasses import dataclass
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch import distributions as td

from pyro_dvi.errors import DataError, UnsupportedError
from pyro_dvi.predictive.run import Response

__all__ = ["Mixture", "Part", "checked_log_prob", "class_log_probabilities"]


@dataclass(frozen=True)
class Part:
    """The predictive distribution of one batch; tensors have the examples in their first dimension.

    Attributes:
        kind: name of the components' distribution.
        mean: predictive mean, one-hot for classes; None where the distribution has none.
        variance: predictive variance; None where the distribution has none.
        log_probabilities: of each class in the last dimension; None if the response is no class.
        log_likelihood: of the observed values; None if there were none.
        observed: the observed values; None if there were none.
        distribution: the mixture as one distribution object; None where it has no such form.
        is_masked: whether the model masks some of the values.
        axis: the dimension of its batch shape that counts examples, negative.
        num_rows: number of examples.
    """

    kind: str
    mean: Tensor | None
    variance: Tensor | None
    log_probabilities: Tensor | None
    log_likelihood: Tensor | None
    observed: Tensor | None
    distribution: Any
    is_masked: bool
    axis: int
    num_rows: int

    def log_prob(self, values: Tensor, site: str) -> Tensor:
        """Log density of other values, examples first."""
        if self.distribution is None:
            raise UnsupportedError(
                f"the prediction at site {site!r} averages several {self.kind} distributions and kept none of them: "
                "give predict the observed values, predict(model, guide, (x, y), ...), and they are scored on the way"
            )
        native = values.movedim(0, self.axis - len(self.distribution.event_shape)) if values.dim() else values
        return checked_log_prob(self.distribution, native, site).movedim(self.axis, 0)

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


class Mixture:
    """Running summary of the components that are added.

    Args:
        observed: values to score as they come, or None.
        num_rows: number of examples.
    """

    def __init__(self, observed: Tensor | None, num_rows: int) -> None:
        self.observed = observed
        self.num_rows = num_rows
        self.count = 0
        self.mean: Tensor | None = None
        self.within: Tensor | None = None  # mean of the components' variances
        self.between: Tensor | None = None  # sum of squared distances of their means from the mean
        self.log_probabilities: Tensor | None = None  # log of the sum over components, as is the next
        self.log_likelihood: Tensor | None = None
        self.last: Response | None = None

    def add(self, response: Response) -> None:
        """Add a component."""
        self.count += 1
        self.last = response
        fn = response.distribution
        if self.observed is None and response.is_observed:
            self.observed = response.value
        if self.observed is not None:
            self.log_likelihood = _log_add(
                self.log_likelihood, checked_log_prob(fn, self.observed, response.site)
            )
        classes = class_log_probabilities(fn)
        self.log_probabilities = None if classes is None else _log_add(self.log_probabilities, classes)
        mean, variance = _moments(fn)
        if mean is None or variance is None:
            return
        if self.mean is None or self.within is None or self.between is None:
            self.mean, self.within, self.between = mean.clone(), variance.clone(), torch.zeros_like(mean)
        else:
            step = mean - self.mean
            self.mean = self.mean + step / self.count
            self.between = self.between + step * (mean - self.mean)
            self.within = self.within + (variance - self.within) / self.count

    def finish(self) -> Part:
        """Return the summary of everything added."""
        assert self.last is not None, "a rule gave no component"
        fn, axis, log_count = self.last.distribution, self.last.axis, math.log(self.count)
        event_dim = len(fn.event_shape)
        base = _base(fn)
        extra = (
            1 if isinstance(base, td.Categorical) else 0
        )  # the moments of a class are those of its one-hot code
        variance = None
        if self.within is not None and self.between is not None:
            variance = self.within + self.between / self.count
        log_p = None if self.log_probabilities is None else self.log_probabilities - log_count
        merged = fn if self.count == 1 else _as_one_distribution(fn, log_p)
        if isinstance(base, td.Bernoulli):
            class_dims = 1
        else:
            class_dims = 0 if isinstance(base, td.OneHotCategorical) else 1

        def first(value: Tensor | None, more: int) -> Tensor | None:
            return None if value is None else value.movedim(axis - more, 0)

        return Part(
            kind=type(base).__name__,
            mean=first(self.mean, event_dim + extra),
            variance=first(variance, event_dim + extra),
            log_probabilities=first(log_p, event_dim + class_dims),
            log_likelihood=first(None if self.log_likelihood is None else self.log_likelihood - log_count, 0),
            observed=first(self.observed, event_dim),
            distribution=merged,
            is_masked=self.last.is_masked,
            axis=axis,
            num_rows=self.num_rows,
        )


def class_log_probabilities(fn: Any) -> Tensor | None:
    """Log-probabilities of the classes in the last dimension, or None if ``fn`` is not over classes."""
    base = _base(fn)
    if isinstance(base, td.Bernoulli):
        return torch.nn.functional.logsigmoid(torch.stack([-base.logits, base.logits], -1))
    if isinstance(base, (td.Categorical, td.OneHotCategorical)):
        return torch.log_softmax(base.logits, -1)
    return None


def checked_log_prob(fn: Any, values: Tensor, site: str) -> Tensor:
    """Log density of ``values``, which must have the shape of one draw and lie in the support.

    Raises:
        DataError: another shape (broadcasting would score every value against every prediction), or impossible values.
    """
    expected = tuple(fn.batch_shape) + tuple(fn.event_shape)
    kind = type(_base(fn)).__name__
    if tuple(values.shape) != expected:
        raise DataError(
            f"site {site!r} ({kind}): observed values have shape {tuple(values.shape)}, the predictions {expected}"
        )
    reference = _parameter(fn)
    if not values.is_floating_point() and not isinstance(_base(fn), td.Categorical):
        values = values.to(reference.dtype)
    inside = fn.support is None or bool(fn.support.check(values).all())
    if isinstance(_base(fn), td.Categorical):
        inside = inside and torch.equal(values, values.long().to(values.dtype))
    if not inside:
        raise DataError(
            f"site {site!r}: observed values from {float(values.min()):.6g} to {float(values.max()):.6g} include "
            f"some that {kind} cannot give (its support: {fn.support})"
        )
    log_prob: Tensor = fn.log_prob(values)
    return log_prob


def _parameter(fn: Any) -> Tensor:
    """Any floating-point parameter of the distribution, for its dtype."""
    base = _base(fn)
    for name in base.arg_constraints:
        value = base.__dict__.get(name)
        if torch.is_tensor(value) and value.is_floating_point():
            return value
    return torch.empty(())


def _moments(fn: Any) -> tuple[Tensor | None, Tensor | None]:
    classes = class_log_probabilities(fn) if isinstance(_base(fn), td.Categorical) else None
    if classes is not None:
        p = classes.exp()
        return p, p * (1 - p)
    try:
        mean, variance = fn.mean, fn.variance
    except (NotImplementedError, AttributeError):
        return None, None
    return mean, variance


def _as_one_distribution(fn: Any, log_probabilities: Tensor | None) -> Any:
    """Return the mixture as a distribution: classes mix into classes, nothing else into its own kind."""
    base = _base(fn)
    if log_probabilities is None:
        return None
    if isinstance(base, td.OneHotCategorical):
        return dist.OneHotCategorical(logits=log_probabilities)
    if len(fn.event_shape):
        return None  # labels of one example are dependent under the mixture
    if isinstance(base, td.Bernoulli):
        return dist.Bernoulli(logits=log_probabilities[..., 1] - log_probabilities[..., 0])
    return dist.Categorical(logits=log_probabilities)


def _log_add(total: Tensor | None, value: Tensor) -> Tensor:
    return value if total is None else torch.logaddexp(total, value)


def _base(fn: Any) -> Any:
    while isinstance(fn, (td.Independent, dist.MaskedDistribution, dist.ExpandedDistribution)):
        fn = fn.base_dist
    return fn
