# SPDX-License-Identifier: Apache-2.0
"""Objects that pass through torch functions: each call is dispatched to an entry in a table.

The table is filled by :mod:`pyro_dvi.moments.rules`. It is defined here so that the classes whose calls it dispatches
need not import the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from pyro_dvi.errors import UnsupportedError

# The entry of each function, by the function as it is called.
ENTRIES: dict[Callable, Any] = {}

# Attributes and methods of a tensor that do not depend on its values.
_DESCRIPTIVE = frozenset(
    "shape dtype device ndim layout is_cuda is_cpu is_mps is_sparse is_quantized is_nested requires_grad itemsize "
    "size dim numel nelement ndimension stride is_contiguous is_floating_point is_complex is_signed element_size "
    "get_device".split()
)


def call(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a torch function of moments.

    Raises:
        UnsupportedError: if the function has no rule.
    """
    entry = ENTRIES.get(func)
    if entry is None:
        raise UnsupportedError(_no_rule(func))
    return entry(func, args, kwargs)


def _no_rule(func: Callable) -> str:
    name = name_of(func)
    return (
        f"{name} has no rule for means and variances. Write one with the signature of the function:\n\n"
        "    from pyro_dvi.moments import GaussianMoments, moment_rule\n\n"
        f"    @moment_rule({name})\n"
        f"    def {name.rsplit('.', 1)[-1].strip('_')}_moments(x, ...):\n"
        "        return GaussianMoments(mean_of_the_result, variance_of_the_result)\n\n"
        "See 'Adding a moment rule' in the documentation. Or replace the function with one that has a rule, or train "
        "with TaylorELBO, which needs no rules. Comparisons, indices of the largest elements, step functions and "
        "losses of uncertain values need x.loc, the mean; the ELBO computes the expected loss from observed sites."
    )


def name_of(func: Callable) -> str:
    """Return the name of a torch function as users write it."""
    name = getattr(func, "__name__", repr(func))
    if getattr(torch.Tensor, name, None) is func and not hasattr(torch, name):
        return f"torch.Tensor.{name}"
    module = getattr(func, "__module__", None) or "torch"
    if getattr(torch.nn.functional, name, None) is func and not hasattr(torch, name):
        return f"torch.nn.functional.{name}"
    for area in ("special", "linalg", "fft"):  # torch.special.erf is torch._C._special.special_erf
        short = name.removeprefix(f"{area}_")
        if getattr(getattr(torch, area), short, None) is func:
            return f"torch.{area}.{short}"
    return f"torch.{name}" if module in ("torch._C", "torch._tensor", "builtins") else f"{module}.{name}"


def _operator(function: Callable) -> Callable[..., Any]:
    def operator(self: TensorLike, *other: Any) -> Any:
        return call(function, (self, *other), {})

    return operator


def _reflected(function: Callable) -> Callable[..., Any]:
    def operator(self: TensorLike, other: Any) -> Any:
        return call(function, (other, self), {})

    return operator


class TensorLike:
    """An object with the operators, methods and attributes of a tensor but no values; reading a value raises an error.

    The shape, dtype and device are those of ``loc``.
    """

    __slots__ = ()

    def _refuse_value(self, *args: Any) -> NoReturn:
        raise UnsupportedError(
            "the code needs the value of an uncertain tensor (an if, .item(), a conversion to a number or array): "
            "use x.loc to decide by the mean, or write a rule with pyro_dvi.moments.moment_rule. If a class in "
            "torch.distributions needs the value, use the class of the same name in pyro.distributions."
        )

    __bool__ = __float__ = __int__ = __index__ = __complex__ = __array__ = _refuse_value  # type: ignore[assignment]
    item = tolist = numpy = _refuse_value

    @property
    def loc(self) -> Tensor:
        """A tensor of the same shape, dtype and device."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return call(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name in _DESCRIPTIVE:
            return getattr(self.loc, name)
        method = None if name.startswith("__") else getattr(torch.Tensor, name, None)
        if not callable(method):
            raise AttributeError(f"GaussianMoments have no attribute {name!r}")
        return partial(self._call, method)

    def _call(self, method: Callable, *args: Any, **kwargs: Any) -> Any:
        return call(method, (self, *args), kwargs)

    @property
    def T(self) -> Any:
        """Transpose of a matrix."""
        return call(torch.t, (self,), {})

    @property
    def mT(self) -> Any:
        """Transpose of the last two dimensions."""
        return call(torch.transpose, (self, -2, -1), {})

    @property
    def data(self) -> Any:
        """The moments without their autograd history."""
        return self.detach()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(
                "an uncertain scalar has no length, and torch.tensor and torch.as_tensor need plain numbers: pass x.loc"
            )
        return len(self.loc)

    def __iter__(self) -> Iterator[Any]:
        return iter(call(torch.unbind, (self, 0), {}))

    def __getitem__(self, index: Any) -> Any:
        return call(torch.Tensor.__getitem__, (self, index), {})

    def __setitem__(self, index: Any, value: Any) -> None:
        call(torch.Tensor.__setitem__, (self, index, value), {})

    # Operators: forward, reflected and in place.
    __add__, __radd__, __iadd__ = _operator(torch.add), _reflected(torch.add), _operator(torch.Tensor.add_)
    __sub__, __rsub__, __isub__ = _operator(torch.sub), _reflected(torch.sub), _operator(torch.Tensor.sub_)
    __mul__, __rmul__, __imul__ = _operator(torch.mul), _reflected(torch.mul), _operator(torch.Tensor.mul_)
    __truediv__, __rtruediv__ = _operator(torch.div), _reflected(torch.div)
    __itruediv__ = _operator(torch.Tensor.div_)
    __matmul__, __rmatmul__ = _operator(torch.matmul), _reflected(torch.matmul)
    __pow__, __rpow__ = _operator(torch.pow), _reflected(torch.pow)
    __mod__, __rmod__ = _operator(torch.remainder), _reflected(torch.remainder)
    __floordiv__, __rfloordiv__ = _operator(torch.floor_divide), _reflected(torch.floor_divide)
    __neg__, __abs__, __invert__ = _operator(torch.neg), _operator(torch.abs), _operator(torch.bitwise_not)
    __gt__, __ge__, __lt__, __le__ = map(_operator, (torch.gt, torch.ge, torch.lt, torch.le))

    def __format__(self, spec: str) -> str:
        return self._refuse_value() if spec else str(self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TensorLike | Tensor | int | float):
            self._refuse_value()
        return NotImplemented

    __hash__ = object.__hash__
    __array_ufunc__ = None  # so that an operator with a numpy number on its left calls ours
