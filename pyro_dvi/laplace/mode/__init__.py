# SPDX-License-Identifier: Apache-2.0
"""The mode: its search, whether it is a minimum, and what is done when it is not."""
