# SPDX-License-Identifier: Apache-2.0
"""The posterior as a Gaussian around its mode."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.bayesian import init_to_module
from pyro_dvi.errors import ArgumentError, GuideError
from pyro_dvi.guides.base import FactorisedGuide
from pyro_dvi.guides.factors import Deterministic, Factor
from pyro_dvi.guides.laplace.dense import Dense
from pyro_dvi.guides.laplace.energy import Energy
from pyro_dvi.guides.laplace.gaussian_outputs import GaussianOutputs
from pyro_dvi.guides.laplace.layout import Layout
from pyro_dvi.guides.laplace.posterior import LaplacePosterior, Method
from pyro_dvi.guides.laplace.query import Query

__all__ = ["LaplaceGuide"]


class LaplaceGuide(FactorisedGuide):
    r"""Train a mode, then put a Gaussian around it.

    .. math:: q(u) = \mathcal N(\hat u, P^{-1}), \qquad \hat u = \arg\min_u U(u), \qquad
        U(u) = -\tfrac1\kappa\log p(D \mid u) - \log p(u)

    In training it is a point mass in unconstrained space, for ``SVI`` with any ELBO: its loss is
    :math:`\kappa U` up to a constant. Then :meth:`polish` finds the minimum itself, :meth:`fit` the Gaussian, and
    :meth:`predictive`, ``predict`` and :meth:`log_evidence` use it. Predictions linearise the model around the mode.

    Status: the Gaussian is exact for linear models with Gaussian noise; elsewhere a local approximation.

    Args:
        model: a Pyro model whose latents are continuous.
        kl_weight: :math:`\kappa`, as the objective had it in training; the posterior is that of the tempered
            likelihood :math:`p(D \mid u)^{1/\kappa}`.
        init_loc_fn: Pyro initialisation strategy of the mode; by default the weights that a network had before
            :func:`~pyro_dvi.to_bayesian_`: a trained network is a mode already.
        create_plates: as in Pyro's guides.

    Attributes:
        locs: module of modes, ``guide.locs.<site>``.
        posterior: what the last :meth:`fit` made; None before.

    Raises:
        ModelError: a latent is discrete, or there is none.
        ArgumentError: a KL weight that is not positive.

    Source: MacKay (1992); Immer, Korzepa & Bauer (2021) for the linearised predictive.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> def model(x, y=None):
        ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         return pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)
        >>> x = torch.ones(3)
        >>> guide = LaplaceGuide(model)
        >>> guide.initialize(x, x)
        >>> _ = guide.fit([(x, x)], Dense())
        >>> guide.predictive(x).variance
        tensor([0.2500, 0.2500, 0.2500])
    """

    def __init__(
        self,
        model: Callable,
        *,
        kl_weight: float = 1.0,
        init_loc_fn: Callable = init_to_module,
        create_plates: Callable | None = None,
    ) -> None:
        if not kl_weight > 0:
            raise ArgumentError(f"kl_weight must be positive, got {kl_weight!r}")
        super().__init__(model, init_loc_fn=init_loc_fn, create_plates=create_plates)
        self.kl_weight = float(kl_weight)
        self._plain_model = (model,)  # without the initialisation of means; in a tuple it is no submodule
        self._fitted: _Fitted | None = None

    def _factor_of(self, name: str, site: Any, loc: Tensor) -> Factor:
        return Deterministic()

    @property
    def posterior(self) -> LaplacePosterior | None:
        """The Gaussian of the last :meth:`fit`; None before.

        Raises:
            GuideError: the mode has moved since.
        """
        return None if self._fitted is None else self._current_fit().posterior

    def fit(
        self,
        batches: Iterable[Any],
        method: Method | None = None,
        *,
        subset: str | Iterable[str] | None = None,
        seed: int = 0,
        progress: bool = False,
    ) -> LaplacePosterior:
        """Put the Gaussian around the mode.

        Args:
            batches: all the data: a loader or a list of batches, as for :func:`~pyro_dvi.fit`.
            method: how the Gaussian is represented.
            subset: sites that are uncertain, by name or pattern (``"net.4.*"`` for a last layer); the others stay at
                their mode. None: all.
            seed: of random numbers.
            progress: show a progress bar.

        Returns:
            the Gaussian; also ``guide.posterior``.

        Raises:
            GuideError: the guide has not seen its model yet.
            DataError: batches that do not hold all data, or change.
        """
        method = Dense() if method is None else method
        if not isinstance(method, Method):
            raise ArgumentError(
                f"method must be an object such as Dense() or PosteriorSamples(64), not {method!r}"
            )
        energy = self.energy(batches, subset=subset)
        posterior = method.fit(energy.at(energy.start), seed=seed, progress=progress)
        self._fitted = _Fitted(posterior, energy.layout, self.unconstrained_mode())
        return posterior

    def energy(self, batches: Iterable[Any], *, subset: str | Iterable[str] | None = None) -> Energy:
        """Return U on these batches, with its gradient and products; arguments as :meth:`fit`."""
        locs = self.unconstrained_mode()
        names = None if subset is None else _selected(list(locs), subset)
        return Energy(self._plain_model[0], batches, locs, subset=names, kl_weight=self.kl_weight)

    def unconstrained_mode(self) -> dict[str, Tensor]:
        """Return a copy of the mode of every site in unconstrained space."""
        return {name: attrgetter(name)(self.locs).detach().clone() for name, _ in self._sites()}

    @torch.no_grad()
    def predictive(self, *inputs: Any, site: str | None = None) -> GaussianOutputs:
        """Return the Gaussian over the outputs for some inputs.

        Args:
            inputs: positional arguments of the model; observations may be left out.
            site: an observed site, or one of ``pyro.deterministic``; None for the one observed site.

        Returns:
            ``mean`` and ``variance`` of the prediction ``[B, ...]``, ``covariance`` ``[B, k, k]``.

        Raises:
            GuideError: not fitted yet, or the mode has moved since.
        """
        fitted = self._current_fit()
        query = Query(self._plain_model[0], inputs, fitted.mode, fitted.layout, site=site)
        return GaussianOutputs(query.outputs, fitted.posterior.covariance(query))

    def _current_fit(self) -> "_Fitted":
        if self._fitted is None:
            raise GuideError(
                "this LaplaceGuide is a point mass so far: call guide.fit(batches, method) after training"
            )
        for name, value in self.unconstrained_mode().items():
            if not torch.equal(value, self._fitted.mode[name]):
                raise GuideError(
                    f"site {name!r} has moved since guide.fit, so that its Gaussian belongs to another mode: fit again"
                )
        return self._fitted


@dataclass(frozen=True)
class _Fitted:
    posterior: LaplacePosterior
    layout: Layout
    mode: dict[str, Tensor]


def _selected(names: list[str], subset: str | Iterable[str]) -> list[str]:
    patterns = [subset] if isinstance(subset, str) else list(subset)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ArgumentError(f"subset names {pattern!r}, which is no site of the guide; there are {names}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
