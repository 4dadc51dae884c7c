# SPDX-License-Identifier: Apache-2.0
"""Where a guide stores the parameters of its sites; a state may be loaded before the guide has seen its model."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pyro.infer.autoguide.utils import deep_setattr
from pyro.nn import PyroModule, PyroParam
from torch import Tensor
from torch.distributions import transform_to

from pyro_dvi.errors import GuideError


@dataclass(frozen=True)
class Store:
    """A parameter for each site, of one kind.

    Attributes:
        name: attribute of the guide, as ``locs``.
        module: what holds the parameters.
        constraint: which the optimizer does not see.
    """

    name: str
    module: PyroModule
    constraint: Any

    def create(self, site: str, value: Tensor, event_dim: int = 0) -> None:
        """Create the parameter of a site."""
        deep_setattr(self.module, site, PyroParam(value, self.constraint, event_dim))

    def create_from(self, state: Mapping[str, Any], prefix: str) -> None:
        """Create the parameters that a state has."""
        start = f"{prefix}{self.name}."
        for key, stored in state.items():
            if key.startswith(start) and key.endswith("_unconstrained"):
                site = key.removeprefix(start).removesuffix("_unconstrained")
                self.create(site, transform_to(self.constraint)(stored.detach().clone()))

    def owner_of(self, site: str) -> Any:
        """Return the module within that holds the parameter of a site, or None."""
        *path, leaf = site.split(".")
        owner: Any = self.module
        for part in path:
            owner = getattr(owner, "_modules", {}).get(part)
        return owner if leaf in getattr(owner, "_pyro_params", {}) else None


def complete_loaded(
    stores: Iterable[Store], site: str, fresh: Mapping[str, Tensor], event_dim: int, guide: str
) -> bool:
    """Give loaded parameters the event dimension that only the model knows.

    Args:
        stores: of the guide.
        site: name of the site.
        fresh: what its parameters would be by name of the store, had none been loaded.
        event_dim: their event dimensions.
        guide: name of its class.

    Returns:
        whether there are any.

    Raises:
        GuideError: what was loaded belongs to another posterior of the site.
    """
    owners = {store.name: store.owner_of(site) for store in stores}
    loaded = {name: owner for name, owner in owners.items() if owner is not None}
    if loaded and loaded.keys() != fresh.keys():
        raise GuideError(
            f"the loaded state has {' and '.join(sorted(loaded))} for site {site!r}, where this guide has "
            f"{' and '.join(sorted(fresh))}: build {guide} with the options that it was saved with"
        )
    leaf = site.rpartition(".")[2]
    for name, owner in loaded.items():
        constraint, _ = owner._pyro_params[leaf]
        owner._pyro_params[leaf] = (constraint, event_dim)
        shape, expected = getattr(owner, leaf).shape, fresh[name].shape
        if name != "locs" and shape != expected:
            raise GuideError(
                f"the loaded {name} of site {site!r} have the shape {tuple(shape)}, this guide's have "
                f"{tuple(expected)}: build {guide} with the options that it was saved with"
            )
    return bool(loaded)
