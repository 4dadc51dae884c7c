# SPDX-License-Identifier: Apache-2.0
"""Distributions with uncertain parameters, for likelihoods that depend on moments.

Inside :func:`uncertain_likelihoods`, building a Pyro distribution from :class:`~pyro_dvi.moments.GaussianMoments`
creates an :class:`UncertainDistribution`, whose ``log_prob`` is the *expected* log-likelihood. Plates, masks, scales,
``to_event`` and transforms with deterministic parameters work as usual.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor, distributions as td

from pyro_dvi.core.distributions import WRAPPERS, arguments_of, building_by, innermost, rewrapped
from pyro_dvi.errors import UnsupportedError
from pyro_dvi.expectations.expectation import expected_log_prob
from pyro_dvi.expectations.logits import LogitEstimator
from pyro_dvi.moments import GaussianMoments


class UncertainDistribution(dist.TorchDistribution):
    r"""A family of distributions with Gaussian parameters.

    .. math:: \texttt{log\_prob}(y) = \mathrm E_{\theta}[\log p(y \mid \theta)]

    Status: as accurate as the rule of the family, see :mod:`pyro_dvi.expectations`.

    Args:
        family: class of the distribution.
        parameters: arguments of the distribution by name, of which some are moments.
        estimator: estimator of the expected log-normaliser of logits; None for the default.

    Attributes:
        at_mean: the distribution with every parameter at its mean.
    """

    arg_constraints = {}
    has_rsample = False

    def __init__(
        self, family: type, parameters: Mapping[str, Any], estimator: LogitEstimator | None = None
    ) -> None:
        self.family, self.parameters, self.estimator = family, dict(parameters), estimator
        self.at_mean = family(**{name: _centre(value) for name, value in self.parameters.items()})
        super().__init__(self.at_mean.batch_shape, self.at_mean.event_shape, validate_args=False)

    def __repr__(self) -> str:
        uncertain = [name for name, value in self.parameters.items() if isinstance(value, GaussianMoments)]
        return f"{self.family.__name__} with uncertain {', '.join(uncertain)}"

    @property
    def support(self) -> Any:
        """The support of the family."""
        return self.at_mean.support

    @property
    def has_enumerate_support(self) -> bool:  # type: ignore[override]
        """True if the family can enumerate its support."""
        return self.at_mean.has_enumerate_support

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the expected log-likelihood, in the batch shape."""
        if self.at_mean._validate_args:
            self.at_mean._validate_sample(value)
        return expected_log_prob(self.family, self.parameters, value, self.estimator)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw parameters, each from its own Gaussian, and then an observation."""
        drawn = {name: _draw(value, sample_shape) for name, value in self.parameters.items()}
        drawn_distribution: Any = self.family(**drawn, validate_args=False)
        return drawn_distribution.sample()


def uncertain_part(fn: Any) -> UncertainDistribution | None:
    """Return the uncertain distribution in ``fn``, inside any wrappers; None if all parameters are deterministic."""
    fn = innermost(fn)
    return fn if isinstance(fn, UncertainDistribution) else None


def rebuilt(fn: Any, certain: Callable[[UncertainDistribution], Any]) -> Any:
    """Return ``fn`` with the uncertain distribution in it replaced by the result of ``certain``."""
    return rewrapped(fn, lambda base: certain(base) if isinstance(base, UncertainDistribution) else base)


@contextmanager
def uncertain_likelihoods(estimator: LogitEstimator | None = None) -> Iterator[None]:
    """Let Pyro distributions take moments as parameters inside the context."""

    def coerce(cls: type, args: tuple, kwargs: dict[str, Any]) -> Any:
        values = (*args, *kwargs.values())
        if any(isinstance(value, td.Distribution) and uncertain_part(value) is not None for value in values):
            _check_wrapper(cls, values)
            return None
        if any(isinstance(value, GaussianMoments) for value in values):
            return _uncertain(cls, args, kwargs, estimator)
        return None

    with building_by(coerce), _Repeated():  # takes precedence over an outer context
        yield


class _Repeated(Messenger):
    """If a tied layer repeats a latent, record it as deterministic, because Pyro would treat its moments as a prior."""

    def _pyro_sample(self, msg: Any) -> None:
        value = msg["fn"]
        if isinstance(value, GaussianMoments):
            msg["fn"] = dist.Delta(value.loc, event_dim=value.dim()).mask(False)
            msg["value"], msg["is_observed"], msg["infer"]["_deterministic"] = value, True, True


# Building one --------------------------------------------------------------------------------------------------


def _uncertain(cls: Any, args: tuple, kwargs: dict[str, Any], estimator: LogitEstimator | None) -> Any:
    given = arguments_of(cls, args, kwargs)
    if cls is dist.Delta:  # pyro.deterministic: no density to integrate
        return dist.Delta(given["v"].loc, given.get("log_density", 0.0), given.get("event_dim", 0))
    if cls is dist.Unit:  # pyro.factor: the log density is linear in the uncertain term
        return dist.Unit(given["log_factor"].loc)
    return UncertainDistribution(cls, given, estimator)


def _check_wrapper(cls: type, values: tuple) -> None:
    if not issubclass(cls, WRAPPERS):
        raise UnsupportedError(
            f"{cls.__name__} of a distribution with uncertain parameters has no rule, and nor has any other sum of "
            "densities, such as a mixture. Train such models with TaylorELBO or Pyro's Trace_ELBO"
        )
    transforms = chain.from_iterable(v if isinstance(v, list | tuple) else [v] for v in values)
    for transform in (t for t in transforms if isinstance(t, td.Transform)):
        if any(isinstance(part, GaussianMoments) for part in vars(transform).values()):
            raise UnsupportedError(
                f"{type(transform).__name__} has uncertain parameters: only the base distribution may be uncertain, as "
                "in TransformedDistribution(Normal(mean, scale), AffineTransform(0.0, unit))"
            )


def _centre(value: Any) -> Any:
    """Return a deterministic value that lies in the domain of the parameter."""
    if not isinstance(value, GaussianMoments):
        return value
    return value.loc if value.link is None else value.link.function(value.link.inner.loc)


def _draw(value: Any, sample_shape: Any) -> Any:
    if not isinstance(value, GaussianMoments):
        return value
    inner = value if value.link is None else value.link.inner
    noise = torch.randn((*sample_shape, *inner.shape), dtype=inner.dtype, device=inner.device)
    drawn = inner.loc + noise * inner.variance.sqrt()
    return drawn if value.link is None else value.link.function(drawn)


def refuse_moments(fn: Any, name: str) -> None:
    """Raise an error for a torch distribution that was built with moments.

    Raises:
        UnsupportedError: if the distribution is a plain torch distribution with moments.
    """
    if any(isinstance(part, GaussianMoments) for part in vars(fn).values()):
        raise UnsupportedError(
            f"site {name!r} has uncertain parameters: use {type(fn).__name__} of pyro.distributions, not of torch"
        )
