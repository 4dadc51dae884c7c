# SPDX-License-Identifier: Apache-2.0
"""What benchmarks share: the frame, data, networks, methods and tables."""
