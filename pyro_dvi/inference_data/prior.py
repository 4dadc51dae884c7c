# SPDX-License-Identifier: Apache-2.0
"""Draws from the prior, and the model's predictions with them."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.predictive.rules.rule import FromDraws, seed_all
from pyro_dvi.signatures import with_missing
from pyro_dvi.sites import AllRows

__all__ = ["PriorSamples"]


@dataclass(frozen=True)
class PriorSamples(FromDraws):
    """Average the predictions of draws from the model's prior.

    Every draw has a seed of its own and is made with the same inputs, so that each is one function over all batches
    and nothing has to be kept.

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

    def draws(self, guide: Callable[..., Any], inputs: tuple[Any, ...]) -> Iterator[dict[str, Tensor]]:
        """Give the latent values of one draw after the other, whatever the posterior and the inputs of this batch.

        Raises:
            UnsupportedError: a prior that has no draws.
        """
        for seed in torch.randint(2**31 - 1, (self.num_samples,)).tolist():
            seed_all(seed)
            try:
                with AllRows():
                    trace = poutine.trace(self.model).get_trace(*with_missing(self.model, self.inputs))
            except NotImplementedError as error:
                reason = str(error).splitlines()[0]  # Pyro adds the shapes of its trace
                raise UnsupportedError(
                    f"a prior of the model cannot be drawn from ({reason}): leave out prior="
                ) from error
            nodes: Mapping[str, Any] = trace.nodes
            yield {name: nodes[name]["value"] for name in self.sites if name in nodes}
