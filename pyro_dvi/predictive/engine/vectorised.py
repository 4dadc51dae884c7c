# SPDX-License-Identifier: Apache-2.0
"""Predict with many draws at a time: the same numbers as a loop over them, in less time.

The first draw runs the model with every check. The others need only the numbers that the mixture averages, so that

- a run ends at the observed site, and neither records nor draws anything there;
- one run serves a chunk of draws by ``torch.vmap``, where the model lets itself be run so;
- draws of an automatic guide, which does not look at the inputs, serve all batches.

Kernels of convolutions are an exception: ``vmap`` makes them one convolution of many groups, which a CPU computes more
slowly than one kernel after the other. They go one by one, laid out with their channels last.

Whatever does not work this way is run again by the plain loop, whose errors say what is wrong: models that draw random
numbers, that keep values in their modules, whose control flow depends on values, whose results are not finite or whose
distributions are impossible. The first draw is run in the new way as well, and must give the same numbers.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_dvi.predictive.engine.probe import Probe, agrees, possible
from pyro_dvi.predictive.engine.run import Latents, Respond
from pyro_dvi.predictive.prediction.mixture import Mixture
from pyro_dvi.predictive.rules.rule import Samples, ignores_inputs

__all__ = ["SampledComponents"]

Distributions = Callable[[Latents], Any]
Way = Callable[[Mixture, Sequence[Latents], Distributions], dict[str, Tensor]]

MAX_CHUNK = 64  # draws that share one run
# Numbers in the largest tensor of a vectorised run: 16 MiB of float32, so that caches help.
CHUNK_OUTPUT = 2**22
CHUNK_LATENTS = 2**24  # numbers in the draws of a chunk
POSSIBLE = "possible"  # among the statistics: whether the parameters are in their domains
KEPT_LATENTS = 2**26  # numbers in all draws, if they are kept for later batches: 256 MiB of float32


class SampledComponents:
    """Adds the components of ``Samples`` to the mixtures of one batch after the other.

    Args:
        rule: how many draws.
        guide: where they come from.
    """

    def __init__(self, rule: Samples, guide: Callable[..., Any]) -> None:
        self._rule, self._guide = rule, guide
        self._kept: list[Latents] = []
        self._way: Way | None = None  # None: the plain loop
        self._chunk = 0  # 0: nothing is known yet
        # The first draw and its statistics, which the first chunk must give again.
        self._untried: tuple[Latents, dict[str, Tensor]] | None = None

    def add_to(
        self,
        mixture: Mixture,
        inputs: tuple[Any, ...],
        respond: Respond,
        distribution_of: Callable[[str], Distributions],
    ) -> None:
        """Add all components for a batch.

        Args:
            mixture: of the batch, empty.
            inputs: positional arguments of the model for this batch.
            respond: runs the model with the latent values that it is given, with every check.
            distribution_of: returns a function that does the same for the distribution at a site, without checks.
        """
        draws = self._draws(inputs)
        first = next(draws)
        response = respond(_with_channels_last(first) if self._way is _channels_last else first)
        mixture.add(response)
        run = distribution_of(response.site)
        if self._chunk == 0:
            self._choose(mixture, run, first)
        if self._way is None:
            for latents in draws:
                mixture.add(respond(latents))
            return
        while chunk := list(islice(draws, self._chunk)):
            found = self._statistics(mixture, chunk, run)
            if found is not None:
                mixture.add_statistics(found, len(chunk))
                continue
            for latents in chunk:
                mixture.add(respond(latents))

    # Draws ---------------------------------------------------------------------------------------------------------

    def _draws(self, inputs: tuple[Any, ...]) -> Iterator[Latents]:
        """Give the draws for a batch: those of the first batch again where they cannot be others."""
        draws = self._rule.draws(self._guide, inputs)
        if not self._kept:
            return self._keeping(draws) if ignores_inputs(self._guide) else draws
        first = next(draws)
        same = first.keys() == self._kept[0].keys() != set() and torch.equal(
            _flat(first), _flat(self._kept[0])
        )
        return iter(self._kept) if same else chain([first], draws)

    def _keeping(self, draws: Iterator[Latents]) -> Iterator[Latents]:
        kept: list[Latents] = []
        for latents in draws:
            if not kept or (
                self._way is not None and self._rule.num_samples * _size(latents) <= KEPT_LATENTS
            ):
                kept.append(latents)
            yield latents
        if len(kept) == self._rule.num_samples:
            self._kept = kept

    # Ways to run ---------------------------------------------------------------------------------------------------

    def _choose(self, mixture: Mixture, run: Distributions, first: Latents) -> None:
        """Find out from one more run how this model is run best."""
        self._chunk = 1
        device = next((value.device for value in first.values()), torch.device("cpu"))
        probe = Probe(device)
        try:
            with probe:
                plain = _one_by_one(mixture, [first], run)
        except Exception:  # the model's own, whatever it is
            return
        if probe.drew or probe.kept:
            return  # numbers of its own, which belong to the draw; values that must not be those of many draws
        self._chunk = max(
            1,
            min(MAX_CHUNK, CHUNK_OUTPUT // max(1, probe.size), CHUNK_LATENTS // max(1, _size(first))),
        )
        if any(value.dim() >= 3 for value in first.values()) and device.type == "cpu":
            works = _gives(plain, lambda: _channels_last(mixture, [first], run))
            self._way = _channels_last if works else _one_by_one
        elif self._chunk > 1:
            self._way, self._untried = _vmapped, (first, plain)
        else:
            self._way = _one_by_one

    def _statistics(
        self, mixture: Mixture, chunk: Sequence[Latents], run: Distributions
    ) -> dict[str, Tensor] | None:
        """Return the statistics of a chunk, or None where only the plain loop can tell."""
        assert self._way is not None, "there is a way"
        try:
            found = self._tried(mixture, chunk, run) if self._untried else self._way(mixture, chunk, run)
        except Exception:  # whatever a foreign model raises when its tensors are batched
            if self._way is not _vmapped:
                return None  # the plain loop raises it again, in order, with its checks
            self._way, self._untried = _one_by_one, None
            return self._statistics(mixture, chunk, run)
        fine = found.pop(POSSIBLE).all()
        for value in found.values():
            fine = fine & value.isfinite().all()
        return found if fine else None

    def _tried(self, mixture: Mixture, chunk: Sequence[Latents], run: Distributions) -> dict[str, Tensor]:
        """Run the first chunk with the first draw before it, which must come out as it did by itself.

        Raises:
            RuntimeError: it did not: draws of the chunk share what each has for itself, such as random numbers.
        """
        assert self._untried is not None, "there is something to try"
        (first, plain), self._untried = self._untried, None
        found = _vmapped(mixture, [first, *chunk], run)
        if not agrees({name: value[:1] for name, value in found.items()}, plain):
            raise RuntimeError
        return {name: value[1:] for name, value in found.items()}


def _vmapped(mixture: Mixture, chunk: Sequence[Latents], run: Distributions) -> dict[str, Tensor]:
    """One run for all draws of a chunk."""
    stacked = {name: torch.stack([latents[name] for latents in chunk]) for name in chunk[0]}
    with pyro.validation_enabled(False), warnings.catch_warnings():  # values cannot be looked at inside
        warnings.filterwarnings("error", message="There is a performance drop")
        return torch.vmap(lambda latents: _read(mixture, run(latents)), randomness="error")(stacked)


def _one_by_one(mixture: Mixture, chunk: Sequence[Latents], run: Distributions) -> dict[str, Tensor]:
    """A run for each draw of a chunk."""
    with pyro.validation_enabled(False):
        found = [_read(mixture, run(latents)) for latents in chunk]
    return {name: torch.stack([one[name] for one in found]) for name in found[0]}


def _read(mixture: Mixture, fn: Any) -> dict[str, Tensor]:
    """Statistics of a distribution that was made without checks, and whether it would have passed them."""
    return {**mixture.statistics(fn), POSSIBLE: possible(fn)}


def _channels_last(mixture: Mixture, chunk: Sequence[Latents], run: Distributions) -> dict[str, Tensor]:
    """A run for each draw, with images and kernels in the layout that is the faster for poolings on a CPU."""
    return _one_by_one(mixture, [_with_channels_last(latents) for latents in chunk], run)


def _with_channels_last(latents: Latents) -> Latents:
    """Return the same kernels in another layout."""

    def laid_out(value: Tensor) -> Tensor:
        # A copy: `contiguous` would leave kernels of one channel in a layout that counts as either.
        return torch.empty_like(value, memory_format=torch.channels_last).copy_(value)

    return {name: laid_out(value) if value.dim() == 4 else value for name, value in latents.items()}


def _flat(latents: Latents) -> Tensor:
    return torch.cat([latents[name].flatten() for name in sorted(latents)])


def _size(latents: Latents) -> int:
    return sum(value.numel() for value in latents.values())


def _gives(expected: Mapping[str, Tensor], run: Callable[[], Mapping[str, Tensor]]) -> bool:
    try:
        return agrees(run(), expected)
    except Exception:  # `view` of a tensor whose channels come last, say
        return False
