# SPDX-License-Identifier: Apache-2.0
"""What a model says about a few rows of data, by which it is recognised: after a change, or in another process."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import Distribution, Transform

from pyro_dvi.batches import arguments
from pyro_dvi.handlers.means import PosteriorMeans
from pyro_dvi.undisturbed import evaluating, undisturbed

__all__ = ["Fingerprint", "central_values"]

_ROWS = 4  # of the data
_NUMBERS = 64  # of each parameter of a distribution, spread evenly over its elements
# Relative to the largest number. More than rounding on another device adds up to in a deep network (0.003 with
# TensorFloat-32 in ResNet-50), less than another activation, prior or noise makes.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-2}
_SHORT = 5e-2  # of other types


@dataclass(frozen=True)
class Fingerprint:
    """Sites of a model in evaluation mode at given values of its latents: plates, distributions, their parameters.

    Attributes:
        args: positional arguments that the model was run with: the first rows of a batch, or all of it where the model
            does not take fewer.
        kwargs: keyword arguments, likewise.
        sites: what was found, in tensors and plain values.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sites: dict[str, dict[str, Any]]

    @classmethod
    def of(
        cls, model: Callable[..., Any], args: Any, kwargs: Any, latents: Mapping[str, Tensor]
    ) -> "Fingerprint | None":
        """Take it; parameters that depend on random numbers of the model's own are left out.

        Returns:
            The fingerprint; None if the model does not run with these values of its latents.
        """
        for rows in (_ROWS, None):
            some = _first_rows(args, kwargs, rows)
            try:
                sites, again = _look(model, *some, latents, 0), _look(model, *some, latents, 1)
            except Exception:  # the model takes whole batches only, or these latents belong to other rows
                continue
            for name, site in sites.items():
                twin = again[name]["parameters"] if name in again else {}
                site["parameters"] = {
                    k: v for k, v in site["parameters"].items() if k in twin and torch.equal(v, twin[k])
                }
            return cls(*some, sites)
        return None

    def differences(self, model: Callable[..., Any], latents: Mapping[str, Tensor]) -> str:
        """Say what is not as it was, at the same values of the latents; empty if all is."""
        device = next((value.device for value in latents.values()), None)
        found = list(_compared(self.sites, _look(model, *self.placed(device), latents, 0)))
        return "; ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")

    def placed(self, device: torch.device | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments on a device."""
        return arguments(self.args, device)[0], arguments(self.kwargs, device)[1]


def central_values(guide: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Tensor]:
    """Return the median of an automatic guide, the means of another; empty where it has neither."""
    with undisturbed(), evaluating(guide), torch.no_grad(), poutine.block():
        try:
            if hasattr(guide, "median"):
                return dict(guide.median(*args, **kwargs))
            with PosteriorMeans():
                nodes = poutine.trace(guide).get_trace(*args, **kwargs).nodes
        except Exception:
            # A guide without a median, or with sites that have no mean; both may be of the user's own.
            return {}
    return {name: node["value"].detach() for name, node in _sites(nodes)}


def _sites(nodes: Any) -> Iterator[tuple[str, Any]]:
    for name, node in nodes.items():
        inner = type(node.get("fn")).__name__ == "_Subsample" or node.get("infer", {}).get("is_auxiliary")
        if node["type"] == "sample" and not inner:
            yield name, node


def _first_rows(args: Any, kwargs: Any, count: int | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.dim()]
    size = len(tensors[0]) if tensors else -1

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return (value[:count] if value.dim() and len(value) == size else value).detach().clone()

    return tuple(map(cut, args)), {name: cut(value) for name, value in kwargs.items()}


def _look(model: Any, args: Any, kwargs: Any, latents: Mapping[str, Tensor], seed: int) -> dict[str, Any]:
    with undisturbed(), evaluating(model), torch.no_grad(), poutine.block():
        torch.manual_seed(seed)
        nodes = poutine.trace(poutine.condition(model, data=dict(latents))).get_trace(*args, **kwargs).nodes
    return {
        name: {
            "latent": name in latents or not node["is_observed"],
            "family": type(_innermost(node["fn"])).__name__,
            "shape": tuple(node["value"].shape),
            "plates": {f.name: f.full_size or f.size for f in node["cond_indep_stack"]},
            "parameters": dict(_parameters(node["fn"])),
        }
        for name, node in _sites(nodes)
    }


def _innermost(fn: Any) -> Any:
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return fn


def _parameters(part: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters of a distribution as it was given them, of those within it, and of its transforms."""
    transform = isinstance(part, Transform)
    for name, value in vars(part).items():
        for inner in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(inner, (Distribution, Transform)) and name != "_inv":
                yield from _parameters(inner)
        if isinstance(value, float) and transform:
            yield name, torch.tensor([value])
        elif isinstance(value, Tensor) and (transform or name in part.arg_constraints):
            for dim in range(value.dim()):  # what is expanded says the same again and again
                value = value.narrow(dim, 0, 1) if value.stride(dim) == 0 and value.shape[dim] else value
            flat = value.detach().reshape(-1)
            places = torch.linspace(0, max(len(flat) - 1, 0), min(len(flat), _NUMBERS)).long()
            yield name, flat[places.to(flat.device)].cpu()


def _compared(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for name in [*before, *(set(after) - set(before))]:
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            deterministic = (old or new or {}).get("family") == "Delta"  # may show more of a model, or less
            if not deterministic:
                yield f"site {name!r} is {'new' if old is None else 'missing'}"
            continue
        what = f"{'prior' if old['latent'] else 'distribution'} of site {name!r}"
        for part in ("family", "shape", "plates"):
            if old[part] != new[part]:
                yield f"{what}: {part} {old[part]} → {new[part]}"
        for key in old["parameters"].keys() & new["parameters"].keys():
            a, b = (side["parameters"][key].reshape(-1) for side in (old, new))
            if min(len(a), len(b)) not in (1, max(len(a), len(b))):
                yield f"{what}: {key} has other dimensions"
                continue
            tolerance = max(_TOLERANCES.get(v.dtype, _SHORT) for v in (a, b))
            a, b = torch.broadcast_tensors(a.cpu().double(), b.cpu().double())
            largest = max(1e-4, *(float(v.abs().max()) for v in (a, b))) if a.numel() else 1.0
            gap = (a - b).abs()
            if bool((gap > tolerance * largest).any()):
                at = int(gap.argmax())
                yield f"{what}: {key} {float(a[at]):.5g} → {float(b[at]):.5g}"
