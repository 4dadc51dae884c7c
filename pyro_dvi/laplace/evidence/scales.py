# SPDX-License-Identifier: Apache-2.0
"""What can be tuned after training: the scale of priors, and that of the noise."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_positive
from pyro_dvi.errors import ArgumentError, ModelError, UnsupportedError
from pyro_dvi.laplace.energy.energy import Energy
from pyro_dvi.runs.log_joint import Rescaled, scale_name


class Scale(ABC):
    """What is tuned: a positive number that multiplies something in the model.

    Attributes:
        exponent: of the number, in what multiplies the scale of the sites' distributions.
        of_prior: it changes the prior's part of P, not the likelihood's.
        decades: above and below 1, in which values are tried where the caller names none.
        num_values: how many.
    """

    exponent: ClassVar[float]
    of_prior: ClassVar[bool]
    decades: ClassVar[int]
    num_values: ClassVar[int]

    @abstractmethod
    def sites(self, energy: Energy) -> list[str]:
        """Return the sites whose distributions change."""

    def factor(self, value: float) -> float:
        """Return what multiplies the scale of these sites."""
        return value**self.exponent

    def grid(self) -> Tensor:
        """Return the values that are tried where the caller names none."""
        return torch.logspace(-self.decades, self.decades, self.num_values, dtype=torch.float64)

    def proportions(self, value: float) -> tuple[float, float]:
        """Return what multiplies the likelihood's part of P and the prior's, if all sites of a kind change."""
        precision = value ** (-2 * self.exponent)
        return (1.0, precision) if self.of_prior else (precision, 1.0)


@dataclass(frozen=True)
class PriorPrecision(Scale):
    """The precision of the prior, times one number for several sites.

    Args:
        names: the sites, by name or pattern (``"net.0.*"``); None: all that are uncertain and whose prior is Normal,
            MultivariateNormal, StudentT, Laplace or Cauchy.
    """

    names: str | None = None

    exponent, of_prior, decades, num_values = -0.5, True, 3, 25

    def sites(self, energy: Energy) -> list[str]:
        """Return the latent sites.

        Raises:
            ArgumentError: the pattern fits no site that is uncertain.
            UnsupportedError: the prior of a site has no scale to multiply.
        """
        nodes = _nodes(energy)
        scalable = [name for name in energy.layout.names if scale_name(nodes[name]["fn"]) is not None]
        if self.names is None:
            if not scalable:
                raise UnsupportedError(
                    "no uncertain site has a prior whose scale can be multiplied: Normal, MultivariateNormal, "
                    "StudentT, Laplace or Cauchy"
                )
            return scalable
        chosen = [name for name in energy.layout.names if fnmatchcase(name, self.names)]
        if not chosen:
            raise ArgumentError(
                f"PriorPrecision({self.names!r}) fits no uncertain site; there are {energy.layout.names}"
            )
        for name in chosen:
            if name not in scalable:
                raise UnsupportedError(
                    f"the prior of {name!r}, a {type(nodes[name]['fn']).__name__}, has no scale that can be multiplied"
                )
        return chosen


@dataclass(frozen=True)
class NoiseScale(Scale):
    """The scale of the observation noise, times a number.

    Args:
        site: the observed site, a Normal, MultivariateNormal, StudentT, Laplace or Cauchy; None for the one that the
            model has.
    """

    site: str | None = None

    exponent, of_prior, decades, num_values = 1.0, False, 1, 17

    def sites(self, energy: Energy) -> list[str]:
        """Return the observed site.

        Raises:
            ModelError: there is no such site, or several to choose from.
            UnsupportedError: it has no scale.
        """
        nodes = _nodes(energy)
        observed = [
            site.name for site in energy.first_run(energy.start)[1].sites if self.site in (None, site.name)
        ]
        if len(observed) != 1:
            raise ModelError(f"NoiseScale(site) needs one observed site; {observed or 'none'} would do")
        if scale_name(nodes[observed[0]]["fn"]) is None:
            raise UnsupportedError(
                f"observed site {observed[0]!r}, a {type(nodes[observed[0]]['fn']).__name__}, has no noise scale"
            )
        return observed


def rescaled_model(model: Callable[..., Any], factors: Mapping[str, float]) -> Callable[..., Any]:
    """Return the model with scales multiplied; the model itself where nothing changes.

    Raises:
        ArgumentError: a factor that is no positive number.
    """
    for name, factor in factors.items():
        scalar = torch.is_tensor(factor) and factor.numel() == 1
        check_positive(f"scale_factors[{name!r}]", float(factor) if scalar else factor)
    changed = {name: factor for name, factor in factors.items() if factor != 1}
    if not changed:
        return model
    # As by Pyro's own handlers, so that the signature stays known.
    return functools.update_wrapper(Rescaled(changed)(model), model, assigned=(), updated=())


def _nodes(energy: Energy) -> Any:
    return energy.first_run(energy.start)[1].trace.nodes
