# SPDX-License-Identifier: Apache-2.0
"""A guide that is a point mass: trained first, then brought to the minimum, and asked what U is around it."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.bayesian import init_to_module
from pyro_dvi.core.arguments import check_positive
from pyro_dvi.errors import ArgumentError
from pyro_dvi.guides.base import FactorisedGuide
from pyro_dvi.guides.factors import Deterministic, Factor
from pyro_dvi.laplace.energy.batch_graph import refuse_torch_modes
from pyro_dvi.laplace.energy.energy import Energy
from pyro_dvi.laplace.energy.layout import Subset
from pyro_dvi.laplace.energy.passes import Passes
from pyro_dvi.laplace.energy.query import Query
from pyro_dvi.laplace.mode.certificate import Certificate
from pyro_dvi.laplace.mode.diagnosis import Diagnosis, diagnose
from pyro_dvi.laplace.mode.polish import polish
from pyro_dvi.laplace.mode.search import Polished
from pyro_dvi.laplace.point_mass import ModelReference, PointMass
from pyro_dvi.runs.fingerprint import Fingerprint


class ModeGuide(FactorisedGuide):
    r"""A point mass :math:`\hat u` in unconstrained space, what :class:`~pyro_dvi.LaplaceGuide` is before its fit.

    .. math:: \hat u = \arg\min_u U(u), \qquad U(u) = -\tfrac1\beta\log p(D \mid u) - \log p(u)

    Args:
        model: a Pyro model whose latents are continuous.
        kl_weight: :math:`\beta`.
        init_loc_fn: Pyro initialisation strategy of the mode.
        create_plates: as in Pyro's guides.

    Raises:
        ArgumentError: a KL weight that is not positive.
    """

    _certificate: Certificate | None = None

    def __init__(
        self,
        model: Callable,
        *,
        kl_weight: float = 1.0,
        init_loc_fn: Callable = init_to_module,
        create_plates: Callable | None = None,
    ) -> None:
        if callable(kl_weight) or isinstance(kl_weight, str):
            raise ArgumentError(
                f"kl_weight must be a positive number, the one that training ended with, not {kl_weight!r}: schedules "
                "are for the objective"
            )
        check_positive("kl_weight", kl_weight)
        super().__init__(model, init_loc_fn=init_loc_fn, create_plates=create_plates)
        self.kl_weight = float(kl_weight)
        self.scale_factors: dict[str, float] = {}
        self._plain_model = ModelReference(model)  # without the initialisation of means, and no submodule

    def _factor_of(self, name: str, site: Any, loc: Tensor) -> Factor:
        return Deterministic()

    def unconstrained_mode(self) -> dict[str, Tensor]:
        """Return a copy of the mode of every site in unconstrained space."""
        return {site.name: site.loc.detach().clone() for site in self._sites()}

    @torch.no_grad()
    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return the mode of every site; in unconstrained space that is the median."""
        return self._constrained(self.unconstrained_mode())

    def _point_mass(self, batches: Iterable[Any] | None = None) -> PointMass:
        """The mode as it is now; a guide that has not seen its model yet looks at it with the first batch."""
        if batches is not None:
            device = self._plain_model.device
            refuse_torch_modes(device)
            if self.prototype_trace is None:
                args, kwargs = next(iter(Passes(batches, device)))
                self.initialize(*args, **kwargs)
        return PointMass(self.unconstrained_mode(), dict(self.scale_factors), self.kl_weight)

    def energy(self, batches: Iterable[Any], *, subset: Subset | None = None) -> Energy:
        """Return U on these batches, with its gradient and products.

        A guide that has not seen its model yet looks at it with the first batch.

        Args:
            batches: all the data: a loader or a list of batches, as for :func:`~pyro_dvi.fit`.
            subset: what varies, as in ``guide.fit``; the rest stays at its mode. None: all.
        """
        return self._point_mass(batches).energy(self._plain_model.get(), batches, subset)

    def query(self, *inputs: Any, site: str | None = None, subset: Subset | None = None) -> Query:
        """Return the outputs at the mode for some inputs, with products of their Jacobian.

        ``guide.predictive(x)`` does with it what is usually wanted; ``guide.posterior`` takes it for the rest.

        Args:
            inputs: positional arguments of the model; observations may be left out.
            site: an observed site, or one of ``pyro.deterministic``; None for the one observed site.
            subset: what varies, as in ``guide.fit``.
        """
        point = self._point_mass()
        return point.query(self._plain_model.get(), inputs, point.layout(subset), site)

    def polish(
        self,
        batches: Iterable[Any],
        *,
        subset: Subset | None = None,
        tolerance: float = 1e-10,
        max_gradients: int = 3000,
        progress: bool = True,
        callback: Callable[[int, float, float, float], None] | None = None,
    ) -> Polished:
        r"""Bring the mode to the minimum of U, and prove it by the true Hessian.

        First-order training ends near a saddle point as often as not, where a Gaussian does not exist. The Hessian is
        known by its products only. Ctrl-C ends the search; the best point so far is kept then, and after any error.

        Status: a local minimum with a positive definite Hessian, as far as 200 Lanczos steps show. Where U has kinks
        (ReLU), a point at rest in the norm of the Gauss-Newton matrix, or a warning.

        Args:
            batches: all the data, the same in every pass.
            subset: what may move, as in ``guide.fit``; None: all.
            tolerance: on the Newton decrement :math:`g^\top P^{-1} g`, in squared posterior standard deviations.
            max_gradients: of all data, that the search may take: by default as many as a training of 3,000 steps.
            progress: show a progress bar where there is a terminal or notebook.
            callback: called after each step with its number, U, the norm of its gradient, and the decrement before
                or an estimate of it.

        Returns:
            What was done; ``print`` it.

        Raises:
            UnconvergedError: no minimum was found; ``report`` says how far it came.
            NonFiniteError: U is NaN or infinite at the mode.
            DataError: batches that do not hold all data, or change.

        Example:
            >>> import pyro, pyro.distributions as dist
            >>> from pyro_dvi.laplace import LaplaceGuide
            >>> def model(x, y=None):
            ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
            ...     with pyro.plate("data", len(x)):
            ...         return pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)
            >>> x = torch.ones(3)
            >>> guide = LaplaceGuide(model)
            >>> guide.initialize(x, x)
            >>> guide.polish([(x, x)], progress=False).converged, guide.median()["slope"]
            (True, tensor(0.7500))
            >>> guide.diagnose([(x, x)]).verdict
            'Converged: a minimum with a positive definite Hessian.'
        """

        def keep(point: Tensor) -> None:
            with torch.no_grad():
                for name, value in energy.layout.place(energy.layout.split(point), energy.locs).items():
                    self._seen[name].loc.copy_(value)

        energy = self.energy(batches, subset=subset)
        report = polish(
            energy,
            keep,
            tolerance=tolerance,
            max_gradients=max_gradients,
            progress=progress,
            callback=callback,
        )
        if report.converged:
            self._certify(self._point_of(energy), energy, report)
        return report

    def _point_of(self, energy: Energy) -> PointMass:
        """The mode as it is now, with the data of U and what the model says at it."""
        data = energy.passes.checksum
        model = Fingerprint.of(self._plain_model.get(), *energy.passes.first_again(), self.median())
        return replace(self._point_mass(), data=data, model=model)

    def _certify(self, point: PointMass, energy: Energy, shown: Polished | Diagnosis) -> None:
        assert shown.newton_decrement is not None
        whole = tuple(name for name in energy.layout.names if name not in energy.layout.chosen)
        self._certificate = Certificate(point, whole, shown.curvature, shown.newton_decrement)

    def _place(self, point: PointMass, energy: Energy) -> tuple[PointMass, Energy, Certificate | None]:
        """Of which U the mode should be a minimum: not of the tuned one, unless polished since; what is known of it."""
        known, model = self._certificate, self._plain_model.get()
        if point.scale_factors and not (known and known.is_of(point)):
            point, energy = replace(point, scale_factors={}), energy.with_model(model)
        covered = known and known.is_of(point) and known.covers(energy, model, self.median())
        return point, energy, known if covered else None

    def diagnose(
        self,
        batches: Iterable[Any],
        *,
        subset: Subset | None = None,
        tolerance: float = 1e-2,
        steps: int = 200,
    ) -> Diagnosis:
        r"""Say whether the mode is a minimum of U, and what is wrong if it is not; nothing moves.

        After ``tune``, U has the tuned scales, of which a mode that was trained before is no minimum.

        Args:
            batches: all the data.
            subset: what varies, as in ``guide.fit``; None: all.
            tolerance: on the Newton decrement :math:`g^\top P^{-1} g`; 0.01 is a tenth of a standard
                deviation.
            steps: of the Lanczos recursion, and of conjugate gradients; up to two gradients of all data each.

        Returns:
            Gradient norm, decrement, smallest eigenvalue and a ``verdict`` in words; ``print`` it.

        Raises:
            DataError: batches that do not hold all data, or change.
        """
        energy = self.energy(batches, subset=subset)
        found = diagnose(energy, tolerance=tolerance, steps=steps)
        if found.near:
            self._certify(self._point_of(energy), energy, found)
        return found
