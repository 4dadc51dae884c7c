# SPDX-License-Identifier: Apache-2.0
"""What the observed sites of a model observe, and which of it counts."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pyro.poutine.condition_messenger import ConditionMessenger
from torch import Tensor

from pyro_dvi.errors import DataError, ModelError
from pyro_dvi.handlers.response import choose_response, counted, responses
from pyro_dvi.inference_data.names import listed
from pyro_dvi.predictive.engine.batches import Batch

__all__ = [
    "Observation",
    "choose_responses",
    "given_others",
    "observations",
]

T = TypeVar("T")


@dataclass(frozen=True)
class Observation:
    """Observed values of one site in one batch.

    Attributes:
        value: of the shape of one draw.
        counts: which of them the model does not mask, of the same shape; None if all count.
    """

    value: Tensor
    counts: Tensor | None


def choose_responses(
    site: str | Sequence[str] | None, nodes: Mapping[str, Any], latents: Mapping[str, Tensor]
) -> list[str]:
    """Return the sites to export: those that are named, else all that the model observes.

    Raises:
        ModelError: a name that is no observed site, no such site at all, or several of which some observe nothing.
    """
    names = responses(nodes, latents)
    if site is not None:
        asked = listed("site", site)
        if not asked:
            raise ModelError(f"site=[] asks for no observed site; the model has {names}")
        return [choose_response(name, names) for name in asked]
    if len(names) > 1 and all(nodes[name]["is_observed"] for name in names):
        return names
    return [choose_response(None, names)]


def observations(batch: Batch, sites: Sequence[str], nodes: Mapping[str, Any]) -> dict[str, Observation]:
    """Return what each site observes in a run by :func:`~pyro_dvi.predictive.engine.run.observed_run`.

    Raises:
        DataError: the data hold an observation, and a site observes nothing.
    """
    found = {}
    for name in sites:
        node = nodes[name]
        if node["is_observed"]:
            found[name] = Observation(node["value"], counted(node))
        elif batch.observed is not None:
            raise DataError(
                f"site {name!r} observes nothing when the model is given the observation of the data: choose the "
                "argument that it observes by observed=..., or the site by site=..."
            )
    return found


def given_others(
    run: Callable[[Mapping[str, Tensor]], T],
    site: str,
    nodes: Mapping[str, Any],
    latents: Collection[str],
) -> Callable[[Mapping[str, Tensor]], T]:
    r"""Return ``run`` with every observed site but ``site`` at its observed value.

    Its distribution is then :math:`p(y_s \mid y_{\setminus s}, x, \theta)` in the order of the model, whose product
    over sites is the likelihood, also where one site depends on another.

    Args:
        run: gives the response or distribution at ``site`` for latent values.
        site: the site that stays free.
        nodes: the sites of a run by :func:`~pyro_dvi.predictive.engine.run.observed_run`.
        latents: names of the latent sites.
    """
    others = {
        name: nodes[name]["value"]
        for name in responses(nodes, latents)
        if name != site and nodes[name]["is_observed"]
    }
    if not others:
        return run

    def conditioned(values: Mapping[str, Tensor]) -> T:
        with ConditionMessenger(others):
            return run(values)

    return conditioned
