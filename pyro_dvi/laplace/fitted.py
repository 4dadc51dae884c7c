# SPDX-License-Identifier: Apache-2.0
"""What a fit leaves in the guide: a Gaussian, the sites that it is over, and the mode that it belongs to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_dvi.core.batches import mapped
from pyro_dvi.errors import CheckpointError, GuideError, UnsupportedError, warn
from pyro_dvi.laplace.energy.batch_graph import refuse_torch_modes
from pyro_dvi.laplace.energy.layout import Layout
from pyro_dvi.laplace.energy.precision import GGN, PrecisionMatrix
from pyro_dvi.laplace.methods.posterior import LaplacePosterior
from pyro_dvi.laplace.point_mass import PointMass


@dataclass(frozen=True)
class Fitted:
    """The result of ``guide.fit``; nothing changes it, so that copies of a guide share it.

    Attributes:
        posterior: the Gaussian.
        layout: what varies, in the order of its vectors.
        point: the mode, and the U that it belongs to, with its data and its model.
        curvature: which matrix its precision is.
    """

    posterior: LaplacePosterior
    layout: Layout
    point: PointMass
    curvature: PrecisionMatrix = field(default_factory=GGN)

    def draw(self, count: int) -> dict[str, Tensor]:
        """Draw unconstrained values ``[count, *site]`` of every site."""
        fixed = {name: loc.expand(count, *loc.shape) for name, loc in self.point.locs.items()}
        pieces = self.layout.split(_draw(self.posterior, count))
        return {**fixed, **self.layout.place(pieces, self.point.locs)}

    def values_of(self, vectors: Tensor, event_dims: Mapping[str, int]) -> dict[str, Tensor]:
        """Return the unconstrained value of every site in flat vectors ``[*lead, D]``; at its mode where it is fixed.

        Leading dimensions belong to plates outside the guide, so the sites' own plates lie to their right.
        """
        values = dict(self.point.locs)
        for name, value in self.layout.place(self.layout.split(vectors), self.point.locs).items():
            lead = (*vectors.shape[:-1], *(1,) * event_dims[name])
            values[name] = value.reshape(torch.broadcast_shapes(values[name].shape, lead))
        return values

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
        refuse_torch_modes(self.posterior.mode.device)
        known = self.point.model
        differences = "" if known is None else known.differences(model, latents, plates)
        if differences:
            raise GuideError(
                f"the model has changed since guide.fit, or is another one, so that the Gaussian does not belong to it "
                f"({differences}; in evaluation mode, at the mode, on stand-ins for the data). Give it the model of "
                "the fit, with its state, or fit again"
            )

    # In files: tensors and plain values ---------------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """Return tensors and plain values to make it of again; None, with a warning, if the posterior has none."""
        try:
            posterior = self.posterior.state()
        except UnsupportedError as error:
            warn(f"the Gaussian of guide.fit is left out: {error}")
            return None
        return {
            "posterior": posterior,
            "kind": type(self.posterior).__name__,
            "sites": {name: self.layout.chosen.get(name) for name in self.layout.names},
            "point": self.point.state(),
            "curvature": type(self.curvature).__name__,
        }

    @staticmethod
    def from_state(state: dict[str, Any] | None) -> "Fitted | None":
        """Make what :meth:`state` describes.

        Raises:
            CheckpointError: something is missing, as in files of another version.
        """
        if state is None:
            return None
        try:
            point = PointMass.from_state(state["point"])
            return Fitted(
                LaplacePosterior.of_kind(state["kind"], state["posterior"]),
                Layout({name: point.locs[name].shape for name in state["sites"]}, state["sites"]),
                point,
                PrecisionMatrix.of_kind(state["curvature"]),
            )
        except KeyError as missing:
            raise CheckpointError(
                f"the Gaussian in this state has no {missing.args[0]}: it was saved by another version. Load the guide "
                "without it (state['_extra_state'] = None), fit again, and save"
            ) from missing

    def moved(self, function: Callable[[Tensor], Tensor]) -> "Fitted | None":
        """Return it with ``function`` (to another device or dtype) applied to every tensor; None as :meth:`state`."""
        state = mapped(lambda leaf: function(leaf) if torch.is_tensor(leaf) else leaf, self.state())
        return Fitted.from_state(state)

    def __deepcopy__(self, memo: Any) -> "Fitted":
        return self

    def __reduce__(self) -> Any:
        return Fitted.from_state, (self.state(),)


class Draws(dist.TorchDistribution):
    """The Gaussian over the flat vector, known by draws.

    Args:
        posterior: the Gaussian.
        batch_shape: of independent copies.
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012 (as in torch)
    support = constraints.real_vector

    def __init__(self, posterior: LaplacePosterior, batch_shape: Any = ()) -> None:
        self.posterior = posterior
        super().__init__(torch.Size(batch_shape), posterior.mode.shape, validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "Draws":
        """Return as many independent copies."""
        return Draws(self.posterior, batch_shape)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw vectors ``[*sample_shape, *batch_shape, D]``."""
        shape = torch.Size(sample_shape) + self.batch_shape
        return _draw(self.posterior, shape.numel()).reshape(*shape, -1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Refuse: a method knows draws or covariances, not always the density."""
        raise UnsupportedError(
            "a fitted LaplaceGuide gives draws without gradients, and these have no density for a loss: compute losses "
            "of the mode before guide.fit, or with gradients enabled, as svi.step does"
        )


def _draw(posterior: LaplacePosterior, count: int) -> Tensor:
    """Draw flat vectors ``[count, D]`` with random numbers that follow from torch's global generator."""
    generator = torch.Generator(posterior.mode.device).manual_seed(int(torch.randint(2**31 - 1, ())))
    return posterior.draw(count, generator).detach()
