# SPDX-License-Identifier: Apache-2.0
"""Run a model with the latent values that a rule chooses, and pass its distributions to a reader, batch by batch."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_dvi.core.distributions import tensors_of
from pyro_dvi.core.undisturbed import forked, seeder
from pyro_dvi.errors import UnsupportedError
from pyro_dvi.predictive.engine.inputs import Batch
from pyro_dvi.predictive.engine.model_runs import Latents, Respond, Response, respond, sites_at, with_others
from pyro_dvi.predictive.engine.posterior_values import (
    example_latents,
    first_arguments,
    members_of,
    of_member,
    predicted_model,
)
from pyro_dvi.predictive.engine.vectorised import POSSIBLE, ManyDraws, possible, size_of
from pyro_dvi.predictive.predictive_mixture import Mixture, ObservationDraws
from pyro_dvi.predictive.rules.rule import FromDraws, OfMembers, PredictionRule
from pyro_dvi.training.ensemble import TrainedPosterior

# Largest number of elements of all draws that are kept for later batches: 256 MiB of float32.
KEPT_LATENTS = 2**26
NOTHING: Latents = MappingProxyType({})
Reader = Mixture | ObservationDraws


class Components:
    """The predictive distributions of a model under a prediction rule, batch by batch.

    A rule with draws needs only a few runs of the model, because one run can serve many draws; see
    :mod:`~pyro_dvi.predictive.engine.vectorised`. Draws that do not depend on the inputs are reused for all batches,
    unless they take too much memory. For an ensemble, the components of the first member come first, then those of the
    second, and so on; each member is run with its own model.

    Args:
        model: the Pyro model.
        guide: its posterior.
        rule: the prediction rule, which chooses latent values to represent the posterior.
        seed: seed of the draws, the same for every batch.
    """

    def __init__(self, model: Callable[..., Any], guide: Any, rule: PredictionRule, seed: int) -> None:
        self._model, self._guide, self._rule, self._seed = predicted_model(guide, model), guide, rule, seed
        self._members: list[tuple[TrainedPosterior, Components]] = []
        if isinstance(rule, OfMembers):
            generator = torch.Generator().manual_seed(seed)
            seeds = torch.randint(2**31 - 1, (len(rule.rules),), generator=generator).tolist()
            for member, own, its_seed in zip(members_of(guide), rule.rules, seeds, strict=True):
                self._members.append((member, Components(member.model, member.guide, own, its_seed)))
        self._ways: dict[str | None, ManyDraws] = {}
        self._kept: list[Latents] = []

    @property
    def count(self) -> int:
        """Number of components of a batch."""
        return self._rule.num_components

    def read(self, reader: Reader, batch: Batch, site: str | None, others: Latents = NOTHING) -> None:
        """Pass the components for a batch to a reader.

        Args:
            reader: receives the components: first a single one, with all checks, then the others in chunks.
            batch: arguments of the model.
            site: observed site to predict, if the model has several.
            others: values of the other observed sites.

        Raises:
            UnsupportedError: if the prediction depends on a site that is neither latent nor observed.
        """
        for member, own in self._members:
            with member.in_store():
                own.read(reader, batch, site, others)
        if self._members:
            return
        known = first_arguments(self._guide)
        run = with_others(partial(respond, self._model, batch, site=site, learned_for=known), others)
        if isinstance(self._rule, FromDraws):
            self._read_draws(reader, batch, site, run, others)
            return
        seeder()(self._seed)
        for k, response in enumerate(self._rule.components(self._guide, batch.inputs, run)):
            if k == 0 and response.drawn and not self._rule.averages_draws:
                again = with_others(sites_at(self._model, batch.inputs, {}, [response.site]), others)
                latents = example_latents(self._guide, batch.inputs)
                _refuse_unseen(response, again, latents, type(self._rule).__name__)
            reader.add(response)

    def draws(self, inputs: tuple[Any, ...], way: ManyDraws | None = None) -> Iterator[Latents]:
        """Yield the draws for a batch.

        Args:
            inputs: arguments of the model for the batch, without the observation.
            way: how the model is run with the draws. In a plain loop, the weights of each draw are drawn just before
                its run, because the seed of a draw also determines the random numbers of the model.
        """
        if self._members:
            yield from self._of_members(inputs)
            return
        if self._kept:
            yield from self._kept
            return
        assert isinstance(self._rule, FromDraws)
        draws = self._anew(inputs)
        first = next(draws)
        yield first
        is_plain = way is not None and way.is_plain
        if not is_plain and self._rule.repeats(self._guide) and self.count * size_of(first) <= KEPT_LATENTS:
            self._kept = [first, *draws]
            draws = iter(self._kept[1:])
        yield from draws

    def _of_members(self, inputs: tuple[Any, ...]) -> Iterator[Latents]:
        for place, (member, components) in enumerate(self._members):
            drawn = components.draws(inputs)
            while True:  # the member's parameter store is active only while it draws
                with member.in_store():
                    own = next(drawn, None)
                if own is None:
                    break
                yield of_member(place, own)

    def _anew(self, inputs: tuple[Any, ...]) -> Iterator[Latents]:
        assert isinstance(self._rule, FromDraws)
        seeder()(self._seed)
        return self._rule.draws(self._guide, inputs)

    def _read_draws(
        self, reader: Reader, batch: Batch, site: str | None, run: Respond, others: Latents
    ) -> None:
        way = self._ways.setdefault(site, ManyDraws())
        draws = self._anew(batch.inputs) if way.is_plain else self.draws(batch.inputs, way)
        first = next(draws)
        response = run(first)
        reader.add(response)
        nodes = with_others(sites_at(self._model, batch.inputs, {}, [response.site]), others)

        def read(latents: Latents) -> dict[str, Tensor]:
            node = nodes(latents)[response.site]
            return {**reader.statistics(node), POSSIBLE: possible(node["fn"])}

        for chunk, found in way.chunks(first, draws, read):
            if found is not None:
                reader.add_statistics(found, len(chunk))
                continue
            for latents in chunk:
                reader.add(run(latents))


def _refuse_unseen(response: Response, run: Callable[[Latents], Any], latents: Latents, rule: str) -> None:
    """Raise an error if the predictive distribution depends on draws at sites that are neither latent nor observed.

    Args:
        response: the response of a run of the model.
        run: runs the model with latent values and returns its site.
        latents: values to run the model with.
        rule: name of the prediction rule, for the error message.

    Raises:
        UnsupportedError: if the distribution depends on such draws.
    """
    found = []
    for last in (False, True):
        with forked(*(value.device for value in latents.values())), _Elsewhere(response.drawn, last):
            torch.manual_seed(1 + last)
            found.append(run(latents)[response.site]["fn"])
    with suppress(TypeError):  # raised for a distribution that may contain tensors elsewhere
        first, second = (tensors_of(fn, strict=True) for fn in found)
        if len(first) == len(second) and all(map(torch.equal, first, second)):
            return
    raise UnsupportedError(
        f"site {response.site!r} depends on sites {list(response.drawn)}, which are neither in the guide nor observed: "
        f"{rule}() would predict from a single draw of them. Use Samples(n), or pass their values to the model as data"
    )


class _Elsewhere(Messenger):
    """Set discrete sites to their first or last possible value; two random draws could be equal by chance."""

    def __init__(self, sites: tuple[str, ...], last: bool) -> None:
        super().__init__()
        self.sites, self.place = sites, -1 if last else 0

    def _pyro_sample(self, msg: Any) -> None:
        fn = msg["fn"]
        if msg["name"] in self.sites and not msg["done"] and fn.has_enumerate_support:
            try:
                values = fn.enumerate_support(expand=False)
            except NotImplementedError:  # for events of several labels, which are drawn instead
                return
            msg["value"], msg["done"] = values[self.place].expand(fn.shape()), True
