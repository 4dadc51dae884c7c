# SPDX-License-Identifier: Apache-2.0
"""A model with other scales of some of its distributions: a tighter prior, a larger noise."""

from collections.abc import Mapping
from typing import Any

import pyro.distributions as dist
from pyro.poutine.messenger import Messenger
from torch import distributions as td

from pyro_dvi.core.distributions import rewrapped, untransformed
from pyro_dvi.errors import UnsupportedError

# Distributions of location and scale, with what multiplies their spread.
_SCALES: dict[type, str] = {
    td.Normal: "scale",
    td.Laplace: "scale",
    td.StudentT: "scale",
    td.Cauchy: "scale",
    td.MultivariateNormal: "scale_tril",
}


class Rescaled(Messenger):
    """Multiply the scales of sites by constants.

    Args:
        factors: what multiplies the scale of a site, by its name, latent or observed; sites that are left out, or that
            a run does not meet, stay as they are.

    Raises:
        UnsupportedError: in a run: a site's distribution has no scale to multiply.

    Example:
        >>> import pyro, torch
        >>> def model():
        ...     return pyro.sample("w", dist.Normal(0.0, 2.0), obs=torch.tensor(0.0))
        >>> trace = pyro.poutine.trace(Rescaled({"w": 0.5})(model)).get_trace()
        >>> trace.nodes["w"]["fn"].scale
        tensor(1.)
    """

    def __init__(self, factors: Mapping[str, float]) -> None:
        super().__init__()
        self.factors = dict(factors)

    def _pyro_sample(self, msg: Any) -> None:
        factor = self.factors.get(msg["name"])
        if factor is not None:
            msg["fn"] = rescaled(msg["name"], msg["fn"], factor)


def scale_name(fn: Any) -> str | None:
    """Return the name of the scale of a distribution, or None where it has none to multiply."""
    fn = untransformed(fn)  # what a factor inside does to the value is another matter for every transform
    return next((name for family, name in _SCALES.items() if isinstance(fn, family)), None)


def rescaled(site: str, fn: Any, factor: float) -> Any:
    """Return a distribution with its scale multiplied.

    Args:
        site: where it is from, for the message.
        fn: the distribution.
        factor: of its scale.

    Raises:
        UnsupportedError: it has no scale to multiply.
    """
    name = scale_name(fn)
    if name is None:
        raise UnsupportedError(
            f"site {site!r} has a {type(fn).__name__}, whose scale cannot be multiplied: Normal, MultivariateNormal, "
            "StudentT, Laplace and Cauchy can. Make the scale an argument of the model, and compare models."
        )

    def replaced(base: Any) -> Any:
        given = {"loc": base.loc, name: getattr(base, name) * factor}
        if isinstance(base, td.StudentT):
            given["df"] = base.df
        family = (
            type(base) if type(base).__module__.startswith("pyro") else getattr(dist, type(base).__name__)
        )
        return family(**given, validate_args=False)

    return rewrapped(fn, replaced)
