# SPDX-License-Identifier: Apache-2.0
"""VOGN, OGN and IVON."""
