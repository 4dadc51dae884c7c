# SPDX-License-Identifier: Apache-2.0
"""Draws that came from elsewhere, in the place of a guide: of MCMC, of ``Predictive``, of another program."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_dvi.analysis.inference_data.group import close_names
from pyro_dvi.core.distributions import broadcasts_to
from pyro_dvi.errors import ArgumentError
from pyro_dvi.predictive.rules.rule import FromDraws
from pyro_dvi.runs.sites import is_data, is_latent


class GivenSamples(FromDraws):
    """Average the predictions of draws that are given.

    Args:
        samples: ``[num_samples, ...]`` by site name, as of ``MCMC.get_samples()``.
        device: where the model is; None leaves them where they are.

    Raises:
        ArgumentError: no sites, no draws, or unequal numbers of them.
    """

    def __init__(self, samples: Mapping[str, Any], device: torch.device | None = None) -> None:
        self.samples = {name: torch.as_tensor(values, device=device) for name, values in samples.items()}
        lengths = {name: len(v) if v.dim() else 0 for name, v in self.samples.items()}
        if not lengths or 0 in lengths.values():
            raise ArgumentError(
                f"the samples hold no draws: {lengths or 'no sites'}; give tensors [num_samples, ...] by site name"
            )
        if len(set(lengths.values())) > 1:
            raise ArgumentError(
                f"the sites have unequal numbers of draws, {lengths}: the draws of one index belong together"
            )
        self.num_samples = next(iter(lengths.values()))

    def __repr__(self) -> str:
        return f"GivenSamples({self.num_samples})"

    def repeats(self, guide: Callable[..., Any]) -> bool:
        """Always: the draws are given."""
        return True

    def draws(self, guide: Callable[..., Any], inputs: tuple[Any, ...]) -> Iterator[dict[str, Tensor]]:
        """Give the latent values of one draw after the other."""
        for k in range(self.num_samples):
            yield {name: values[k] for name, values in self.samples.items()}

    def first(self) -> dict[str, Tensor]:
        """Return the first draw."""
        return {name: values[0] for name, values in self.samples.items()}

    def guide(self, *args: Any, **kwargs: Any) -> None:
        """Stand for the guide where one draw is enough: the first."""
        for name, value in self.first().items():
            pyro.sample(name, dist.Delta(value, event_dim=value.dim()))

    def fit_to(self, nodes: Mapping[str, Any], *, is_complete: bool) -> None:
        """Compare with the sites of a run of the model, and take off leading dimensions of length 1 that it has not.

        ``Predictive`` leaves such dimensions where plates could have been.

        Args:
            nodes: the sites.
            is_complete: whether the model saw its observation, so that all that it drew is latent.

        Raises:
            ArgumentError: draws of what the model does not draw, none of what it does, or of another shape.
        """
        latent = [name for name, node in nodes.items() if is_latent(node)]
        for name in self.samples:
            if name not in nodes:
                raise ArgumentError(
                    f"the samples have a site {name!r} that the model has not; close names: "
                    f"{close_names(name, latent)}"
                )
            if is_data(nodes[name]):
                raise ArgumentError(
                    f"the samples have a site {name!r} that the model observes: leave it out, predictions are made "
                    "from the latent sites"
                )
        for name in latent if is_complete else ():
            if name not in self.samples:
                raise ArgumentError(
                    f"the samples have no draws of site {name!r}, which the model draws; they have "
                    f"{list(self.samples)}, close to it {close_names(name, self.samples)}"
                )
        for name, values in self.samples.items():
            fn = nodes[name]["fn"]
            self.samples[name] = _shaped(name, values, tuple(fn.batch_shape + fn.event_shape))


def _shaped(name: str, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return draws of a site without leading dimensions of length 1 that one value does not have."""
    while values.dim() - 1 > len(shape) and values.shape[1] == 1:
        values = values.squeeze(1)
    own = tuple(values.shape[1:])
    if not broadcasts_to(own, shape):
        raise ArgumentError(
            f"a draw of site {name!r} has the shape {own}, its value in the model {shape}. Give [num_samples, ...]: "
            "draws of several chains one after the other (MCMC.get_samples() without group_by_chain); and where a "
            "site has a value for each example, the data of the training, in one batch"
        )
    return values
