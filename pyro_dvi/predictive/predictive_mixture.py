# SPDX-License-Identifier: Apache-2.0
r"""Accumulate an equally weighted mixture of distributions, one component or many at a time.

Memory does not grow with the number of components: moments by Welford's and Chan's updates and the law of total
variance,

.. math::
    \mathrm{E}[y] = \tfrac1K\textstyle\sum_k m_k, \qquad
    \mathrm{Var}[y] = \underbrace{\tfrac1K\textstyle\sum_k v_k}_{\text{aleatoric}}
        + \underbrace{\tfrac1K\textstyle\sum_k (m_k - \mathrm{E}[y])^2}_{\text{epistemic}},

class probabilities and densities of observed values by log-sum-exp. The statistics of each component are kept only if
that is asked for, and the components of numbers, for their quantiles, while there is room.
"""

import math
from collections.abc import Mapping
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch import distributions as td

from pyro_dvi.core.distributions import tensors_of, untransformed, with_tensors
from pyro_dvi.errors import ModelError
from pyro_dvi.links.noise_links import EqualMixture
from pyro_dvi.predictive.batch_prediction import (
    Part,
    both_masks,
    check_events,
    checked_log_prob,
    class_log_probabilities,
    filled,
    statistics,
    with_any,
)
from pyro_dvi.predictive.engine.model_runs import Response


def _form(response: Response) -> tuple[str, tuple[int, ...]]:
    """Return the site and the shape of its numbers or class probabilities."""
    fn = response.distribution
    classes = class_log_probabilities(fn)
    return response.site, tuple(fn.batch_shape + fn.event_shape if classes is None else classes.shape)


_LOG = ("log_probabilities", "log_likelihood")  # averaged as probabilities
_PLAIN = ("variance", "function_variance", "entropy")  # averaged as they are
_AVERAGES = {"variance": "aleatoric", "entropy": "expected_entropy"}  # what their averages are called


class Mixture:
    """Running summary of the components that are added.

    Args:
        observed: values to score as they come, or None.
        num_rows: number of examples.
        mask: which observed values count; None if all do, or if only the model's run without them says so.
        room: how many numbers all components that are kept may predict; if infinite, their moments or probabilities
            are kept as well.
    """

    def __init__(
        self, observed: Tensor | None, num_rows: int, mask: Tensor | None = None, *, room: float = 0
    ) -> None:
        self.observed = observed
        self.num_rows = num_rows
        self.mask = mask
        self.count = 0
        self.averages: dict[str, Tensor] = {}  # "log_..." of the sum over components, the others of the mean
        self.between: Tensor | None = None  # sum of squared distances of the components' means from the mean
        self.last: Response | None = None
        self.room = room
        self._kept: list[dict[str, Tensor]] = []
        self._components: list[Any] = []
        self._made: Any  # a component of a run without checks, for its structure
        # What is observed, with possible values in place of the masked ones.
        self._scored: Tensor | None = None

    @property
    def site(self) -> str:
        """The observed site."""
        assert self.last is not None, "a rule gave no component"
        return self.last.site

    def add(self, response: Response) -> None:
        """Add a component, having checked what was observed.

        Raises:
            DataError: observed values of another shape, or impossible under this component.
            UnsupportedError: a mask cuts observations that the distribution scores as a whole.
        """
        fn = response.distribution
        if self.last is None:
            if self.observed is None and response.is_observed:
                self.observed = response.value
            self.mask = both_masks(self.mask, response.mask)
            if self.observed is not None:
                self._scored = filled(self.observed, self.mask, fn)
                check_events(fn, self.mask, response.site)
        elif _form(response) != _form(self.last):
            raise ModelError(
                f"members of the ensemble predict unlike things: the first {_form(self.last)}, another "
                f"{_form(response)}, site and shape of its numbers or class probabilities. Choose a site that all "
                "models have by site="
            )
        self.last = response
        if self._scored is not None:
            checked_log_prob(fn, self._scored, response.site)
        found = statistics(fn, self._scored)
        if "log_probabilities" not in found:
            self._keep_component(fn)
        self.add_statistics({name: value.unsqueeze(0) for name, value in found.items()}, 1)

    def statistics(self, node: Any) -> dict[str, Tensor]:
        """Return what is averaged over components, and their parameters, for the site of one, without checks."""
        fn = self._made = node["fn"]
        found = statistics(fn, self._scored)
        if self.room <= 0 or "log_probabilities" in found:
            return found
        return found | {str(i): tensor for i, tensor in enumerate(tensors_of(fn, strict=True))}

    def add_statistics(self, many: Mapping[str, Tensor], count: int) -> None:
        """Add ``count`` components by their statistics, stacked in the first dimension."""
        tensors = [value for name, value in many.items() if name.isdigit()]
        many = {name: value for name, value in many.items() if not name.isdigit()}
        for k in range(count if tensors else 0):
            self._keep_component(with_tensors(self._made, [tensor[k] for tensor in tensors]))
        total = self.count + count
        if total == 1:
            self.averages = {name: value[0] for name, value in many.items()}
            self.between = torch.zeros_like(many["mean"][0]) if "mean" in many else None
        else:
            self._update(many, count, total)
        self.count = total
        if self.room == math.inf:
            self._kept.append(dict(many))

    def _keep_component(self, fn: Any) -> None:
        self.room -= (fn.batch_shape + fn.event_shape).numel()
        self._components = [*self._components, fn] if self.room >= 0 else []

    def _update(self, many: Mapping[str, Tensor], count: int, total: int) -> None:
        before, added = self.count / total, count / total
        if "function_variance" not in many:  # known of all components, or of none
            self.averages.pop("function_variance", None)
        for name, values in many.items():
            old = self.averages.get(name)
            if name in _LOG:
                new = values.logsumexp(0)
                self.averages[name] = new if old is None else torch.logaddexp(old, new)
            elif name in _PLAIN and old is not None:
                # In this form infinite variances stay infinite.
                self.averages[name] = old * before + values.mean(0) * added
        if "mean" in many:
            mean = many["mean"].mean(0)
            between = (many["mean"] - mean).square().sum(0)
            if self.between is not None:
                step = mean - self.averages["mean"]
                between = self.between + between + step.square() * (self.count * added)
                mean = self.averages["mean"] * before + mean * added
            self.averages["mean"], self.between = mean, between

    def finish(self) -> Part:
        """Return the summary of everything added."""
        assert self.last is not None, "a rule gave no component"
        fn, axis = self.last.distribution, self.last.axis
        base, event_dim = untransformed(fn), len(fn.event_shape)
        # Dimensions on the right of the batch shape: the moments of a class are those of its one-hot code.
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
            # Rounding makes the difference negative where the noise is far smaller.
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
                each |= {
                    n: v.masked_fill(left_out, math.nan) for n, v in each.items() if n == "log_likelihood"
                }
        distribution = self._distribution(fn, found.get("log_probabilities"))
        return Part(type(base).__name__, values, draws, distribution, self.count, axis, self.num_rows)

    def _distribution(self, fn: Any, log_probabilities: Tensor | None) -> Any:
        """Return the mixture as one distribution: classes mix into classes."""
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
