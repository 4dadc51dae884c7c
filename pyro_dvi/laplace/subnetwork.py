# SPDX-License-Identifier: Apache-2.0
"""Which weights to keep uncertain where all of them are too many."""

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_count
from pyro_dvi.errors import ArgumentError
from pyro_dvi.laplace.guide import LaplaceGuide


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
