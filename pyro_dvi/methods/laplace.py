# SPDX-License-Identifier: Apache-2.0
"""Laplace's approximation of a network that is trained already, in one call."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from pyro_dvi.errors import ArgumentError
from pyro_dvi.laplace import ByValidation, LaplaceGuide
from pyro_dvi.methods.method import Method
from pyro_dvi.methods.posterior import Posterior
from pyro_dvi.training import History, fit
from pyro_dvi.variational_laplace import TaylorELBO


@dataclass(frozen=True, kw_only=True)
class Laplace(Method):
    """A Gaussian around trained weights, by :class:`~pyro_dvi.LaplaceGuide`: polish, fit, and tune the prior.

    Args:
        layers: the uncertain ones: "last" for the last ``Linear``, None for all, else a ``subset`` as for
            :meth:`LaplaceGuide.fit <pyro_dvi.LaplaceGuide.fit>`.
        covariance: a method of :mod:`pyro_dvi.laplace`; None for ``Dense()``.
        lr: of the training, if there is one.
        prior_scale: of a network without priors.
        noise_scale: of a network whose targets are numbers.
        kl_weight: of a training that has led to these weights.
        temperature: multiplies the covariance.

    Example:
        >>> import torch, pyro_dvi as dvi
        >>> x = torch.linspace(-1, 1, 60)[:, None]
        >>> loader = [(x, torch.sin(3 * x))]
        >>> net = torch.nn.Sequential(
        ...     torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1)
        ... )
        >>> adam = torch.optim.Adam(net.parameters(), 0.01)
        >>> for _ in range(300):
        ...     adam.zero_grad()
        ...     torch.nn.functional.mse_loss(net(x), torch.sin(3 * x)).backward()
        ...     adam.step()
        >>> posterior = dvi.Laplace(noise_scale=0.1).fit(net, loader, progress=False)
        >>> sd = posterior.predict(torch.tensor([[0.0], [3.0]])).epistemic.sqrt()
        >>> bool(sd[1] > 3 * sd[0])
        True
    """

    layers: Any = "last"
    covariance: Any = None

    def guide(self, model: Any) -> LaplaceGuide:
        """Return a guide at the weights that the network has."""
        return LaplaceGuide(model, kl_weight=self.kl_weight, temperature=self.temperature)

    def elbo(self) -> TaylorELBO:
        """Return the objective of a training that goes before."""
        return TaylorELBO(kl_weight=self.kl_weight)

    def fit(
        self,
        model: Any,
        loader: Iterable[Any],
        epochs: int = 0,
        *,
        validation: Any = None,
        unconverged: str = "refuse",
        seed: int = 0,
        **options: Any,
    ) -> Posterior:
        """Put a Gaussian around the weights of a copy of a trained network.

        Args:
            model: a trained torch module, or a Pyro model; see :meth:`Method.fit`.
            loader: all the data.
            epochs: of a training that goes before; 0 for a network that is trained.
            validation: inputs with observations, by which the scale of the prior is tuned; None leaves it.
            unconverged: as for :meth:`LaplaceGuide.fit <pyro_dvi.LaplaceGuide.fit>`.
            seed: of everything random.
            **options: of :func:`~pyro_dvi.fit`.
        """
        own = {"validation": validation, "unconverged": unconverged}
        return super().fit(model, loader, epochs, seed=seed, **options, **own)

    def _train(self, svi: Any, loader: Iterable[Any], epochs: int, options: dict[str, Any]) -> History:
        validation, unconverged = options.pop("validation"), options.pop("unconverged")
        history, progress = History(), options.get("progress", True)
        if epochs:
            fit(svi, loader, epochs, history=history, **options)
        subset = self._subset(svi.model)
        svi.guide.polish(loader, subset=subset, progress=progress)
        svi.guide.fit(loader, self.covariance, subset=subset, unconverged=unconverged, progress=progress)
        if validation is not None:
            svi.guide.tune(loader, criterion=ByValidation([validation]), progress=progress)
        return history

    def _subset(self, model: Any) -> Any:
        if self.layers != "last":
            return self.layers
        named = model.named_modules() if isinstance(model, nn.Module) else ()
        names = [name for name, module in named if isinstance(module, nn.Linear)]
        if not names:
            raise ArgumentError(
                'layers="last" looks for a Linear layer and finds none: name the sites, or pass None'
            )
        return f"{names[-1]}.*"
