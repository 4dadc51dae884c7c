# SPDX-License-Identifier: Apache-2.0
"""What a model says about a few rows of data, by which it is recognised: after a change, or in another process."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import Distribution, Transform

from pyro_dvi.core.batches import arguments, is_strided, mapped, rows_cut, tensors_in
from pyro_dvi.core.distributions import unexpanded
from pyro_dvi.core.undisturbed import evaluating, undisturbed
from pyro_dvi.runs.means import PosteriorMeans
from pyro_dvi.runs.sites import core, is_latent

_ROWS = 4  # of the data
_NUMBERS = 64  # of each parameter of a distribution, spread evenly over its elements
_PLAIN = {type(None), bool, int, float, str}
_LARGEST = 1_000_000  # numbers in arguments that are kept, where the model does not take a few rows
# Relative to the range of the numbers. More than rounding adds up to in a deep network (0.003 with TensorFloat-32 in
# ResNet-50, on a device; 0.000002 on the CPU), less than another activation, prior or noise makes.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-2, torch.bfloat16: 5e-2, torch.float16: 5e-2}
_ON_CPU = {**_TOLERANCES, torch.float32: 1e-4}
_OFFSET = 0.1  # of the tolerance, relative to the largest number: what all have in common is rounded as well


@dataclass(frozen=True)
class Fingerprint:
    """Sites of a model in evaluation mode at given values of its latents: plates, distributions, their parameters.

    Attributes:
        args: positional arguments that the model was run with: the first rows of a batch, or all of it where the model
            does not take fewer.
        kwargs: keyword arguments, likewise.
        sites: what was found, in tensors and plain values.
        precise: whether it was computed in full precision, by the CPU.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sites: dict[str, dict[str, Any]]
    precise: bool = False

    @classmethod
    def of(
        cls, model: Any, args: Any, kwargs: Any, latents: Mapping[str, Tensor], known: Any = None
    ) -> "Fingerprint | None":
        """Take it; parameters that depend on random numbers of the model's own are left out.

        Args:
            model: the model.
            args: its positional arguments.
            kwargs: its keyword arguments.
            latents: values of its latents.
            known: the sites of an earlier one with these arguments, at other values of the latents. None: the model is
                run a second time to see what depends on random numbers.

        Returns:
            The fingerprint; None if the model does not run with these values of its latents, or only with more data
            than is worth keeping.
        """
        for rows in (_ROWS, None) if known is None else (None,):
            try:
                some = rows_cut(itemgetter(slice(rows)), (tuple(args), dict(kwargs)))
                if sum(value.numel() for value in tensors_in(some) if is_strided(value)) > _LARGEST:
                    continue
                few, named = mapped(lambda v: v.detach().clone() if is_strided(v) else v, some)
                sites = _look(model, few, named, latents, 0)
                again = known or _look(model, few, named, latents, 1)
            except Exception:  # the model takes whole batches only, or these latents belong to other rows
                continue
            for name, site in sites.items():
                twin = again[name]["parameters"] if name in again else {}
                site["parameters"] = {
                    k: v
                    for k, v in site["parameters"].items()
                    if k in twin and (known is not None or torch.equal(*map(torch.nan_to_num, (v, twin[k]))))
                }
            return cls(few, named, sites, _precise(latents))
        return None

    def differences(self, model: Any, latents: Mapping[str, Tensor], plates: bool = True) -> str:
        """Say what is not as it was, at the same values of the latents; empty if all is.

        Args:
            model: the model to compare.
            latents: values of its latents.
            plates: whether plates and shapes of observed sites count. False is for predictions, which do not depend on
                them, and asks nothing of a model that does not take the arguments of before.
        """
        device = next((value.device for value in latents.values()), None)
        try:
            after = _look(model, *self.placed(device), latents, 0)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            return f"it does not run with the arguments of before ({reason})" if plates else ""
        tolerances = _ON_CPU if self.precise and _precise(latents) else _TOLERANCES
        found = list(_compared(self.sites, after, plates, tolerances))
        return "; ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")

    def placed(self, device: torch.device | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments on a device."""
        return arguments(self.args, device)[0], arguments(self.kwargs, device)[1]

    def state(self) -> dict[str, Any] | None:
        """Return it for a file; None where the arguments hold what a safe load of the file does not build."""
        return dict(vars(self)) if _is_plain((self.args, self.kwargs)) else None


def central_values(guide: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Tensor]:
    """Return the median of an automatic guide, the means of another; empty where it has neither."""
    with undisturbed(), evaluating(guide), torch.no_grad(), poutine.block():
        try:
            if hasattr(guide, "median"):
                return dict(guide.median(*args, **kwargs))
            with PosteriorMeans() as means:
                guide(*args, **kwargs)
        except Exception:
            # A guide without a median, or with sites that have no mean; both may be of the user's own.
            return {}
    return {name: node["value"].detach() for name, node in _sites(means.trace.nodes)}


def _sites(nodes: Any) -> Iterator[tuple[str, Any]]:
    for name, node in nodes.items():
        if (is_latent(node) or node.get("is_observed")) and not node["infer"].get("is_auxiliary"):
            yield name, node


def _precise(latents: Mapping[str, Tensor]) -> bool:
    modes = torch.is_autocast_enabled("cpu") or torch.get_float32_matmul_precision() != "highest"
    return not modes and {value.device.type for value in latents.values()} == {"cpu"}


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list, dict):
        return all(map(_is_plain, (*value, *value.values()) if type(value) is dict else value))
    return type(value) in _PLAIN or (type(value) is Tensor and is_strided(value))


def _look(model: Any, args: Any, kwargs: Any, latents: Mapping[str, Tensor], seed: int) -> dict[str, Any]:
    with undisturbed(), evaluating(model), torch.no_grad(), poutine.block():
        torch.manual_seed(seed)
        nodes = poutine.trace(poutine.condition(model, data=dict(latents))).get_trace(*args, **kwargs).nodes
    return {
        name: {
            "latent": name in latents or not node["is_observed"],
            "family": type(core(node["fn"])).__name__,
            "shape": tuple(node["value"].shape),
            "plates": {f.name: f.full_size or f.size for f in node["cond_indep_stack"]},
            "parameters": dict(_parameters(node["fn"])),
        }
        for name, node in _sites(nodes)
    }


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
            flat = unexpanded(value.detach()).reshape(-1)
            if len(flat) > _NUMBERS:
                flat = flat[torch.linspace(0, len(flat) - 1, _NUMBERS).long().to(flat.device)]
            yield name, flat.to("cpu", copy=True)


def _compared(before: Any, after: Any, plates: bool, tolerances: Mapping[Any, float]) -> Iterator[str]:
    for name in [*before, *(set(after) - set(before))]:
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            if (old or new)["family"] != "Delta":  # deterministic ones may show more of a model, or less
                yield f"site {name!r} is {'new' if old is None else 'missing'}"
            continue
        what = f"{'prior' if old['latent'] else 'distribution'} of site {name!r}"
        for part in ("family", "shape", "plates"):
            if old[part] != new[part] and (plates or old["latent"] or part == "family"):
                yield f"{what}: {part} {old[part]} → {new[part]}"
        for key in old["parameters"].keys() & new["parameters"].keys():
            values = old["parameters"][key].cpu(), new["parameters"][key]
            if not torch.equal(*values) and (change := _change(*values, tolerances)):
                yield f"{what}: {key} {change}"


def _change(a: Tensor, b: Tensor, tolerances: Mapping[Any, float]) -> str:
    """Say how a parameter has changed by more than rounding; empty if it has not."""
    if min(len(a), len(b)) not in (1, max(len(a), len(b))):
        return "has other dimensions"
    tolerance = max(tolerances.get(v.dtype, 0.0) for v in (a, b))
    a, b = torch.broadcast_tensors(a.double(), b.double())
    gap = (a - b).abs().nan_to_num(nan=math.inf).masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0)
    if not bool((gap > tolerance * max(1e-4, _scale(a), _scale(b))).any()):
        return ""
    at = int(gap.argmax())
    return f"{float(a[at]):.5g} → {float(b[at]):.5g}"


def _scale(values: Tensor) -> float:
    """What differences between numbers are relative to: their range, and a part of what they have in common."""
    numbers = values[values.isfinite()].tolist() or [0.0]
    largest = max(map(abs, numbers))
    return largest if len(numbers) == 1 else max(numbers) - min(numbers) + _OFFSET * largest
