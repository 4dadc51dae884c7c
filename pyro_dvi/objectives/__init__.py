# SPDX-License-Identifier: Apache-2.0
"""The base class of objectives, the sampled ELBO, schedules of the KL weight, and captured steps."""

from pyro_dvi.objectives.captured import Captured
from pyro_dvi.objectives.objective import Objective
from pyro_dvi.objectives.sampled import SampledELBO

__all__ = ["Captured", "Objective", "SampledELBO"]
