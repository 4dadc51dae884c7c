# SPDX-License-Identifier: Apache-2.0
"""Linear algebra and minimisation with matrix-vector products. This package depends only on torch."""
