# SPDX-License-Identifier: Apache-2.0
"""Say what is wrong with the data where a model merely stumbles over them."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from traceback import extract_tb

import torch
from torch import Tensor, nn

from pyro_dvi.core.arguments import misfit, positional
from pyro_dvi.core.batches import named_arguments, non_finite_inputs, tensor_arguments
from pyro_dvi.errors import DataError, DeviceError, ModelError, ParameterError, PyroDviError, UnsupportedError

AS_A_MODEL = (
    "A network becomes a model by dvi.classifier(dvi.to_bayesian_(net), num_data=...), or by dvi.regressor."
)


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
        DataError: the model does not take these arguments, or fails on data that hold NaN, or are of another type than
            its weights, or of a shape that it does not take; or a minibatch has no rows, or more than its plate.
        ModelError: the model fails on weights that are NaN, a site does not fit its plate, or a prior is improper.
        ParameterError: a distribution refuses its parameters.
    """
    try:
        yield
    except PyroDviError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError, ZeroDivisionError) as error:
        data, message = tensor_arguments(args, kwargs), str(error).partition("\n")[0]
        inner = inspect.unwrap(model)
        module = inner if isinstance(inner, nn.Module) else nn.Module()
        weights = dict((*module.named_parameters(), *module.named_buffers()))
        explanation = _of_arguments(error, inner, args, kwargs)
        about_data = not isinstance(error, (TypeError, torch.OutOfMemoryError))
        if explanation is None and about_data:
            explanation = _of_devices(data, [*weights.values(), *posterior]) or _of_values(
                args, kwargs, weights
            )
        explanation = explanation or _of_text(error, message)
        if explanation is None and about_data:
            types = _of_types(message, data, [*weights.values(), *posterior])
            explanation = types or _of_shapes(error, message, data)
        if explanation is None:
            raise
        raise explanation from error


def _of_arguments(error: Exception, model: Callable, args: tuple, kwargs: dict) -> PyroDviError | None:
    for name, value in named_arguments(args, kwargs).items():
        if hasattr(value, "__array__") and not isinstance(value, Tensor):
            kind = type(value).__name__
            return DataError(f"{name} of the model is of type {kind}: torch.as_tensor makes it a tensor")
    reason = misfit(model, args, kwargs) if isinstance(error, TypeError) else None
    if reason is None:
        return None
    # A module of one argument sees no observations.
    network = f". {AS_A_MODEL}" if isinstance(model, nn.Module) and len(positional(model)) == 1 else ""
    return DataError(f"a batch does not hold the arguments of the model: {reason}{network}")


def _of_devices(data: Mapping[str, Tensor], weights: Iterable[Tensor]) -> PyroDviError | None:
    parameters = {t.device.type for t in weights}
    places = {v.device.type for v in data.values()}
    if len(places | parameters) <= 1:
        return None
    return DeviceError(
        f"the data are on {sorted(places)} but the posterior is on {sorted(parameters) or 'the default device'}: "
        "move both to one device, e.g. x.to(device), model.to(device), and build the guide after moving the model"
    )


def _of_values(args: tuple, kwargs: dict, weights: Mapping[str, Tensor]) -> PyroDviError | None:
    bad = bad_values(args, kwargs)
    if bad is not None:
        return bad
    for name, value in tensor_arguments(args, kwargs).items():
        if value.dim() and not len(value):
            return DataError(f"{name} of the model has no rows: leave out batches without examples")
    for name in non_finite(weights):
        return ModelError(
            f"{name!r} of the model holds NaN or infinite values, on which it fails: start from finite weights"
        )
    return None


def _of_types(message: str, data: Mapping[str, Tensor], weights: Iterable[Tensor]) -> PyroDviError | None:
    own = {t.dtype for t in weights if t.is_floating_point()}
    if {v.dtype for v in data.values()} == own or not ("dtype" in message or "scalar type" in message):
        return None
    known = f" ({', '.join(sorted(map(str, own)))})" if own else ""
    return DataError(
        f"the data ({_described(data)}) are of another type than the weights{known}: convert the data, as "
        "by x.float(), or build model and guide in their type, as by model.double(). A batch holds the "
        "arguments of the model in their order"
    )


def _of_shapes(error: Exception, message: str, data: Mapping[str, Tensor]) -> PyroDviError | None:
    # A ValueError with a shape is that of a distribution, whose parameters training may have made impossible.
    words = ("shape", "size", "dimension", "channels")
    if isinstance(error, ValueError) or not any(word in message for word in words):
        return None
    return DataError(
        f"the model fails on data of these shapes ({_described(data)}): {message}. A batch holds the arguments of the "
        "model in their order; inputs differ from those that a network was made for by their number of rows only"
    )


def _described(data: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {value.dtype} {tuple(value.shape)}" for name, value in data.items())


_TRANSFORM = (
    "means and variances do not pass through torch.vmap or torch.func: {}. Write the function for all rows at once, as "
    "x @ w.T for torch.vmap(lambda row: w @ row)(x), or train with TaylorELBO and predict by Samples()"
)
# What Pyro and PyTorch say, and how to say it to somebody who can change it; {} is the first line of what they say,
# {at} where.
_TEXTS: dict[str, tuple[type[PyroDviError], str]] = {
    "subsample_size does not match": (
        DataError,
        "a minibatch has more rows than its plate is large: {}. The size of "
        "pyro.plate(name, size, subsample_size=len(x)) is the number of examples in the whole data set.",
    ),
    "Shape mismatch inside plate": (
        ModelError,
        "{}: dimensions of a site that do not belong to a plate need .to_event(n)",
    ),
    "does not support sampling": (
        ModelError,
        "{}: a latent site needs a proper prior, for its start and for the KL divergence. Take a wide one, as "
        "Normal(0, 100)",
    ),
    "to satisfy the constraint": (
        ParameterError,
        "{} in the model.\nMap what it is computed from into that range, as torch.nn.functional.softplus does for a "
        "scale. Values of NaN come from weights or inputs that are too large.",
    ),
    "save_for_backward can only": (
        UnsupportedError,
        "{at.name}, line {at.lineno}, calls a custom torch.autograd.Function, which cannot save means and variances: "
        "{}. Use torch functions there, write a rule with pyro_dvi.moments.moment_rule, or train with TaylorELBO",
    ),
    "type <class 'pyro_dvi.moments": (UnsupportedError, _TRANSFORM),
    "transformed by a functorch": (UnsupportedError, _TRANSFORM),
}


def _of_text(error: Exception, message: str) -> PyroDviError | None:
    for part, (kind, text) in _TEXTS.items():
        if part in message:
            frames = extract_tb(error.__traceback__)
            at = next(frame for frame in reversed(frames) if not frame.filename.startswith(torch.__path__[0]))
            return kind(text.format(message.rstrip(":"), at=at))
    return None


def bad_values(args: tuple, kwargs: dict) -> DataError | None:
    """Return an error that names NaN or infinities among the arguments of a model; None where there are none."""
    found = non_finite_inputs(args, kwargs)
    if not found:
        return None
    return DataError(
        f"{' and '.join(found)} of the model: NaN or infinite values. Drop those rows, or replace the values by "
        "numbers, those of missing observations with pyro.poutine.mask around their site"
    )


def non_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of trained parameters and running statistics that hold NaN or infinities, and of other tensors with NaN.

    A buffer or constant may be infinite by right, as the mask of causal attention. One value is read for each device.

    Example:
        >>> non_finite({"mask": torch.tensor(-torch.inf), "running_var": torch.tensor(torch.inf)})
        ['running_var']
    """
    # The least and the largest element are NaN if any is; they take one pass and no memory.
    found: dict[torch.device, dict[str, tuple[Tensor, Tensor]]] = {}
    for name, value in tensors.items():
        if value.layout == torch.strided and value.numel() > 0:
            real = torch.view_as_real(value) if value.is_complex() else value
            found.setdefault(value.device, {})[name] = torch.aminmax(real.detach())
    bad = []
    for extremes in found.values():
        for name, ends in zip(
            extremes, torch.stack([*map(torch.stack, extremes.values())]).tolist(), strict=True
        ):
            finite = tensors[name].requires_grad or name.endswith(("running_mean", "running_var"))
            if any(math.isnan(end) or (finite and math.isinf(end)) for end in ends):
                bad.append(name)
    return bad
