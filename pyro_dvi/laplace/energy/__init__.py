# SPDX-License-Identifier: Apache-2.0
"""The energy around a mode with its derivatives, passes over the data, and outputs at query inputs."""
