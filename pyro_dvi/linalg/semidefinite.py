# SPDX-License-Identifier: Apache-2.0
"""Eigenvectors of positive semi-definite matrices, which may be of low rank."""

from contextlib import suppress

import torch
from torch import Tensor

from pyro_dvi.core.recorder import structural
from pyro_dvi.errors import NotPositiveDefiniteError


def eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    r"""Decompose a positive semi-definite matrix, :math:`A = V \operatorname{diag}(d) V^\top`.

    In float32, the decomposition of a matrix of low rank can fail to converge, or return NaN. It is then repeated in
    float64, and finally with distinct numbers below the rounding of float32 added to the diagonal, which separate equal
    eigenvalues.

    Status: exact up to rounding; eigenvalues that rounding makes negative become zero.

    Args:
        matrix: A, ``[*batch, n, n]``; only its symmetric part is used.

    Returns:
        d, ``[*batch, n]``, in ascending order, and V, ``[*batch, n, n]``.

    Raises:
        NotPositiveDefiniteError: the decomposition does not converge, for example because of infinite elements.

    Example:
        >>> eigen(torch.ones(2, 2))[0]
        tensor([0., 2.])
    """
    symmetric = 0.5 * (matrix + matrix.mT)
    wide = torch.device("cpu") if matrix.device.type == "mps" else matrix.device  # mps has no float64
    for attempt in range(3):
        if attempt == 1:
            symmetric = symmetric.to(wide, torch.float64)
        elif attempt == 2:
            apart = torch.linspace(0, torch.finfo(torch.float32).eps, matrix.shape[-1]).to(symmetric)
            symmetric = symmetric + torch.diag_embed(symmetric.abs().amax((-2, -1)).unsqueeze(-1) * apart)
        with suppress(torch.linalg.LinAlgError):  # type: ignore[attr-defined]
            values, vectors = torch.linalg.eigh(symmetric)
            if structural(values.isfinite().all()):
                return values.clamp_min(0).to(matrix), vectors.to(matrix)
    raise NotPositiveDefiniteError(
        f"the eigenvectors of a matrix of size {matrix.shape[-1]} cannot be computed: check for infinite or extreme "
        "inputs and weights"
    )
