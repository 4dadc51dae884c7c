# SPDX-License-Identifier: Apache-2.0
"""What pyro-dvi costs and how good its predictions are: each question a module, each answer from committed lines.

Run ``python -m benchmarks list`` to see them.
"""
