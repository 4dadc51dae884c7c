# SPDX-License-Identifier: Apache-2.0
"""Pyro effect handlers that run guides at their means, give latents their moments, and collect observed sites."""
