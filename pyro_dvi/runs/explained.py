# SPDX-License-Identifier: Apache-2.0
"""Errors of torch and Pyro in a run of a model, converted to errors that name their cause."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from traceback import extract_tb

import torch
from torch import Tensor, nn

from pyro_dvi.core.arguments import misfit, positional
from pyro_dvi.core.batches import is_strided, named_arguments, non_finite_inputs
from pyro_dvi.errors import DataError, ModelError, ParameterError, PyroDviError, UnsupportedError

AS_A_MODEL = "To turn a network into a model, use dvi.classifier(dvi.to_bayesian_(net), num_data=...) or dvi.regressor."


@contextmanager
def explained_errors(model: Callable, args: tuple, kwargs: dict) -> Iterator[None]:
    """Convert errors of a run of ``model`` to errors that name their cause.

    Args:
        model: a Pyro model.
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.

    Raises:
        DataError: if the model does not accept these arguments; if it fails on data that contain NaN, or on their
            dtypes, devices or shapes; or if a minibatch has no rows, or more rows than its plate.
        ModelError: if the model fails on NaN weights.
        ParameterError: if a distribution rejects its parameters.
    """
    try:
        yield
    except PyroDviError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError, ZeroDivisionError) as error:
        explanation = _of_arguments(error, model, args, kwargs)
        if explanation is None and not isinstance(error, (TypeError, torch.OutOfMemoryError)):
            explanation = _of_data(model, args, kwargs)
        explanation = explanation or _of_text(error) or _of_tensors(error, args, kwargs)
        if explanation is None:
            raise
        raise explanation from error


def _of_arguments(error: Exception, model: Callable, args: tuple, kwargs: dict) -> PyroDviError | None:
    for name, value in named_arguments(args, kwargs).items():
        if hasattr(value, "__array__") and not isinstance(value, Tensor):
            kind = type(value).__name__
            return DataError(f"{name} of the model is of type {kind}: convert it with torch.as_tensor")
    inner = inspect.unwrap(model)
    reason = misfit(inner, args, kwargs) if isinstance(error, TypeError) else None
    if reason is None:
        return None
    # A module with one argument is assumed to be a network, because it cannot receive observations.
    network = f". {AS_A_MODEL}" if isinstance(inner, nn.Module) and len(positional(inner)) == 1 else ""
    return DataError(f"a batch does not match the arguments of the model: {reason}{network}")


def _of_data(model: Callable, args: tuple, kwargs: dict) -> PyroDviError | None:
    if (bad := bad_values(args, kwargs)) is not None:
        return bad
    for name, value in named_arguments(args, kwargs).items():
        if is_strided(value) and value.dim() and not len(value):
            return DataError(f"{name} of the model has no rows: remove batches without examples")
    inner = inspect.unwrap(model)
    module = inner if isinstance(inner, nn.Module) else nn.Module()
    for name in non_finite(dict((*module.named_parameters(), *module.named_buffers()))):
        return ModelError(f"{name!r} of the model contains NaN or infinite values: start from finite weights")
    return None


def _of_tensors(error: Exception, args: tuple, kwargs: dict) -> PyroDviError | None:
    message = str(error).partition("\n")[0]
    words = ("dtype", "scalar type", "device", "shape", "size", "dimension", "channels")
    # A ValueError about a shape comes from a distribution; training may have made the parameters invalid.
    if type(error) not in (RuntimeError, IndexError) or not any(word in message for word in words):
        return None
    tensors = {name: value for name, value in named_arguments(args, kwargs).items() if is_strided(value)}
    given = ", ".join(f"{name} {v.dtype} {tuple(v.shape)} on {v.device}" for name, v in tensors.items())
    return DataError(
        f"the model fails on these data ({given}): {message}. A batch must contain the arguments of the model in the "
        "order of its signature, with the dtype and device of the weights: x.float(), x.to(device). A model whose rows "
        "depend on each other, such as the nodes of a graph, needs all of them in one batch: batch_size=len(x)"
    )


_TRANSFORM = (
    "means and variances cannot pass through torch.vmap or torch.func: {}. Write the function for all rows at once, "
    "or train with TaylorELBO and predict with Samples()"
)
# Messages of Pyro and PyTorch, and the messages that replace them. {} stands for the first line of the original
# message, and {at} for its location.
_TEXTS: dict[str, tuple[type[PyroDviError], str]] = {
    "subsample_size does not match": (
        DataError,
        "a minibatch has more rows than the size of its plate: {}. In pyro.plate(name, size, subsample_size=len(x)), "
        "size must be the number of examples in the whole data set.",
    ),
    "Shape mismatch inside plate": (
        ModelError,
        "{}: dimensions of a site that do not belong to a plate need .to_event(n)",
    ),
    "more than 1 value per channel": (
        DataError,
        "batch norm cannot normalise a batch of one row: {}. Pass drop_last=True to the DataLoader, or another size",
    ),
    "Multiple sample sites named": (
        ModelError,
        "{}: in a model that is a plain function, each call of a network draws its weights again, and two networks may "
        "use the same names. Write the model as a pyro.nn.PyroModule with the networks as attributes, self.net = net, "
        "which draws them once per run under names of their own; give other sites different names",
    ),
    "to satisfy the constraint": (
        ParameterError,
        "{} in the model.\nMap the parameter into this range (a scale with torch.nn.functional.softplus). "
        "NaN is caused by weights or inputs that are too large.",
    ),
    "save_for_backward can only": (
        UnsupportedError,
        "{at.name}, line {at.lineno}, calls a custom torch.autograd.Function, which cannot save means and variances: "
        "{}. Use torch functions instead, write a rule with pyro_dvi.moments.moment_rule, or train with TaylorELBO",
    ),
    "type <class 'pyro_dvi.moments": (UnsupportedError, _TRANSFORM),
    "transformed by a functorch": (UnsupportedError, _TRANSFORM),
}


def _of_text(error: Exception) -> PyroDviError | None:
    message = str(error).partition("\n")[0]
    for part, (kind, text) in _TEXTS.items():
        if part in message:
            frames = extract_tb(error.__traceback__)
            at = next(frame for frame in reversed(frames) if not frame.filename.startswith(torch.__path__[0]))
            return kind(text.format(message.rstrip(":"), at=at))
    return None


def bad_values(args: tuple, kwargs: dict) -> DataError | None:
    """Return an error that names NaN or infinities among the arguments of a model; None if there are none."""
    found = non_finite_inputs(args, kwargs)
    if not found:
        return None
    return DataError(
        f"arguments of the model contain NaN or infinite values: {' and '.join(found)}. Drop these rows, or replace "
        "the values (and mask the site of missing observations with pyro.poutine.mask)"
    )


def non_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of parameters and running statistics with NaN or infinities, and of other tensors with NaN.

    Infinities are allowed in other buffers and constants, such as the mask of causal attention. The check reads one
    value per device.

    Example:
        >>> non_finite({"mask": torch.tensor(-torch.inf), "running_var": torch.tensor(torch.inf)})
        ['running_var']
    """
    # Minimum and maximum are NaN if any element is NaN; computing them takes one pass and no memory.
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
