# SPDX-License-Identifier: Apache-2.0
"""Detection of changes of a model, even between processes, without storing any data."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import Distribution, Transform

from pyro_dvi.core.batches import is_strided, mapped, rows_cut
from pyro_dvi.core.distributions import unexpanded
from pyro_dvi.core.undisturbed import device_of, evaluating, seeder, undisturbed
from pyro_dvi.runs.sites import core, is_latent

_ELEMENTS = 64  # maximum number of elements of a parameter that are stored
_ROWS = 4  # number of rows of the artificial inputs, if the model accepts so few
# Relative tolerance: above the accumulated rounding error of a deep network (0.003 with TensorFloat-32 in ResNet-50),
# and below the effect of a different activation, prior or noise.
_TOLERANCE = 1e-2


@dataclass(frozen=True)
class Fingerprint:
    """Summary of a model's sites in evaluation mode, at artificial inputs.

    An artificial input has the shape and dtype of the original input, and its elements increase from 0 to 1; integers
    and booleans are 1. No data are stored. Names, families and shapes of sites show whether two models have the same
    latents. At given values of the latents, the parameters of the distributions also reveal changes of priors, noise,
    activations and deterministic weights.

    Attributes:
        args: positional arguments of the model, as tensors in tuples, lists and dictionaries. Only the shape and dtype
            of the tensors are used.
        kwargs: keyword arguments of the model, in the same form.
        sites: for each site, whether it is latent, its family and its shape; and, at given values of the latents, for
            each parameter of its distribution the mean, the mean absolute value, a mean weighted by position, and some
            elements. Files of earlier versions lack the elements, which are then not compared.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sites: dict[str, dict[str, Any]]

    @classmethod
    def of(
        cls, model: Any, args: Any, kwargs: Any, latents: Mapping[str, Tensor] | None = None
    ) -> "Fingerprint | None":
        """Compute the fingerprint, with fixed random numbers if the model draws any.

        Args:
            model: the model.
            args: positional arguments of the model.
            kwargs: keyword arguments of the model.
            latents: values of the model's latents. None draws them, and leaves out the parameters of distributions.

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

    def differences(self, model: Any, latents: Mapping[str, Tensor] | None = None) -> str:
        """Return a description of what has changed; empty if nothing has, or if the model rejects these arguments.

        Args:
            model: the model to compare.
            latents: the same values of the model's latents.
        """
        try:
            after = _look(model, self.args, self.kwargs, latents)
        except Exception:
            return ""
        found = list(_compared(self.sites, after))
        return "; ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


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

    def stand_in(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        elements = (
            torch.linspace(0, 1, value.numel()) if value.is_floating_point() else torch.ones(value.shape)
        )
        return elements.reshape(value.shape).to(device, value.dtype)

    return mapped(stand_in, args), mapped(stand_in, kwargs)


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list, dict):
        return all(map(_is_plain, value.values() if type(value) is dict else value))
    return value is None or type(value) is bool or (type(value) is Tensor and is_strided(value))


def _only_shape(value: Any) -> Any:
    return torch.zeros((), dtype=value.dtype).expand(value.shape) if isinstance(value, Tensor) else value


def _look(model: Any, args: Any, kwargs: Any, latents: Mapping[str, Tensor] | None) -> dict[str, Any]:
    given = dict(latents or {})
    device = next((value.device for value in given.values()), device_of(model))
    args, kwargs = stand_ins(args, kwargs, device)
    with undisturbed(), evaluating(model), torch.no_grad(), poutine.block(), pyro.validation_enabled(False):
        seeder()(0)
        trace: Any = poutine.trace(poutine.condition(model, data=given)).get_trace(*args, **kwargs)
    return {
        name: {
            "latent": name in given or not node["is_observed"],
            "family": type(core(node["fn"])).__name__,
            "shape": tuple(node["value"].shape),
            "parameters": {} if latents is None else dict(_parameters(node["fn"])),
        }
        for name, node in trace.nodes.items()
        if (is_latent(node) or node.get("is_observed")) and not node["infer"].get("is_auxiliary")
    }


def _parameters(part: Any) -> Iterator[tuple[str, list[float]]]:
    """Summarise the parameters that the model passed to a distribution, and those of its inner parts and transforms."""
    for name, value in vars(part).items():
        for inner in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(inner, (Distribution, Transform)) and name != "_inv":
                yield from _parameters(inner)
        own = isinstance(part, Transform) or name in part.arg_constraints
        if own and isinstance(value, (float, Tensor)):
            values = unexpanded(torch.as_tensor(value)).detach().flatten().cpu().double().nan_to_num()
            weights = torch.linspace(0.5, 1.5, len(values), dtype=values.dtype, device="cpu")
            means = (values, values.abs(), values * weights)
            some = values[:: len(values) // _ELEMENTS + 1].tolist()
            yield name, [*(float(v.mean()) for v in means), *some] if len(values) else []


def _compared(before: Any, after: Any) -> Iterator[str]:
    for name in {**before, **after}:
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            if (old or new)["family"] != "Delta":  # deterministic sites may be added or removed
                yield f"site {name!r} is {'new' if old is None else 'missing'}"
            continue
        what = f"{'prior' if old['latent'] else 'distribution'} of site {name!r}"
        for part in ("family", "shape") if old["latent"] else ("family",):
            if old[part] != new[part]:
                yield f"{what}: {part} {old[part]} → {new[part]}"
        for key in old["parameters"].keys() & new["parameters"].keys():
            pairs = list(zip(old["parameters"][key], new["parameters"][key], strict=False))
            size = max((abs(number) for pair in pairs for number in pair), default=0.0)
            apart = [(a, b) for a, b in pairs if not abs(a - b) <= _TOLERANCE * size]
            if apart:
                yield f"{what}: {key} {apart[0][0]:.5g} → {apart[0][1]:.5g}"
