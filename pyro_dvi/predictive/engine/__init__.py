# SPDX-License-Identifier: Apache-2.0
"""Runs of a model for prediction: batches of data, posterior values, and runs with one draw or with many."""
