# SPDX-License-Identifier: Apache-2.0
"""The log evidence, and tuning of scales with the evidence or on validation data."""
