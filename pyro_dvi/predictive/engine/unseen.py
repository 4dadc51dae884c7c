# SPDX-License-Identifier: Apache-2.0
"""Sites that the model draws on its way to the predicted one: does the prediction depend on them?"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from pyro.poutine.messenger import Messenger

from pyro_dvi.devices import forked
from pyro_dvi.errors import UnsupportedError
from pyro_dvi.predictive.engine.distributions import tensors_of
from pyro_dvi.predictive.engine.run import Latents, Response

__all__ = ["refuse_unseen"]


def refuse_unseen(
    response: Response, run: Callable[[Latents], Mapping[str, Any]], latents: Latents, rule: str
) -> None:
    """Refuse a prediction that one draw of such a site would decide.

    Args:
        response: of a run of the model.
        run: gives the site in a run with latent values.
        latents: values to look at the model with.
        rule: name of the rule that predicts, for the error.

    Raises:
        UnsupportedError: with the same latent values and other draws of these sites, the distribution is another.
    """
    found = []
    for last in (False, True):
        with forked(*(value.device for value in latents.values())), _Elsewhere(response.drawn, last):
            torch.manual_seed(1 + last)
            found.append(run(latents)[response.site]["fn"])
    with suppress(TypeError):  # of a distribution that cannot be looked into
        first, second = map(tensors_of, found)
        if len(first) == len(second) and all(map(torch.equal, first, second)):
            return
    raise UnsupportedError(
        f"site {response.site!r} depends on sites {list(response.drawn)}, which are neither in the guide nor observed, "
        f"so that the model draws them: {rule}() would take one draw for the truth. Predict with Samples(n), which "
        "averages over them, or let the model take their values from the data"
    )


class _Elsewhere(Messenger):
    """Take the first or the last possible value of discrete sites, which two draws might have in common."""

    def __init__(self, sites: tuple[str, ...], last: bool) -> None:
        super().__init__()
        self.sites, self.place = sites, -1 if last else 0

    def _pyro_sample(self, msg: Any) -> None:
        fn = msg["fn"]
        if msg["name"] in self.sites and not msg["done"] and fn.has_enumerate_support:
            try:
                values = fn.enumerate_support(expand=False)
            except NotImplementedError:  # of several labels in an event, which are then drawn
                return
            msg["value"], msg["done"] = values[self.place].expand(fn.shape()), True
