# SPDX-License-Identifier: Apache-2.0
"""The latent sites of a model and their Gaussians in the guide, in every form that guides use."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import dropwhile
from typing import Any

import torch
from pyro.distributions.util import sum_rightmost
from pyro.infer.autoguide.guides import AutoContinuous
from torch import Tensor, distributions as td, nn
from torch.distributions import biject_to, constraints

from pyro_dvi.core.distributions import strip_event_dims
from pyro_dvi.errors import GuideError, ModelError
from pyro_dvi.gaussians.normals import is_joint, shared_factor
from pyro_dvi.moments.shared_noise import SharedNoise
from pyro_dvi.runs.sites import is_latent, sites_of


@dataclass
class GaussianSite:
    """A Gaussian sample site of a guide.

    Attributes:
        name: name of the site in the guide.
        value: the value in the guide: a tracked copy of the mean, or a sample.
        base: the Normal distribution, attached to the parameters of the guide.
        transforms: maps from the Gaussian to the site's value, as in ``LogNormal``; usually empty.
        sampled: True if the elements were sampled, False if they were set to the mean; or a mask of the sampled ones.
    """

    name: str
    value: Tensor
    base: td.Normal
    transforms: tuple[Any, ...] = ()
    sampled: Tensor | bool = False

    @property
    def loc(self) -> Tensor:
        """Mean, attached to the parameters of the guide."""
        return self.base.loc

    @property
    def scale(self) -> Tensor:
        """Standard deviation, attached to the parameters of the guide."""
        return self.base.stddev

    def expanded_scale(self) -> Tensor:
        """Standard deviations of the elements that were set to their mean; zero for elements that were sampled."""
        scale = self.scale
        return scale if self.sampled is False else scale.masked_fill(torch.as_tensor(self.sampled), 0.0)


@dataclass(eq=False)
class Latent:
    """One latent site of the model and its posterior marginal in unconstrained space.

    Attributes:
        name: name of the site in the model.
        prior: the site's distribution, given the values of its parents.
        value: the value that the model used.
        loc: posterior mean of the unconstrained value; None for a point mass.
        own_scale: posterior standard deviation; by default the scale of ``source``.
        transform: map from unconstrained to constrained values; None for the identity.
        log_density: log-density of a point mass; for MAP in unconstrained space, it is a log-Jacobian.
        plate_scale: scale of the model's site, which differs from 1 for local latents of a subsampled plate.
        mask: mask of the model's site.
        source: the guide's Gaussian that contains the site; None for a point mass.
        guide_scale: scale of the guide's site, which multiplies its log-density.
        elements: mask of the elements of the guide's Gaussian that belong to the site; True if all belong to it.
        shared: noise that the site shares with other sites of a Gaussian with covariances.
        rest: variance of the site that is not due to shared noise; None for zero.
    """

    name: str
    prior: Any
    value: Tensor
    loc: Tensor | None = None
    own_scale: Tensor | None = None
    transform: Any = None
    log_density: Tensor | float = 0.0
    plate_scale: float | Tensor = 1.0
    mask: Tensor | bool | None = None
    source: GaussianSite | None = None
    guide_scale: float | Tensor = 1.0
    elements: Tensor | bool = True
    shared: SharedNoise | None = None
    rest: Tensor | None = None

    @property
    def scale(self) -> Tensor | None:
        """Standard deviation of the unconstrained value, computed on access; None for a point mass."""
        return self.source.scale if self.own_scale is None and self.source is not None else self.own_scale


def is_real(support: Any) -> bool:
    """Return True if a support is the real line, or a product of real lines."""
    while isinstance(support, (constraints.independent, constraints.MixtureSameFamilyConstraint)):
        support = support.base_constraint
    return support is constraints.real or support is constraints.real_vector


def unconstraining_transform(support: Any) -> Any:
    """Return the transform from real numbers to ``support``, or None if it is the identity."""
    if isinstance(
        support, constraints.MixtureSameFamilyConstraint
    ):  # torch has a transform for its components
        support = support.base_constraint
    return None if is_real(support) else biject_to(support)


def elementary(transform: Any) -> list[Any]:
    """Return the elementary transforms that compose a transform, without identities.

    An example of an identity is the shift by zero that PyTorch appends to exp for positive supports.
    """
    if isinstance(transform, td.IndependentTransform):
        return elementary(transform.base_transform)
    if isinstance(transform, td.ComposeTransform):
        return [part for inner in transform.parts for part in elementary(inner)]
    if isinstance(transform, td.AffineTransform):
        numbers = isinstance(transform.loc, int | float) and isinstance(transform.scale, int | float)
        return [] if numbers and (transform.loc, transform.scale) == (0, 1) else [transform]
    return [] if transform is None else [transform]


class Marginals:
    """Finds the Gaussian of each latent site among the sites of a guide.

    It recognises Normal sites with the name of the latent, auxiliary ``<name>_unconstrained`` Normals followed by a
    Delta (as in Pyro's AutoNormal), and the joint vector of AutoDiagonalNormal, AutoMultivariateNormal and similar
    guides.

    Args:
        guide: the guide.
        gaussians: the Gaussian sites of the guide.
    """

    def __init__(self, guide: Callable, gaussians: dict[str, GaussianSite]) -> None:
        self.gaussians = gaussians
        self._auxiliary = dict(_parts_of_vectors(guide, gaussians))
        for name, source in gaussians.items():
            if name.endswith("_unconstrained"):
                part = {"source": source, "loc": source.loc}
                self._auxiliary[name.removesuffix("_unconstrained")] = part

    def of(self, site: Any) -> Latent:
        """Return a latent site of the model (a node of a trace, or a message), with its Gaussian if it has one."""
        name, prior = site["name"], site["fn"]
        found: dict[str, Any] = {}
        if name in self.gaussians:
            source = self.gaussians[name]
            transform = td.ComposeTransform(list(source.transforms)) if source.transforms else None
            found = {"source": source, "loc": source.loc, "transform": transform}
            if is_joint(source.base):
                factor, found["rest"], between = shared_factor(source.base)
                found["shared"] = SharedNoise(factor, repr(name), between)
        elif name in self._auxiliary:
            found = self._auxiliary[name] | {"transform": unconstraining_transform(prior.support)}
        return Latent(name, prior, site["value"], plate_scale=site["scale"], mask=site["mask"], **found)


def match_latents(model_trace: Any, guide_trace: Any, marginals: Marginals) -> list[Latent]:
    """Pair every latent site of the model with its marginal in the guide, or its point mass.

    Raises:
        ModelError: if a site is neither observed nor in the guide, or has a different shape in the guide.
        GuideError: if the guide has Gaussians that belong to no latent site, or lacks a required auxiliary site.
    """
    latents = []
    for site in sites_of(model_trace, is_latent):
        name = site["name"]
        guide_site = guide_trace.nodes.get(name)
        if guide_site is None:
            raise ModelError(not_in_guide(name))
        check_shape(site, guide_site["cond_indep_stack"])
        latent = marginals.of(site)
        if latent.source is None:
            latent.log_density = _log_density_of_mass(guide_site["fn"])
        else:
            guide_site = guide_trace.nodes[latent.source.name]
        latent.guide_scale = guide_site["scale"]
        latents.append(latent)
    used = {latent.source.name for latent in latents if latent.source is not None}
    if left := sorted(set(marginals.gaussians) - used):
        raise GuideError(
            f"guide site {left[0]!r} is a Normal that matches no latent site of the model. Give each of "
            f"{[latent.name for latent in latents]} its own Normal site of the same name (or '<name>_unconstrained')"
        )
    return latents


def not_in_guide(name: str) -> str:
    """Return the error message for a site without a value."""
    return (
        f"site {name!r} is neither observed nor in the guide. If it is data, pass the observed values (y was None?). "
        f"If it is a latent variable, add pyro.sample({name!r}, ...) to the guide, or set the guide up with this model"
    )


def check_shape(site: Any, frames: Iterable[Any] = ()) -> None:
    """Raise an error if the shape of a latent's value differs from its prior's shape, because it would be broadcast.

    As in Pyro, leading dimensions of size one are ignored.

    Args:
        site: the latent site in a run of the model.
        frames: the plates around the site in the guide.

    Raises:
        ModelError: if the shapes differ; the message names the site and both shapes.
    """
    shape, value = site["fn"].batch_shape + site["fn"].event_shape, site["value"]
    sizes = {frame.name: frame.full_size for frame in frames}
    here = {frame.name: frame.full_size for frame in site["cond_indep_stack"] if frame.name in sizes}
    same = _without_leading_ones(value.shape) == _without_leading_ones(shape)
    if not same or not here.items() <= sizes.items():
        raise ModelError(
            f"latent site {site['name']!r} has the shape {tuple(shape)} (plates {here}) in this call of the model, but "
            f"{tuple(value.shape)} (plates {sizes}) in the guide: the shape must not depend on the minibatch. A latent "
            "with one value per row needs a plate over the whole data set, pyro.plate(name, num_data, subsample=rows), "
            "with the numbers of the rows of each minibatch"
        )


def _without_leading_ones(shape: torch.Size) -> tuple[int, ...]:
    return tuple(dropwhile(lambda size: size == 1, shape))


def _log_density_of_mass(fn: Any) -> Tensor | float:
    """Return the log-density of a point mass; for a Delta inside ``to_event``, it is summed over elements."""
    log_density = getattr(strip_event_dims(fn), "log_density", 0.0)
    if not torch.is_tensor(log_density):
        return log_density
    return sum_rightmost(log_density, log_density.dim() - len(fn.batch_shape))


def _parts_of_vectors(
    guide: Callable, gaussians: dict[str, GaussianSite]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Split the joint vector of guides such as AutoDiagonalNormal into the model's sites, without their transforms."""
    for name, source in gaussians.items():
        owner = _vector_owner(guide, name)
        if owner is None:
            continue
        positions = torch.arange(source.loc.shape[-1], device=source.loc.device)
        unpacked = map(owner._unpack_latent, (source.loc, source.scale, positions))
        parts, indices = {}, {}
        for (site, loc), (_, scale), (_, index) in zip(*unpacked, strict=True):
            elements = torch.zeros_like(positions, dtype=torch.bool)
            elements[index.reshape(-1)] = True
            parts[site["name"]] = {"source": source, "loc": loc, "own_scale": scale, "elements": elements}
            indices[site["name"]] = index
        if is_joint(source.base):
            factor, rest, between = shared_factor(source.base)
            sites, start = " and ".join(map(repr, parts)), 0
            for name, index in indices.items():
                # A view is used, because the backward pass of indexing costs more.
                own = slice(start, start := start + index.numel())
                parts[name]["shared"] = SharedNoise(factor[:, own].reshape(-1, *index.shape), sites, between)
                parts[name]["rest"] = None if rest is None else rest[own].reshape(index.shape)
        yield from parts.items()


def _vector_owner(guide: Callable, name: str) -> AutoContinuous | None:
    if not name.endswith("_latent") or not isinstance(guide, nn.Module):
        return None
    for module in guide.modules():
        if isinstance(module, AutoContinuous) and f"_{module._pyro_name}_latent" == name:
            return module
    return None
