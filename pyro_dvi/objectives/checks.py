# SPDX-License-Identifier: Apache-2.0
"""Checks of distributions in recorded steps; they replace Pyro's validation, which reads values."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import Distribution
from torch.distributions.constraints import is_dependent
from torch.distributions.utils import lazy_property

from pyro_dvi.core.distributions import innermost
from pyro_dvi.runs.latents import is_real
from pyro_dvi.runs.sites import is_data, is_latent


def _parts(fn: Any) -> Iterator[Any]:
    """Yield a distribution, and those of which it is made: bases, components of mixtures."""
    yield fn
    for part in vars(fn).values():
        if isinstance(part, Distribution):
            yield from _parts(part)


class Checks(Messenger):
    """Record whether distributions have valid parameters and values in their supports, as validation would.

    A replay does not validate, so the recorded conditions replace validation. Distributions built with
    ``validate_args=False`` are skipped. To distinguish them, the default of ``validate_args`` is 0 within the context.
    """

    def __init__(self) -> None:
        super().__init__()
        self.passed: list[Tensor] = []
        self._validates = Distribution._validate_args

    def __enter__(self) -> Any:
        # Distributions that were built earlier would still validate.
        self._own, Distribution._validate_sample = Distribution._validate_sample, lambda *_: None  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        Distribution._validate_sample = self._own  # type: ignore[method-assign]
        return super().__exit__(*error)

    def _pyro_post_sample(self, msg: Any) -> None:
        if not self._validates or getattr(innermost(msg["fn"]), "_validate_args", 0) is False:
            return
        for fn in _parts(msg["fn"]):
            for name, constraint in getattr(fn, "arg_constraints", {}).items():
                # For real parameters, only NaN is invalid, and it makes the loss NaN. Of probabilities and logits,
                # the one that was given is checked.
                computed = name not in vars(fn) and isinstance(getattr(type(fn), name, None), lazy_property)
                if not computed and not is_dependent(constraint) and not is_real(constraint):
                    self._note(constraint, getattr(fn, name, None))
        with suppress(NotImplementedError, AttributeError):
            if is_data(msg) or (is_latent(msg) and not is_real(msg["fn"].support)):
                self._note(msg["fn"].support, msg["value"])

    def _note(self, constraint: Any, value: Any) -> None:
        with suppress(NotImplementedError, AttributeError, TypeError, ValueError, RuntimeError):
            self.passed.append(constraint.check(value).all())
