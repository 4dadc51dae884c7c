# SPDX-License-Identifier: Apache-2.0
"""The log evidence, and scales that are chosen by it or by validation data."""
