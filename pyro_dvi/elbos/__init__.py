# SPDX-License-Identifier: Apache-2.0
"""Deterministic objectives for ``pyro.infer.SVI``."""

from pyro_dvi.elbos.taylor import TaylorELBO

__all__ = ["TaylorELBO"]
