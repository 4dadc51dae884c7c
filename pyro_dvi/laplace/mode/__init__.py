# SPDX-License-Identifier: Apache-2.0
"""The mode: its search, the check that it is a minimum, and the policy if it is not."""
