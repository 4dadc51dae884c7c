# SPDX-License-Identifier: Apache-2.0
"""Tools shared by all folders: argument checks, signatures, batches, devices, distributions, tables, progress bars."""
