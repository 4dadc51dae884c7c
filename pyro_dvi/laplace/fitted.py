# SPDX-License-Identifier: Apache-2.0
"""What a fit leaves in the guide: a Gaussian, the sites that it is over, and the mode that it belongs to."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.batches import mapped
from pyro_dvi.errors import CheckpointError, DviWarning, GuideError, UnsupportedError
from pyro_dvi.handlers.fingerprint import Fingerprint
from pyro_dvi.laplace.draws import draw
from pyro_dvi.laplace.energy.layout import Layout
from pyro_dvi.laplace.energy.precision import GGN, PrecisionMatrix
from pyro_dvi.laplace.energy.query import Query
from pyro_dvi.laplace.energy.torch_modes import refuse_torch_modes
from pyro_dvi.laplace.methods.posterior import LaplacePosterior
from pyro_dvi.laplace.outputs import GaussianOutputs

__all__ = ["Fitted"]

_ENTRIES = {
    "posterior",
    "kind",
    "sites",
    "mode",
    "scale_factors",
    "kl_weight",
    "curvature",
    "model",
    "data",
}


@dataclass(frozen=True)
class Fitted:
    """The result of ``guide.fit``; nothing changes it, so that copies of a guide share it.

    Attributes:
        posterior: the Gaussian.
        layout: the sites that vary, in the order of its vectors.
        mode: unconstrained mode of every site.
        scale_factors: what multiplied the scales of sites in the fit.
        kl_weight: that of the fit.
        curvature: which matrix its precision is.
        model: what the model said at the mode; None where it could not be asked.
        data: checksum of the batches, if a whole pass was made.
    """

    posterior: LaplacePosterior
    layout: Layout
    mode: dict[str, Tensor]
    scale_factors: dict[str, float] = field(default_factory=dict)
    kl_weight: float = 1.0
    curvature: PrecisionMatrix = field(default_factory=GGN)
    model: Fingerprint | None = None
    data: float | None = None

    @torch.enable_grad()  # Jacobians need it, whoever asks
    def gaussian_outputs(self, query: Query, *, joint: bool = False) -> GaussianOutputs:
        """Return the Gaussian over the outputs of a query; with ``joint`` also over all its examples."""
        outputs = query.outputs.detached()
        if not joint:
            return GaussianOutputs(outputs, self.posterior.covariance(query).detach())
        count, size = query.num_rows, query.size
        whole = self.posterior.joint_covariance(query).detach().reshape(count, size, count, size)
        rows = torch.arange(count, device=whole.device)
        return GaussianOutputs(outputs, whole[rows, :, rows], whole)

    def draw(self, count: int) -> dict[str, Tensor]:
        """Draw unconstrained values ``[count, *site]`` of every site."""
        drawn = self.layout.named(draw(self.posterior, count))
        return {
            name: drawn[name] if name in drawn else loc.expand(count, *loc.shape)
            for name, loc in self.mode.items()
        }

    def value_of(self, name: str, vectors: Tensor, event_dim: int) -> Tensor:
        """Return the unconstrained value of a site in flat vectors ``[*lead, D]``; at its mode where it is fixed.

        Leading dimensions belong to plates outside the guide, so the site's own plates lie to their right.
        """
        loc = self.mode[name]
        if name not in self.layout.shapes:
            return loc
        value = self.layout.named(vectors)[name]
        lead = vectors.shape[:-1]
        shape = torch.broadcast_shapes(loc.shape, (*lead, *(1,) * event_dim))
        return value.reshape(shape)

    def stale(self, mode: dict[str, Tensor], scale_factors: dict[str, float], kl_weight: float) -> str | None:
        """Say what is no longer as it was in the fit; None if all is."""
        moved = next((name for name, u in mode.items() if not torch.equal(u, self.mode[name])), None)
        if moved is not None:
            return f"site {moved!r} has moved since guide.fit, so that its Gaussian belongs to another mode"
        if scale_factors != self.scale_factors:
            return "guide.scale_factors has changed since guide.fit"
        if kl_weight != self.kl_weight:
            return f"the Gaussian was fitted with kl_weight={self.kl_weight:g}, and guide.kl_weight is {kl_weight:g}"
        return None

    def check(self, model: Callable[..., Any], latents: dict[str, Tensor], plates: bool = False) -> None:
        """Refuse a model that is not the one of the fit.

        Args:
            model: the model, with every scale as it is written.
            latents: the mode, constrained.
            plates: whether plates and shapes of observed sites count, on which predictions do not depend.

        Raises:
            GuideError: a prior, the likelihood or a deterministic part of the model is another one.
            UnsupportedError: in half precision, which would look like another model.
        """
        refuse_torch_modes(next(iter(self.mode.values())).device)
        differences = "" if self.model is None else self.model.differences(model, latents, plates)
        if differences:
            raise GuideError(
                f"the model has changed since guide.fit, or is another one, so that the Gaussian does not belong to it "
                f"({differences}; in evaluation mode, at the mode, on the first rows of the fit). Give it the model of "
                "the fit, with its state, or fit again"
            )

    def marginal_variances(self) -> dict[str, Tensor]:
        """Return the variances of the sites that vary."""
        return self.layout.named(self.posterior.marginal_variance().detach())

    # In files: tensors and plain values ---------------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """Return tensors and plain values to make it of again; None, with a warning, if the posterior has none."""
        try:
            posterior = self.posterior.state()
        except UnsupportedError as error:
            warnings.warn(f"the Gaussian of guide.fit is left out: {error}", DviWarning, stacklevel=2)
            return None
        return {
            "posterior": posterior,
            "kind": type(self.posterior).__name__,
            "sites": list(self.layout.names),
            "mode": dict(self.mode),
            "scale_factors": dict(self.scale_factors),
            "kl_weight": self.kl_weight,
            "curvature": type(self.curvature).__name__,
            "model": None if self.model is None else self.model.state(),
            "data": self.data,
        }

    @staticmethod
    def from_state(state: dict[str, Any] | None) -> "Fitted | None":
        """Make what :meth:`state` describes.

        Raises:
            CheckpointError: something is missing, as in files of another version.
        """
        if state is None:
            return None
        missing = sorted(_ENTRIES - state.keys())
        if missing:
            raise CheckpointError(
                f"the Gaussian in this state has no {', '.join(missing)}: it was saved by another version. Load the "
                "guide without it (state['_extra_state'] = None), fit again, and save"
            )
        mode = state["mode"]
        layout = Layout({name: mode[name].shape for name in state["sites"]})
        posterior = LaplacePosterior.of_kind(state["kind"], state["posterior"])
        return Fitted(
            posterior,
            layout,
            mode,
            dict(state["scale_factors"]),
            state["kl_weight"],
            PrecisionMatrix.of_kind(state["curvature"]),
            None if state["model"] is None else Fingerprint(**state["model"]),
            state["data"],
        )

    def moved(self, function: Callable[[Tensor], Tensor]) -> "Fitted | None":
        """Return it with ``function`` (to another device or dtype) applied to every tensor; None as :meth:`state`."""
        state = mapped(lambda leaf: function(leaf) if torch.is_tensor(leaf) else leaf, self.state())
        return Fitted.from_state(state)

    def __deepcopy__(self, memo: Any) -> "Fitted":
        return self

    def __reduce__(self) -> Any:
        return Fitted.from_state, (self.state(),)
