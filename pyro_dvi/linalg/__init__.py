# SPDX-License-Identifier: Apache-2.0
"""Linear algebra and minimisation with matrix-vector products, without forming matrices; depends on torch only."""
