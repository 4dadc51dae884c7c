# SPDX-License-Identifier: Apache-2.0
"""How much of the data a minibatch is: is its likelihood scaled up to all of them, and what does a part of it say?"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.core.batches import rows_cut, tensors_in, with_rows
from pyro_dvi.core.distributions import untransformed
from pyro_dvi.core.undisturbed import preserve_buffers
from pyro_dvi.curvature import ObservedSite
from pyro_dvi.curvature.likelihood import SliceArguments
from pyro_dvi.errors import DataError, ModelError, UnsupportedError, warn
from pyro_dvi.runs.means import twice_differentiable
from pyro_dvi.runs.observed import observation, observed_sites
from pyro_dvi.runs.posterior_run import PosteriorRun
from pyro_dvi.runs.sites import is_data, is_latent


def check_num_data(sites: list[ObservedSite], num_data: int) -> None:
    """Compare the plate's scale of every site with the size of the data set.

    Once a site agrees, others may be data of their own, with a plate of another size or none: only those as long as
    the minibatch have to agree as well.

    Args:
        sites: observed in a step.
        num_data: size of the data set.

    Raises:
        DataError: a minibatch whose likelihood is not scaled up to the data set.
    """
    agreeing: set[int] = set()
    others = []
    for site in sites:
        if torch.is_tensor(site.scale) and site.scale.numel() > 1:
            continue  # weights per example are the user's own business
        scale = float(site.scale)
        lengths = [n for n in (*site.fn.batch_shape, *site.value.shape) if n > 0] or [1]
        nearest = min(lengths, key=lambda n: abs(n * scale - num_data))
        # A last, shorter minibatch under a fixed scale is off by less than one minibatch's worth.
        slack = max(scale, 1.0) * 1e-4 * num_data
        # All the data may have a weight of their author's, but no plate of another size.
        if abs(nearest * scale - num_data) <= slack or (nearest == num_data and site.share == 1):
            agreeing.add(nearest)
        else:
            others.append((site, scale, nearest))
    for site, scale, nearest in sorted(others, key=lambda other: abs(other[1] * other[2] - num_data)):
        if agreeing and nearest not in agreeing:
            continue
        if scale == 1.0 and nearest < num_data:
            raise DataError(
                f"observed site {site.name!r} sees {nearest} of {num_data} examples but its likelihood is not scaled "
                f"up: put it in pyro.plate('data', size={num_data}, subsample_size=len(x)), or pass "
                f"num_data={nearest} if these are all. It is the number of examples in the data set, not of batches."
            )
        raise DataError(
            f"observed site {site.name!r}: plate scale {scale:.6g} times {nearest} examples gives "
            f"{scale * nearest:.6g}, not num_data={num_data}. Both are the number of examples in the whole "
            "data set, not of batches: correct the size of the plate, or num_data, which fit takes from "
            "loader.dataset; give it to the objective where that is a part of the data."
        )


def check_list(messages: list[Any], batches: Sequence[Any], refuse: bool) -> None:
    """Compare the plates of the first step with the rows of all batches of a list.

    Rows are counted by tensors of the batches that are as long, in the first one, as a plate of an observed site; where
    there is none, as for one row at a time or a plate of tokens, nothing is said. A tensor that comes again counts
    once, a last batch may have been dropped, and more rows than the plate has may be those of several epochs. Where one
    plate agrees, others may be of data of their own.

    Args:
        messages: of all sites in the step.
        batches: the list.
        refuse: raise an error; a warning else.

    Raises:
        DataError: a minibatch whose likelihood is not scaled up to the data.
    """
    # For each tensor of a batch its length in every one.
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
        f"likelihood is scaled to {size}: write pyro.plate('data', size={sum(lengths)}, subsample_size=len(x)), or "
        f"pass num_data={size} to an ELBO of pyro_dvi, if that is the number of examples in the data set"
    )
    if refuse:
        raise DataError(message)
    warn(message)


def _plates(site: Any) -> list[tuple[Any, int, int]]:
    """Plates that scale a site, with their rows and size; if nothing does, those that it has or lacks."""
    frames = site["cond_indep_stack"]
    scaling = [(f, f.size, f.full_size) for f in frames if f.full_size not in (None, f.size)]
    if scaling or torch.is_tensor(site["scale"]) or site["scale"] != 1:
        return scaling
    fn = site["fn"]
    shape = (*fn.batch_shape, *fn.event_shape[: len(fn.event_shape) - len(untransformed(fn).event_shape)])
    return [(f, f.size, f.size) for f in frames] or [(None, n, n) for n in shape[:1]]


def _fits(size: int, lengths: list[int]) -> bool:
    """Whether a plate may be that of all batches: of more, if they are several epochs, or but for one dropped."""
    rows, total = lengths[0], sum(lengths)
    return total == rows if size == rows else size < total + (rows if len(set(lengths)) == 1 else 1)


def _all_local(latents: list[Any], plate: Any, rows: int) -> bool:
    """Whether all latents belong to rows, as in an autoencoder, whose posterior does not depend on the scale."""
    inside = [
        m for m in latents if (plate in m["cond_indep_stack"] if plate else m["value"].shape[:1] == (rows,))
    ]
    return {m["name"] for m in inside} == {m["name"] for m in latents}


class UnscaledMinibatches:
    """Warns of minibatches whose likelihood nothing scales up: N is then taken for the size of a minibatch.

    Attributes:
        largest: examples of the largest minibatch so far.
    """

    def __init__(self) -> None:
        self.largest = 0.0
        self._warned = False

    def see(self, terms: list[ObservedSite]) -> None:
        """Compare a minibatch with those before."""
        if self._warned or any(torch.is_tensor(site.scale) or site.scale != 1 for site in terms):
            return
        size = max(_unmasked(site) for site in terms)
        if size < 0.9 * self.largest:
            self._warned = True
            warn(
                f"the data were {self.largest:g} in one step and {size:g} in another, and no plate says how "
                "large the data set is. If these are minibatches, N is the size of the minibatch, and the posterior is "
                'far too wide: write pyro.plate("data", N, subsample_size=len(x)) around the observations, with N the '
                "number of all data; NaturalGradientELBO(num_data=N) then checks it."
            )
        self.largest = max(size, self.largest)


def num_data_of(site: ObservedSite) -> float:
    """Number of examples in the data set: the plate's scale times the minibatch."""
    scale = float(site.scale.cpu().double().mean()) if torch.is_tensor(site.scale) else float(site.scale)
    return scale * max(1, torch.Size(site.fn.batch_shape).numel())


def _unmasked(site: ObservedSite) -> float:
    """Number of examples in the minibatch without those that a mask leaves out, as padding."""
    shape = torch.Size(site.fn.batch_shape)  # a plain tuple in some distributions of Pyro
    if not torch.is_tensor(site.mask):
        return float(shape.numel())
    return float(site.mask.expand(torch.broadcast_shapes(shape, site.mask.shape)).sum())


def run_on_part(run: PosteriorRun, fraction: float, slice_args: SliceArguments | None) -> list[ObservedSite]:
    """Return the observed sites of the model on a random part of the rows, at the same latent values.

    Raises:
        UnsupportedError: a latent variable belongs to rows, so rows cannot be left out.
        ModelError: the plate does not follow the number of rows.
    """
    call = run.call
    first = with_rows((call.args, call.kwargs))
    if first is None:
        raise UnsupportedError(
            f"Fisher(fraction={fraction}) found no tensor among the model's arguments to take rows of: pass slice_args"
        )
    length = len(first)
    for latent in run.latents:  # a plate of another size, of groups say, has nothing to do with the rows
        if any(frame.size == length for frame in run.model_trace.nodes[latent.name]["cond_indep_stack"]):
            raise UnsupportedError(
                f"Fisher(fraction={fraction}) cannot take part of the rows: latent site {latent.name!r} is local to a "
                "plate of as many elements. Use Fisher(every=k) to save time instead."
            )
    rows = torch.randperm(length, device=first.device)[: max(1, math.ceil(fraction * length))]
    part_args, part_kwargs = (slice_args or _slice_rows)(call.args, call.kwargs, rows)
    advice = (
        "Give the plate the length of the data (subsample_size=len(x)), so that its scale follows the part, or pass "
        "Fisher(slice_args=...) that fits the model's arguments."
    )
    with preserve_buffers(), twice_differentiable():
        try:
            trace = replace(call, args=part_args, kwargs=part_kwargs).trace_model(run.guide.trace)
        except (ValueError, RuntimeError) as error:
            raise ModelError(
                f"the model failed on {len(rows)} of {length} rows for Fisher(fraction={fraction}): {error}. {advice}"
            ) from error
    sites = observed_sites(trace).sites
    for site in sites:
        before, after = num_data_of(observation(run.model_trace.nodes[site.name])), num_data_of(site)
        if abs(after / before - 1) > 1e-3:
            raise ModelError(
                f"observed site {site.name!r} weighs {after:.6g} on {len(rows)} rows and {before:.6g} on {length}: the "
                f"penalty of Fisher(fraction={fraction}) would be biased. {advice}"
            )
    return sites


def _slice_rows(args: tuple, kwargs: dict, rows: Tensor) -> tuple[tuple, dict]:
    part: tuple[tuple, dict] = rows_cut(lambda tensor: tensor[rows], (args, kwargs))
    return part
