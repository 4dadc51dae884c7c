# SPDX-License-Identifier: Apache-2.0
"""The log evidence, and tuning of scales by the evidence or on validation data."""
