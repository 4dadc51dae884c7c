# SPDX-License-Identifier: Apache-2.0
"""Selection of the parameters that become Bayesian, by type, by name or by predicate.

A *selector* is a module type (``nn.Linear``, for the parameters directly in such a module), a pattern for the full
parameter name as in :mod:`fnmatch` (``"encoder.*"``; ``*`` also matches dots), or a predicate of ``(name, module,
parameter)``. A list selects what any of its entries selects.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _WeightNorm

from pyro_dvi.bayesian.converted import SitePrior, parameter_order
from pyro_dvi.errors import ArgumentError, ModelError, UnsupportedError

Predicate = Callable[[str, nn.Module, Tensor], bool]
Selector = type[nn.Module] | str | Predicate
Selection = Selector | Iterable[Selector]

DEFAULT_LAYERS: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Bilinear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.MultiheadAttention,
)
"""Layers whose weights and biases become Bayesian by default."""

NORM_LAYERS: tuple[type[nn.Module], ...] = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)
"""Normalisation layers, whose parameters are skipped by name patterns with wildcards."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """One parameter, in the module that owns it.

    Args:
        names: all dotted names of the parameter below the root, in order. There are several if a module object is used
            in several places.
        module: the module that owns the parameter.
        attribute: the name of the parameter in that module.
        parameter: the current value of the parameter.
        obstacle: the reason why the parameter cannot become Bayesian, with the remedy; ``None`` if it can.
        layer: the layer whose weight is computed from the parameter, if it is not ``module``.
    """

    names: tuple[str, ...]
    module: nn.Module
    attribute: str
    parameter: Tensor
    obstacle: str | None = None
    layer: nn.Module | None = None

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]

    def is_called(self, pattern: str) -> bool:
        """Return whether a pattern matches one of the names."""
        return any(fnmatchcase(name, pattern) for name in self.names)

    def chosen_by(self, selector: Selector) -> bool:
        """Return whether ``selector`` chooses this parameter."""
        if isinstance(selector, str):
            if isinstance(self.module, NORM_LAYERS) and any(wildcard in selector for wildcard in "*?["):
                return False
            return self.is_called(selector)
        if isinstance(selector, type):
            return isinstance(self.layer or self.module, selector)
        return bool(selector(self.name, self.module, self.parameter))


def chosen(root: nn.Module, include: Selection, exclude: Selection) -> list[list[Candidate]]:
    """Return the chosen parameters in order, grouped by shared tensor.

    Raises:
        ArgumentError: if a selection has an entry that is not a selector.
        ModelError: if a selector matches nothing, if a chosen parameter cannot become Bayesian, or if none is chosen.
        UnsupportedError: if a chosen parameter is complex or an integer.
    """
    including, excluding = _selectors(include), _selectors(exclude)
    everything = _candidates(root)
    _check_that_all_match(everything, excluding if include is DEFAULT_LAYERS else (*including, *excluding))
    included, excluded = _matching(everything, including), _matching(everything, excluding)
    wanted = included - excluded
    groups: dict[int, list[Candidate]] = {}
    for candidate in everything:
        groups.setdefault(id(candidate.parameter), []).append(candidate)
    touched = [group for group in groups.values() if any(id(c) in wanted for c in group)]
    for group in touched:
        _check_group(group, wanted, excluded)
    trained = [group for group in touched if group[0].parameter.requires_grad]
    if not trained:
        kinds = ", ".join(sorted({type(c.module).__name__ for c in everything})[:6]) or "no module"
        raise ModelError(
            f"No parameter would become Bayesian. Of {len(everything)} parameters ({kinds}), include= matches "
            f"{len(included)}, exclude= {len(excluded)}, and {len(touched)} are frozen: see requires_grad_(True)"
        )
    return trained


def _matching(everything: Sequence[Candidate], selectors: Sequence[Selector]) -> set[int]:
    return {id(c) for c in everything if any(c.chosen_by(selector) for selector in selectors)}


def _check_group(group: Sequence[Candidate], wanted: set[int], excluded: set[int]) -> None:
    """Raise an error if a parameter cannot become Bayesian, or is excluded in another layer that shares it."""
    for candidate in group:
        if id(candidate) in excluded:
            name = next(c.name for c in group if id(c) in wanted)
            raise ModelError(f"{name!r} and {candidate.name!r} share a parameter: include or exclude both")
        if candidate.obstacle is not None:
            floating = candidate.parameter.is_floating_point()  # not complex, not an integer
            kind = ModelError if floating else UnsupportedError
            raise kind(f"{candidate.name!r} cannot become Bayesian: {candidate.obstacle}")


def _check_that_all_match(everything: Sequence[Candidate], selectors: Sequence[Selector]) -> None:
    """Raise an error if a pattern or type matches nothing, because it is probably misspelt."""
    for selector in selectors:
        if isinstance(selector, str | type) and not any(c.chosen_by(selector) for c in everything):
            hint = suggestion(selector, everything) if isinstance(selector, str) else ""
            raise ModelError(f"{selector!r} in include= or exclude= matches no parameter. {hint}")


def _candidates(root: nn.Module) -> list[Candidate]:
    """List every parameter below ``root`` with its owner, in the order of ``named_parameters``."""
    paths: dict[int, list[str]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(path)
    return [
        candidate
        for module in root.modules()
        if not isinstance(module, parametrize.ParametrizationList)  # reported with the module that uses it
        for candidate in _owned(module, paths[id(module)])
    ]


def _selectors(selection: Any) -> tuple[Selector, ...]:
    """Return ``selection`` as a tuple of selectors."""
    several = isinstance(selection, Iterable) and not isinstance(selection, str) and not callable(selection)
    selectors = tuple(selection) if several else (selection,)
    for one in selectors:
        if isinstance(one, nn.Module) or not (isinstance(one, str) or callable(one)):
            raise ArgumentError(
                "include= and exclude= take types of modules, patterns of names, functions of (name, module, "
                f"parameter), or a list of these, not {one!r}"
            )
    return selectors


def suggestion(pattern: str, everything: Iterable[Candidate]) -> str:
    """Return a sentence that names the parameters closest to a pattern that matched nothing."""
    names = [candidate.name for candidate in everything]
    close = difflib.get_close_matches(pattern, names, cutoff=0.3) or names[:3]
    return f"Parameters are named like {', '.join(map(repr, close))}; '*' stands for any text."


def _owned(module: nn.Module, paths: Sequence[str]) -> Iterator[Candidate]:
    """Yield the parameters directly in ``module``, with the obstacles to their conversion."""

    def names(attribute: str) -> tuple[str, ...]:
        return tuple(f"{path}.{attribute}" if path else attribute for path in paths)

    excluded = f"dvi.to_bayesian_(net, exclude={names('*')[0]!r})"
    hooks = {type(hook).__name__ for hook in module._forward_pre_hooks.values()}
    hooked = hooks & {"WeightNorm", "SpectralNorm"} and (
        f"a hook of its layer computes the weight: pass {excluded}, or first call "
        "torch.nn.utils.remove_weight_norm(module) or remove_spectral_norm(module)"
    )
    for attribute in parameter_order(module):
        prior = getattr(module, "_pyro_samples", {}).get(attribute)
        if isinstance(prior, SitePrior):
            obstacle: str | None = "it is already Bayesian: exclude it, or start from a new module"
            yield Candidate(names(attribute), module, attribute, prior.shown_value(module), obstacle)
            continue
        # Frozen parameters are buffers.
        value = module._parameters.get(attribute, module._buffers.get(attribute))
        if value is not None:  # bias=False registers the name without a value
            obstacle = hooked or _unsuitable(value)
            yield Candidate(names(attribute), module, attribute, value, obstacle)
    if parametrize.is_parametrized(module):
        for attribute, found in module.parametrizations.items():  # type: ignore[union-attr, operator]
            if all(isinstance(step, _WeightNorm) for step in found):
                for name in ("original0", "original1"):  # length and direction
                    names_of = names(f"parametrizations.{attribute}.{name}")
                    yield Candidate(names_of, found, name, getattr(found, name), layer=module)
                continue
            obstacle = (
                f"it is computed by torch.nn.utils.parametrize: pass {excluded}, or first call "
                f"parametrize.remove_parametrizations(module, {attribute!r})"
            )
            yield Candidate(names(attribute), module, attribute, torch.empty(0), obstacle)


def _unsuitable(parameter: Tensor) -> str | None:
    """Return the reason why a parameter cannot have a Gaussian posterior; None if it can."""
    if not parameter.is_floating_point():
        return f"it is {parameter.dtype}, and a Gaussian posterior needs floating-point weights: exclude it"
    if parameter.is_meta:
        return "it is on the meta device: first materialise it with module.to_empty(device=...)"
    if parameter.requires_grad and not bool(torch.isfinite(parameter.detach()).all()):
        return "its value is not finite: first initialise it or load a valid checkpoint"
    return None
