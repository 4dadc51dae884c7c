# SPDX-License-Identifier: Apache-2.0
"""Does the model's plate have the size of the data set that the loader draws from?"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyro.poutine.messenger import Messenger

from pyro_dvi.curvature import ObservedSite
from pyro_dvi.handlers.observed import check_num_data, observation
from pyro_dvi.sites import is_data
from pyro_dvi.training.routes import Route

__all__ = ["PlateCheck", "known_data_size"]


class PlateCheck(Messenger):
    """Compare the scale of observed sites with the loader, for ELBOs that do not do so themselves."""

    def __init__(self, num_data: int) -> None:
        super().__init__()
        self.num_data = num_data
        self.sites: list[ObservedSite] = []

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        sites, self.sites = self.sites, []
        if error[0] is None and sites:
            check_num_data(sites, self.num_data)

    def _pyro_post_sample(self, msg: Any) -> None:
        if is_data(msg):
            self.sites.append(observation(msg))


@contextmanager
def known_data_size(route: Route, size: int | None) -> Iterator[None]:
    """Tell an ELBO that does not know it the size of the data set, for as long as this loader is used."""
    elbo = route.elbo
    if size is None or getattr(elbo, "num_data", size) is not None:
        yield
        return
    elbo.num_data = size
    try:
        yield
    finally:
        elbo.num_data = None
