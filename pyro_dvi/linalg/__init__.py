# SPDX-License-Identifier: Apache-2.0
"""Linear algebra and minimisation by products with a matrix that is never formed: torch only, nothing of Pyro."""
