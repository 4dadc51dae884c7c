# SPDX-License-Identifier: Apache-2.0
"""Read the observed sites of a model's run, and check what they say about the data."""

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.core.distributions import untransformed
from pyro_dvi.curvature import ObservedSite
from pyro_dvi.curvature.base import sum_of
from pyro_dvi.errors import DataError, ModelError, PyroDviError
from pyro_dvi.runs.explained import AS_A_MODEL
from pyro_dvi.runs.sites import is_data, is_factor, sites_of, subsampled_share


@dataclass
class Observed:
    """What a run of a model says about its data.

    Attributes:
        sites: observed sites.
        factors: ``pyro.factor`` terms.
    """

    sites: list[ObservedSite]
    factors: list[ObservedSite]

    @property
    def terms(self) -> list[ObservedSite]:
        """Observed sites and factors."""
        return [*self.sites, *self.factors]

    def log_likelihood(self) -> Tensor:
        """Return the scaled log-likelihood of all terms, a scalar, with errors that name the site."""
        return sum_of([checked_log_likelihood(site) for site in self.terms])


def observed_sites(trace: Any) -> Observed:
    """Return the observed sites and the ``pyro.factor`` terms of a run.

    Raises:
        ModelError: the model observes nothing.
        DataError: values do not have the shape of a draw.
    """
    data = sites_of(trace, is_data)
    for site in data:
        _check_shape(site)
    sites, factors = [[observation(s) for s in found] for found in (data, sites_of(trace, is_factor))]
    if not sites and not factors:
        raise ModelError(
            "the model has no observed site: pass the observed values and give them to "
            "pyro.sample(name, distribution, obs=values). Without data the posterior is the prior. dvi.fit "
            f"takes a list [x, y] for two batches: pass [(x, y)] for one. {AS_A_MODEL}"
        )
    return Observed(sites, factors)


def observation(site: Any) -> ObservedSite:
    """Return what objectives and curvatures read of an observed site."""
    share = subsampled_share(site)
    return ObservedSite(site["name"], site["fn"], site["value"], site["scale"], site["mask"], share)


def checked_log_likelihood(site: ObservedSite) -> Tensor:
    """Scaled log-likelihood of a site, with errors that name it."""
    try:
        log_prob = site.log_prob(site.value)
    except PyroDviError:
        raise
    except ValueError as error:
        value = site.value
        if torch.is_tensor(value) and value.is_floating_point() and not bool(torch.isfinite(value).all()):
            count = int((~torch.isfinite(value)).sum())
            raise DataError(
                f"observed site {site.name!r} holds {count} NaN or infinite values: drop those rows or mask them "
                "with pyro.poutine.mask after replacing them by a number"
            ) from error
        shape = tuple(value.shape) if torch.is_tensor(value) else type(value).__name__
        low, high = (
            (value.min().item(), value.max().item()) if torch.is_tensor(value) and value.numel() else (0, 0)
        )
        raise DataError(
            f"observed site {site.name!r} ({type(site.fn).__name__}, batch shape {tuple(site.fn.batch_shape)}, event "
            f"shape {tuple(site.fn.event_shape)}) cannot have these values (shape {shape}, from {low} to {high}): "
            f"{error}"
        ) from error
    except (RuntimeError, IndexError) as error:
        raise DataError(
            f"observed site {site.name!r}: values of shape {tuple(site.value.shape)} do not fit "
            f"{type(site.fn).__name__} with batch shape {tuple(site.fn.batch_shape)} and event shape "
            f"{tuple(site.fn.event_shape)} ({error})"
        ) from error
    return (log_prob * site.scale).sum()


def _check_shape(node: Any) -> None:
    """Refuse values that are broadcast against the distribution: [N] against [N, 1] would score N² pairs.

    A plate may repeat what lacks its dimension: a number, an event, or one data set for several models. A single row is
    repeated only where the rows of another plate are all there, and never over a minibatch. Dimensions of an event are
    compared where ``to_event`` has made them; a distribution's own are its own business.
    """
    fn, value = node["fn"], node["value"]
    own = len(untransformed(fn).event_shape)
    shape = tuple(fn.batch_shape) + tuple(fn.event_shape)[: len(fn.event_shape) - own]
    given = tuple(value.shape)[: value.dim() - own] if torch.is_tensor(value) else ()
    if given == shape:
        return
    shift = own - len(fn.event_shape)
    plates = {-frame.dim - shift: frame for frame in node["cond_indep_stack"] if frame.vectorized}
    sizes = list(zip_longest(reversed(given), reversed(shape), fillvalue=1))
    fitting = {place for place in plates if place <= len(given) and len(set(sizes[place - 1])) == 1}
    for place, (size, expected) in enumerate(sizes, start=1):
        whole = place in plates and plates[place].size == plates[place].full_size
        repeated = place in plates and (place > len(given) or (whole and fitting))
        if size != expected and not (size == 1 and repeated):
            raise DataError(
                f"observed site {node['name']!r}: values of shape {tuple(value.shape)} would be broadcast against "
                f"{type(fn).__name__} with batch shape {tuple(fn.batch_shape)} and event shape "
                f"{tuple(fn.event_shape)}. Give values of the shape of a draw, as f.squeeze(-1) and y of one column; "
                "or put dimensions into a plate or to_event. One number for all "
                "rows of a plate has no dimensions: y.squeeze()"
            )
