# SPDX-License-Identifier: Apache-2.0
"""He scaling: prior variances over the number of inputs to a unit."""

import math
from dataclasses import dataclass

from pyro.nn.module import PyroModule
from torch import Tensor, nn

from pyro_dvi.bayesian.priors import Prior, positive
from pyro_dvi.bayesian.selection import Candidate
from pyro_dvi.bayesian.site_prior import NormalPrior, SitePrior

__all__ = ["FanIn", "fan_in"]


@dataclass(frozen=True)
class FanIn(Prior):
    r"""He scaling: weights get a variance of ``gain²`` over the number of inputs to a unit.

    .. math::
        w \sim N\left(0, \frac{g^2}{\text{fan-in}}\right), \qquad b \sim N(0, s_b^2)

    With :math:`g^2 = 2` the activations of a ReLU network keep their second moment from layer to layer. The
    fan-in is that of the layer: inputs of a Linear layer, input channels times kernel size of a convolution,
    input channels times kernel size over stride of a transposed one, the product of both inputs of a Bilinear
    layer. An Embedding looks up one row and nothing is summed, so its prior is N(0, 1). A bias multiplies the
    constant 1 and has no fan-in either; parameters with fewer than two dimensions get :math:`s_b`.

    Status: exact for independent inputs; a convention for biases and embeddings.

    Args:
        gain: :math:`g`, without unit; :math:`\sqrt 2` for ReLU and its smooth relatives, 1 for linear layers.
        bias: :math:`s_b`, the scale of biases and other vectors.

    Raises:
        ArgumentError: if ``gain`` or ``bias`` is not positive and finite.

    Source: He et al. (2015), "Delving deep into rectifiers", Eq. 10.

    Example:
        >>> import torch
        >>> fan_in("weight", torch.zeros(10, 50))
        0.2
    """

    gain: float = math.sqrt(2.0)
    bias: float = 1.0

    def __post_init__(self) -> None:
        positive(self.gain, "FanIn: gain")
        positive(self.bias, "FanIn: bias")

    def __call__(self, name: str, parameter: Tensor, module: nn.Module | None = None) -> float:
        """Return the scale of ``parameter``; ``module`` tells apart layers with unusual weight layouts."""
        if parameter.dim() < 2:
            return self.bias
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            return 1.0
        inputs = parameter.numel() / max(1, parameter.shape[0])
        if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
            inputs = (
                module.in_channels / module.groups * math.prod(module.kernel_size) / math.prod(module.stride)
            )
        return self.gain / math.sqrt(max(inputs, 1.0))

    def place(self, target: Candidate, root: PyroModule) -> SitePrior:
        """Return a Normal prior of that scale."""
        scale = self(target.name, target.parameter, target.module)
        return NormalPrior(target.attribute, target.position, scale)


fan_in = FanIn()
"""He scaling with the usual gain: ``to_bayesian_(net, prior_scale=fan_in)``."""
