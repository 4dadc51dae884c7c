# SPDX-License-Identifier: Apache-2.0
"""The base class of objectives, schedules of the KL weight, and the objective that draws weights."""

from pyro_dvi.objectives.objective import Objective
from pyro_dvi.objectives.sampled import SampledELBO

__all__ = ["Objective", "SampledELBO"]
