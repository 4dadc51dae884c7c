# SPDX-License-Identifier: Apache-2.0
"""Hamiltonian Monte Carlo with many chains in one batch, as a reference for small networks.

Pyro's NUTS runs one chain at a time. On the network of the quickstart, it had not converged after half a minute.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def monte_carlo(energy: Callable[[Tensor], Tensor], start: Tensor, draws: int = 100) -> Tensor:
    """Draw from the density exp(-energy); a warm-up of equal length first adapts the step size of each chain.

    Args:
        energy: maps points ``[chains, D]`` to one energy per chain.
        start: initial points; 1,000 steps of Adam move them to regions of high density.
        draws: number of draws per chain.

    Returns:
        Points of shape ``[draws, chains, D]``.
    """
    u = start.clone().requires_grad_()
    adam, kept = torch.optim.Adam([u], 0.03), []
    for _ in range(1000):
        adam.zero_grad()
        energy(u).sum().backward()
        adam.step()

    def at(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        u = u.detach().requires_grad_()
        value = energy(u)
        return u.detach(), value.detach(), torch.autograd.grad(value.sum(), u)[0]

    chains = len(start)
    now, step = at(u), torch.full((chains, 1), 1e-3)
    for iteration in range(2 * draws):
        momentum, new = torch.randn_like(u), now
        before = now[1] + 0.5 * momentum.square().sum(-1)
        momentum = momentum - 0.5 * step * now[2]
        for _ in range(int(torch.randint(100, 300, ()))):
            new = at(new[0] + step * momentum)
            momentum = momentum - step * new[2]
        momentum = momentum + 0.5 * step * new[2]
        after = new[1] + 0.5 * momentum.square().sum(-1)
        accepted = (before - after).clamp(max=0).exp().nan_to_num(0.0)[:, None]
        moves = torch.rand(chains, 1) < accepted
        now = at(torch.where(moves, new[0], now[0]))
        if iteration < draws:
            step = step * (0.1 * (accepted - 0.8)).exp()
        else:
            kept.append(now[0])
    return torch.stack(kept)
