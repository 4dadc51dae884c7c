# SPDX-License-Identifier: Apache-2.0
"""The search for the mode, the check that it is a minimum, and the policy if it is not."""
