# SPDX-License-Identifier: Apache-2.0
"""Tools of every folder: checks of arguments, signatures, batches, devices, distributions, tables, progress bars."""
