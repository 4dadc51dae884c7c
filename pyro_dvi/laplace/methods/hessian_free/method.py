# SPDX-License-Identifier: Apache-2.0
"""The method, and the Gaussian whose covariances are read off second fits."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_choice
from pyro_dvi.errors import NonFiniteError, NotPositiveDefiniteError, UnsupportedError, warn
from pyro_dvi.laplace.energy.energy import LocalEnergy
from pyro_dvi.laplace.energy.precision import Hessian
from pyro_dvi.laplace.energy.query import Query
from pyro_dvi.laplace.methods.hessian_free.modes import Mode, Pointwise, PretrainedMode
from pyro_dvi.laplace.methods.hessian_free.newton_cg import NewtonCG
from pyro_dvi.laplace.methods.hessian_free.solvers import Fits, Solver
from pyro_dvi.laplace.methods.posterior import LaplacePosterior, Method


@dataclass(frozen=True)
class HessianFree(Method):
    r"""Variances from fitting again: by how much a prediction moves when a multiple of it is added to the loss.

    .. math:: u_{\pm\lambda} = \arg\min_u U(u) \mp \lambda f(x; u), \qquad
        \frac{f(x; u_\lambda) - f(x; u_{-\lambda})}{2\lambda} \to \nabla f^\top (\nabla^2 U)^{-1} \nabla f

    with U as in :class:`~pyro_dvi.LaplaceGuide`: a sum over all data, the likelihood divided by the KL weight, the
    prior in full.

    Status: it depends on the solver. With ``Pointwise()`` and ``NewtonCG()``, which takes products of the Hessian, it
    is the exact Hessian's covariance up to terms of the order of the step squared and the tolerance. ``Adam``, ``SGD``
    and ``LBFGS`` take gradients only, and start from any network without a look at it, as the paper does. They subtract
    two fits, so that what training had left to do cancels; the paper subtracts the network as it is:
    ``AsPrinted(Adam(strength))``. Fine-tuning by ``Adam`` and ``SGD`` ends before the minimum: after 300 steps of the
    paper's regressions, less an untilted fit, standard deviations come out 15 to 32 % too small in the median, a tenth
    of them by more than 1.7 to 3.5 times. The modes other than ``Pointwise()`` target something else.

    ``ConjugateGradient(Hessian())`` gives the numbers of ``NewtonCG()`` with one linear solve in the place of two fits,
    in our benchmark at about a ninth of the cost (923 gradients of all data against 8,067).

    Args:
        mode: ``Pointwise()``, or one of the pre-trained modes ``Sum(inputs)``, ``AbsoluteSum(inputs)``, ``InSample()``
            and ``LabelShift()``, which fit once for all queries.
        solver: ``NewtonCG()`` at a minimum (``guide.polish(batches)``); elsewhere ``Adam(strength)``, ``SGD(strength,
            learning_rate)`` or ``LBFGS(strength)``.
        central: fit with strengths of both signs; False: with one and without a tilt, for half the cost with
            ``NewtonCG`` and an error of the order of the step itself. ``AsPrinted(solver)`` has one side, whatever is
            given here.

    Raises:
        ArgumentError: an option that is no such object.
        NotPositiveDefiniteError: at a query: the mode is no minimum, or a variance came out negative.
        NotConvergedError: at a query: a tilted minimum was not found.

    Source: McInerney & Kallus (2024).

    Example:
        >>> import pyro, pyro.distributions as dist, pyro_dvi
        >>> def model(x, y=None):
        ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         return pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)
        >>> x = torch.ones(3)
        >>> guide = pyro_dvi.LaplaceGuide(
        ...     model,
        ...     init_loc_fn=pyro.infer.autoguide.init_to_value(
        ...         values={"slope": torch.tensor(0.75)}
        ...     ),
        ... )
        >>> guide.initialize(x, x)
        >>> _ = guide.fit([(x, x)], HessianFree())
        >>> guide.predictive(2 * x).variance.round(decimals=3)
        tensor([1., 1., 1.])
    """

    mode: Mode = field(default_factory=Pointwise)
    solver: Solver = field(default_factory=NewtonCG)
    central: bool = True

    curvature = Hessian()  # what second fits of U amount to; no field
    by_spectrum = True

    def __post_init__(self) -> None:
        modes = "Pointwise(), Sum(inputs), AbsoluteSum(inputs), InSample() or LabelShift()"
        check_choice("mode", self.mode, Mode, modes)
        check_choice("solver", self.solver, Solver, "NewtonCG(), LBFGS(strength) or Adam(strength)")

    @property
    def needs_minimum(self) -> bool:  # type: ignore[override]
        """Whether the solver does."""
        return self.solver.needs_minimum

    def fit(self, local: LocalEnergy, *, seed: int = 0) -> "HessianFreePosterior":
        """Return the posterior; its fits follow when queries come."""
        self.mode.check(local)
        if isinstance(self.mode, PretrainedMode):
            warn(
                f"{type(self.mode).__name__}() gives means of rows of the covariance matrix, not variances: they are "
                "too small away from the evaluation set, and may be negative, which raises an error. Use Pointwise() "
                "or ConjugateGradient(Hessian()) where the numbers matter."
            )
        return HessianFreePosterior(local, self)


class HessianFreePosterior(LaplacePosterior):
    """A Gaussian that is known by second fits only.

    Args:
        local: U around the mode.
        method: which fits.
    """

    def __init__(self, local: LocalEnergy, method: HessianFree) -> None:
        self.local, self.method = local, method
        self.mode = local.point
        self._kept: dict[str | None, list[Fits]] = {}

    def responses(self, query: Query) -> Tensor:
        """Return what the mode of the fit gives in the place of covariances, ``[B, K, K]``, of either sign."""
        return self.method.mode.responses(self._fits(query), query)

    def covariance(self, query: Query) -> Tensor:
        """Return the covariances, checked.

        Raises:
            NotPositiveDefiniteError: a variance is negative.
            NonFiniteError: one is NaN or infinite.
        """
        found = self.responses(query)
        _check_variances(found.diagonal(dim1=-2, dim2=-1), self.method.mode)
        return found

    def joint_covariance(self, query: Query) -> Tensor:
        if not isinstance(self.method.mode, Pointwise):
            raise UnsupportedError(
                f"{type(self.method.mode).__name__}() knows nothing of pairs of inputs: use HessianFree(Pointwise())"
            )
        found = self.method.mode.joint(self._fits(query), query)
        _check_variances(found.diagonal(), self.method.mode)
        return found

    def _fits(self, query: Query) -> Iterable[Fits]:
        if query.site in self._kept:
            return self._kept[query.site]
        method = self.method
        found = method.solver.fits(self.local, method.mode.tilts(self.local, query), method.central)
        if not method.mode.reusable:
            return found
        self._kept[query.site] = list(found)
        return self._kept[query.site]


def _check_variances(variances: Tensor, mode: Mode) -> None:
    if not bool(torch.isfinite(variances).all()):
        raise NonFiniteError(
            f"{int((~torch.isfinite(variances)).sum())} of {variances.numel()} variances are NaN or infinite: the "
            "second fits have failed. Use solver=NewtonCG(), a lower learning rate, or float64."
        )
    negative = int((variances < 0).sum())
    if negative:
        raise NotPositiveDefiniteError(
            f"{negative} of {variances.numel()} variances of {type(mode).__name__}() came out negative: "
            f"{mode.if_negative}; posterior.responses(query) holds the numbers."
        )
