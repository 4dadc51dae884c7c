# SPDX-License-Identifier: Apache-2.0
r"""Gradients of single examples, :math:`g_i = \partial_u \ell_i`.

While the model runs, a :class:`~pyro_dvi.curvature.squared_gradients.SquaredGradients` records where each latent weight
is used. In a layer with a rule, the gradient of example i follows from the layer's input and output gradient, without a
backward pass per example. All other weights need one backward pass per example, which is exact for every model but slow
for many examples.

To add a rule, write and register it in the file of its family, as described in :func:`per_example_rule`.
"""

from pyro_dvi.curvature.per_example import broadcasting, convolution, dense
from pyro_dvi.curvature.per_example.example_rules import Contribution, Outer, per_example_rule

__all__ = ["Contribution", "Outer", "broadcasting", "convolution", "dense", "per_example_rule"]
