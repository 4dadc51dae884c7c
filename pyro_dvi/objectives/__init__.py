# SPDX-License-Identifier: Apache-2.0
"""What objectives share: the KL weight, the count of steps and Pyro's interface; and the objective that draws weights."""

from pyro_dvi.objectives.sampled import SampledELBO

__all__ = ["SampledELBO"]
