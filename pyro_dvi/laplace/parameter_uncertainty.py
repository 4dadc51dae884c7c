# SPDX-License-Identifier: Apache-2.0
"""Uncertainty of the latents themselves, and the choice of those that stay uncertain in a subnetwork."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_choice, check_count
from pyro_dvi.errors import ArgumentError, warn
from pyro_dvi.laplace.energy.passes import Arguments
from pyro_dvi.laplace.energy.query import Subset
from pyro_dvi.laplace.guide import LaplaceGuide
from pyro_dvi.laplace.hessian_free.solvers import NewtonCG, Solver, Tilt


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
        subset: the latents that vary, as in ``guide.fit``.
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
    check_choice("solver", solver, Solver, "NewtonCG() or Adam(strength)")
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

    def gradient(self, point: Tensor, batch: Arguments | None = None) -> Tensor:
        return self.signs


def largest_variance(guide: LaplaceGuide, size: int) -> dict[str, Tensor]:
    r"""Choose the weights with the largest posterior variances, as masks for ``subset=``.

    .. math:: S = \arg\max_{|S| = \text{size}} \sum_{i \in S} \sigma_i^2

    Status: for a Gaussian of independent latents the subset of this size whose posterior, with the others at the mode,
    is nearest in Wasserstein distance; a heuristic for others. Variances are in squared units of the latents, so that
    weights about which the data say nothing come first.

    Args:
        guide: fitted by a method that knows the variances: ``Diagonal()`` for large networks.
        size: how many latents to choose.

    Returns:
        For each site of the fit a boolean mask of the shape of its unconstrained values.

    Raises:
        ArgumentError: more latents than the fit has, or none.
        GuideError: not fitted, or the mode has moved since.
        UnsupportedError: the method of the fit has no variances.

    Source: Daxberger et al. (2021), "Bayesian Deep Learning via Subnetwork Inference", Section 5.

    Example:
        >>> import pyro_dvi as dvi
        >>> from pyro_dvi.laplace import Dense, Diagonal, LaplaceGuide
        >>> net = dvi.to_bayesian_(torch.nn.Linear(3, 1, bias=False))
        >>> guide = LaplaceGuide(dvi.regressor(net, num_data=2, noise_scale=1.0))
        >>> batches = [(torch.tensor([[3.0, 1.0, 2.0], [3.0, 1.0, 2.0]]), torch.zeros(2, 1))]
        >>> _ = guide.polish(batches, progress=False)
        >>> _ = guide.fit(batches, Diagonal())
        >>> masks = largest_variance(guide, 2)
        >>> masks
        {'net.weight': tensor([[False,  True,  True]])}
        >>> guide.fit(batches, Dense(), subset=masks).precision
        tensor([[3., 4.],
                [4., 9.]])
    """
    variances, layout = guide.fitted.posterior.marginal_variance(), guide.fitted.layout
    check_count("size", size)
    if size > layout.size:
        raise ArgumentError(
            f"size must be at most {layout.size}, the number of latents of the fit, not {size}"
        )
    chosen = torch.zeros_like(variances, dtype=torch.bool)
    chosen[variances.topk(size).indices] = True
    return layout.place(layout.split(chosen))
