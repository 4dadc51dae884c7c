# SPDX-License-Identifier: Apache-2.0
"""Export to ArviZ: ``InferenceData`` with ArviZ 0.x, ``xarray.DataTree`` with ArviZ 1.x.

The only chapter that knows ArviZ; ``import pyro_dvi`` does not load it.
"""

from pyro_dvi.inference_data.export import to_arviz
from pyro_dvi.inference_data.prediction import from_prediction

__all__ = ["from_prediction", "to_arviz"]
