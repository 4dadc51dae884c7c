# SPDX-License-Identifier: Apache-2.0
"""Rules of prediction, a file for each: what stands for the posterior."""
