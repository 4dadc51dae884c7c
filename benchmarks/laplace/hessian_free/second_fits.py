# SPDX-License-Identifier: Apache-2.0
"""Second fits for each query or for an evaluation set, with any solver, and what is computed from them."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.laplace.hessian_free.solvers import Fits, NewtonCG, Solver, Tilt
from pyro_dvi.core.arguments import check_choice
from pyro_dvi.errors import ArgumentError, NonFiniteError, NotPositiveDefiniteError, UnsupportedError, warn
from pyro_dvi.laplace import LaplaceGuide
from pyro_dvi.laplace.energy.energy import LocalEnergy
from pyro_dvi.laplace.energy.passes import Arguments
from pyro_dvi.laplace.energy.precision import Hessian
from pyro_dvi.laplace.energy.query import Query, Subset
from pyro_dvi.laplace.methods.method import LaplacePosterior, Method
from pyro_dvi.linalg.operator import identity_rows


class Mode(ABC):
    r"""Choice of the functions that tilt U; by default, one pair of fits per output k.

    .. math:: r_k(u) = \frac1M \sum_j f_k(x_j; u), \qquad
        \frac{\partial f_k(x; u_\lambda)}{\partial\lambda} \to \frac1M \sum_j \operatorname{Cov}(f_k(x), f_k(x_j))

    If r is the mean of an output over M inputs, one pair of fits serves any number of queries. However, the result is
    the mean of a row of the covariance matrix, not the variance on its diagonal. The two agree only for inputs whose
    outputs are as correlated with the outputs at the M inputs as with themselves. Otherwise, the result is smaller in
    proportion to the mean correlation, and negative if the mean correlation is negative.

    Attributes:
        reusable: whether the fits can be reused for other queries of the same site.
    """

    reusable: bool = False

    def check(self, local: LocalEnergy) -> None:  # noqa: B027 (most modes support every model)
        """Raise an error if the mode does not support the model."""

    @abstractmethod
    def tilts(self, local: LocalEnergy, query: Query) -> Iterable[Tilt]:
        """Return the functions r."""

    def responses(self, fits: Iterable[Fits], query: Query) -> Tensor:
        """Return estimates ``[B, K, K]`` from the fits, which may be negative; by default, the row means."""
        found = torch.stack([pair.slope(query.at) for pair in fits], -1)  # [B, K] for the tilt of each output
        return 0.5 * (found + found.mT)


@dataclass(frozen=True)
class Pointwise(Mode):
    r"""Tilt U by each output at each query input in turn.

    .. math:: \frac{f_j(x; u_\lambda) - f_j(x; u_{-\lambda})}{2\lambda}
        &= \nabla f_j^\top P^{-1} \nabla f_k + O(\text{step}^2), \\ u_\lambda &= \arg\min_u U(u) - \lambda f_k(x; u)

    All outputs of a tilted fit together give a row of the K × K covariance.

    Status: converges to the exact covariance of the linearised model; needs B K pairs of fits for B inputs and K
    outputs.

    Source: McInerney & Kallus (2024), the main method.
    """

    def tilts(self, local: LocalEnergy, query: Query) -> Iterator[Tilt]:
        """Yield one tilt for each output of each input."""
        units = identity_rows(query.mean.flatten(), at_once=1)
        return (Tilt(query, weights.reshape(query.mean.shape)) for weights in units)

    def responses(self, fits: Iterable[Fits], query: Query) -> Tensor:
        """Return the covariances of single examples."""
        size = query.size
        found = [pair.slope(query.at)[index // size] for index, pair in enumerate(fits)]
        blocks = torch.stack(found).reshape(query.num_rows, size, size)
        return 0.5 * (blocks + blocks.mT)

    def joint(self, fits: Iterable[Fits], query: Query) -> Tensor:
        """Return the covariance of all outputs of all examples, ``[B K, B K]``."""
        whole = torch.stack([pair.slope(query.at).reshape(-1) for pair in fits])
        return 0.5 * (whole + whole.mT)


@dataclass(frozen=True, eq=False)
class Sum(Mode):
    r"""Tilt U by the mean of an output over an evaluation set of size M.

    .. math:: r_k(u) = \frac1M \sum_j f_k(x_j; u)

    Status: gives :math:`\frac1M\sum_j \operatorname{Cov}(f_k(x), f_k(x_j))`, the mean of a row of the covariance
    matrix, not the variance; see :class:`Mode`.

    Args:
        inputs: arguments of the model for the evaluation set, a tensor or a tuple. None means the inputs of each query,
            with new fits for each query.

    Source: McInerney & Kallus (2024), the pre-trained variant. The paper does not divide by M, so its result grows with
    the evaluation set.
    """

    inputs: Any = None

    @property
    def reusable(self) -> bool:  # type: ignore[override]
        """Whether there is an evaluation set; the fits then do not depend on the query."""
        return self.inputs is not None

    def tilts(self, local: LocalEnergy, query: Query) -> list[Tilt]:
        """Return one tilt for each output."""
        energy, evaluation = local.energy, query
        if self.inputs is not None:
            given = self.inputs if isinstance(self.inputs, tuple) else (self.inputs,)
            evaluation = Query(energy.model, given, energy.locs, energy.layout, site=query.site)
        weights = self.weights(evaluation) / evaluation.num_rows
        return [Tilt(evaluation, weights * only) for only in torch.eye(query.size).to(weights)]

    def weights(self, evaluation: Query) -> Tensor:
        """Return the weights of the outputs of the evaluation set in the sum."""
        return torch.ones_like(evaluation.mean)


@dataclass(frozen=True, eq=False)
class AbsoluteSum(Sum):
    r"""Tilt U by the mean of absolute outputs over an evaluation set of size M, and compare absolute outputs.

    .. math:: r_k(u) &= \frac1M \sum_j |f_k(x_j; u)|, \\
        \frac{\partial |f_k(x; u_\lambda)|}{\partial\lambda} &\to
        \frac{s(x)}M \sum_j s(x_j) \operatorname{Cov}(f_k(x), f_k(x_j)), \quad s = \operatorname{sign} f_k

    Predictions of different signs are often negatively correlated; absolute values prevent them from cancelling.

    Status: gives a signed row mean of the covariance matrix, not the variance; it can be negative, and depends on the
    origin of the outputs. The signs are fixed at the mode, so they give the absolute values only until an output
    crosses zero.

    Args:
        inputs: as in :class:`Sum`.

    Source: McInerney & Kallus (2024), the pre-trained variant with absolute values.
    """

    def weights(self, evaluation: Query) -> Tensor:
        """Return the signs of the outputs at the mode."""
        return torch.where(evaluation.mean < 0, -1.0, 1.0).to(evaluation.mean)

    def responses(self, fits: Iterable[Fits], query: Query) -> Tensor:
        """Return the signed row means."""
        return self.weights(query).unsqueeze(-1) * super().responses(fits, query)


@dataclass(frozen=True)
class SecondFits(Method):
    r"""Compute variances from second fits: how far a prediction moves when a multiple of it is added to the loss.

    .. math:: u_{\pm\lambda} = \arg\min_u U(u) \mp \lambda f(x; u), \qquad
        \frac{f(x; u_\lambda) - f(x; u_{-\lambda})}{2\lambda} \to \nabla f^\top (\nabla^2 U)^{-1} \nabla f

    with U as in :class:`~pyro_dvi.LaplaceGuide`: it includes the full prior, and the log-likelihood of all data divided
    by the KL weight.

    Status: depends on the solver. With ``Pointwise()`` and ``NewtonCG()``, which uses Hessian-vector products, the
    result is the covariance of the exact Hessian, up to terms of the order of the squared step and the tolerance.
    ``Adam`` and ``SGD`` use only gradients and start from any network without checking it, as in the paper. They
    subtract two fits, so that the effect of unfinished training cancels; the paper subtracts the original network
    (``less="mode"``). Fine-tuning with ``Adam`` and ``SGD`` ends before the minimum. After 300 steps on the regressions
    of the paper, with an untilted fit subtracted, standard deviations are 15 to 32 % too small in the median. A tenth
    of them are too small by a factor of more than 1.7 to 3.5. Modes other than ``Pointwise()`` do not estimate the
    variance. ``ConjugateGradient(Hessian())`` gives the same results as ``NewtonCG()`` with one linear solve instead of
    two fits, at about a ninth of the cost in our benchmark.

    Args:
        mode: ``Pointwise()``, or one of the pre-trained modes ``Sum(inputs)``, ``AbsoluteSum(inputs)``, ``InSample()``
            and ``LabelShift()``, which fit once for all queries.
        solver: ``NewtonCG()`` at a minimum (``guide.polish(batches)``); otherwise ``Adam(strength)`` or ``SGD(strength,
            learning_rate)``.
        less: the fit that is subtracted. ``"opposite"`` is the fit with the opposite tilt. ``"untilted"`` is a fit
            without tilt; with ``NewtonCG``, it halves the cost, and the error is of the order of the step. ``"mode"``
            is the original network, as in the paper; the effect of unfinished training then counts as variance and may
            have either sign.

    Raises:
        ArgumentError: an argument is not one of these objects or names.
        NotPositiveDefiniteError: in a query, the mode is not a minimum, or a variance is negative.
        NotConvergedError: in a query, a tilted minimum was not found.

    Source: McInerney & Kallus (2024).
    """

    mode: Mode = field(default_factory=Pointwise)
    solver: Solver = field(default_factory=NewtonCG)
    less: str = "opposite"

    precision = Hessian()  # not a field, because second fits of U correspond to this matrix
    by_spectrum = True

    def __post_init__(self) -> None:
        modes = "Pointwise(), Sum(inputs), AbsoluteSum(inputs), InSample() or LabelShift()"
        check_choice("mode", self.mode, Mode, modes)
        check_choice("solver", self.solver, Solver, "NewtonCG() or Adam(strength)")
        if self.less not in ("opposite", "untilted", "mode"):
            raise ArgumentError(f'less must be "opposite", "untilted" or "mode", got {self.less!r}')

    def fit(self, local: LocalEnergy, *, seed: int = 0) -> "SecondFitsPosterior":
        """Return the posterior; the second fits run at the first query."""
        self.mode.check(local)
        if not isinstance(self.mode, Pointwise):
            warn(
                f"{type(self.mode).__name__}() gives means of rows of the covariance, not variances: for variances, "
                "use Pointwise()"
            )
        return SecondFitsPosterior(local, self)


class SecondFitsPosterior(LaplacePosterior):
    """A Gaussian represented by second fits.

    Args:
        local: U with its derivatives at the mode.
        method: the method, with its mode and solver.
    """

    def __init__(self, local: LocalEnergy, method: SecondFits) -> None:
        self.local, self.method = local, method
        self.mode = local.point
        self._kept: dict[str | None, list[Fits]] = {}

    def responses(self, query: Query) -> Tensor:
        """Return what ``method.mode`` computes in place of covariances, ``[B, K, K]``; variances may be negative."""
        return self.method.mode.responses(self._fits(query), query)

    def covariance(self, query: Query) -> Tensor:
        """Return the covariances, after checking their signs.

        Raises:
            NotPositiveDefiniteError: a variance is negative.
            NonFiniteError: a variance is NaN or infinite.
        """
        return self._checked(self.responses(query))

    def joint_covariance(self, query: Query) -> Tensor:
        if not isinstance(self.method.mode, Pointwise):
            raise UnsupportedError("covariances between inputs need SecondFits(Pointwise())")
        return self._checked(self.method.mode.joint(self._fits(query), query))

    def _checked(self, covariance: Tensor) -> Tensor:
        variances = covariance.diagonal(dim1=-2, dim2=-1)
        if not bool(torch.isfinite(variances).all()):
            raise NonFiniteError("some variances are NaN or infinite: use NewtonCG(), or smaller steps")
        if negative := int((variances < 0).sum()):
            raise NotPositiveDefiniteError(
                f"{negative} of {variances.numel()} variances of {type(self.method.mode).__name__}() are negative: run "
                "guide.polish(batches) and use SecondFits(Pointwise(), NewtonCG()), or get the values with "
                "posterior.responses(query)"
            )
        return covariance

    def _fits(self, query: Query) -> Iterable[Fits]:
        if query.site in self._kept:
            return self._kept[query.site]
        method = self.method
        found = method.solver.fits(self.local, method.mode.tilts(self.local, query), method.less)
        if not method.mode.reusable:
            return found
        self._kept[query.site] = list(found)
        return self._kept[query.site]


def parameter_uncertainty(
    guide: LaplaceGuide,
    batches: Iterable[Any],
    *,
    subset: Subset | None = None,
    solver: Solver | None = None,
) -> dict[str, Tensor]:
    r"""Return a variance for every latent, from two fits with a small multiple of the L1 norm added to U.

    .. math:: u_{\pm\lambda} = \arg\min_u U(u) \mp \lambda \|u\|_1, \qquad
        \frac{|u_{i,\lambda}| - |u_{i,-\lambda}|}{2\lambda} \to
        \sum_j s_i s_j (P^{-1})_{ij}, \quad s = \operatorname{sign} \hat u

    Status: equal to the variance if latents are uncorrelated; in general, the signed sum of a row of the covariance,
    with the signs of the mode. If the sum is negative, the entry is NaN, with a warning; this does not mean that the
    variance is small. For actual variances, use ``PosteriorSamples(n)``, ``Diagonal()`` or ``Dense()``.

    *Sparsification*: a latent whose mode is small relative to its standard deviation can be set to zero with little
    loss, for example with ``weight * (weight.abs() > 2 * variance.sqrt())``. This also sets latents to zero whose
    variance is NaN, so check how many there are.

    Args:
        guide: the guide. For ``NewtonCG()``, its mode must be a minimum of U (``guide.polish``).
        batches: all the data.
        subset: the latents that vary, as in ``guide.fit``.
        solver: solver of the tilted fits; by default, ``NewtonCG()``.

    Returns:
        For each site, the variances of its unconstrained values, in squared units; zero outside a mask.

    Raises:
        ArgumentError: ``solver`` is not a solver object.
        NotPositiveDefiniteError: the mode is not a minimum.
        NotConvergedError: a tilted minimum was not found.

    Source: McInerney & Kallus (2024), Eqs. 31 and 32.
    """
    solver = NewtonCG() if solver is None else solver
    check_choice("solver", solver, Solver, "NewtonCG() or Adam(strength)")
    energy = guide.energy(batches, subset=subset)
    local = energy.at(energy.start)
    tilt = _NormTilt(local.point)
    (pair,) = solver.fits(local, [tilt])
    variances = pair.slope(lambda point: tilt.signs * point)
    negative = variances < 0
    if bool(negative.any()):
        count = f"{int(negative.sum())} of {len(variances)} signed row sums of the covariance are negative"
        warn(
            f"{count}, because latents are correlated; these entries are NaN. For variances, use PosteriorSamples(n)."
        )
    return energy.layout.place(energy.layout.split(torch.where(negative, torch.nan, variances)))


class _NormTilt(Tilt):
    """The L1 norm, with the signs that the latents have at the mode."""

    def __init__(self, mode: Tensor) -> None:
        self.signs = torch.where(mode < 0, -1.0, 1.0).to(mode)

    def gradient(self, point: Tensor, batch: Arguments | None = None) -> Tensor:
        return self.signs
