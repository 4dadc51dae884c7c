# SPDX-License-Identifier: Apache-2.0
"""Match the latent sites of a model with the Gaussians of a guide, whatever way the guide writes them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from pyro.distributions.util import sum_rightmost
from pyro.infer.autoguide.guides import AutoContinuous
from torch import Tensor, nn
from torch import distributions as td
from torch.distributions import biject_to, constraints

from pyro_dvi.errors import GuideError, ModelError
from pyro_dvi.handlers.distributions import strip_event_dims
from pyro_dvi.sites import is_latent

__all__ = [
    "GaussianSite",
    "Latent",
    "is_identity",
    "is_real",
    "match_latents",
    "unconstraining_transform",
    "vector_elements",
    "vector_parts",
]


@dataclass
class GaussianSite:
    """A Gaussian sample site of a guide.

    Attributes:
        name: the guide's site name.
        value: what the guide returned: a tracked copy of the mean, or a sample.
        base: the Normal distribution, its parameters attached to those of the guide.
        transforms: maps from the Gaussian to the site's value (``LogNormal`` and its like); usually none.
        sampled: elements of the value that were sampled instead of set to the mean: a mask, or True or False.
    """

    name: str
    value: Tensor
    base: td.Normal
    transforms: tuple[Any, ...] = ()
    sampled: Tensor | bool = False

    @property
    def loc(self) -> Tensor:
        """Mean, attached to the parameters."""
        return self.base.loc

    @property
    def scale(self) -> Tensor:
        """Standard deviation, attached to the parameters."""
        return self.base.scale

    def expanded_scale(self) -> Tensor:
        """Standard deviations of the elements that stand at their mean; zero for those that were sampled."""
        return (
            self.scale
            if self.sampled is False
            else self.scale.masked_fill(torch.as_tensor(self.sampled), 0.0)
        )


@dataclass
class Latent:
    """One latent site of the model and its posterior marginal in unconstrained space.

    Attributes:
        name: the model's site name.
        prior: the site's distribution, given its parents' values.
        value: the value that the model computed with.
        loc: posterior mean of the unconstrained value; None for a point mass.
        scale: its standard deviation; None for a point mass.
        transform: map from unconstrained to constrained values; None for the identity.
        log_density: log-density that a point mass carries (a Jacobian, for MAP in unconstrained space).
        plate_scale: the site's own scale, as for local latents of a subsampled plate.
        mask: the site's own mask.
        source: the guide's Gaussian that it comes from; None for a point mass.
        guide_scale: the scale of the guide's site, which weighs its density.
    """

    name: str
    prior: Any
    value: Tensor
    loc: Tensor | None
    scale: Tensor | None
    transform: Any
    log_density: Tensor | float
    plate_scale: float | Tensor
    mask: Tensor | bool | None
    source: GaussianSite | None
    guide_scale: float | Tensor = 1.0


def is_real(support: Any) -> bool:
    """Whether a support is all real numbers."""
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support is constraints.real or support is constraints.real_vector


def unconstraining_transform(support: Any) -> Any:
    """Return the transform from real numbers to ``support``, or None where it is the identity."""
    return None if is_real(support) else biject_to(support)


def is_identity(transform: Any) -> bool:
    """Return whether a transform is the shift by nothing that PyTorch appends to exp for positive supports."""
    shift = isinstance(transform, torch.distributions.AffineTransform)
    return shift and type(transform.loc) in (int, float) and (transform.loc, transform.scale) == (0, 1)


def match_latents(
    model_trace: Any, guide_trace: Any, gaussians: dict[str, GaussianSite], guide: Callable
) -> list[Latent]:
    """Pair every latent site of the model with its marginal in the guide.

    Understood are Normal sites of the same name, auxiliary ``<name>_unconstrained`` Normals followed by a Delta (Pyro's
    AutoNormal), the joint vector of AutoDiagonalNormal, and point masses.

    Raises:
        ModelError: a site is neither observed nor in the guide.
        GuideError: the guide has Gaussians that belong to no latent site, or lacks an auxiliary that it needs.
    """
    vectors = dict(vector_parts(guide, gaussians))
    used = {part.source.name for part in vectors.values()}
    latents = []
    for name, site in model_trace.nodes.items():
        if not is_latent(site):
            continue
        guide_site = guide_trace.nodes.get(name)
        if guide_site is None:
            raise ModelError(
                f"site {name!r} is neither observed nor in the guide. If it is data, pass the observed values "
                f"(y was None?); if it is a latent variable, add pyro.sample({name!r}, ...) to the guide."
            )
        log_density: Tensor | float = 0.0
        transform = None
        loc = scale = None
        source = gaussians.get(name)
        if source is not None:
            used.add(name)
            loc, scale = source.loc, source.scale
            if source.transforms:
                transform = torch.distributions.ComposeTransform(list(source.transforms))
        elif f"{name}_unconstrained" in gaussians:
            source = gaussians[f"{name}_unconstrained"]
            used.add(source.name)
            loc, scale = source.loc, source.scale
            transform = unconstraining_transform(site["fn"].support)
        elif name in vectors:
            part = vectors[name]
            source, loc, scale = part.source, part.loc, part.scale
            transform = unconstraining_transform(site["fn"].support)
        else:
            log_density = getattr(strip_event_dims(guide_site["fn"]), "log_density", 0.0)
            if torch.is_tensor(log_density):  # of a Delta below to_event, one for each element
                log_density = sum_rightmost(
                    log_density, log_density.dim() - len(guide_site["fn"].batch_shape)
                )
        latents.append(
            Latent(
                name,
                site["fn"],
                site["value"],
                loc,
                scale,
                transform,
                log_density,
                site["scale"],
                site["mask"],
                source,
                guide_trace.nodes[name if source is None else source.name]["scale"],
            )
        )
    left = sorted(set(gaussians) - used)
    if left:
        raise GuideError(
            f"guide site {left[0]!r} is a Normal that belongs to no latent site of the model, so latents computed from "
            "it may depend on each other. Give each latent site of the model its own Normal site of the same name "
            f"(or '<name>_unconstrained'); the model's latent sites are {[latent.name for latent in latents]}."
        )
    return latents


@dataclass
class _VectorPart:
    source: GaussianSite
    loc: Tensor
    scale: Tensor
    elements: Tensor  # mask of the joint vector


def vector_parts(guide: Callable, gaussians: dict[str, GaussianSite]) -> Iterator[tuple[str, _VectorPart]]:
    """Split the joint vector of AutoDiagonalNormal guides into the model's sites."""
    for name, source in gaussians.items():
        owner = _vector_owner(guide, name)
        if owner is None:
            continue
        positions = torch.arange(source.loc.shape[-1], device=source.loc.device)
        parts = zip(
            owner._unpack_latent(source.loc),
            owner._unpack_latent(source.scale),
            owner._unpack_latent(positions),
            strict=True,
        )
        for (site, loc), (_, scale), (_, index) in parts:
            elements = torch.zeros_like(positions, dtype=torch.bool)
            elements[index.reshape(-1)] = True
            yield site["name"], _VectorPart(source, loc, scale, elements)


def _vector_owner(guide: Callable, name: str) -> AutoContinuous | None:
    if not name.endswith("_latent") or not isinstance(guide, nn.Module):
        return None
    for module in guide.modules():
        if isinstance(module, AutoContinuous) and f"_{module._pyro_name}_latent" == name:
            return module
    return None


def vector_elements(guide: Callable, gaussians: dict[str, GaussianSite], name: str) -> Tensor | bool:
    """Mask of the elements of a joint vector that belong to model site ``name``; True outside joint vectors."""
    for site, part in vector_parts(guide, gaussians):
        if site == name:
            return part.elements
    return True
