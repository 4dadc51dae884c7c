# SPDX-License-Identifier: Apache-2.0
"""Laplace's approximation for a trained network, in one call."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from pyro_dvi.bayesian import LearnedScale
from pyro_dvi.core.batches import arguments, check_loader
from pyro_dvi.laplace import ByValidation, LaplaceGuide, last_layer
from pyro_dvi.methods.method import Method
from pyro_dvi.methods.posterior import Posterior
from pyro_dvi.predictive import AtMean, Linearised, predict
from pyro_dvi.training import History, fit
from pyro_dvi.variational_laplace import TaylorELBO

_ROUNDS = 5  # maximum number of fits, each with the noise that follows from the fit before


@dataclass(frozen=True, kw_only=True)
class Laplace(Method):
    """Laplace's approximation around trained weights, with :class:`~pyro_dvi.LaplaceGuide`.

    ``fit`` moves the weights closer to the mode (``LaplaceGuide.polish``), fits the Gaussian and, if there are
    validation data, tunes the prior scale.

    Args:
        layers: layers that get a posterior: "last" for the layer (or heads) that :func:`~pyro_dvi.laplace.last_layer`
            finds, None for all, or a ``subset`` as in :meth:`LaplaceGuide.fit <pyro_dvi.LaplaceGuide.fit>`.
        covariance: a method of :mod:`pyro_dvi.laplace`; None means ``Dense()``.
        unconverged: what to do if the mode is not a minimum, as in
            :meth:`LaplaceGuide.fit <pyro_dvi.LaplaceGuide.fit>`.
        lr: step size of Adam, used only if ``fit`` trains the network first.
        prior_scale: standard deviation of the priors of a network without priors.
        noise_scale: standard deviation of the noise, for a regression network. A ``LearnedScale``, the default, is set
            to the root mean square of the residuals under the posterior, as in the EM algorithm. It follows them while
            the weights move, up to four times.
        kl_weight: KL weight with which the network was trained.
        temperature: factor by which the covariance is multiplied.

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
    unconverged: str = "refuse"
    temperature: float = 1.0

    def guide(self, model: Any) -> LaplaceGuide:
        """Return a guide centred at the network's weights."""
        return LaplaceGuide(model, kl_weight=self.kl_weight, temperature=self.temperature)

    def elbo(self) -> TaylorELBO:
        """Return the objective for training the network first."""
        return TaylorELBO(kl_weight=self.kl_weight)

    def fit(
        self, model: Any, loader: Any, epochs: int = 0, *, validation: Any = None, **options: Any
    ) -> Posterior:
        """Fit a Gaussian around the weights of a copy of a trained network.

        Args:
            model: a trained torch module, or a Pyro model; see :meth:`Method.fit`.
            loader: batches of all training data.
            epochs: number of epochs to train the network first; 0 if it is already trained.
            validation: inputs with observations, or a loader; if given, the prior scale is tuned on them.
            **options: ``seed`` and further arguments of :func:`~pyro_dvi.fit`.
        """
        return super().fit(model, loader, epochs, validation=validation, **options)

    def _train(self, svi: Any, loader: Any, epochs: int, **options: Any) -> History:
        validation, progress = options.pop("validation"), options.get("progress", True)
        history = fit(svi, loader, epochs, **options) if epochs else History()
        subset = last_layer(svi.guide, loader) if self.layers == "last" else self.layers
        policy = {"unconverged": self.unconverged, "progress": progress}
        for k in range(_ROUNDS):  # the mode depends on the noise, and the residuals on the mode
            if not self._follows_residuals(svi, loader, Linearised() if k else AtMean()) and k:
                break
            svi.guide.polish(loader, subset=subset, progress=progress)
            svi.guide.fit(loader, self.covariance, subset=subset, **policy)
        if validation is not None:
            held_out = [validation] if isinstance(validation, tuple | Mapping) else validation
            check_loader(held_out, 2, role="validation")
            svi.guide.tune(loader, criterion=ByValidation(held_out), **policy)
        return history

    def _follows_residuals(self, svi: Any, loader: Any, rule: Any) -> bool:
        """Set a learned noise scale to the root mean square of the residuals; return whether it changed by over 1 %.

        The mean square includes the epistemic variance, so the noise does not vanish if the weights can follow all
        targets. The noise is at least a thousandth of its initial value.
        """
        if not isinstance(self.noise_scale, LearnedScale) or "noise_scale" not in getattr(
            svi.model, "_pyro_params", ()
        ):
            return False
        noise = svi.model.noise_scale.detach()
        args, named = arguments(next(iter(loader)), noise.device)
        svi.guide.initialize(*args, **named)
        found = predict(svi.model, svi.guide, loader, rule)
        rms = (found.metrics()["rmse"] ** 2 + float(found.epistemic.mean())) ** 0.5
        residuals = max(rms, 1e-3 * float(cast(float, self.noise_scale.init)))
        if changed := not 0.99 < residuals / float(noise) < 1.01:
            svi.model.noise_scale = torch.full_like(noise, residuals)
        return changed
