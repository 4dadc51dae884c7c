# SPDX-License-Identifier: Apache-2.0
"""Laplace's approximation for a trained network, in one call."""

import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from pyro.infer import SVI
from torch import Tensor, nn

from pyro_dvi.bayesian import LearnedScale
from pyro_dvi.bayesian.converted import was_converted
from pyro_dvi.bayesian.likelihoods import Classifier
from pyro_dvi.core.batches import check_loader
from pyro_dvi.errors import ArgumentError, DviWarning, UnsupportedError, warn
from pyro_dvi.laplace import (
    ByTrainingLoss,
    ByValidation,
    Dense,
    Diagonal,
    KroneckerFactored,
    LaplaceGuide,
    NoiseScale,
    PriorPrecision,
    last_layer,
)
from pyro_dvi.methods.method import Method
from pyro_dvi.methods.models import is_network, target_of
from pyro_dvi.methods.posterior import Posterior
from pyro_dvi.training import History, fit
from pyro_dvi.training.random_state import preserve_random_state
from pyro_dvi.variational_laplace import TaylorELBO

_ROUNDS = 10  # maximum number of minima, each with the noise of the one before
_LARGEST = 2500  # number of latents up to which the default covariance is dense
_PRECISIONS = torch.logspace(-3, 6, 37, dtype=torch.float64)
_NARROWER = _PRECISIONS[12:]  # at least 1, for priors that are not wider than the given ones


@dataclass(frozen=True, kw_only=True)
class Laplace(Method):
    """Laplace's approximation around trained weights, with :class:`~pyro_dvi.LaplaceGuide`.

    ``fit`` leaves the weights where they are, so predictions at the mode stay those of the network. It chooses the
    prior scale on validation data if there are any. Otherwise, it keeps the priors of a Pyro model, and those that you
    have chosen; for other networks, it chooses the prior scale by the evidence for a regression, and by
    :class:`~pyro_dvi.laplace.ByTrainingLoss` for a classifier. ``posterior.guide.diagnosis`` tells how far the weights
    are from the nearest minimum, in standard deviations of the posterior.

    Args:
        layers: layers that get a posterior: "last" for the layer (or heads) that :func:`~pyro_dvi.laplace.last_layer`
            finds, None for all, a submodule of the network, or a ``subset`` as in
            :meth:`LaplaceGuide.fit <pyro_dvi.LaplaceGuide.fit>`.
        covariance: a method of :mod:`pyro_dvi.laplace`. None means ``Dense()`` up to 2,500 weights; otherwise
            ``KroneckerFactored()`` or, for layers without Kronecker factors, ``Diagonal()``.
        polish: True moves the weights to the minimum first, with ``LaplaceGuide.polish``; a learned noise scale and the
            minimum follow each other. This changes predictions: the minimum of the training loss may predict worse than
            weights from early stopping.
        unconverged: what to do if the mode is not a minimum, as in
            :meth:`LaplaceGuide.fit <pyro_dvi.LaplaceGuide.fit>`. With ``GGN()``, the default, the Gaussian belongs to
            the linearised network and needs no minimum.
        lr: step size of Adam, used only if ``fit`` trains the network first.
        prior_scale: standard deviation of the priors of a network without priors; it stays if there are no validation
            data. None starts from 1 and tunes it; without validation data, the prior of a classifier does not become
            wider.
        noise_scale: standard deviation of the noise, for a regression network. A ``LearnedScale``, the default, is
            first set to the root mean square of the residuals of each output, and then tuned together with the priors.
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
        >>> posterior = dvi.Laplace().fit(net, loader, progress=False)
        >>> near_and_far = torch.tensor([[0.0], [3.0]])
        >>> prediction = posterior.predict(near_and_far)
        >>> torch.allclose(prediction.mean, net(near_and_far)[:, 0])
        True
        >>> sd = prediction.epistemic.sqrt()
        >>> bool(sd[1] > 3 * sd[0])
        True
    """

    prior_scale: Any = None
    layers: Any = "last"
    covariance: Any = None
    polish: bool = False
    unconverged: str = "accept"
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

        Raises:
            ArgumentError: ``validation`` is no loader, or ``layers`` is a module of another network.
        """
        if validation is not None:
            validation = [validation] if isinstance(validation, tuple | Mapping) else validation
            check_loader(validation, 2, role="validation")
        if isinstance(self.layers, nn.Module):
            names = [name for name, module in model.named_modules() if name and module is self.layers]
            if not names:
                raise ArgumentError("layers is a module, but not a submodule of the network")
            return replace(self, layers=names[0]).fit(model, loader, epochs, validation=validation, **options)
        tuned = self.prior_scale is None and is_network(model) and not was_converted(model)
        return super().fit(model, loader, epochs, validation=validation, tuned=tuned, **options)

    def svi(self, model: Any, loader: Any, epochs: int) -> SVI:
        """Return an untrained ``pyro.infer.SVI``, as in :meth:`Method.svi`; each output has its own learned noise."""
        started = replace(self, prior_scale=1.0) if self.prior_scale is None else self
        svi = super(Laplace, started).svi(model, loader, epochs)
        if self._learns_noise(svi):
            with preserve_random_state(loader):
                y = target_of(next(iter(loader)))
            if isinstance(y, Tensor) and y.dim() == 2 and y.shape[1] > 1:
                svi.model.noise_scale = svi.model.noise_scale.detach().expand(y.shape[1]).clone()
        return svi

    def _learns_noise(self, svi: SVI) -> bool:
        learned = "noise_scale" in getattr(svi.model, "_pyro_params", ())
        return isinstance(self.noise_scale, LearnedScale) and learned

    def _train(self, svi: Any, loader: Any, epochs: int, **options: Any) -> History:
        validation, tuned = options.pop("validation"), options.pop("tuned")
        history = fit(svi, loader, epochs, **options) if epochs else History()
        guide, progress = svi.guide, options.get("progress", True)
        subset = last_layer(guide, loader) if self.layers == "last" else self.layers
        learned = self._follow_residuals(svi, loader)
        guide.energy(loader)  # initialises the guide
        start: Any = guide.prototype_trace
        # Only the weights of a converted network have an initial value.
        fresh = [n for n, s in start.iter_stochastic_nodes() if not hasattr(s["fn"], "initial_value")]
        if fresh and not (epochs or self.polish):
            warn(
                f"latent sites {fresh[:5]} have no trained values, so the Gaussian is fitted around their initial "
                "values: pass the number of epochs to train the model first, or polish=True"
            )
        common = {"subset": subset, "unconverged": self.unconverged, "progress": progress}
        methods = [self.covariance] if self.covariance else _structures(guide, loader, subset)
        for _ in range(_ROUNDS):
            before = svi.model.noise_scale.detach() if learned else None
            if self.polish:
                guide.polish(loader, subset=subset, progress=progress)
            for method in methods[:-1]:
                with suppress(UnsupportedError):
                    self._tune(svi, loader, method, tuned, learned, validation, common)
                    break
            else:
                self._tune(svi, loader, methods[-1], tuned, learned, validation, common)
            settled = before is None or bool((svi.model.noise_scale / before).log().abs().max() < 0.01)
            if settled or not self.polish:
                return history
        warn(f"the noise scale still changes after {_ROUNDS} minima: pass a noise_scale")
        return history

    def _tune(
        self, svi: Any, loader: Any, method: Any, tuned: bool, learned: bool, validation: Any, common: Any
    ) -> None:
        """Fit the Gaussian, and choose its scales."""
        guide, of_classes = svi.guide, isinstance(svi.model, Classifier)
        by_evidence = not of_classes and self.kl_weight == self.temperature == 1
        common = {"method": method, **common}
        scales = [PriorPrecision()] * tuned + [NoiseScale()] * learned if by_evidence else []
        if scales and (learned or validation is None):
            guide.tune(loader, scales, values=_PRECISIONS, **common)
            if learned:
                svi.model.noise_scale = svi.model.noise_scale.detach() * guide.scale_factors["obs"]
                guide.scale_moved("obs", loader)
        with warnings.catch_warnings():  # the network alone, with almost no posterior, may predict best
            warnings.filterwarnings("ignore", "the best value of PriorPrecision", DviWarning)
            if validation is not None:
                guide.tune(loader, criterion=ByValidation(validation), values=_PRECISIONS, **common)
            elif not scales and tuned and method.reweights:
                guide.tune(loader, criterion=ByTrainingLoss(), values=_NARROWER, **common)
        if validation is None and not scales and not (tuned and method.reweights):
            if tuned:
                warn(
                    f"the prior scale is not tuned, because {type(method).__name__} would be fitted again for each "
                    "value: pass validation data, or a prior_scale that you have chosen"
                )
            guide.fit(loader, **common)

    def _follow_residuals(self, svi: Any, loader: Any) -> bool:
        """Set a learned noise scale to the root mean square of the residuals; return whether there is one.

        Each output has its own scale, which is at least a thousandth of the initial one.
        """
        if not self._learns_noise(svi):
            return False
        noise, energy = svi.model.noise_scale.detach(), svi.guide.energy(loader)
        with torch.no_grad():
            sites = [run.sites[0] for _, run in energy.runs(energy.start)]
        unit = 1.0 if svi.model.target_scale is None else svi.model.target_scale
        residuals = torch.cat([(site.value - site.fn.mean) / unit for site in sites]).square()
        least = 1e-3 * float(cast(float, cast(LearnedScale, self.noise_scale).init))
        svi.model.noise_scale = residuals.mean(0).sqrt().clamp(min=least).to(noise)
        return True


def _structures(guide: LaplaceGuide, loader: Any, subset: Any) -> list[Any]:
    """Return the methods to try, according to the number of latents."""
    size = guide.energy(loader, subset=subset).layout.size
    return [Dense()] if size <= _LARGEST else [KroneckerFactored(), Diagonal()]
