# SPDX-License-Identifier: Apache-2.0
"""The Gaussian around a mode and the record that the mode is a minimum, as a guide makes, keeps and saves them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from pyro_dvi.core.progress import progress_bar
from pyro_dvi.errors import GuideError, warn
from pyro_dvi.laplace.energy.energy import Energy, LocalEnergy
from pyro_dvi.laplace.fitted import Fitted, PointMass
from pyro_dvi.laplace.methods.method import LaplacePosterior, Method
from pyro_dvi.laplace.mode.convergence import Certificate, Unconverged
from pyro_dvi.laplace.mode.diagnosis import distance_by

DRAWN_WEIGHTS = (
    "weights are drawn from a Laplace posterior: a network run at them leaves the neighbourhood in which the Gaussian "
    "was fitted, and predicts too widely. predict(model, guide, x, method=Linearised()) stays at the mode."
)
WIDE_WEIGHTS = (
    "the spread of the weights of a Laplace posterior goes through the network itself: unless it is linear in them, as "
    "a last layer is, it can predict far too widely. predict(model, guide, x, method=Linearised()) stays at the mode."
)


@dataclass
class Approximation:
    """Everything that is known around a mode.

    Attributes:
        fitted: the result of the last fit; None before, and after an error.
        failed: the method of the last fit, if that ended in an error.
        certificate: the record that a mode is a minimum.
    """

    fitted: Fitted | None = None
    failed: Method | None = None
    certificate: Certificate | None = None

    @property
    def requested(self) -> bool:
        """A fit was requested, whose Gaussian is then expected; it may have ended in an error."""
        return self.fitted is not None or self.failed is not None

    def fit(
        self,
        energy: Energy,
        method: Method,
        policy: Unconverged,
        point: PointMass,
        model: Callable[..., Any],
        latents: dict[str, Tensor],
        *,
        make: Callable[[Method, LocalEnergy], LaplacePosterior],
        progress: bool,
    ) -> LaplacePosterior:
        """Check that the mode is a minimum, make the Gaussian, and keep both findings; an error leaves no Gaussian.

        A tuned U counts only where the mode was polished since; else the mode belongs to the model as it is written.

        Args:
            energy: U with the scales of the point.
            method: the method that was asked for.
            policy: for a mode that is no minimum.
            point: the mode.
            model: the model, with every scale as it is written.
            latents: the mode, constrained.
            make: returns the Gaussian of the method that the policy has chosen.
            progress: count the work, in gradients of all data, where there is a terminal or notebook.
        """
        self.fitted, self.failed = None, method
        known, factors, looked_at = self.certificate, point.scale_factors, energy
        if factors and not (known and known.is_of(point)):
            factors, looked_at = {}, energy.with_model(model)
        if known and not (
            known.is_of(replace(point, scale_factors=factors)) and known.covers(looked_at, model, latents)
        ):
            known = None
        with progress_bar(progress, None, unit="gradient") as bar:
            energy.work.report = looked_at.work.report = bar.update
            used, found = policy.look(method, looked_at, known)
            posterior = make(used, energy.at(energy.start))
            energy.work.report = None
            seen = point.seen_with(energy, model, latents)
            if found is not None and found.newton_decrement is None and not found.at_saddle:
                found = distance_by(posterior, found, looked_at.at(looked_at.start))
                if found.decrement_at_least > found.tolerance:
                    warn(f"the Gaussian is put around a mode that is no minimum. {found}")
        if found is not None and found.near:
            self.certificate = Certificate.of(replace(seen, scale_factors=factors), looked_at, found)
        self.fitted, self.failed = Fitted(posterior, energy.layout, seen, used.precision, used), None
        return posterior

    def change_since(self, point: PointMass) -> str | None:
        """Return the reason for which the Gaussian does not belong to the present mode; None if it does."""
        if self.fitted is None:
            return "the last guide.fit ended in an error"
        return point.change_since(self.fitted.point)

    def at(self, point: Callable[[], PointMass]) -> Fitted:
        """Return the Gaussian of the present mode, which ``point`` returns.

        Raises:
            GuideError: not fitted yet, or the mode has moved since, or the last fit ended in an error.
        """
        if self.failed is not None:
            raise GuideError(
                f"the last guide.fit, by {self.failed!r}, ended in an error, so that there is no Gaussian: run "
                "guide.polish(batches) and fit again, or fit with another method or GGN(), which exists at any mode"
            )
        if self.fitted is None:
            raise GuideError(
                "this LaplaceGuide is a point mass so far: call guide.fit(batches, method) after training. "
                "predict(..., method=AtMean()) predicts at the mode"
            )
        change = self.change_since(point())
        if change is not None:
            raise GuideError(f"{change}: fit again")
        return self.fitted

    def describe(self, point: PointMass) -> str:
        """Return the size of the mode, the evidence that it is a minimum, and the Gaussian, in words."""
        known, found = self.certificate, "not known to be a minimum"
        if known is not None and known.is_of(point):
            found = "a minimum" if known.curvature == "Hessian" else "a point without slope"
            if len(known.sites) < len(point.locs):
                found += f" in {len(known.sites)} of {len(point.locs)} sites"
        mode = f"mode of {sum(u.numel() for u in point.locs.values())} latents, {found}"
        if self.fitted is None:
            return f"{mode}; no Gaussian yet: guide.fit(batches)"
        gaussian = f"{self.fitted.posterior!r}, precision {type(self.fitted.precision).__name__}"
        return "; ".join(part for part in (mode, gaussian, self.change_since(point)) if part)

    def state(self) -> dict[str, Any]:
        """Return tensors and plain values, for files; a Gaussian that needs the model and the data is left out."""
        return {
            "gaussian": None if self.fitted is None else self.fitted.state(),
            "certificate": None if self.certificate is None else self.certificate.state(),
        }

    @staticmethod
    def from_state(state: Mapping[str, Any] | None) -> "Approximation":
        """Make what :meth:`state` describes."""
        if state is None:
            return Approximation()
        gaussian, certificate = Fitted.from_state(state["gaussian"]), state.get("certificate")
        return Approximation(gaussian, None, Certificate.from_state(certificate))

    def moved(self, function: Callable[[Tensor], Tensor]) -> "Approximation":
        """Return it with ``function`` (to another device or dtype) applied to the Gaussian; modes are rounded anew."""
        return Approximation(None if self.fitted is None else self.fitted.moved(function), self.failed)
