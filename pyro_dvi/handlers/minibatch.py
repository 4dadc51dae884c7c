# SPDX-License-Identifier: Apache-2.0
"""How much of the data a minibatch is: is its likelihood scaled up to all of them, and what does a part of it say?"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.batches import rows_cut, tensors_in, with_rows
from pyro_dvi.curvature import ObservedSite
from pyro_dvi.curvature.likelihood import SliceArguments
from pyro_dvi.errors import DataError, ModelError, UnsupportedError, warn
from pyro_dvi.handlers.means import twice_differentiable
from pyro_dvi.handlers.observed import observation, observed_sites
from pyro_dvi.handlers.posterior_run import PosteriorRun
from pyro_dvi.undisturbed import preserve_buffers


def check_num_data(sites: list[ObservedSite], num_data: int, dropped: int = 1) -> None:
    """Compare the plate's scale of every site with the size of the data set.

    Once a site agrees, others may be data of their own, with a plate of another size or none: only those as long as
    the minibatch have to agree as well.

    Args:
        sites: observed in a step.
        num_data: size of the data set.
        dropped: the data set may be larger by fewer rows than these.

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
        slack, more = max(scale, 1.0) * 1e-4 * num_data, nearest * scale - num_data
        # All the data may have a weight of their author's, but no plate of another size.
        if -slack <= more <= max(slack, dropped - 1) or (nearest == num_data and site.share == 1):
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
            "data set, not of batches: correct the size of the plate, or num_data, which fit takes from loader.dataset "
            "or counts in a list of batches; give it to the objective where these are a part of the data."
        )


def check_list(sites: list[ObservedSite], batches: Sequence[Any]) -> None:
    """Compare the sites of a step with all batches of a list, whose rows are those of one of their tensors.

    A tensor that comes again counts once, and a last batch may have been dropped where all are equal.

    Raises:
        DataError: a minibatch whose likelihood is not scaled up to the data.
    """
    wrong: list[DataError] = []
    tensors = [[t for t in tensors_in(batch) if t.dim()] for batch in batches]
    for place in zip(*tensors, strict=True) if len(set(map(len, tensors))) == 1 else ():
        rows = [len(tensor) for tensor in {id(t): t for t in place}.values()]
        try:
            return check_num_data(sites, sum(rows), rows[0] if len(rows) > 1 == len(set(rows)) else 1)
        except DataError as error:
            wrong.append(error)
    if wrong:
        raise wrong[0]


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
