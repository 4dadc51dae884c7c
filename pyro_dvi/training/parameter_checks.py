# SPDX-License-Identifier: Apache-2.0
"""Checks for parameters that belong to another training run.

Pyro's store identifies parameters by name only. If a second model or guide, such as a new one in the same session, has
parameters of the same names, it silently takes over the parameters of the first. Training one then changes the other.
"""

import inspect
import re
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pyro
from pyro.infer.autoguide import AutoGuide
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from pyro_dvi.errors import GuideError, ModelError, warn
from pyro_dvi.optim.learning_rates import SCALE_PATTERN, is_uninitialised, parameter_names
from pyro_dvi.runs.posterior_prior import without_posterior_prior
from pyro_dvi.training.routes import Route

# The model or guide with which each parameter was trained. Both sides are weak references, so nothing is kept alive.
_owners: Any = WeakIdKeyDictionary()

_WAY_OUT = (
    "Call pyro.clear_param_store() before you build model and guide, or separate models with "
    "pyro.get_param_store().scope(). If you loaded the store from a file, call model and guide before training."
)


def check_parameters(route: Route) -> None:
    """Raise an error if the store has parameters of another model or guide under the names of this model or guide.

    Raises:
        GuideError: if the guide or the model would share parameters with another guide or model.
        ModelError: if the store contains a copy of a parameter instead of the parameter, because the parameter is not
            contiguous in memory.
    """
    if pyro.settings.get("module_local_params"):
        return
    guide = route.guide
    if isinstance(guide, AutoGuide) and is_uninitialised(guide):
        taken = [name for name in _stored() if name.startswith(f"{guide._pyro_name}.")]
        if taken:
            raise GuideError(
                f"Pyro's parameter store already contains {taken[0]!r} of another {guide._pyro_name}. {_WAY_OUT}"
            )
    for role, part in route.modules().items():
        for name, parameter, _ in supplanted(part):
            if not parameter.is_contiguous():
                raise ModelError(
                    f"Parameter {name!r} of the {role} is not contiguous (channels_last?), so Pyro's store would "
                    "train a copy of it: make the parameters of the module .contiguous()."
                )
            raise GuideError(
                f"Pyro's parameter store contains another parameter under the name {name!r}, which this {role} uses. "
                f"{_WAY_OUT}"
            )
    for name, tensor in route.parameters().items():
        if _owner_of(tensor) not in (None, id(_trained(route.model)), id(guide)):
            raise GuideError(
                f"Parameter {name!r} belongs to another model or guide that was trained earlier. {_WAY_OUT}"
            )


def claim_parameters(route: Route) -> None:
    """Record that the parameters are trained with this model and guide."""
    in_model = set(route.model_parameters)
    if isinstance(route.model, nn.Module):
        in_model |= {id(parameter) for parameter in route.model.parameters()}
    for parameter in route.parameters().values():
        owner = _trained(route.model) if id(parameter) in in_model else route.guide
        with suppress(TypeError):  # raised for a bound method of an object without weak references
            _owners[parameter] = weakref.ref(owner)


def check_still_own(model: Any, guide: Any) -> None:
    """Raise an error if another model or guide has since been trained under the same names in the store.

    Pyro would use the values of that model or guide. Values that were loaded into the store have no owner and are
    accepted.

    Raises:
        GuideError: if a parameter has another owner; the message names it.
    """
    if pyro.settings.get("module_local_params"):
        return
    own = (id(model), id(_trained(model)), id(guide))
    for role, part in (("model", model), ("guide", guide)):
        for name, _, stored in supplanted(part) if isinstance(part, nn.Module) else ():
            if stored in _owners and _owner_of(stored) not in own:
                raise GuideError(
                    f"Pyro's parameter store contains another parameter under the name {name!r}, which this {role} "
                    "uses, because another model or guide with the same names has been trained since. Predict before "
                    "that, separate them with pyro.get_param_store().scope(), or reload this one with pyro_dvi.load."
                )


def supplanted(part: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield names under which a module and the store have different parameters, together with both parameters."""
    store = _stored()
    for name, parameter in parameter_names(part):
        if store.get(name, parameter) is not parameter:
            yield name, parameter, store[name]


def _trained(model: Any) -> Any:
    """Return the model that the parameters belong to, without other priors and without a posterior's own store."""
    return inspect.unwrap(without_posterior_prior(model))


def _stored() -> dict[str, Tensor]:
    """Return the parameters in Pyro's store by name; the parts of a name are separated by dots."""
    return {name.replace("$$$", "."): value for name, value in pyro.get_param_store().named_parameters()}


def _owner_of(parameter: Tensor) -> int | None:
    """Return the id of the model or guide with which a parameter was trained; None if this object is gone."""
    owner = _owners.get(parameter, lambda: None)()
    return None if owner is None else id(owner)


def warn_of_decaying_scales(route: Route) -> None:
    """Warn about weight decay that acts on posterior scales."""
    # Sort by name, because Pyro's optimizers meet their parameters in no fixed order.
    for name, optimizer, place in sorted(route.optimizer_groups(), key=lambda group: group[0]):
        if optimizer.param_groups[place].get("weight_decay") and re.search(SCALE_PATTERN, name):
            warn(
                f"the weight decay of {route.optimizer_name()} acts on {name!r}, the logarithm of posterior scales, "
                "and pulls the scales towards 1. Train without weight decay: the prior regularises the weights."
            )
            break
