# SPDX-License-Identifier: Apache-2.0
"""Methods that train a posterior of all weights, and MAP estimation as a baseline."""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar

import torch
from pyro.infer.autoguide import AutoDelta
from pyro.optim import PyroOptim
from torch import Tensor

from pyro_dvi.bayesian import init_to_module
from pyro_dvi.bayesian.likelihoods import LikelihoodModule
from pyro_dvi.errors import ArgumentError
from pyro_dvi.guides import MeanField, MeanFieldGuide
from pyro_dvi.guides.given_rows import FollowsRows
from pyro_dvi.methods.method import Method
from pyro_dvi.moment_propagation import MomentPropagationELBO, MultiplicativeNoiseGuide
from pyro_dvi.natural_gradients import VOGN, KroneckerGuide, NaturalGradientELBO, NaturalGradientGuide
from pyro_dvi.natural_gradients.optimizer import wanted_by
from pyro_dvi.natural_gradients.updates import OGNOptimizer
from pyro_dvi.objectives import SampledELBO
from pyro_dvi.variational_laplace import TaylorELBO


@dataclass(frozen=True, kw_only=True)
class VariationalLaplace(Method):
    """:class:`~pyro_dvi.TaylorELBO` with a :class:`~pyro_dvi.MeanFieldGuide`; predicts at the posterior mean.

    Args:
        curvature: as in ``TaylorELBO``; None means its default.
        lr: initial step size of Adam for the posterior means; posterior scales get ten times this step size. Both decay
            to zero with a cosine schedule.
        prior_scale: standard deviation of the priors of a network without priors.
        noise_scale: standard deviation of the noise, for a regression network.
        kl_weight: factor of the KL divergence in the objective.
        temperature: temperature of the objective; None means the default of :class:`~pyro_dvi.methods.Method`.

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
    """:class:`~pyro_dvi.MomentPropagationELBO`; predicts with propagated moments.

    Args:
        posterior: class of the guide, such as :class:`~pyro_dvi.MultiplicativeNoiseGuide` (MNVI) or
            :class:`~pyro_dvi.MeanFieldGuide`, or a function that makes a guide from the model. For a Pyro model of your
            own, scalars and vectors in ``MultiplicativeNoiseGuide`` are mean-field Gaussians instead of point masses.
        lr: initial step size of Adam for the posterior means; posterior scales get ten times this step size. Both decay
            to zero with a cosine schedule.
        prior_scale: standard deviation of the priors of a network without priors.
        noise_scale: standard deviation of the noise, for a regression network.
        kl_weight: factor of the KL divergence in the objective.
        temperature: temperature of the objective; None means the default of :class:`~pyro_dvi.methods.Method`.
    """

    posterior: Callable[[Any], Any] = MultiplicativeNoiseGuide
    prior_scale: Any = 1.0
    normalised_temperature: ClassVar[float] = 0.005

    def guide(self, model: Any) -> Any:
        """Return an untrained guide."""
        if self.posterior is MultiplicativeNoiseGuide and not isinstance(model, LikelihoodModule):
            # Its vectors are coefficients, not biases of a network.
            return MultiplicativeNoiseGuide(model, biases=MeanField())
        return self.posterior(model)

    def elbo(self) -> MomentPropagationELBO:
        """Return the objective."""
        return MomentPropagationELBO(kl_weight=self.kl_weight, temperature=self.temperature)


@dataclass(frozen=True, kw_only=True)
class NaturalGradients(Method):
    """:class:`~pyro_dvi.NaturalGradientELBO` with a natural-gradient optimizer; predicts with sampled weights.

    Args:
        by: the optimizer: ``VOGN``, ``IVON`` or ``NoisyKFAC``; for other options, a function such as
            ``lambda options: IVON(options | {"betas": (0.9, 0.99)})``. The guide is a :class:`~pyro_dvi.KroneckerGuide`
            for ``NoisyKFAC``, otherwise a :class:`~pyro_dvi.NaturalGradientGuide`.
        max_step: maximum step size of the optimizer.
        lr: refused; ``max_step`` sets the step size.
        prior_scale: standard deviation of the priors of a network without priors.
        noise_scale: standard deviation of the noise, for a regression network.
        kl_weight: factor of the KL divergence in the objective.
        temperature: temperature of the objective; None means the default of :class:`~pyro_dvi.methods.Method`.
    """

    by: Callable[[dict[str, Any]], Any] = VOGN
    max_step: float = 0.15
    lr: Any = None
    normalised_temperature: ClassVar[float] = 0.005
    space: ClassVar = {
        "max_step": (0.05, 0.15, 0.5),
        "prior_scale": (0.3, 1.0, 3.0),
        "temperature": (0.01, 0.1, 1.0),
    }

    def __post_init__(self) -> None:
        if self.lr is not None:
            raise ArgumentError("natural gradients have no lr: pass max_step, the largest step size")

    def guide(self, model: Any) -> NaturalGradientGuide:
        """Return an untrained guide."""
        factored = wanted_by(self.optimizer(1)).factored
        return (KroneckerGuide if factored else NaturalGradientGuide)(model)

    def elbo(self) -> NaturalGradientELBO:
        """Return the objective."""
        return NaturalGradientELBO(kl_weight=self.kl_weight, temperature=self.temperature)

    def optimizer(self, epochs: int) -> Any:
        """Return the optimizer; ``fit`` tells it the number of steps."""
        if not callable(self.by) or isinstance(self.by, PyroOptim):
            raise ArgumentError(
                f"by must be the function VOGN, IVON or NoisyKFAC, without options, not {self.by!r}"
            )
        optimizer = self.by({"max_step": self.max_step})
        if optimizer.pt_optim_constructor is OGNOptimizer:
            raise ArgumentError(
                "by cannot be OGN: it measures the curvature at the mean, where a fitted network has almost none, so "
                "sampled weights predict badly. Pass VOGN; or use OGN with SVI, and predict with AtMean()"
            )
        return optimizer


class PointEstimate(FollowsRows, AutoDelta):
    """Pyro's ``AutoDelta``, whose local latents follow the rows that the model gives to its plates."""

    @torch.no_grad()
    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return the value of each latent, of the rows of a batch or, without arguments, of all rows."""
        if args or kwargs or self.prototype_trace is None:
            return super().median(*args, **kwargs)  # type: ignore[no-any-return]
        return {
            name: attrgetter(name)(self).detach() for name, _ in self.prototype_trace.iter_stochastic_nodes()
        }


@dataclass(frozen=True, kw_only=True)
class MAP(Method):
    """MAP estimation with ``AutoDelta`` and :class:`~pyro_dvi.SampledELBO`, as a baseline.

    Args:
        lr: initial step size of Adam, with cosine decay to zero.
        prior_scale: standard deviation of the priors of a network without priors; the prior acts as weight decay.
        noise_scale: standard deviation of the noise, for a regression network.
        kl_weight: factor of the KL divergence in the objective.
        temperature: has no effect on a point estimate.
    """

    temperature: float = 1.0
    space: ClassVar = {"lr": (0.003, 0.01, 0.03), "prior_scale": (0.3, 1.0, 3.0)}

    def guide(self, model: Any) -> AutoDelta:
        """Return an untrained guide that starts at the network's weights."""
        return PointEstimate(model, init_loc_fn=init_to_module)

    def elbo(self) -> SampledELBO:
        """Return the objective."""
        return SampledELBO(kl_weight=self.kl_weight)
