# SPDX-License-Identifier: Apache-2.0
"""The observed sites of a model's run, and the scale that extends their likelihood from a minibatch to the data set."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from pyro.poutine.util import site_is_factor
from torch import Tensor, distributions as td

from pyro_dvi.core.batches import tensors_in
from pyro_dvi.core.densities import untransformed
from pyro_dvi.core.recorder import is_recording
from pyro_dvi.curvature.linearisation import ObservedSite, sum_of
from pyro_dvi.errors import DataError, ModelError, PyroDviError, warn
from pyro_dvi.runs.explained import AS_A_MODEL
from pyro_dvi.runs.missing import without_missing
from pyro_dvi.runs.sites import is_data, is_latent, sites_of, subsampled_share


@dataclass
class Observed:
    """The likelihood of a run of a model.

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
        """Return the scaled log-likelihood of all terms, as a scalar; errors name the site."""
        return sum_of([_log_likelihood(site) for site in self.terms])


def observed_sites(trace: Any) -> Observed:
    """Return the observed sites and the ``pyro.factor`` terms of a run.

    Raises:
        ModelError: if the model has no observed site.
        DataError: if observed values do not have the shape of a draw.
    """
    data = sites_of(trace, is_data)
    for site in data:
        _check_shape(site)
    sites, factors = [[observation(s) for s in found] for found in (data, sites_of(trace, site_is_factor))]
    if not sites and not factors:
        raise ModelError(
            "the model has no observed site: pass the observed values and use them in pyro.sample(name, distribution, "
            f"obs=values). dvi.fit treats a list [x, y] as two batches; for one batch, pass [(x, y)]. {AS_A_MODEL}"
        )
    return Observed(sites, factors)


def observation(site: Any) -> ObservedSite:
    """Return the properties of an observed site that objectives and curvatures use."""
    fn, value = without_missing(site["fn"], site["value"])
    return ObservedSite(site["name"], fn, value, site["scale"], site["mask"], subsampled_share(site))


def _log_likelihood(site: ObservedSite) -> Tensor:
    try:
        return (site.log_prob(site.value) * site.scale).sum()
    except PyroDviError:
        raise
    except (ValueError, RuntimeError, IndexError) as error:
        value, fn, extent = torch.as_tensor(site.value), site.fn, ""
        # A RuntimeError may mean that the values are on a different device.
        if value.numel() and (isinstance(error, ValueError) or value.device.type == "cpu"):
            if lost := int((~torch.isfinite(value)).sum()):
                raise DataError(
                    f"observed site {site.name!r} contains {lost} NaN or infinite values: drop or mask these rows "
                    "(in a model of your own, dist.NanMaskedNormal masks NaN)"
                ) from error
            lowest, highest, base = value.min().item(), value.max().item(), untransformed(fn)
            extent, base = f" from {lowest} to {highest}", getattr(base, "at_mean", base)
            n = base.logits.shape[-1] if isinstance(base, td.Categorical) else None
            if n and not 0 <= lowest <= highest < n:
                hint = " (one output means two)" if n == 2 else ""
                raise DataError(
                    f"observed site {site.name!r}: labels{extent}, but outputs for {n} classes, from 0 to {n - 1}{hint}"
                    ". Number the classes of all data from 0, as in y.unique(return_inverse=True)[1], or give the "
                    "network more outputs; for a regression, pass y.float()"
                ) from error
        raise DataError(
            f"observed site {site.name!r}: values of shape {tuple(value.shape)}{extent} do not fit {type(fn).__name__} "
            f"with batch shape {tuple(fn.batch_shape)} and event shape {tuple(fn.event_shape)}: "
            + str(error).partition(", but found invalid values")[0]  # the rest lists all values
        ) from error


def _check_shape(node: Any) -> None:
    """Raise an error for values that would be broadcast against the distribution: [N] and [N, 1] would score N² pairs.

    A plate may repeat a value that lacks the plate's dimension: a scalar, an event, or one data set for several models.
    A single row is repeated only if another plate has all its rows, and never over a minibatch. Event dimensions are
    compared if they were created by ``to_event``; a distribution checks its own event dimensions itself.
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
                f"{tuple(fn.event_shape)}. Pass values of the shape of a draw (for one output, write f.squeeze(-1)), "
                "or declare dimensions with a plate or to_event. If one value is for all rows, pass y.squeeze()"
            )


# The scale from a minibatch to the data set -------------------------------------------------------------------


def num_data_of(site: ObservedSite) -> float:
    """Return the number of examples in the data set: the plate's scale times the rows of the minibatch.

    Masked rows count. Otherwise, the number would differ between minibatches, and captured steps would read masks.
    """
    scale = float(site.scale.cpu().double().mean()) if torch.is_tensor(site.scale) else float(site.scale)
    return scale * max(1, torch.Size(site.fn.batch_shape).numel())


def row_weights(sites: Sequence[ObservedSite], num_rows: int) -> Tensor:
    """Return the weight of each example, ``[num_rows]``: the largest weight of its observations; zero if it has none.

    Args:
        sites: observed sites, of which those with a dimension of this size have one observation or more per example.
        num_rows: number of examples.
    """
    each = [site.weights for site in sites]
    own = [w.movedim(w.shape.index(num_rows), 0) for w in each if num_rows in w.shape]
    rows = own or [w.amax().expand(num_rows) for w in each]
    return torch.cat([w.reshape(num_rows, -1) for w in rows], 1).amax(1)


def check_num_data(sites: list[ObservedSite], num_data: int) -> None:
    """Compare the plate's scale of every site with the size of the data set.

    If one site agrees, other sites may belong to other data, with a plate of a different size or without a plate. Of
    these, only sites with as many rows as the minibatch must agree as well.

    Args:
        sites: the observed sites of a step.
        num_data: size of the data set.

    Raises:
        DataError: if the likelihood of a minibatch is not scaled up to the data set.
    """
    agreeing: set[int] = set()
    others = []
    for site in sites:
        if torch.is_tensor(site.scale) and (site.scale.numel() > 1 or is_recording()):
            continue  # the user has chosen example weights, or the value must not be read
        scale = float(site.scale)
        lengths = [n for n in (*site.fn.batch_shape, *site.value.shape) if n > 0] or [1]
        nearest = min(lengths, key=lambda n: abs(n * scale - num_data))
        # If the scale is fixed, a shorter last minibatch makes a difference of less than one minibatch.
        slack = max(scale, 1.0) * 1e-4 * num_data
        # The user may choose a weight for the whole data set, but not a plate of a different size.
        if abs(nearest * scale - num_data) <= slack or (nearest == num_data and site.share == 1):
            agreeing.add(nearest)
        else:
            others.append((site.name, scale, nearest))
    for name, scale, rows in sorted(others, key=lambda other: abs(other[1] * other[2] - num_data)):
        if not agreeing or rows in agreeing:
            raise DataError(
                f"observed site {name!r} sees {rows} of {num_data} examples, but its likelihood is scaled to "
                f"{scale * rows:.6g} examples. Write pyro.plate('data', size={num_data}, subsample_size=len(x)), or "
                "correct num_data, the number of examples (fit takes it from the loader)"
            )


def check_list(messages: list[Any], batches: Sequence[Any], refuse: bool) -> None:
    """Compare the plates of the first step with the rows of all batches in a list.

    To count the rows, the check uses tensors that, in the first batch, have as many rows as a plate of an observed
    site. If there is no such tensor (for single rows, or a plate over tokens), nothing is checked. A repeated tensor
    counts once, the last batch may have been dropped, and a list with more rows than the plate may contain several
    epochs. If one plate agrees, other plates may belong to other data.

    Args:
        messages: the messages of all sites in the step.
        batches: the list of batches.
        refuse: True to raise an error, False to warn.

    Raises:
        DataError: if the likelihood of a minibatch is not scaled up to the data.
    """
    # For each tensor of a batch, the length of this tensor in every batch.
    places = [
        [len(t) if t.dim() else 0 for t in {id(t): t for t in place}.values()]
        for place in zip(*map(tensors_in, batches), strict=False)
    ]
    latents = [msg for msg in messages if is_latent(msg) and not msg["infer"].get("is_auxiliary")]
    found = [
        (site["name"], size, lengths)
        for site in filter(is_data, messages)
        for plate, rows, size in _plates(site)
        for lengths in places
        if lengths[0] == rows and not _all_local(latents, plate, rows)
    ]
    if not found or any(_fits(size, lengths) for _, size, lengths in found):
        return
    name, size, lengths = found[0]
    message = (
        f"observed site {name!r} sees {lengths[0]} of {sum(lengths)} examples in the list of batches, but its "
        f"likelihood is scaled to {size}. Write pyro.plate('data', size={sum(lengths)}, subsample_size=len(x)). If the "
        f"data set has {size} examples, pass num_data={size} to an ELBO of pyro_dvi"
    )
    if refuse:
        raise DataError(message)
    warn(message)


def _plates(site: Any) -> list[tuple[Any, int, int]]:
    """Return the plates that scale a site, with rows and sizes; if none do, all its plates or its first dimension."""
    frames = site["cond_indep_stack"]
    scaling = [(f, f.size, f.full_size) for f in frames if f.full_size not in (None, f.size)]
    if scaling or torch.is_tensor(site["scale"]) or site["scale"] != 1:
        return scaling
    fn = site["fn"]
    shape = (*fn.batch_shape, *fn.event_shape[: len(fn.event_shape) - len(untransformed(fn).event_shape)])
    return [(f, f.size, f.size) for f in frames] or [(None, n, n) for n in shape[:1]]


def _fits(size: int, lengths: list[int]) -> bool:
    """Return True if a plate fits all batches, which may be of several epochs or lack a dropped last batch."""
    rows, total = lengths[0], sum(lengths)
    return total == rows if size == rows else size < total + (rows if len(set(lengths)) == 1 else 1)


def _all_local(latents: list[Any], plate: Any, rows: int) -> bool:
    """Return True if all latents belong to rows, as in an autoencoder; the posterior does not depend on the scale."""
    return all(plate in m["cond_indep_stack"] if plate else m["value"].shape[:1] == (rows,) for m in latents)
