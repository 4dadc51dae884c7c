# SPDX-License-Identifier: Apache-2.0
r"""Training by several processes, each with its part of every minibatch, over ``torch.distributed``.

Process k evaluates the objective on its :math:`m_k` examples, with the plate's scale :math:`N/m_k`. Weighted by
:math:`m_k/\sum_j m_j`, their sum is the objective of the joint minibatch: log-likelihoods, their gradients and sums
over examples add up with the scale :math:`N/\sum_j m_j`, and the KL divergence counts once.
"""

from pyro_dvi.distributed.data_parallel import DataParallel
from pyro_dvi.distributed.draws import Draws, OwnDraws, SharedDraws
from pyro_dvi.distributed.joint_batches import JointBatches

__all__ = ["DataParallel", "Draws", "JointBatches", "OwnDraws", "SharedDraws"]
