# SPDX-License-Identifier: Apache-2.0
"""A site of a guide, with what stays the same in every run after the first look at the model."""

from dataclasses import dataclass
from typing import Any

import pyro
from pyro.distributions.util import sum_rightmost
from pyro.nn import PyroModule
from torch import Tensor

from pyro_dvi.guides.factors import Factor, TransformedValue


@dataclass(frozen=True, eq=False)
class GuideSite:
    """The posterior of one latent site of the model.

    Attributes:
        name: the model's name of the site.
        prior: its distribution in the first look at the model.
        transform: from unconstrained values to the site's own; None for the identity.
        event_dim: event dimensions of an unconstrained value; those to their left belong to plates.
        plates: names of the plates around the site.
        factor: which posterior it has.
        means: the module that holds its mean.
        spreads: the module that holds the parameter of its spread; None if nothing but the mean is learned.
    """

    name: str
    prior: Any
    transform: Any
    event_dim: int
    plates: tuple[str, ...]
    factor: Factor
    means: PyroModule
    spreads: PyroModule | None

    @property
    def loc(self) -> Tensor:
        """The mean, read by a statement of Pyro's where a handler is around."""
        value: Tensor = self._read(self.means)
        return value

    @property
    def spread(self) -> Any:
        """The parameter of the spread likewise; None if nothing but the mean is learned."""
        return self._read(self.spreads)

    def _read(self, owner: PyroModule | None) -> Any:
        return None if owner is None else getattr(owner, self.name.rpartition(".")[2])

    def posterior(self) -> Any:
        """Return the posterior in unconstrained space."""
        return self.factor.distribution(self.loc, self.spread).to_event(self.event_dim)

    def sample(self, posterior: Any) -> Tensor:
        """Draw the site from a posterior in unconstrained space, by statements of Pyro's; return its own value."""
        if self.transform is None:
            return pyro.sample(self.name, posterior)
        u = pyro.sample(f"{self.name}_unconstrained", posterior, infer={"is_auxiliary": True})
        value, event_dim = self.transform(u), self.prior.event_dim
        log_density = -self.transform.log_abs_det_jacobian(u, value)
        log_density = sum_rightmost(log_density, log_density.dim() - value.dim() + event_dim)
        return pyro.sample(self.name, TransformedValue(value, log_density=log_density, event_dim=event_dim))

    def constrained(self, u: Tensor) -> Tensor:
        """Return the site's own value, given an unconstrained one."""
        value: Tensor = u if self.transform is None else self.transform(u)
        return value
