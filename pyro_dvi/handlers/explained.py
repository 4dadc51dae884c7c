# SPDX-License-Identifier: Apache-2.0
"""Say what is wrong with the data where a model merely stumbles over them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pyro_dvi.batches import is_strided
from pyro_dvi.errors import DataError, DeviceError, ModelError, PyroDviError

__all__ = ["explained_errors", "non_finite"]


@contextmanager
def explained_errors(
    model: Callable, posterior: Iterable[Tensor], args: tuple, kwargs: dict
) -> Iterator[None]:
    """Turn errors of a run of ``model`` into errors that name their cause.

    Args:
        model: a Pyro model.
        args: its positional arguments.
        kwargs: its keyword arguments.
        posterior: tensors of the guide, which tell its device.

    Raises:
        DeviceError: data and parameters live on different devices.
        DataError: the model fails on data that hold NaN, or are of another type than its weights; or a minibatch has
            no rows, or more than its plate.
        ModelError: the model fails on weights that are NaN, a site does not fit its plate, or a prior is improper.
    """
    try:
        yield
    except PyroDviError:
        raise
    except (RuntimeError, ValueError, ZeroDivisionError) as error:
        named = [(f"argument {k + 1}", v) for k, v in enumerate(args)] + list(kwargs.items())
        tensors = [(name, v) for name, v in named if is_strided(v)]
        module = model if isinstance(model, nn.Module) else nn.Module()
        weights_by_name = dict((*module.named_parameters(), *module.named_buffers()))
        owned = list(weights_by_name.values())
        parameters = {t.device.type for t in (*owned, *posterior)}
        data = {v.device.type for _, v in tensors}
        if len(data | parameters) > 1:
            raise DeviceError(
                f"the data are on {sorted(data)} but the posterior is on {sorted(parameters) or 'the default device'}: "
                "move both to one device, e.g. x.to(device), model.to(device), and build the guide after moving the "
                "model"
            ) from error
        for name, v in tensors:
            if v.is_floating_point() and not bool(torch.isfinite(v).all()):
                raise DataError(
                    f"{name} of the model holds NaN or infinite values, on which the model fails: drop those rows, or "
                    "replace the values"
                ) from error
            if v.dim() and not len(v):
                raise DataError(
                    f"{name} of the model has no rows: leave out batches without examples"
                ) from error
        for name in non_finite(weights_by_name):
            raise ModelError(
                f"{name!r} of the model holds NaN or infinite values, on which it fails: start from finite weights"
            ) from error
        types = {v.dtype for _, v in tensors}
        weights = {t.dtype for t in (*owned, *posterior) if t.is_floating_point()} or {
            torch.get_default_dtype()
        }
        if any(word in str(error) for word in ("dtype", "scalar type")) and len(types | weights) > 1:
            raise DataError(
                f"the data are {sorted(map(str, types))} but the weights {sorted(map(str, weights))}: convert the "
                "data, as by x.float(), or build model and guide in the data's type, as by model.double()"
            ) from error
        if "subsample_size does not match" in str(error):
            raise DataError(
                f"a minibatch has more rows than its plate is large: {str(error).splitlines()[0]}. The size of "
                "pyro.plate(name, size, subsample_size=len(x)) is the number of examples in the whole data set."
            ) from error
        if "Shape mismatch inside plate" in str(error):
            raise ModelError(
                f"{str(error).splitlines()[0]}: dimensions of a site that do not belong to a plate need .to_event(n)"
            ) from error
        if "does not support sampling" in str(error):
            raise ModelError(
                f"{str(error).splitlines()[0]}: a latent site needs a proper prior, for its start and for the KL "
                "divergence. Take a wide one, as Normal(0, 100)"
            ) from error
        raise


def non_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of trained parameters and running statistics that hold NaN or infinities, and of other tensors with NaN.

    A buffer or constant may be infinite by right, as the mask of causal attention. One value is read for each device.

    Example:
        >>> non_finite({"mask": torch.tensor(-torch.inf), "running_var": torch.tensor(torch.inf)})
        ['running_var']
    """
    found: dict[torch.device, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if value.layout == torch.strided:
            finite = value.requires_grad or name.endswith(("running_mean", "running_var"))
            bad = ~torch.isfinite(value).all() if finite else torch.isnan(value).any()
            found.setdefault(value.device, {})[name] = bad
    return [
        name
        for flags in found.values()
        for name, bad in zip(flags, torch.stack(list(flags.values())).tolist(), strict=True)
        if bad
    ]
