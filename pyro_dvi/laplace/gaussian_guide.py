# SPDX-License-Identifier: Apache-2.0
"""A point mass that a fit has given a Gaussian: what that is to predictions, to Pyro and to files."""

from collections.abc import Callable, Sequence
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_dvi.errors import GuideError, warn
from pyro_dvi.guides.factors import GuideSite
from pyro_dvi.laplace.energy.query import Query, ReadOutputs
from pyro_dvi.laplace.evidence.scales import rescaled_model
from pyro_dvi.laplace.fitted import Draws, Fitted
from pyro_dvi.laplace.methods.posterior import LaplacePosterior, Method
from pyro_dvi.laplace.mode.certificate import Certificate
from pyro_dvi.laplace.mode_guide import ModeGuide
from pyro_dvi.laplace.outputs import GaussianOutputs

DRAWN_WEIGHTS = (
    "weights are drawn from a Laplace posterior: a network run at them leaves the neighbourhood in which the Gaussian "
    "was fitted, and predicts too widely. predict(model, guide, x, method=Linearised()) stays at the mode."
)
WIDE_WEIGHTS = (
    "the spread of the weights of a Laplace posterior goes through the network itself: unless it is linear in them, as "
    "a last layer is, it can predict far too widely. predict(model, guide, x, method=Linearised()) stays at the mode."
)


class GaussianGuide(ModeGuide):
    """A point mass in training; after a fit, the Gaussian around it.

    A subclass fits: it sets ``_fitted``, and ``_method``, by which it was made; ``_refused``, the method of a fit that
    ended in an error.
    """

    _method: Method | None = None
    _refused: Method | None = None
    _fitted: Fitted | None = None

    @property
    def posterior(self) -> LaplacePosterior | None:
        """The Gaussian of the last :meth:`fit`; None before, and after an error.

        Raises:
            GuideError: the mode has moved since.
        """
        return None if self._fitted is None else self.fitted.posterior

    @property
    def fitted(self) -> Fitted:
        """The Gaussian with its mode and the sites that it is over.

        Raises:
            GuideError: not fitted yet, or the mode has moved since, or the last fit ended in an error.
        """
        if self._refused is not None:
            raise GuideError(
                f"the last guide.fit, by {self._refused!r}, ended in an error, so that there is no Gaussian: run "
                "guide.polish(batches) and fit again, or fit with another method or GGN(), which exists at any mode"
            )
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
        if self._fitted is None:
            return "the last guide.fit ended in an error"
        return self._point_mass().change_since(self._fitted.point)

    @property
    def _asked(self) -> bool:
        """Whether a fit was asked for, whose Gaussian is then expected; it may have ended in an error."""
        return self._fitted is not None or self._refused is not None

    # What predictions ask of a guide, this one or another's -------------------------------------------------------

    prediction_rule: Any = "Linearised"  # the name of a rule, or a rule

    @property
    def factorised(self) -> Callable[..., dict[str, Tensor]] | None:
        """The Gaussian as a guide of independent sites; None where it couples latents.

        Raises:
            GuideError: not fitted yet, or the mode has moved since.
        """
        return self._at_marginals if self.fitted.posterior.independent else None

    def _at_marginals(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        warn(WIDE_WEIGHTS)
        marginals = self._marginals()
        return self._within_plates(lambda site: site.sample(marginals[site.name]), *args, **kwargs)

    def predicted_model(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """Return the model as it is predicted with: its scales times those that :meth:`tune` has set."""
        return rescaled_model(model, self.scale_factors)

    def example_latents(self) -> dict[str, Tensor]:
        """Return values to look at the model with: the mode, since not every method has draws."""
        return self.median()

    def linearised(self, inputs: tuple[Any, ...], read: ReadOutputs) -> GaussianOutputs:
        """Return the Gaussian over outputs that someone else reads.

        Args:
            inputs: positional arguments of the model.
            read: returns the outputs at unconstrained values of the latents, as nodes of the graph of these; it is
                also given the number of rows.

        Raises:
            GuideError: not fitted yet, or the mode has moved since.
        """
        fitted = self.fitted
        query = Query(read, inputs, fitted.point.locs, fitted.layout, read=read)
        return GaussianOutputs.of(fitted.posterior, query)

    def __repr__(self) -> str:
        """Say what the guide has: its mode, what is known of that, and a Gaussian."""
        return f"{type(self).__name__}({self._state()})"

    def _state(self) -> str:
        if self.prototype_trace is None:
            return "has not seen its model yet"
        point, known = self._point_mass(), self._certificate
        size, found = sum(u.numel() for u in point.locs.values()), "not known to be a minimum"
        if known is not None and known.is_of(point):
            found = "a minimum" if known.curvature == "Hessian" else "a point without slope"
            if len(known.sites) < len(point.locs):
                found += f" in {len(known.sites)} of {len(point.locs)} sites"
        mode, fitted = f"mode of {size} latents, {found}", self._fitted
        if fitted is None:
            return f"{mode}; no Gaussian yet: guide.fit(batches)"
        parts = [mode, f"{fitted.posterior!r}, precision {type(fitted.curvature).__name__}", self._stale()]
        return "; ".join(part for part in parts if part)

    # What a guide is to Pyro, to files and to devices -----------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Give every latent site a value; Pyro calls it with the arguments of the model.

        With gradients enabled, as in training, this is the mode. Without (``Predictive``, ``Samples``) and after
        :meth:`fit` it is a draw from the Gaussian, with a warning: a network run at such weights is no linearised
        prediction.
        """
        self.initialize(*args, **kwargs)
        if torch.is_grad_enabled() or not self._asked:
            return super().forward(*args, **kwargs)
        stale = self._stale()
        if stale is not None or self._fitted is None:
            warn(f"{stale}: a point mass until it is fitted again")
            return super().forward(*args, **kwargs)
        warn(DRAWN_WEIGHTS)
        vectors = pyro.sample(
            f"_{self._pyro_name}_latent", Draws(self._fitted.posterior), infer={"is_auxiliary": True}
        )
        event_dims = {site.name: site.event_dim for site in self._sites()}
        values = self._constrained(self._fitted.values_of(vectors, event_dims))

        def drawn(site: GuideSite) -> Tensor:
            return pyro.sample(site.name, dist.Delta(values[site.name], event_dim=site.prior.event_dim))

        return self._within_plates(drawn, *args, **kwargs)

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] | int = ()) -> dict[str, Tensor]:
        """Draw all sites at once: from the Gaussian after :meth:`fit`, the mode before.

        Args:
            sample_shape: leading dimensions of the draws; a number of draws, or a shape.

        Returns:
            draws of shape ``[*sample_shape, *site]`` by site name, in their own (constrained) space.

        Raises:
            GuideError: the mode has moved since the fit, or that ended in an error.
            UnsupportedError: the method of the fit has no draws.
        """
        if not self._asked:
            return super().sample(sample_shape)
        shape = torch.Size([sample_shape] if isinstance(sample_shape, int) else sample_shape)
        drawn = self.fitted.draw(shape.numel())
        return self._constrained({name: u.reshape(shape + u.shape[1:]) for name, u in drawn.items()})

    def _marginals(self) -> dict[str, Any]:
        marginals = super()._marginals()
        if self._asked:
            variances = self.fitted.posterior.marginal_variance().detach()
            layout = self.fitted.layout
            for name, variance in layout.place(layout.split(variances)).items():
                normal = dist.Normal(marginals[name].mean.detach(), variance.sqrt(), validate_args=False)
                marginals[name] = normal.to_event(self._seen[name].event_dim)
        return marginals

    def get_extra_state(self) -> dict[str, Any] | None:
        """Return the Gaussian of the last fit, tuned scales and what was shown of the mode, for ``state_dict``.

        A method that needs the model and the data to predict (conjugate gradients, say) is left out, with a warning.
        """
        if self._fitted is None and self._certificate is None and not self.scale_factors:
            return None
        return {
            "gaussian": None if self._fitted is None else self._fitted.state(),
            "scale_factors": dict(self.scale_factors),
            "certificate": None if self._certificate is None else self._certificate.state(),
        }

    def set_extra_state(self, state: Any) -> None:
        """Take over what :meth:`get_extra_state` returned."""
        self.scale_factors = {} if state is None else dict(state["scale_factors"])
        self._fitted = None if state is None else Fitted.from_state(state["gaussian"])
        self._certificate = None if state is None else Certificate.from_state(state.get("certificate"))
        self._method = self._refused = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self._certificate = None
        if self._fitted is not None:
            self._fitted = self._fitted.moved(fn)
        return self
