# SPDX-License-Identifier: Apache-2.0
r"""Gradients of single examples, :math:`g_i = \partial_u \ell_i`.

While the model runs, a :class:`~pyro_dvi.curvature.squared_gradients.SquaredGradients` notes where each latent weight
is used. The gradient of example i is then an outer product of that layer's input and output gradient, and no pass per
example is needed. Weights used in any other way are served by one backward pass per example: exact for every model,
slow for many examples.

Adding a rule: write it in the file of its family, as :func:`per_example_rule` says, and register it there.
"""

from pyro_dvi.curvature.per_example import broadcasting, convolution, dense
from pyro_dvi.curvature.per_example.example_rules import Contribution, Outer, per_example_rule

__all__ = ["Contribution", "Outer", "broadcasting", "convolution", "dense", "per_example_rule"]
