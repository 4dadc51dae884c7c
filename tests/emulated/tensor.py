# SPDX-License-Identifier: Apache-2.0
"""The tensors of the emulated device, and what it does and refuses."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.emulated import random
from tests.emulated.reads import note

NAME = "emulated"

# What returns a value, or a result whose size depends on values.
_READS = {
    "_local_scalar_dense": "item",
    "is_nonzero": "bool",
    "equal": "equal",
    "allclose": "allclose",
    "nonzero": "nonzero",
    "masked_select": "masked_select",
    "bincount": "bincount",
    "_unique2": "unique",
    "unique_dim": "unique",
    "unique_consecutive": "unique",
    "repeat_interleave": "repeat_interleave",
    "_linalg_check_errors": "check of a decomposition",
}
# Operations that take tensors of two devices on a GPU as well, and those that do not even without dimensions.
_CROSSES = {
    "copy_",
    "_to_copy",
    "index",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "_unsafe_index",
    "fill_",
}
_NEVER_MIXED = {"cat", "stack"}

_without_float64 = False


class EmulatedTensor(torch.Tensor):
    """A tensor that says it is on the emulated device; ``near`` is the tensor on the CPU that holds its values."""

    near: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, near: Tensor) -> "EmulatedTensor":
        if _without_float64 and near.dtype in (torch.float64, torch.complex128):
            raise TypeError(f"the emulated device has no {near.dtype}; use float32 instead")
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            near.shape,
            strides=near.stride(),
            storage_offset=near.storage_offset(),
            dtype=near.dtype,
            device=torch.device(NAME, 0),
        )
        self.near = near
        return self  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        assert isinstance(value, EmulatedTensor), "a parameter of a module moves by swap()"
        self.near = value.near
        _follow(self)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        note("repr")
        return f"{self.near!r} on {self.device}"

    def tolist(self) -> Any:
        note("tolist")
        return self.near.tolist()

    def numpy(self, **options: Any) -> Any:
        raise TypeError("can't convert an emulated tensor to numpy; use Tensor.cpu() first")

    def data_ptr(self) -> int:
        return self.near.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.near.untyped_storage()

    def __reduce_ex__(self, protocol: Any) -> Any:
        note("copy to the CPU")
        state = (self.detach().near.clone(), self.dtype, str(self.device), self.requires_grad)
        return torch._utils._rebuild_device_tensor_from_cpu_tensor, state

    def __deepcopy__(self, memo: dict[int, Any]) -> "EmulatedTensor":
        if id(self) not in memo:
            assert self.is_leaf, "only leaves of the graph can be copied deeply"
            twin = EmulatedTensor(self.near.clone()).requires_grad_(self.requires_grad)
            twin.__dict__.update({k: v for k, v in self.__dict__.items() if k != "near"})
            memo[id(self)] = twin
        return memo[id(self)]  # type: ignore[no-any-return]


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the values, and place its results."""
    name = func._schema.name.partition("::")[2]
    given = _tensors((args, tuple(kwargs.values())))
    far = [a for a in given if isinstance(a, EmulatedTensor)]
    near = [a for a in given if not isinstance(a, EmulatedTensor)]
    target = kwargs.get("device")
    target = None if target is None else torch.device(target).type
    _refuse(name, given, far, near)
    if far and name == "native_batch_norm_backward" and args[2] is None and not args[9][0]:
        raise RuntimeError("Expected weight to be defined: CUDA's kernel of sums alone has no default for it")
    if name == "copy_":
        target = NAME if isinstance(args[0], EmulatedTensor) else "cpu"
    result_is_far = target == NAME or (bool(far) and target is None)
    if far and (what := _read(name, args, target)):
        note(what)
    if target is not None and "device" in kwargs:
        kwargs = {**kwargs, "device": "cpu"}
        kwargs.pop("pin_memory", None), kwargs.pop("non_blocking", None)
    draws = torch.Tag.nondeterministic_seeded in func.tags and result_is_far
    with random.drawn(kwargs.get("generator")) if draws else contextlib.nullcontext():
        result = func(*_map(_values, args), **{k: _map(_values, a) for k, a in kwargs.items()})
    owners = {id(a.near): a for a in far}

    def place(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in owners:  # an operation in place returns what it was given
            return _follow(owners[id(value)])
        return EmulatedTensor(value) if result_is_far else value

    return _map(place, result)


def _follow(tensor: EmulatedTensor) -> EmulatedTensor:
    """Give a tensor the shape that its values were given in place."""
    near = tensor.near
    if (tensor.shape, tensor.stride()) != (near.shape, near.stride()):
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Python)):
            torch.ops.aten.as_strided_.default(tensor, near.shape, near.stride(), near.storage_offset())
    return tensor


def swap(a: Tensor, b: Tensor) -> None:
    """Let two tensors change places, one of them on the CPU, whatever refers to them.

    A module that moves between CPU and GPU keeps its parameters, with what others have noted on them, and only their
    data change. Tensors of different classes cannot do that, so everything but the notes has to change places.
    """
    a.__class__, b.__class__ = b.__class__, a.__class__
    torch._C._swap_tensor_impl(a, b)
    own = [{k: t.__dict__.pop(k) for k in ("near", "_is_param") if k in t.__dict__} for t in (b, a)]
    for tensor, entries in zip((a, b), own, strict=True):
        tensor.__dict__.update(entries)


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to what is in tuples and lists, in a fifth of the time of torch's own."""
    kind = type(tree)
    return kind(_map(function, part) for part in tree) if kind is tuple or kind is list else function(tree)


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, tuple | list):
        return [tensor for part in tree for tensor in _tensors(part)]
    return [tree] if isinstance(tree, Tensor) else []


def _values(a: Any) -> Any:
    return a.near if isinstance(a, EmulatedTensor) else a


def _refuse(name: str, given: list[Tensor], far: list[EmulatedTensor], near: list[Tensor]) -> None:
    if not far or not near or name in _CROSSES and isinstance(given[0], EmulatedTensor) or name == "copy_":
        return
    written = name.endswith("_") and not isinstance(given[0], EmulatedTensor)
    if written or name in _NEVER_MIXED or any(a.dim() for a in near):
        raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got {NAME}:0 and cpu")


def _read(name: str, args: tuple[Any, ...], target: str | None) -> str | None:
    if name in ("copy_", "_to_copy") and target == "cpu":
        return "copy to the CPU"
    masks = name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index") and any(
        isinstance(a, Tensor) and a.dtype in (torch.bool, torch.uint8) for a in args[1]
    )
    if masks and (name == "index" or args[2].numel() > 1):  # a mask that fills with one value is masked_fill
        return "index by a mask"
    return _READS.get(name)


@contextlib.contextmanager
def no_float64() -> Iterator[None]:
    """Let the device refuse float64 within this context, as Apple's does."""
    global _without_float64
    _without_float64 = True
    try:
        yield
    finally:
        _without_float64 = False


def factory(func: Any) -> Callable[..., Any]:
    """Return the kernel of a function that makes a tensor on the device its arguments name."""
    return lambda *args, **kwargs: run(func, args, {**kwargs, "device": NAME})


def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy as ``target.copy_(source)`` does."""
    return run(torch.ops.aten.copy_.default, (target, source), {})  # type: ignore[no-any-return]
