# SPDX-License-Identifier: Apache-2.0
"""Uncertainty of the latents themselves from one pair of fits."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_choice
from pyro_dvi.errors import warn
from pyro_dvi.laplace.energy.layout import Subset
from pyro_dvi.laplace.guide import LaplaceGuide
from pyro_dvi.laplace.methods.hessian_free.newton_cg import NewtonCG
from pyro_dvi.laplace.methods.hessian_free.solvers import Solver, Tilt


def parameter_uncertainty(
    guide: LaplaceGuide,
    batches: Iterable[Any],
    *,
    subset: Subset | None = None,
    solver: Solver | None = None,
    central: bool = True,
) -> dict[str, Tensor]:
    r"""Return a variance for every latent, from two further fits with a small multiple of the L1 norm added.

    .. math:: u_{\pm\lambda} = \arg\min_u U(u) \mp \lambda \|u\|_1, \qquad
        \frac{|u_{i,\lambda}| - |u_{i,-\lambda}|}{2\lambda} \to
        \sum_j s_i s_j (P^{-1})_{ij}, \quad s = \operatorname{sign} \hat u

    Status: equal to the variance where latents are uncorrelated; in general the sum of a row of the covariance with the
    signs of the mode, which may be negative. Such entries are NaN, with a warning: they are not known to be small. The
    signs are those at the mode. For variances proper use ``PosteriorSamples(n)``, ``Diagonal()`` or ``Dense()``.

    *Sparsification*: a latent whose mode is small against its standard deviation can be set to zero at little loss,
    ``weight * (weight.abs() > 2 * variance.sqrt())``; where the variance is NaN this removes the latent, so look at
    how many there are.

    Args:
        guide: for ``NewtonCG()`` at a minimum of U (``guide.polish``).
        batches: all the data.
        subset: what varies, as in ``guide.fit``.
        solver: of the tilted fits; ``NewtonCG()`` by default.
        central: fit on both sides.

    Returns:
        For each site the variances of its unconstrained values, in squared units of these; zero outside a mask.

    Raises:
        ArgumentError: the solver is no such object.
        NotPositiveDefiniteError: the mode is no minimum.
        NotConvergedError: a tilted minimum was not found.

    Source: McInerney & Kallus (2024), Eqs. 31 and 32.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> def model(x, y=None):
        ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         return pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)
        >>> x = torch.ones(3)
        >>> guide = LaplaceGuide(
        ...     model,
        ...     init_loc_fn=pyro.infer.autoguide.init_to_value(
        ...         values={"slope": torch.tensor(0.75)}
        ...     ),
        ... )
        >>> guide.initialize(x, x)
        >>> parameter_uncertainty(guide, [(x, x)])["slope"].round(decimals=3)
        tensor(0.2500)
    """
    solver = NewtonCG() if solver is None else solver
    check_choice("solver", solver, Solver, "NewtonCG(), LBFGS(strength) or Adam(strength)")
    energy = guide.energy(batches, subset=subset)
    local = energy.at(energy.start)
    tilt = _NormTilt(local.point)
    (pair,) = solver.fits(local, [tilt], central)
    variances = pair.slope(lambda point: tilt.signs * point)
    negative = variances < 0
    if bool(negative.any()):
        warn(
            f"{int(negative.sum())} of {len(variances)} row sums of the covariance are negative, as latents are "
            "correlated: these variances are NaN. PosteriorSamples(n) or Diagonal() give variances proper."
        )
    return energy.layout.place(energy.layout.split(torch.where(negative, torch.nan, variances)))


class _NormTilt(Tilt):
    """The L1 norm, with the signs that the latents have at the mode."""

    def __init__(self, mode: Tensor) -> None:
        self.signs = torch.where(mode < 0, -1.0, 1.0).to(mode)

    def value_and_gradient(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm and its gradient."""
        return self.signs @ point, self.signs
