# SPDX-License-Identifier: Apache-2.0
"""Export to ArviZ: ``InferenceData`` with ArviZ 0.x, ``xarray.DataTree`` with ArviZ 1.x.

Only this folder imports ArviZ; ``import pyro_dvi`` does not load it.
"""

from pyro_dvi.analysis.arviz_export.exporter import to_arviz

__all__ = ["to_arviz"]
