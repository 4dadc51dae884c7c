# SPDX-License-Identifier: Apache-2.0
"""The energy around a mode: passes over the data, its derivatives, and what a model answers to a query."""
