# SPDX-License-Identifier: Apache-2.0
"""Whether a training step runs only code that is known to depend on nothing but what captured steps follow."""

from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from pyro_dvi.bayesian.likelihoods import LikelihoodModule

_KNOWN = {"torch", "torchvision", "pyro", "pyro_dvi", "builtins", "abc", "collections", "typing"}


def runs_known_code(model: Any, guide: Any, elbo: Any) -> bool:
    """Return True for a model of ``classifier`` or ``regressor`` whose network consists of modules of torch.

    Modules of torchvision, Pyro and this library are known, too. A class of one's own, a hook, a function as attribute
    or prior, or a guide or objective of one's own is code that may depend on anything.

    Example:
        >>> from pyro_dvi import MeanFieldGuide, TaylorELBO, classifier, to_bayesian_
        >>> model = classifier(to_bayesian_(nn.Linear(3, 3)), num_data=100)
        >>> runs_known_code(model, MeanFieldGuide(model), TaylorELBO())
        True
        >>> runs_known_code(lambda x: model(x), MeanFieldGuide(model), TaylorELBO())
        False
    """
    if not isinstance(model, LikelihoodModule) or not isinstance(guide, nn.Module):
        return False
    modules = {*model.modules(), *guide.modules()}
    parts = (elbo, *vars(elbo).values(), *(part for module in modules for part in _parts_of(module)))
    return all(map(_is_known, parts))


def _parts_of(module: nn.Module) -> Iterator[Any]:
    """Yield a module, and its hooks, priors and functions, which may run in a step."""
    yield module
    for name, value in vars(module).items():
        if isinstance(value, dict) and "hook" in name and "state_dict" not in name:
            yield from value.values()
        elif name == "_pyro_samples":
            for sample in value.values():
                prior = getattr(sample, "prior", sample)
                yield prior
                yield from getattr(prior, "__dict__", {}).values()
        elif isinstance(value, FunctionType | MethodType | partial):
            yield value


def _is_known(part: Any) -> bool:
    if isinstance(part, partial):
        return _is_known(part.func)
    if isinstance(part, MethodType):
        return _is_known(part.__self__)
    if isinstance(part, FunctionType | type):
        return _comes_from_known(part)
    return all(map(_comes_from_known, type(part).__mro__))


def _comes_from_known(thing: Callable[..., Any] | type) -> bool:
    return str(thing.__module__).partition(".")[0] in _KNOWN
