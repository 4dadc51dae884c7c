# SPDX-License-Identifier: Apache-2.0
"""Draws from the prior of a model."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from pyro_dvi.core.arguments import with_missing
from pyro_dvi.core.undisturbed import seeder
from pyro_dvi.errors import UnsupportedError
from pyro_dvi.predictive.engine.distributions import tensors_of
from pyro_dvi.predictive.engine.run import sites_at
from pyro_dvi.predictive.engine.vectorised import ManyDraws
from pyro_dvi.predictive.rules.rule import FromDraws
from pyro_dvi.runs.sites import AllRows


@dataclass(frozen=True)
class PriorSamples(FromDraws):
    """Average the predictions of draws from the model's prior.

    Every draw has a seed of its own and is made with the same inputs, so that each is one function over all batches.
    The model runs for the first. The others are drawn from the priors that it has there, and a run with many of them
    confirms that they are its priors for each; where one prior depends on the draw of another, the model runs for
    every draw.

    Args:
        num_samples: draws.
        model: the Pyro model.
        inputs: its arguments for the first batch, without the observation.
        sites: names of its latent sites.
    """

    num_samples: int
    model: Callable[..., Any] = field(repr=False)
    inputs: tuple[Any, ...] = field(repr=False)
    sites: Collection[str] = field(repr=False)

    def repeats(self, guide: Callable[..., Any]) -> bool:
        """Always: the inputs are those of the first batch."""
        return True

    def draws(self, guide: Callable[..., Any], inputs: tuple[Any, ...]) -> Iterator[dict[str, Tensor]]:
        """Give the latent values of one draw after the other, whatever the posterior and the inputs of this batch.

        Raises:
            UnsupportedError: a prior that has no draws.
        """
        seeds = torch.randint(2**31 - 1, (self.num_samples,)).tolist()
        sites = self._run(seeds[0])
        first = {name: site["value"] for name, site in sites.items()}
        yield first

        def drawn() -> Iterator[dict[str, Tensor]]:
            seed_all = seeder()
            for seed in seeds[1:]:
                seed_all(seed)
                yield {name: site["fn"]() for name, site in sites.items()}

        run = sites_at(self.model, self.inputs, {}, list(sites))
        place = 1
        for chunk, found in ManyDraws().chunks(first, drawn(), lambda latents: _priors(run(latents))):
            are_draws = found is not None and all(
                torch.equal(found[name], prior.expand_as(found[name]))
                for name, prior in _priors(sites).items()
            )
            for k, draw in enumerate(chunk, place):
                yield (
                    dict(draw) if are_draws else {n: site["value"] for n, site in self._run(seeds[k]).items()}
                )
            place += len(chunk)

    def _run(self, seed: int) -> Mapping[str, Any]:
        seeder()(seed)
        try:
            with AllRows():
                trace = poutine.trace(self.model).get_trace(*with_missing(self.model, self.inputs))
        except NotImplementedError as error:
            reason = str(error).splitlines()[0]  # Pyro adds the shapes of its trace
            raise UnsupportedError(
                f"a prior of the model cannot be drawn from ({reason}): improper priors have no prior predictive "
                "distribution; leave out prior="
            ) from error
        return {name: node for name, node in trace.nodes.items() if name in self.sites}


def _priors(sites: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the parameters of the priors, by numbers of their own."""
    return {
        f"{name}.{i}": tensor
        for name, site in sites.items()
        for i, tensor in enumerate(tensors_of(site["fn"]))
    }
