# SPDX-License-Identifier: Apache-2.0
"""What a curvature sees of a model: log p(y | u) around the posterior mean, without any Pyro.

The ELBO builds a :class:`Linearisation` from one run of guide and model. A curvature turns it into a penalty.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from pyro_dvi.core.undisturbed import state_of
from pyro_dvi.errors import ArgumentError, ModelError, UnsupportedError

SliceArguments = Callable[[tuple, dict, Tensor], tuple[tuple, dict]]


@contextmanager
def private_random_state(generator: torch.Generator | None, device: torch.device) -> Iterator[None]:
    """Draw from ``generator`` inside the block and leave the global random state as it was.

    Distributions draw from the global generator only, so its state is swapped for the block's duration.
    """
    if generator is None:
        yield
        return
    if generator.device.type != device.type:
        raise ArgumentError(
            f"the label generator lives on {generator.device} but the model on {device}: "
            f"create it with torch.Generator(device={device.type!r})"
        )
    get, put = state_of(device)
    outer = get()
    put(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(get())
        put(outer)


@dataclass
class ObservedSite:
    """One observed sample site at the posterior mean.

    Attributes:
        name: the site's name.
        fn: its distribution, with parameters that depend on the latent means.
        value: the observed value.
        scale: the plate's scale, N/M for a minibatch of M out of N.
        mask: elements that count, or None.
        share: which part of the rows of its plates it has.
    """

    name: str
    fn: Distribution
    value: Tensor
    scale: float | Tensor = 1.0
    mask: Tensor | bool | None = None
    share: float = 1.0

    def log_prob(self, value: Tensor) -> Tensor:
        """Unscaled log-likelihood of ``value`` per independent observation; masked elements are 0."""
        log_prob = self.fn.log_prob(value)
        if self.mask is None or self.mask is True:
            return log_prob
        if self.mask is False:
            return torch.zeros_like(log_prob)
        return torch.where(self.mask, log_prob, log_prob.new_zeros(()))

    def log_likelihood(self) -> Tensor:
        """Scaled log-likelihood of the observed value, summed: a scalar."""
        return (self.log_prob(self.value) * self.scale).sum()

    def sample_labels(self) -> Tensor:
        """Labels drawn from the model's own predictive at the mean."""
        try:
            with torch.no_grad():
                return self.fn.sample()
        except NotImplementedError as error:
            raise UnsupportedError(
                f"labels cannot be drawn at observed site {self.name!r}: {type(self.fn).__name__} has no sample(). "
                "Use TaylorELBO(curvature=EmpiricalFisher()), which needs the observed labels only."
            ) from error


@dataclass
class Linearisation:
    """The log-likelihood around the posterior mean, as one run of the model recorded it.

    Attributes:
        names: latent sites whose uncertainty is expanded.
        values: their unconstrained means u; ``values[k]`` is a node of the autograd graph of every site.
        scales: posterior standard deviations, broadcastable to the values.
        sites: the observed sites.
        precision_limits: returns per latent the precision that its prior contributes to an optimal posterior,
            kl_weight / s², or None where the prior is not Normal.
        factors: ``pyro.factor`` terms, which have a log-density but no labels.
        local: names of latents inside plates, whose elements belong to other rows in every step.
        recorder: what ``Curvature.recorder`` returned for this run.
        model: what was run, by which a curvature remembers what it knows of it.
        subset: builds the linearisation of a random part of the minibatch, given the fraction and a function
            ``(args, kwargs, rows) -> (args, kwargs)`` that takes rows of the model's arguments (None: along
            the first dimension).
    """

    names: list[str]
    values: list[Tensor]
    scales: list[Tensor]
    sites: list[ObservedSite]
    precision_limits: Callable[[], list[Tensor | None]] = list
    factors: list[ObservedSite] = field(default_factory=list)
    local: frozenset[str] = frozenset()
    recorder: Any = None
    model: Any = None
    subset: Callable[[float, SliceArguments | None], "Linearisation"] | None = None

    @property
    def device(self) -> torch.device:
        return self.values[0].device

    def require_labels(self, curvature: str) -> None:
        """Refuse terms of the likelihood from which no labels can be drawn."""
        if self.factors:
            raise ModelError(
                f"pyro.factor site {self.factors[0].name!r} has no distribution to draw labels from, so {curvature} "
                "would silently leave out its curvature. Write it as an observed pyro.sample site, or use "
                "TaylorELBO(curvature=MinibatchGradient())."
            )

    def gradients(self, scalar: Tensor) -> list[Tensor]:
        """Differentiable gradient of ``scalar`` with respect to every latent mean."""
        if not scalar.requires_grad:  # everything is masked, or no latent reaches the observed sites
            return [torch.zeros_like(u) for u in self.values]
        return list(torch.autograd.grad(scalar, self.values, create_graph=True, materialize_grads=True))
