# SPDX-License-Identifier: Apache-2.0
"""The result of a prediction: moments and probabilities by batch, their scores, quantiles and tables."""
