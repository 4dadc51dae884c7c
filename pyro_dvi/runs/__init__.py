# SPDX-License-Identifier: Apache-2.0
"""Pyro effect handlers: guides at their means, latents with moments, observed sites."""
