# SPDX-License-Identifier: Apache-2.0
"""What every folder uses: checks of arguments, signatures, batches, devices, distributions, tables, progress bars."""
