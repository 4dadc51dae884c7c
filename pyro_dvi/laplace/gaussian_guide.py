# SPDX-License-Identifier: Apache-2.0
"""A point mass in training, the Gaussian of a fit when draws are asked for."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_dvi.errors import DviWarning, GuideError
from pyro_dvi.handlers.latents import unconstraining_transform
from pyro_dvi.laplace.draws import Draws
from pyro_dvi.laplace.fitted import Fitted
from pyro_dvi.laplace.methods.posterior import LaplacePosterior, Method
from pyro_dvi.laplace.point_mass import PointMassGuide

__all__ = ["DRAWN_WEIGHTS", "GaussianGuide"]

DRAWN_WEIGHTS = (
    "weights are drawn from a Laplace posterior: a network run at them leaves the neighbourhood in which the Gaussian "
    "was fitted, and predicts too widely. predict(model, guide, x, method=Linearised()) stays at the mode."
)


class GaussianGuide(PointMassGuide):
    r"""What a Laplace guide is to Pyro, to files and to devices.

    Without a fit a point mass; with one :math:`\mathcal N(\hat u, P^{-1})`.

    Args:
        model: a Pyro model whose latents are continuous.
        kl_weight: of the objective in training.
        init_loc_fn: Pyro initialisation strategy of the mode.
        create_plates: as in Pyro's guides.
    """

    _method: Method | None = None
    _fitted: Fitted | None = None

    @property
    def posterior(self) -> LaplacePosterior | None:
        """The Gaussian of the last :meth:`fit`; None before.

        Raises:
            GuideError: the mode has moved since.
        """
        return None if self._fitted is None else self.fitted.posterior

    @property
    def fitted(self) -> Fitted:
        """The Gaussian with its mode and the sites that it is over.

        Raises:
            GuideError: not fitted yet, or the mode has moved since.
        """
        if self._fitted is None:
            raise GuideError(
                "this LaplaceGuide is a point mass so far: call guide.fit(batches, method) after training. "
                "predict(..., method=AtMean()) predicts at the mode"
            )
        stale = self._stale()
        if stale is not None:
            raise GuideError(f"{stale}: fit again")
        return self._fitted

    def check_model(self, model: Callable[..., Any], plates: bool = False) -> None:
        """Refuse a model that is not the one of the fit. Does nothing before a fit, or after the mode has moved.

        Args:
            model: the model.
            plates: see :meth:`Fitted.check`.

        Raises:
            GuideError: naming what differs.
        """
        if self._fitted is not None and self._stale() is None:
            self._fitted.check(model, self.median(), plates)

    def _stale(self) -> str | None:
        """What is no longer as it was in the fit."""
        assert self._fitted is not None
        return self._fitted.stale(self.unconstrained_mode(), self.scale_factors, self.kl_weight)

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Give every latent site a value; Pyro calls it with the arguments of the model.

        With gradients enabled, as in training, this is the mode. Without (``Predictive``, ``Samples``) and after
        :meth:`fit` it is a draw from the Gaussian, with a warning: a network run at such weights is no linearised
        prediction.
        """
        self.initialize(*args, **kwargs)
        if self._fitted is None or torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        stale = self._stale()
        if stale is not None:
            warnings.warn(f"{stale}: a point mass until it is fitted again", DviWarning, stacklevel=2)
            return super().forward(*args, **kwargs)
        warnings.warn(DRAWN_WEIGHTS, DviWarning, stacklevel=2)
        vectors = pyro.sample(
            f"_{self._pyro_name}_latent", Draws(self._fitted.posterior), infer={"is_auxiliary": True}
        )
        plates = self._create_plates(*args, **kwargs)
        result = {}
        for name, site in self._sites():
            u = self._fitted.value_of(name, vectors, self._event_dims[name])
            transform = unconstraining_transform(site["fn"].support)
            value = u if transform is None else transform(u)
            with ExitStack() as stack:
                for frame in site["cond_indep_stack"]:
                    stack.enter_context(plates[frame.name])
                result[name] = pyro.sample(name, dist.Delta(value, event_dim=site["fn"].event_dim))
        return result

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] | int = ()) -> dict[str, Tensor]:
        """Draw all sites at once: from the Gaussian after :meth:`fit`, the mode before.

        Args:
            sample_shape: leading dimensions of the draws; a number of draws, or a shape.

        Returns:
            draws of shape ``[*sample_shape, *site]`` by site name, in their own (constrained) space.

        Raises:
            GuideError: the mode has moved since the fit.
            UnsupportedError: the method of the fit has no draws.
        """
        if self._fitted is None:
            return super().sample(sample_shape)
        shape = torch.Size([sample_shape] if isinstance(sample_shape, int) else sample_shape)
        drawn = self.fitted.draw(shape.numel())
        return self._constrained({name: u.reshape(shape + u.shape[1:]) for name, u in drawn.items()})

    def _marginals(self) -> dict[str, Any]:
        marginals = super()._marginals()
        if self._fitted is not None:
            for name, variance in self.fitted.marginal_variances().items():
                normal = dist.Normal(marginals[name].mean.detach(), variance.sqrt(), validate_args=False)
                marginals[name] = normal.to_event(self._event_dims[name])
        return marginals

    # Moving and saving ---------------------------------------------------------------------------------------------

    def get_extra_state(self) -> dict[str, Any] | None:
        """Return the Gaussian of the last fit, and tuned scales, for ``state_dict``, in tensors and plain values.

        A method that needs the model and the data to predict (conjugate gradients, say) is left out, with a warning.
        """
        if self._fitted is None and not self.scale_factors:
            return None
        return {
            "gaussian": None if self._fitted is None else self._fitted.state(),
            "scale_factors": dict(self.scale_factors),
        }

    def set_extra_state(self, state: Any) -> None:
        """Take over what :meth:`get_extra_state` returned."""
        self.scale_factors = {} if state is None else dict(state["scale_factors"])
        self._fitted = None if state is None else Fitted.from_state(state["gaussian"])
        self._method = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        if self._fitted is not None:
            self._fitted = self._fitted.moved(fn)
        return self
