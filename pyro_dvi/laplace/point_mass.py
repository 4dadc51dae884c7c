# SPDX-License-Identifier: Apache-2.0
"""Where a Laplace guide is, and of which U that is the mode."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.core.undisturbed import device_of
from pyro_dvi.errors import ArgumentError, GuideError
from pyro_dvi.laplace.energy.energy import Energy
from pyro_dvi.laplace.energy.layout import Layout, Subset
from pyro_dvi.laplace.energy.query import Query
from pyro_dvi.laplace.evidence.scales import rescaled_model
from pyro_dvi.runs.fingerprint import Fingerprint
from pyro_dvi.runs.sites import sites_named


@dataclass(frozen=True)
class PointMass:
    r"""A mode :math:`\hat u`, with what belongs to the U that it minimises.

    Attributes:
        locs: the unconstrained mode of every site.
        scale_factors: what multiplies the scales of sites in U.
        kl_weight: :math:`\beta`.
        data: checksum of the batches, where something was done with all of them.
        model: what the model said at the mode; None where it could not be asked.
    """

    locs: Mapping[str, Tensor]
    scale_factors: Mapping[str, float] = field(default_factory=dict)
    kl_weight: float = 1.0
    data: float | None = None
    model: Fingerprint | None = None

    def state(self) -> dict[str, Any]:
        """Return tensors and plain values, for files."""
        model = None if self.model is None else self.model.state()
        return {**vars(self), "scale_factors": dict(self.scale_factors), "model": model}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> "PointMass":
        """Make what :meth:`state` describes."""
        model = None if state["model"] is None else Fingerprint(**state["model"])
        return PointMass(state["locs"], state["scale_factors"], state["kl_weight"], state["data"], model)

    def layout(self, subset: Subset | None = None) -> Layout:
        """Return the order of what varies.

        Args:
            subset: sites by name or pattern, or a mapping of these to masks: True, or a boolean tensor of the shape of
                the site's unconstrained values. Of several patterns that fit a site the last one counts. None: all.

        Raises:
            ArgumentError: a pattern fits no site, a mask does not fit its site, or nothing is left.
        """
        if isinstance(subset, Layout):
            return subset
        names = list(self.locs)
        asked: Any = "*" if subset is None else subset
        several = isinstance(asked, Iterable) and not isinstance(asked, str)
        given = asked if isinstance(asked, Mapping) else dict.fromkeys(asked if several else [asked], True)
        masks = {name: given[p] for p in given for name in sites_named("subset", [p], names)}
        entries = {
            name: _entries(name, masks[name], self.locs[name])
            for name in names
            if name in masks and self.locs[name].numel()
        }
        varying = {name: places for name, places in entries.items() if places is None or len(places)}
        if not varying:
            raise ArgumentError(
                f"subset is empty: name sites or patterns, or leave it None for all of {names}"
            )
        return Layout({name: self.locs[name].shape for name in varying}, varying)

    def energy(self, model: Callable, batches: Iterable[Any], subset: Subset | None) -> Energy:
        """Return U of a model, whose scales are as it is written, on all the data.

        Raises:
            ArgumentError: a scale factor that is not positive, or of a site that the model has not.
        """
        model = rescaled_model(model, self.scale_factors)
        energy = Energy(model, batches, self.locs, layout=self.layout(subset), kl_weight=self.kl_weight)
        if self.scale_factors:
            run = energy.first_run(energy.start)[1]
            names = [*run.log_priors, *(site.name for site in run.sites)]
            for name in self.scale_factors.keys() - names:
                raise ArgumentError(f"scale_factors: the model has no site {name!r}; there are {names}")
        return energy

    def query(self, model: Callable, inputs: tuple[Any, ...], layout: Layout, site: str | None) -> Query:
        """Return the outputs of such a model at the mode."""
        return Query(rescaled_model(model, self.scale_factors), inputs, self.locs, layout, site=site)

    def change_since(self, fit: "PointMass") -> str | None:
        """Say what is no longer as it was in a fit; None if all is."""
        moved = next((name for name, u in self.locs.items() if not torch.equal(u, fit.locs[name])), None)
        if moved is not None:
            return f"site {moved!r} has moved since guide.fit, so that its Gaussian belongs to another mode"
        if self.scale_factors != fit.scale_factors:
            return "guide.scale_factors has changed since guide.fit"
        if self.kl_weight != fit.kl_weight:
            return (
                f"the Gaussian was fitted with kl_weight={fit.kl_weight:g}, and guide.kl_weight is "
                f"{self.kl_weight:g}"
            )
        return None


def _entries(name: str, given: Tensor | bool, loc: Tensor) -> Tensor | None:
    """Return where the entries of a site that vary are in the flattened site; None: all of them vary."""
    if given is True:
        return None
    try:
        mask = torch.as_tensor(given, device=loc.device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(f"subset[{name!r}] must be True, False, or a boolean tensor: {error}") from None
    if mask.dtype != torch.bool or mask.shape not in (loc.shape, ()):
        raise ArgumentError(
            f"subset[{name!r}] must be True, False, or a boolean tensor of shape {tuple(loc.shape)}, that of the "
            f"site's unconstrained values; got {mask.dtype} of shape {tuple(mask.shape)}"
        )
    return None if bool(mask.all()) else mask.expand(loc.shape).flatten().nonzero()[:, 0]


class ModelReference:
    """Hold a model: copies share it, pickles leave it out, as Pyro's guides do.

    Args:
        model: a Pyro model; None in what was loaded.
    """

    def __init__(self, model: Callable | None = None) -> None:
        self._model = model

    def get(self) -> Callable:
        """Return the model.

        Raises:
            GuideError: it was left out of the file that the guide comes from.
        """
        if self._model is None:
            raise GuideError(
                "this LaplaceGuide comes from a file, which has no model: use predict(model, guide, x), or build "
                "LaplaceGuide(model), call its initialize(*args) and load_state_dict(loaded.state_dict())"
            )
        return self._model

    @property
    def device(self) -> torch.device | None:
        """Where the tensors of a module are; None if it has none."""
        return device_of(self.get())

    def __deepcopy__(self, memo: Any) -> "ModelReference":
        return self

    def __reduce__(self) -> Any:
        return ModelReference, ()
