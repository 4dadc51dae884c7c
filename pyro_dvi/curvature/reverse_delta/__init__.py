# SPDX-License-Identifier: Apache-2.0
r"""The smoothed reverse delta method: variances of outputs that know which weights they share.

Variances that flow forward take the elements of a layer as independent, and lose what a skip connection, or positions
that share a kernel, have in common. Here each output of each example is pulled back to the weights instead:

.. math::
    \mathrm{Var}[f_k] \approx \sum_w \Bigl(\frac{\partial m_k}{\partial \bar w}\Bigr)^2 \mathrm{Var}[w]
        + \sum_y \Bigl(\frac{\partial m_k}{\partial \bar y}\Bigr)^2 \mathrm{Var}_{xw}[y].

The slopes are those of the *moments*: variances are held, and the mean of a layer is a function of the mean of the
layer before it. For a rectifier that slope is :math:`\Phi(\mu/\sigma)`, the smoothed step. The second sum runs over the
functions y that use weights: :math:`\mathrm{Var}_{xw}` is what noise of weights times that of inputs adds to the
variance of y, :math:`\mathrm{Var}[x]\,\mathrm{Var}[w]` for a product.

Status: exact for linear models; to first order in the noise, but with slopes averaged over it, for all others. Only the
noise of weights counts: inputs that are moments themselves are taken as certain, but for where they meet a weight.

Cost: one backward pass for each output and, for weights that positions share or that are used several times, a
gradient for each example, by the rules of :mod:`pyro_dvi.curvature.per_example`. A function without such a rule, or
whose rows are not those of single examples, is served by a backward pass for each example and output.
"""

from pyro_dvi.curvature.reverse_delta.recorder import ReverseDeltaRecorder

__all__ = ["ReverseDeltaRecorder"]
