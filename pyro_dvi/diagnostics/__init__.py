# SPDX-License-Identifier: Apache-2.0
"""Where do approximations deviate from what they stand for?"""

from pyro_dvi.diagnostics.comparison import Comparison, LayerComparison
from pyro_dvi.diagnostics.sampling import compare_with_sampling

__all__ = ["Comparison", "LayerComparison", "compare_with_sampling"]
