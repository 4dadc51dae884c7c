# SPDX-License-Identifier: Apache-2.0
"""Runs of a model for prediction: batches of data, posterior values, one run for one draw or for many."""
