# SPDX-License-Identifier: Apache-2.0
"""Parts of a guide: the mode with the U that it minimises, and the Gaussian of a fit."""

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_dvi.core.batches import mapped
from pyro_dvi.errors import ArgumentError, CheckpointError, GuideError, UnsupportedError, warn
from pyro_dvi.laplace.energy.energy import Energy
from pyro_dvi.laplace.energy.precision import GGN, Hessian, PrecisionMatrix
from pyro_dvi.laplace.energy.query import Layout, Query, Subset, refuse_torch_modes
from pyro_dvi.laplace.methods.method import LaplacePosterior, Method
from pyro_dvi.runs.fingerprint import Fingerprint
from pyro_dvi.runs.log_joint import rescaled_model
from pyro_dvi.runs.sites import sites_named


@dataclass(frozen=True)
class PointMass:
    r"""A mode :math:`\hat u`, and the scales of the U that it minimises.

    Attributes:
        locs: the unconstrained mode of every site.
        scale_factors: multipliers of the scales of sites in U.
        kl_weight: :math:`\beta`.
        temperature: T.
    """

    locs: Mapping[str, Tensor]
    scale_factors: Mapping[str, float] = field(default_factory=dict)
    kl_weight: float = 1.0
    temperature: float = 1.0

    def layout(self, subset: Subset | None = None) -> Layout:
        """Return the latents that vary, in order.

        Args:
            subset: sites by name or pattern, or by the name of a module ("fc" for "net.fc.weight" and "net.fc.bias");
                or a mapping from these to masks: True, or a boolean tensor of the shape of the site's unconstrained
                values. If several patterns match a site, the last one applies. None means all.

        Raises:
            ArgumentError: a pattern matches no site, a mask does not have the shape of its site, or no latent is left.
        """
        if isinstance(subset, Layout):
            return subset
        names = list(self.locs)
        asked: Any = "*" if subset is None else subset
        several = isinstance(asked, Iterable) and not isinstance(asked, str)
        given = asked if isinstance(asked, Mapping) else dict.fromkeys(asked if several else [asked], True)
        masks = {
            name: given[p] for p in given for name in sites_named("subset", [_of_module(p, names)], names)
        }
        entries = {
            name: _entries(name, masks[name], self.locs[name])
            for name in names
            if name in masks and self.locs[name].numel()
        }
        varying = {name: places for name, places in entries.items() if places is None or len(places)}
        if not varying:
            raise ArgumentError(f"subset is empty: name sites or patterns, or None for all of {names}")
        return Layout({name: self.locs[name].shape for name in varying}, varying)

    def energy(
        self, model: Callable, batches: Iterable[Any], subset: Subset | None, **options: Any
    ) -> Energy:
        """Return U on all the data, with options of :class:`Energy`; the model has the scales as written in its code.

        Raises:
            ArgumentError: a scale factor is not positive, or the model does not have its site.
        """
        energy = Energy(
            model,
            batches,
            self.locs,
            scale_factors=self.scale_factors,
            layout=self.layout(subset),
            kl_weight=self.kl_weight,
            temperature=self.temperature,
            **options,
        )
        if self.scale_factors:
            run = energy.at(energy.start).first.run
            names = [*run.log_priors, *(site.name for site in run.sites)]
            for name in self.scale_factors.keys() - names:
                raise ArgumentError(f"scale_factors: the model has no site {name!r}; its sites are {names}")
        return energy

    def query(self, model: Callable, inputs: tuple[Any, ...], layout: Layout, site: str | None) -> Query:
        """Return the outputs of the model at the mode."""
        return Query(rescaled_model(model, self.scale_factors), inputs, self.locs, layout, site=site)

    def change_since(self, fit: "PointMass") -> str | None:
        """Return a description of the change since the mode of a fit; None if nothing changed."""
        moved = next((name for name, u in self.locs.items() if not torch.equal(u, fit.locs[name])), None)
        if moved is not None:
            return f"site {moved!r} has moved since guide.fit, so the Gaussian belongs to another mode"
        if self.scale_factors != fit.scale_factors:
            return "guide.scale_factors has changed since guide.fit"
        for name in ("kl_weight", "temperature"):
            now, then = getattr(self, name), getattr(fit, name)
            if now != then:
                return f"guide.{name} is {now:g}, but the fit had {name}={then:g}"
        return None


@dataclass(frozen=True)
class KnownMinimum:
    """A minimum of U with a positive definite Hessian, which ``polish`` or a diagnosis has found.

    Attributes:
        point: the mode and the scales.
        value: U at the mode; other data or another model have another value.
        sites: the sites of which all entries were optimised.
    """

    point: PointMass
    value: float
    sites: frozenset[str]

    @classmethod
    def of(cls, point: PointMass, energy: Energy, value: float) -> "KnownMinimum":
        """Return the record of a minimum of U over the latents that vary."""
        return cls(point, value, frozenset(energy.layout.names) - energy.layout.chosen.keys())

    def is_of(self, energy: Energy) -> bool:
        """Return whether this is a minimum of U, given the same mode and scales.

        A minimum over more sites is also a minimum over fewer.
        """
        value = energy.at(energy.start).value
        return self.sites.issuperset(energy.layout.names) and same_value(
            float(value), self.value, value.dtype
        )


def same_value(one: float, other: float, dtype: torch.dtype) -> bool:
    """Return whether two values of U are equal up to rounding, to about 5 digits in float32 and 10 in float64."""
    return abs(one - other) <= torch.finfo(dtype).eps ** (2 / 3) * (1 + abs(one))


def _of_module(pattern: Any, names: list[str]) -> Any:
    """Return a pattern for all sites of a module if a pattern matches no site, but names a module."""
    ways = (pattern, f"*.{pattern}", f"{pattern}.*", f"*.{pattern}.*")
    return next((way for way in ways if isinstance(pattern, str) and fnmatch.filter(names, way)), pattern)


def _entries(name: str, given: Tensor | bool, loc: Tensor) -> Tensor | None:
    """Return the indices of the entries that vary in a flattened site; None if all entries vary."""
    if given is True:
        return None
    mask = torch.tensor(False) if given is False else given
    if not torch.is_tensor(mask) or mask.dtype != torch.bool or mask.shape not in (loc.shape, ()):
        wanted = f"True, False, or a boolean tensor of shape {tuple(loc.shape)}, unconstrained"
        got = f"{getattr(mask, 'dtype', mask)} of shape {tuple(getattr(mask, 'shape', ()))}"
        raise ArgumentError(f"subset[{name!r}] must be {wanted}; got {got}")
    return None if bool(mask.all()) else mask.to(loc.device).expand(loc.shape).flatten().nonzero()[:, 0]


class ModelReference:
    """A reference to a model. Copies share the model, and pickling omits it, as in Pyro's guides.

    Args:
        model: a Pyro model; None after unpickling.
    """

    def __init__(self, model: Callable | None = None) -> None:
        self._model = model

    def get(self) -> Callable:
        """Return the model.

        Raises:
            GuideError: the guide was loaded from a file, which does not contain the model.
        """
        if self._model is None:
            raise GuideError(
                "this LaplaceGuide was loaded without its model: use predict(model, guide, x), or load_state_dict"
            )
        return self._model

    def __deepcopy__(self, memo: Any) -> "ModelReference":
        return self

    def __reduce__(self) -> Any:
        return ModelReference, ()


@dataclass(frozen=True)
class Fitted:
    """The result of ``guide.fit``; it is immutable, so copies of a guide share it.

    Attributes:
        posterior: the Gaussian.
        layout: order of the latents in flat vectors.
        point: the mode, with the scales of U.
        value: U at the mode; other data or another model have another value.
        model: fingerprint of the model at the mode; None if the model could not be run.
        precision: the matrix that the precision of the Gaussian equals or approximates.
        method: the method of the fit; None if the Gaussian was loaded from a file.
    """

    posterior: LaplacePosterior
    layout: Layout
    point: PointMass
    value: float
    model: Fingerprint | None = None
    precision: PrecisionMatrix = field(default_factory=GGN)
    method: Method | None = None

    def draw(self, count: int) -> dict[str, Tensor]:
        """Draw unconstrained values ``[count, *site]`` of every site."""
        fixed = {name: loc.expand(count, *loc.shape) for name, loc in self.point.locs.items()}
        pieces = self.layout.split(_draw(self.posterior, count))
        return {**fixed, **self.layout.place(pieces, self.point.locs)}

    def marginal_variances(self) -> dict[str, Tensor]:
        """Return the variances of the unconstrained entries of all sites in the fit; zero for fixed entries."""
        return self.layout.place(self.layout.split(self.posterior.marginal_variance().detach()))

    def sampled(self, name: str, event_dims: Mapping[str, int]) -> dict[str, Tensor]:
        """Sample the flat vector as a Pyro site; return the unconstrained values of every site.

        Leading dimensions belong to plates outside the guide, so the sites' own plates lie to their right.
        """
        vectors = pyro.sample(name, Draws(self.posterior), infer={"is_auxiliary": True})
        values = dict(self.point.locs)
        for site, value in self.layout.place(self.layout.split(vectors), self.point.locs).items():
            lead = (*vectors.shape[:-1], *(1,) * event_dims[site])
            values[site] = value.reshape(torch.broadcast_shapes(values[site].shape, lead))
        return values

    def check_value(self, energy: Energy) -> None:
        """Raise an error if U at the mode is not that of the fit.

        Raises:
            GuideError: the data or the model have changed.
        """
        value = energy.at(energy.start).value
        if not same_value(float(value), self.value, value.dtype):
            raise GuideError(
                f"the data or the model have changed since guide.fit: U, the negative log joint density, is "
                f"{float(value):.8g} at the mode, and was {self.value:.8g}. Fit again"
            )

    def check(self, model: Callable[..., Any], latents: dict[str, Tensor]) -> None:
        """Raise an error if predictions of a model would differ from those of the model of the fit.

        Args:
            model: the model, with the scales as written in its code.
            latents: the constrained mode.

        Raises:
            GuideError: a prior, the likelihood or a deterministic part of the model differs.
            UnsupportedError: autocast is active; half precision would look like another model.
        """
        refuse_torch_modes(self.posterior.mode.device)
        differences = "" if self.model is None else self.model.differences(model, latents)
        if differences:
            what = f"the model has changed since guide.fit, or is another model ({differences}; at synthetic inputs)"
            raise GuideError(f"{what}: use the model of the fit, with its state, or fit again")

    # Files: tensors and plain values ---------------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """Return the state for files; None, with a warning, if the posterior cannot be saved."""
        try:
            posterior = self.posterior.state()
        except UnsupportedError as error:
            warn(f"the Gaussian of guide.fit is left out: {error}")
            return None
        return {
            "posterior": posterior,
            "kind": self.posterior.kind,
            "sites": {name: self.layout.chosen.get(name) for name in self.layout.names},
            "point": dict(vars(self.point)),
            "value": self.value,
            "model": None if self.model is None else dict(vars(self.model)),
            "precision": type(self.precision).__name__,
        }

    @staticmethod
    def from_state(state: dict[str, Any] | None) -> "Fitted | None":
        """Restore an object from its :meth:`state`.

        Raises:
            CheckpointError: the state has missing or unknown entries, as in files of another version.
        """
        if state is None:
            return None
        try:
            point, model = PointMass(**state["point"]), state["model"]
            return Fitted(
                LaplacePosterior.kinds[state["kind"]](**state["posterior"]),
                Layout({name: point.locs[name].shape for name in state["sites"]}, state["sites"]),
                point,
                state["value"],
                None if model is None else Fingerprint(**model),
                {"GGN": GGN, "Hessian": Hessian}[state["precision"]](),
            )
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"the Gaussian in this state cannot be restored ({type(error).__name__}: {error}): import its class "
                "or, if saved by another version, set _extra_state to None and fit again"
            ) from error

    def moved(self, function: Callable[[Tensor], Tensor]) -> "Fitted | None":
        """Return a copy with ``function`` applied to all tensors; None if :meth:`state` is None."""
        state = mapped(lambda leaf: function(leaf) if torch.is_tensor(leaf) else leaf, self.state())
        return Fitted.from_state(state)

    def __deepcopy__(self, memo: Any) -> "Fitted":
        return self

    def __reduce__(self) -> Any:
        return Fitted.from_state, (self.state(),)


class Draws(dist.TorchDistribution):
    """The Gaussian of the flat vector as a distribution that can only be sampled.

    Args:
        posterior: the Gaussian.
        batch_shape: shape of a batch of independent copies.
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012 (as in torch)
    support = constraints.real_vector

    def __init__(self, posterior: LaplacePosterior, batch_shape: Any = ()) -> None:
        self.posterior = posterior
        super().__init__(torch.Size(batch_shape), posterior.mode.shape, validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "Draws":
        """Return a batch of independent copies."""
        return Draws(self.posterior, batch_shape)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw vectors ``[*sample_shape, *batch_shape, D]``."""
        shape = torch.Size(sample_shape) + self.batch_shape
        return _draw(self.posterior, shape.numel()).reshape(*shape, -1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Raise an error, because not every method has a density."""
        raise UnsupportedError("a LaplaceGuide has no density after guide.fit: compute losses before it")


def _draw(posterior: LaplacePosterior, count: int) -> Tensor:
    """Draw flat vectors ``[count, D]``, seeded from torch's global generator."""
    generator = torch.Generator(posterior.mode.device).manual_seed(int(torch.randint(2**31 - 1, ())))
    return posterior.draw(count, generator).detach()
