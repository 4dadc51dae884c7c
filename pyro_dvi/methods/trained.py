# SPDX-License-Identifier: Apache-2.0
"""Methods that train the posterior of all weights, and the point estimate to compare them with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pyro
from pyro.infer.autoguide import AutoDelta
from pyro.optim import PyroOptim

from pyro_dvi.bayesian import init_to_module
from pyro_dvi.errors import ArgumentError
from pyro_dvi.guides import MeanFieldGuide
from pyro_dvi.methods.method import Method
from pyro_dvi.moment_propagation import MomentPropagationELBO, MultiplicativeNoiseGuide
from pyro_dvi.natural_gradients import VOGN, KroneckerGuide, NaturalGradientELBO, NaturalGradientGuide
from pyro_dvi.natural_gradients.optimizer import wanted_by
from pyro_dvi.objectives import SampledELBO
from pyro_dvi.variational_laplace import TaylorELBO


@dataclass(frozen=True, kw_only=True)
class VariationalLaplace(Method):
    """:class:`~pyro_dvi.TaylorELBO` with a :class:`~pyro_dvi.MeanFieldGuide`; predicts at the mean.

    Args:
        curvature: as for ``TaylorELBO``; None for its default.
        lr: as for every :class:`~pyro_dvi.methods.Method`, like the rest.
        prior_scale: of a network without priors.
        noise_scale: of a network whose targets are numbers.
        kl_weight: of the objective.
        temperature: of the objective.

    Example:
        >>> import torch, pyro_dvi as dvi
        >>> x = torch.randn(60, 2)
        >>> data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
        >>> loader = torch.utils.data.DataLoader(data, batch_size=20)
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        >>> posterior = dvi.VariationalLaplace(temperature=0.1).fit(
        ...     net, loader, epochs=40, progress=False
        ... )
        >>> posterior.predict(data[:]).metrics()["accuracy"] > 0.9
        True
    """

    curvature: Any = None

    def guide(self, model: Any) -> MeanFieldGuide:
        """Return an untrained guide."""
        return MeanFieldGuide(model)

    def elbo(self) -> TaylorELBO:
        """Return the objective."""
        return TaylorELBO(kl_weight=self.kl_weight, temperature=self.temperature, curvature=self.curvature)


@dataclass(frozen=True, kw_only=True)
class MomentPropagation(Method):
    """:class:`~pyro_dvi.MomentPropagationELBO`; predicts by moments.

    Args:
        posterior: class of the guide, or a function of the model: :class:`~pyro_dvi.MultiplicativeNoiseGuide` (MNVI),
            or :class:`~pyro_dvi.MeanFieldGuide`.
        lr: as for every :class:`~pyro_dvi.methods.Method`, like the rest.
        prior_scale: of a network without priors.
        noise_scale: of a network whose targets are numbers.
        kl_weight: of the objective.
        temperature: of the objective.
    """

    posterior: Callable[[Any], Any] = MultiplicativeNoiseGuide

    def guide(self, model: Any) -> Any:
        """Return an untrained guide."""
        return self.posterior(model)

    def elbo(self) -> MomentPropagationELBO:
        """Return the objective."""
        return MomentPropagationELBO(kl_weight=self.kl_weight, temperature=self.temperature)


@dataclass(frozen=True, kw_only=True)
class NaturalGradients(Method):
    """:class:`~pyro_dvi.NaturalGradientELBO` with a natural-gradient optimizer; predicts by draws.

    Args:
        by: ``VOGN``, ``OGN``, ``IVON`` or ``NoisyKFAC``, the functions that construct them for SVI; with other options
            ``lambda options: IVON(options | {"betas": (0.9, 0.99)})``. The guide is a
            :class:`~pyro_dvi.KroneckerGuide` with ``NoisyKFAC``, else a :class:`~pyro_dvi.NaturalGradientGuide`.
        max_step: of the optimizer.
        lr: not used; the length of steps is ``max_step``.
        prior_scale: of a network without priors.
        noise_scale: of a network whose targets are numbers.
        kl_weight: of the objective.
        temperature: of the objective.
    """

    by: Callable[[dict[str, Any]], Any] = VOGN
    max_step: float = 0.15
    space: ClassVar = {
        "max_step": (0.05, 0.15, 0.5),
        "prior_scale": (0.3, 1.0, 3.0),
        "temperature": (0.01, 0.1, 1.0),
    }

    def guide(self, model: Any) -> NaturalGradientGuide:
        """Return an untrained guide."""
        factored = wanted_by(self.optimizer(1)).factored
        return (KroneckerGuide if factored else NaturalGradientGuide)(model)

    def elbo(self) -> NaturalGradientELBO:
        """Return the objective."""
        return NaturalGradientELBO(kl_weight=self.kl_weight, temperature=self.temperature)

    def optimizer(self, epochs: int) -> Any:
        """Return the optimizer, which learns the length of training from ``fit``."""
        if not callable(self.by) or isinstance(self.by, PyroOptim):
            raise ArgumentError(f"by is the function VOGN, OGN, IVON or NoisyKFAC itself, not {self.by!r}")
        return self.by({"max_step": self.max_step})


class PointEstimate(AutoDelta):
    """Pyro's ``AutoDelta``, whose median does not depend on what Pyro's store holds under the same names."""

    def median(self, *args: Any, **kwargs: Any) -> Any:
        """Return the most probable weights by site."""
        with pyro.get_param_store().scope():
            return super().median(*args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class MAP(Method):
    """The most probable weights, by ``AutoDelta`` and :class:`~pyro_dvi.SampledELBO`: what to compare with.

    Args:
        lr: step size of Adam.
        prior_scale: of a network without priors, which acts as weight decay.
        noise_scale: of a network whose targets are numbers.
        kl_weight: of the objective.
        temperature: without effect on a point.
    """

    temperature: float = 1.0
    space: ClassVar = {"lr": (0.003, 0.01, 0.03), "prior_scale": (0.3, 1.0, 3.0)}

    def guide(self, model: Any) -> AutoDelta:
        """Return an untrained guide, at the weights that the network has."""
        return PointEstimate(model, init_loc_fn=init_to_module)

    def elbo(self) -> SampledELBO:
        """Return the objective."""
        return SampledELBO(kl_weight=self.kl_weight)
