# SPDX-License-Identifier: Apache-2.0
r"""Gradients of single examples, :math:`g_i = \partial_u \ell_i`.

While the model runs, a :class:`~pyro_dvi.curvature.squared_gradients.SquaredGradients` records where each latent weight
is used. The gradient of example i is then an outer product of the layer's input and output gradient, and no backward
pass per example is needed. Weights that are used in any other way take one backward pass per example, which is exact
for every model but slow for many examples.

To add a rule, write it in the file of its family, as described in :func:`per_example_rule`, and register it there.
"""

from pyro_dvi.curvature.per_example import broadcasting, convolution, dense
from pyro_dvi.curvature.per_example.example_rules import Contribution, Outer, per_example_rule

__all__ = ["Contribution", "Outer", "broadcasting", "convolution", "dense", "per_example_rule"]
