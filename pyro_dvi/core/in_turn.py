# SPDX-License-Identifier: Apache-2.0
"""Calls from several threads wait for each other: handlers and parameters of Pyro, and hooks of torch, are global."""

from threading import RLock

in_turn = RLock()  # a context in which one thread is at a time; the same thread may enter it again
