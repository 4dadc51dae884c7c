# SPDX-License-Identifier: Apache-2.0
"""The network at the posterior mean: the values that a guide gives, and a module with these weights, without Pyro."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from pyro.nn.module import PyroModule
from torch import Tensor, nn

from pyro_dvi.bayesian.converted import forget, parameter_order, plain_type
from pyro_dvi.bayesian.site_prior import SitePrior, TiedPrior, buffer_name
from pyro_dvi.errors import ArgumentError, GuideError, ModelError, UnsupportedError


def to_deterministic(model_or_net: nn.Module, guide: Any) -> nn.Module:
    r"""Return an ordinary torch module with the posterior means as weights.

    .. math::
        \hat w = \mathbb{E}_q[w]

    The result has the classes and the ``state_dict`` keys that the network had before ``to_bayesian_``,
    shares nothing with the Bayesian one and needs neither Pyro nor this library: for ``torch.compile``, ONNX,
    or a program that knows only torch. It predicts like ``AtMean()``; the uncertainty of the weights is lost.

    Status: exact at the mean of Normal guides; the median for others.

    Args:
        model_or_net: the network that ``to_bayesian_`` converted, or a model that has just one such network
            inside, such as ``classifier(net, ...)``. The network stays as it is.
        guide: a trained guide of the model, or a mapping from site names to values.

    Returns:
        The network, in the same train or eval mode, device and dtype.

    Raises:
        ArgumentError: if ``model_or_net`` is no module.
        GuideError: if the guide has not been run, or has no value of the right shape for a weight.
        ModelError: if the model has no converted network, or several.
        UnsupportedError: if a module inside was written as a PyroModule and has no plain form.

    Example:
        >>> import torch
        >>> from pyro_dvi.bayesian import to_bayesian_
        >>> net = to_bayesian_(nn.Linear(2, 1))
        >>> plain = to_deterministic(net, {"weight": torch.ones(1, 2), "bias": torch.zeros(1)})
        >>> type(plain) is nn.Linear, dict(plain.state_dict())
        (True, {'weight': tensor([[1., 1.]]), 'bias': tensor([0.])})
    """
    if not isinstance(model_or_net, nn.Module):
        raise ArgumentError(
            f"to_deterministic got a {type(model_or_net).__name__}; pass the network that to_bayesian_ "
            "converted."
        )
    net = _only_converted_net(model_or_net)
    values = posterior_means(guide)
    weights: dict[tuple[str, str], Tensor] = {}
    for path, module in net.named_modules():
        if plain_type(module) is None:
            raise UnsupportedError(
                f"{path or 'The network'!r} is a {type(module).__name__}, written as a PyroModule, and has "
                "no plain form. Pass the part of the model that to_bayesian_ converted."
            )
        for attribute, prior in getattr(module, "_pyro_samples", {}).items():
            if isinstance(prior, SitePrior) and not isinstance(prior, TiedPrior):
                site = ".".join(filter(None, (module._pyro_name, attribute)))
                weights[path, attribute] = _value(values, site, prior.shown_value(module))

    plain = copy.deepcopy(net)
    modules = dict(plain.named_modules())
    made = {
        (id(modules[path]), attribute): nn.Parameter(value) for (path, attribute), value in weights.items()
    }
    for module in modules.values():
        _restore_parameters(module, made)
    for module in modules.values():  # ties look at the Pyro attributes of each other until here
        _remove_pyro(module)
    return plain


def posterior_means(guide: Any) -> dict[str, Tensor]:
    """Return the medians of the latents, which are the means where the posterior is Normal.

    Args:
        guide: a guide with a ``median()`` method, as all automatic guides have, or a mapping from site names
            to values: one posterior draw, say.

    Raises:
        GuideError: if the guide has no median, or has not been run yet.
    """
    if isinstance(guide, Mapping):
        return dict(guide)
    median: Callable[[], Mapping[str, Tensor]] | None = getattr(guide, "median", None)
    if not callable(median):
        raise GuideError(
            f"{type(guide).__name__} has no median() method, as Pyro's automatic guides have. Pass a mapping "
            "from site names to values instead."
        )
    if getattr(guide, "prototype_trace", True) is None:
        raise GuideError(
            f"The {type(guide).__name__} has not seen the model yet and has no parameters: train it, or call "
            "it once with the arguments of the model."
        )
    return {name: value.detach() for name, value in median().items()}


def _only_converted_net(model: nn.Module) -> nn.Module:
    """Return the smallest module that was converted as a whole and holds every converted parameter."""

    def has_weights(module: nn.Module) -> bool:
        return any(
            isinstance(prior, SitePrior)
            for part in module.modules()
            for prior in getattr(part, "_pyro_samples", {}).values()
        )

    net = model
    while plain_type(net) is None:
        inside = [child for child in net.children() if has_weights(child)]
        if not inside:
            raise ModelError(
                f"{type(net).__name__} holds no network that to_bayesian_ converted; pass the network itself."
            )
        if len(inside) > 1:
            names = [name for name, child in net.named_children() if has_weights(child)]
            raise ModelError(
                f"{type(net).__name__} holds several converted networks ({', '.join(names)}). Export them "
                f"one by one: to_deterministic(model.{names[0]}, guide)."
            )
        net = inside[0]
    if not has_weights(net):
        raise ModelError(
            f"No parameter of this {type(net).__name__} is Bayesian; there is nothing to export."
        )
    return net


def _value(values: Mapping[str, Tensor], site: str, like: Tensor) -> Tensor:
    if site not in values:
        raise GuideError(
            f"The guide has no value for the site {site!r}; it has {', '.join(map(repr, list(values)[:3]))}, "
            "... Pass the guide of the model that this network is part of, after the model was run."
        )
    value = values[site]
    if value.shape != like.shape:
        raise GuideError(
            f"The guide's value for the site {site!r} has the shape {tuple(value.shape)}, and the weight "
            f"{tuple(like.shape)}: the guide belongs to another model."
        )
    return value.detach().to(like).clone()


def _restore_parameters(module: nn.Module, made: dict[tuple[int, str], nn.Parameter]) -> None:
    """Put weights back where priors were, in the original order."""
    order = parameter_order(module)
    forget(module)
    for attribute, prior in getattr(module, "_pyro_samples", {}).items():
        if isinstance(prior, TiedPrior):
            module._parameters[attribute] = made[id(prior.owner), prior.owner_attribute]
        elif isinstance(prior, SitePrior):
            module._parameters[attribute] = made[id(module), attribute]
            del module._buffers[buffer_name(attribute)]
    parameters = {attribute: module._parameters[attribute] for attribute in order}
    module._parameters.clear()
    module._parameters.update(parameters)


def _remove_pyro(module: nn.Module) -> None:
    if not isinstance(module, PyroModule):
        return
    plain = plain_type(module)
    assert plain is not None
    for name in list(module._non_persistent_buffers_set):
        if name.startswith("prior_scale"):
            delattr(module, name)
    for name in ("_pyro_name", "_pyro_context", "_pyro_params", "_pyro_samples"):
        module.__dict__.pop(name, None)
    module.__class__ = plain  # type: ignore[assignment]
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()
