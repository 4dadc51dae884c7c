# SPDX-License-Identifier: Apache-2.0
"""Checks of distributions in recorded steps; they replace Pyro's validation, which reads values."""

from contextlib import suppress
from inspect import getattr_static
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import Size, Tensor
from torch.distributions import Distribution
from torch.distributions.constraints import is_dependent
from torch.distributions.utils import lazy_property

from pyro_dvi.core.distributions import innermost
from pyro_dvi.runs.latents import is_real
from pyro_dvi.runs.missing import are_given
from pyro_dvi.runs.sites import is_data, is_latent

_SCALAR = Size()


class Checks(Messenger):
    """Record whether distributions have valid parameters and values in their supports, as validation would.

    A replay does not validate, so the recorded conditions replace validation: parameters when a distribution is built,
    alone or within another one, and values at the sites. Distributions built with ``validate_args=False`` are skipped.
    To distinguish them, the default of ``validate_args`` is 0 within the context.
    """

    def __init__(self) -> None:
        super().__init__()
        self.passed: list[Tensor] = []
        self._validates = Distribution._validate_args

    def __enter__(self) -> Any:
        self._own = own, _ = Distribution.__init__, Distribution._validate_sample

        def build(
            fn: Any, batch_shape: Any = _SCALAR, event_shape: Any = _SCALAR, validate_args: Any = None
        ) -> None:
            own(fn, batch_shape, event_shape, None if validate_args else validate_args)
            if validate_args or (
                validate_args is None and self._validates and fn._validate_args is not False
            ):
                self._note_parameters(fn)

        Distribution.__init__ = build  # type: ignore[assignment, method-assign]
        # Distributions that were built earlier would still validate.
        Distribution._validate_sample = lambda *_: None  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        Distribution.__init__, Distribution._validate_sample = self._own  # type: ignore[method-assign]
        return super().__exit__(*error)

    def _note_parameters(self, fn: Any) -> None:
        with suppress(NotImplementedError):
            for name, constraint in fn.arg_constraints.items():
                is_computed = isinstance(getattr_static(fn, name, None), lazy_property)
                # For real parameters, only NaN is invalid, and it makes the loss NaN.
                if not (is_computed or is_dependent(constraint) or is_real(constraint)):
                    self._note(constraint, getattr(fn, name))

    def _pyro_post_sample(self, msg: Any) -> None:
        if not self._validates or getattr(innermost(msg["fn"]), "_validate_args", 0) is False:
            return
        with suppress(NotImplementedError, AttributeError):
            if is_data(msg) or (is_latent(msg) and not is_real(msg["fn"].support)):
                given = are_given(msg["fn"], msg["value"])
                value = msg["value"] if given is None else torch.where(given, msg["value"], 0.0)
                self._note(msg["fn"].support, value)

    def _note(self, constraint: Any, value: Any) -> None:
        with suppress(NotImplementedError, AttributeError, TypeError, ValueError, RuntimeError):
            self.passed.append(constraint.check(value).all())
