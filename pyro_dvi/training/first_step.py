# SPDX-License-Identifier: Apache-2.0
"""What the objective learns about a training run, and what is checked in the first step."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from pyro.poutine.messenger import Messenger

from pyro_dvi.core.batches import dataset_size
from pyro_dvi.runs.observed import check_list, check_num_data, observation
from pyro_dvi.runs.sites import is_data
from pyro_dvi.training.parameter_checks import warn_of_decaying_scales
from pyro_dvi.training.routes import Route


@contextmanager
def informed(route: Route, loader: Iterable[Any]) -> Iterator[Any]:
    """Give the objective access to the optimizer and, during training, to the size of the data set.

    Yields:
        A context for the first step. It compares the size of the data set with the plate of the model if the objective
        does not do so: for objectives without ``num_data``, and for lists of batches. If there are several processes,
        the list of each may contain only its own part of the data.
    """
    elbo, size = route.elbo, dataset_size(loader)
    check: Any = nullcontext()
    told, known = hasattr(elbo, "num_data"), getattr(elbo, "num_data", None)
    shared = torch.distributed.is_available() and torch.distributed.is_initialized()
    if size is not None and not told:
        check = _SitesSeen(lambda seen: check_num_data([*map(observation, filter(is_data, seen))], size))
    elif isinstance(loader, (list, tuple)) and not shared and known is None:
        check = _SitesSeen(lambda seen: check_list(seen, loader, told))
    if hasattr(elbo, "prepare"):
        elbo.prepare(route.guide, route.steered)
    if told and known is None:
        elbo.num_data = size
    try:
        yield _checked(route, check)
    finally:
        if told:
            elbo.num_data = known


@contextmanager
def _checked(route: Route, check: Any) -> Iterator[None]:
    """Check the plates of the first step; after the step, check the optimizer's options, because it now has groups."""
    with check:
        yield
    warn_of_decaying_scales(route)


class _SitesSeen(Messenger):
    """Collect the sites of a step, and check them afterwards."""

    def __init__(self, check: Callable[[list[Any]], None]) -> None:
        super().__init__()
        self.check = check
        self.seen: list[Any] = []

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None:
            self.check(self.seen)

    def _pyro_post_sample(self, msg: Any) -> None:
        self.seen.append(msg)
