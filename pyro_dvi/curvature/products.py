# SPDX-License-Identifier: Apache-2.0
r"""Products of vectors with the Hessian and the generalised Gauss-Newton matrix of a log-likelihood.

A run of the model records a graph from its latents :math:`u` to its observed distributions. With parameters f of these
distributions and the square-root factors w of their Fisher information (:mod:`pyro_dvi.curvature.information`),

.. math::
    G = \sum_k w_k^2\, \nabla f_k \nabla f_k^\top, \qquad G v = J^\top\bigl(w^2 \odot J v\bigr),

where :math:`J v` is the derivative of :math:`J^\top c`, which is linear in c. Only reverse mode is used, so the model
only needs to be twice differentiable. Many vectors share one graph.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pyro_dvi.curvature.information import expected_information, of_site
from pyro_dvi.curvature.linearisation import ObservedSite, twice_differentiated
from pyro_dvi.errors import ModelError, UnsupportedError


class LinearMap:
    r"""The Jacobian J of outputs f with respect to several tensors, as products with J and its transpose.

    Args:
        outputs: f, of any shape, a node of the graph of ``values``.
        values: the tensors u, leaves or nodes.
        vectors_at_once: number of vectors per pass through the graph; fewer need less memory.
    """

    def __init__(self, outputs: Tensor, values: Sequence[Tensor], *, vectors_at_once: int = 64) -> None:
        self.outputs = outputs
        self.values = list(values)
        self.vectors_at_once = vectors_at_once

    def transposed(self, cotangents: Tensor, **options: bool) -> list[Tensor]:
        r"""Return :math:`J^\top c` for each c.

        Args:
            cotangents: c, ``[S, *outputs]``.
            options: ``create_graph`` of :func:`gradients_at`.

        Returns:
            One tensor ``[S, *value]`` for each value.
        """
        return batched_gradients(self.outputs, self.values, cotangents, self.vectors_at_once, **options)

    def forward(self, vectors: Sequence[Tensor]) -> Tensor:
        r"""Return :math:`J v` for each v.

        Args:
            vectors: one tensor ``[S, *value]`` for each value.

        Returns:
            Products of shape ``[S, *outputs]``.
        """
        cotangent, pulled = self._dual
        linear = [(p, v) for p, v in zip(pulled, vectors, strict=True) if p is not None and p.requires_grad]
        count = len(vectors[0])
        if not linear:
            return self.outputs.new_zeros(count, *self.outputs.shape)
        # One scalar <J^T c, v> per vector, whose derivative with respect to c is J v.
        (result,) = batched_gradients(
            [p for p, _ in linear],
            [cotangent],
            [v for _, v in linear],
            self.vectors_at_once,
            allow_unused=False,  # unused only if a function of the model is not twice differentiable
        )
        return result

    @cached_property
    def _dual(self) -> tuple[Tensor, list[Tensor | None]]:
        """A cotangent c, and Jᵀ c for each value as a function of c; None for a value that does not affect outputs."""
        cotangent = torch.zeros_like(self.outputs).requires_grad_()
        if not self.outputs.requires_grad:
            return cotangent, [None] * len(self.values)
        with torch.enable_grad():
            pulled: tuple[Tensor | None, ...] = torch.autograd.grad(
                self.outputs, self.values, cotangent, create_graph=True, allow_unused=True
            )
        return cotangent, list(pulled)


def information_pairs(
    sites: Sequence[ObservedSite],
    draw_labels: Callable[[ObservedSite], Sequence[Tensor]],
    differentiable: bool = False,
) -> list[tuple[Tensor, Tensor]]:
    r"""Return f and w of each site, of shape ``[*batch_shape, K]``.

    Args:
        sites: the observed sites.
        draw_labels: function that draws labels from a site's distribution; without a closed form, the Fisher
            information is estimated from these labels, with :math:`f_s = \log p(y_s)`.
        differentiable: whether w has a graph.
    """
    found = []
    for site in sites:
        try:
            pairs = expected_information(site.fn, site.name)
        except UnsupportedError as error:
            if differentiable:
                raise UnsupportedError(
                    f"{type(site.fn).__name__} at site {site.name!r} has no closed-form Fisher information, and drawn "
                    "labels give no gradient: add a rule with pyro_dvi.curvature.information.information_rule"
                ) from error
            labels = draw_labels(site)
            terms = torch.stack([site.fn.log_prob(label) for label in labels], -1)
            pairs = [(terms, torch.full_like(terms.detach(), len(labels) ** -0.5))]
        found += [(f, w if differentiable else w.detach()) for f, w in of_site(pairs, site)]
    return found


def batched_gradients(
    outputs: Any, values: Sequence[Tensor], cotangents: Any, vectors_at_once: int, **options: bool
) -> list[Tensor]:
    """Return vector-Jacobian products for cotangents with an additional first dimension S, computed some at a time.

    If the outputs are gradients that have a graph, the products are Hessian-vector products, :math:`H v`. For the
    options ``create_graph`` and ``allow_unused``, see :func:`gradients_at`.
    """
    found = gradients_at(outputs, values, cotangents, vectors_at_once, **options)
    lead = len(cotangents if isinstance(cotangents, Tensor) else cotangents[0])
    return [v.new_zeros((lead, *v.shape)) if g is None else g for v, g in zip(values, found, strict=True)]


def gradients_at(
    outputs: Any,
    places: Sequence[Any],
    cotangents: Any,
    vectors_at_once: int,
    *,
    create_graph: bool = False,
    allow_unused: bool = True,
) -> list[Tensor | None]:
    """Return products as in :func:`batched_gradients`, at tensors or edges of the graph; None where one is unused.

    Functions that cannot be vectorised are called once per vector.
    """
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    cotangents = [cotangents] if isinstance(cotangents, Tensor) else list(cotangents)
    reached = [n for n, output in enumerate(outputs) if output.requires_grad]
    if not reached or not places:
        return [None] * len(places)
    outputs, cotangents = [outputs[n] for n in reached], [cotangents[n] for n in reached]

    def products(vectors: tuple[Tensor, ...], batched: bool) -> list[Tensor | None]:
        with twice_differentiated(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*performance drop.*", category=UserWarning)  # vmap
            found = torch.autograd.grad(
                outputs,
                places,
                vectors,
                retain_graph=True,
                allow_unused=allow_unused,
                create_graph=create_graph,
                is_grads_batched=batched,
            )
        return [g if create_graph or g is None else g.detach() for g in found]

    def one_by_one(vectors: tuple[Tensor, ...]) -> list[Tensor | None]:
        return _joined([products(v, batched=False) for v in zip(*vectors, strict=True)], torch.stack)

    def some(vectors: tuple[Tensor, ...]) -> list[Tensor | None]:
        if min(len(vectors[0]), vectors_at_once) == 1:
            return one_by_one(vectors)
        try:
            return products(vectors, batched=True)
        except RuntimeError as error:
            if "vmap" not in str(error):
                raise
        return one_by_one(vectors)

    together = len(cotangents[0]) if vectors_at_once == 1 else vectors_at_once
    parts = [some(chunk) for chunk in zip(*[c.split(together) for c in cotangents], strict=True)]
    return _joined(parts, torch.cat) if len(parts) > 1 else parts[0]


def _joined(parts: list[list[Tensor | None]], join: Callable[[Any], Tensor]) -> list[Tensor | None]:
    """Join the parts for each position; None if there are none."""
    return [None if column[0] is None else join(column) for column in zip(*parts, strict=True)]


def vectors_together(saved: int, device: torch.device) -> int:
    """Return the number of vectors per pass through a graph that saved ``saved`` bytes.

    On CPUs, exceeding the cache costs time, and batching vectors does not speed up convolutions.
    """
    budget = 1 << 22 if device.type == "cpu" else 1 << 28
    return max(1, min(256, budget // max(1, saved)))


class SavedBytes(saved_tensors_hooks):
    """Count the bytes that autograd saves for the backward pass within the context.

    Attributes:
        total: bytes so far, counting each storage once.
    """

    def __init__(self) -> None:
        self.total = 0
        self._seen: set[int] = set()
        super().__init__(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> tuple[Tensor, int]:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.total += storage.nbytes()
        # Do not keep the tensor itself: a node that saves its own output, such as tanh, would keep itself alive.
        return tensor.detach(), tensor._version


def _unpack(saved: tuple[Tensor, int]) -> Tensor:
    tensor, version = saved
    if tensor._version != version:  # torch does not check this with hooks
        raise ModelError(
            f"the model modifies a tensor of shape {tuple(tensor.shape)} in place, but a gradient needs its old "
            "values: modify a copy, x.clone(), or use torch.relu(x) instead of x.relu_()"
        )
    return tensor
