# SPDX-License-Identifier: Apache-2.0
"""Detection of changes of a model, even between processes, without storing any data."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import Distribution, Transform

from pyro_dvi.core.batches import arguments, is_strided, mapped, rows_cut
from pyro_dvi.core.distributions import unexpanded
from pyro_dvi.core.undisturbed import device_of, evaluating, seeder, undisturbed
from pyro_dvi.runs.posterior_run import PosteriorMeans
from pyro_dvi.runs.sites import core, is_latent

_ROWS = 4  # number of rows of the artificial inputs, if the model accepts so few
# Relative tolerance: above the accumulated rounding error of a deep network (0.003 with TensorFloat-32 in ResNet-50),
# and below the effect of a different activation, prior or noise.
_TOLERANCE = 1e-2


@dataclass(frozen=True)
class Fingerprint:
    """Summary of a model's sites in evaluation mode, at given values of its latents and at artificial inputs.

    An artificial input has the shape and dtype of the original input, and its elements increase from 0 to 1; integers
    and booleans are 1. No data are stored, and yet changes of priors, noise, activations or deterministic weights are
    detected.

    Attributes:
        args: positional arguments of the model, as tensors in tuples, lists and dictionaries. Only the shape and dtype
            of the tensors are used.
        kwargs: keyword arguments of the model, in the same form.
        sites: for each site, the family, shape and plates; and, for each parameter of its distribution, the mean, the
            mean absolute value, and a mean weighted by position.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sites: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, model: Any, args: Any, kwargs: Any, latents: Mapping[str, Tensor]) -> "Fingerprint | None":
        """Compute the fingerprint, with fixed random numbers if the model draws any.

        Args:
            model: the model.
            args: positional arguments of the model.
            kwargs: keyword arguments of the model.
            latents: values of the model's latents.

        Returns:
            The fingerprint; None if the arguments contain anything but dense tensors, None and booleans in tuples,
            lists and dictionaries, or if the model does not run on artificial inputs.
        """
        shapes = input_shapes(args, kwargs)
        for rows in () if shapes is None else (_ROWS, None):
            args, kwargs = rows_cut(itemgetter(slice(rows)), shapes)
            try:
                return cls(args, kwargs, _look(model, args, kwargs, latents))
            except Exception:  # the model needs a complete batch, or rejects artificial inputs
                continue
        return None

    def differences(self, model: Any, latents: Mapping[str, Tensor], plates: bool = True) -> str:
        """Return a description of what has changed, at the same values of the latents; empty if nothing has changed.

        Args:
            model: the model to compare.
            latents: values of the model's latents.
            plates: True to compare plates and shapes of observed sites; False for predictions, which do not depend on
                these. If False, a model that does not accept the original arguments is not compared at all.
        """
        try:
            after = _look(model, self.args, self.kwargs, latents)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            return f"it does not run with arguments of these shapes ({reason})" if plates else ""
        found = list(_compared(self.sites, after, plates))
        return "; ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")

    def state(self) -> dict[str, Any]:
        """Return the fingerprint as tensors and plain values, for a file."""
        return dict(vars(self))


def input_shapes(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return arguments of a model in which each tensor keeps only its shape and dtype, and stores a single element.

    Return None if the arguments contain anything but dense tensors, None and booleans in tuples, lists and
    dictionaries, because other objects might contain data.
    """
    if not _is_plain((tuple(args), dict(kwargs))):
        return None
    return tuple(mapped(_only_shape, tuple(args))), mapped(_only_shape, dict(kwargs))


def stand_ins(args: Any, kwargs: Any, device: torch.device | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return artificial arguments of the given shapes, on a device, with which a model can run."""
    return arguments(mapped(_stand_in, args), device)[0], arguments(mapped(_stand_in, kwargs), device)[1]


def central_values(guide: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Tensor]:
    """Return the median of an automatic guide, or the means of another guide; empty if it has neither."""
    with undisturbed(), evaluating(guide), torch.no_grad(), poutine.block():
        try:
            if hasattr(guide, "median"):
                return dict(guide.median(*args, **kwargs))
            with PosteriorMeans() as means:
                guide(*args, **kwargs)
        except Exception:
            # The guide has neither a median nor a mean for every site.
            return {}
    return {name: node["value"].detach() for name, node in _sites(means.trace.nodes)}


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list, dict):
        return all(map(_is_plain, value.values() if type(value) is dict else value))
    return value is None or type(value) is bool or (type(value) is Tensor and is_strided(value))


def _only_shape(value: Any) -> Any:
    return torch.zeros((), dtype=value.dtype).expand(value.shape) if isinstance(value, Tensor) else value


def _stand_in(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not value.is_floating_point():
        return torch.ones(value.shape, dtype=value.dtype)
    return torch.linspace(0, 1, value.numel()).reshape(value.shape).to(value.dtype)


def _sites(nodes: Any) -> Iterator[tuple[str, Any]]:
    for name, node in nodes.items():
        if (is_latent(node) or node.get("is_observed")) and not node["infer"].get("is_auxiliary"):
            yield name, node


def _look(model: Any, args: Any, kwargs: Any, latents: Mapping[str, Tensor]) -> dict[str, Any]:
    device = next((value.device for value in latents.values()), device_of(model))
    args, kwargs = stand_ins(args, kwargs, device)
    with undisturbed(), evaluating(model), torch.no_grad(), poutine.block():
        seeder()(0)
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


def _parameters(part: Any) -> Iterator[tuple[str, list[float]]]:
    """Summarise the parameters that the model passed to a distribution, and those of its inner parts and transforms."""
    transform = isinstance(part, Transform)
    for name, value in vars(part).items():
        for inner in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(inner, (Distribution, Transform)) and name != "_inv":
                yield from _parameters(inner)
        if isinstance(value, float) and transform:
            yield name, _summary(torch.tensor([value]))
        elif isinstance(value, Tensor) and (transform or name in part.arg_constraints):
            yield name, _summary(unexpanded(value).flatten())


def _summary(values: Tensor) -> list[float]:
    values = values.detach().cpu().double().nan_to_num()
    weights = torch.linspace(0.5, 1.5, len(values), dtype=values.dtype, device="cpu")
    return [float(v.mean()) for v in (values, values.abs(), values * weights)] if len(values) else []


def _compared(before: Any, after: Any, plates: bool) -> Iterator[str]:
    for name in [*before, *(set(after) - set(before))]:
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            if (old or new)["family"] != "Delta":  # deterministic sites may be added or removed
                yield f"site {name!r} is {'new' if old is None else 'missing'}"
            continue
        what = f"{'prior' if old['latent'] else 'distribution'} of site {name!r}"
        for part in ("family", "shape", "plates"):
            if old[part] != new[part] and (plates or old["latent"] or part == "family"):
                yield f"{what}: {part} {old[part]} → {new[part]}"
        for key in old["parameters"].keys() & new["parameters"].keys():
            pairs = list(zip(old["parameters"][key], new["parameters"][key], strict=False))
            size = max((abs(number) for pair in pairs for number in pair), default=0.0)
            for a, b in pairs:
                if not math.isclose(a, b, rel_tol=0.0, abs_tol=_TOLERANCE * size):
                    yield f"{what}: {key} {a:.5g} → {b:.5g}"
                    break
