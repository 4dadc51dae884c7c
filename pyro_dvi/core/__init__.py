# SPDX-License-Identifier: Apache-2.0
"""What every chapter uses and that knows nothing of inference: checks of arguments, tables, batches, devices, signatures."""
