# SPDX-License-Identifier: Apache-2.0
"""How the Gaussian around a mode is represented: a file for each method."""
