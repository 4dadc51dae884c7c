# SPDX-License-Identifier: Apache-2.0
"""The shortest program for each method, here and in other libraries."""
