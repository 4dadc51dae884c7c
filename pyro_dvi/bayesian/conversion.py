# SPDX-License-Identifier: Apache-2.0
"""Conversion of torch modules to Bayesian modules, and back to modules with the posterior means as weights."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pyro.nn.module import PyroModule, PyroSample, to_pyro_module_
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from pyro_dvi.bayesian.converted import (
    SitePrior,
    TiedPrior,
    accept_old_keys,
    buffer_name,
    forget,
    parameter_order,
    plain_type,
    remember,
    set_attribute,
    was_converted,
)
from pyro_dvi.bayesian.priors import PriorLike, as_prior
from pyro_dvi.bayesian.selection import DEFAULT_LAYERS, Candidate, Selection, chosen
from pyro_dvi.errors import GuideError, ModelError, UnsupportedError, warn

M = TypeVar("M", bound=nn.Module)

_WRAPPERS = set(
    "DataParallel DistributedDataParallel FullyShardedDataParallel FSDPModule OptimizedModule ScriptModule".split()
)


def to_bayesian_(
    module: M,
    prior_scale: PriorLike = 1.0,
    *,
    include: Selection = DEFAULT_LAYERS,
    exclude: Selection = (),
) -> M:
    r"""Turn parameters of ``module`` into latent variables with a prior, in place.

    .. math::
        w_\lambda \sim N(0, s_\lambda^2) \quad \text{for every chosen weight, unless another distribution is given}

    The weights and biases of linear, convolution, embedding, bilinear and attention layers become Bayesian.
    Normalisation layers, recurrent layers and parameters of your own modules stay deterministic unless ``include``
    selects them. Frozen parameters (``requires_grad=False``) stay deterministic even if ``include`` selects them; they
    become buffers of the same name, because Pyro would otherwise set ``requires_grad``.

    The current (possibly pretrained) weights of the module are kept as buffers (``weight_initial``). Guides can start
    from them (:func:`~pyro_dvi.bayesian.init_to_module`), and checkpoints that were saved before the conversion can
    still be loaded. Load such checkpoints *before* the guide is created, because a guide copies its initial values.
    Priors follow ``module.to(device, dtype)``.

    Every chosen parameter is one Pyro site, which has the name of the parameter. A parameter that two layers share
    remains one latent: the first layer has the site, and the other layers repeat its value as a deterministic site.
    Within a Pyro run, each call of the network uses one draw. Outside a run, *each access draws from the prior again*:
    two accesses to ``net.fc.weight`` give two values, and ``net(x)`` evaluates a network drawn from the prior. Use a
    guide to predict.

    The padding row of an ``nn.Embedding`` becomes latent like the other rows, although torch gives it no gradient; a
    warning explains how to mask it.

    In a layer with :func:`torch.nn.utils.parametrizations.weight_norm`, the length and the direction of the weights
    become Bayesian. Other parametrizations stay, if ``exclude`` names their weights. Call
    ``parametrize.remove_parametrizations`` before the conversion, or on the result of :func:`to_deterministic`. Of a
    converted network, torch cannot remove parametrizations: it raises an ``AttributeError``, but may have overwritten
    the original weight before (that of ``orthogonal``, for example).

    Status: exact; the model is the network with the given prior.

    Args:
        module: any module. Its class changes to a Pyro subclass of the original, so ``isinstance`` still works.
        prior_scale: the prior's standard deviation, in units of the weight: a number, ``fan_in``, ``LearnedScale()``,
            ``OptimalScale()``, ``HierarchicalScale(...)``, a Pyro distribution (scalar, or of the parameter's shape), a
            callable of ``(name, parameter)`` that returns one of these, or a mapping from name patterns to these (the
            first match applies).
        include: what becomes Bayesian: module types (for the parameters directly in such a module), name patterns
            (``"encoder.*"``), predicates of ``(name, module, parameter)``, or a list of these. A pattern with a
            wildcard skips normalisation layers; select them by their full names, by type or with a predicate.
        exclude: what stays deterministic, in the same forms; takes precedence over ``include``.

    Returns:
        ``module``.

    Raises:
        ArgumentError: if ``prior_scale``, ``include`` or ``exclude`` has an invalid value.
        ModelError: if no parameter is selected, a pattern matches nothing, or a lazy module has no weights yet; or if a
            selected parameter is already Bayesian, is computed by another parametrization or a hook, does not fit its
            prior, or is shared with an excluded layer. The module is then unchanged.
        UnsupportedError: for compiled, scripted or wrapped modules, and complex or integer parameters.

    Example:
        >>> import pyro, torch
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Softplus(), nn.Linear(8, 2))
        >>> net = to_bayesian_(net, prior_scale=0.5, exclude="3.bias")
        >>> trace = pyro.poutine.trace(net).get_trace(torch.zeros(1, 4))
        >>> list(trace.stochastic_nodes)
        ['0.weight', '0.bias', '3.weight']
        >>> [name for name, _ in net.named_parameters()]
        ['1.weight', '1.bias', '3.bias']
    """
    _check_convertible(module)
    prior = as_prior(prior_scale)
    groups = chosen(module, include, exclude)
    owners = [group[0] for group in groups]
    prior.check_used(owners)
    makers = [prior.prepared(owner) for owner in owners]  # raises all errors before the first change
    _warn_of_padding(groups)

    to_pyro_module_(module)
    remember(module)
    for (owner, *others), make in zip(groups, makers, strict=True):
        _make_site(owner, make())
        owner.module.register_buffer(buffer_name(owner.attribute), owner.parameter.detach())
        for other in others:
            _make_site(other, TiedPrior(other.attribute, owner.module, owner.attribute))
    return module


def _warn_of_padding(groups: Sequence[Sequence[Candidate]]) -> None:
    for owner in (candidate for group in groups for candidate in group):
        if isinstance(owner.module, nn.Embedding) and owner.module.padding_idx is not None:
            warn(
                f"{owner.name!r} has a padding row (padding_idx={owner.module.padding_idx}), for which torch computes "
                "no gradient. The posterior of this row stays at the prior, so padded positions get random embeddings. "
                "Mask them, as in layer(tokens) * (tokens != padding_idx).unsqueeze(-1), or set padding_idx to None"
            )


def _make_site(target: Candidate, prior: SitePrior) -> None:
    del target.module._parameters[target.attribute]
    set_attribute(target.module, target.attribute, PyroSample(prior))
    accept_old_keys(target.module)


def _check_convertible(root: nn.Module) -> None:
    """Raise an error if some module below ``root`` cannot become a ``PyroModule``.

    Raises:
        ModelError: if a lazy module has no weights yet.
        UnsupportedError: for wrapped, compiled and scripted modules.
    """
    for path, module in root.named_modules():
        place = f"{path or 'The module'!r}, a {type(module).__name__},"
        kinds = {kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.")}
        if kinds & _WRAPPERS or module._compiled_call_impl is not None:
            raise UnsupportedError(
                f"{place} cannot be converted: convert the plain module, then wrap or compile it"
            )
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
            raise ModelError(f"{place} is lazy: run the network once on a batch, then convert it")


def to_deterministic(model_or_net: nn.Module, guide: Any) -> nn.Module:
    r"""Return a plain torch module with the posterior means as weights.

    .. math::
        \hat w = \mathbb{E}_q[w]

    The result has the classes and the ``state_dict`` keys that the network had before ``to_bayesian_``. It shares
    nothing with the Bayesian network and needs neither Pyro nor this library. Use it for ``torch.compile``, ONNX, or
    programs that depend only on torch. It predicts like ``AtMean()``; the uncertainty of the weights is lost.

    Status: exact for Normal guides; for other guides, the weights are posterior medians.

    Args:
        model_or_net: the network that ``to_bayesian_`` converted, or a model that contains exactly one such network,
            such as ``classifier(net, ...)``. The network does not change.
        guide: a trained guide of the model, or a mapping from site names to values.

    Returns:
        The network, in the same mode (train or eval) and with the same device and dtype.

    Raises:
        GuideError: if the guide is not initialised, or has no value of the right shape for a weight.
        ModelError: if the model contains no converted network, or more than one.
        UnsupportedError: if a submodule was written as a PyroModule and has no plain form.

    Example:
        >>> import torch
        >>> from pyro_dvi.bayesian import to_bayesian_
        >>> net = to_bayesian_(nn.Linear(2, 1))
        >>> plain = to_deterministic(net, {"weight": torch.ones(1, 2), "bias": torch.zeros(1)})
        >>> type(plain) is nn.Linear, dict(plain.state_dict())
        (True, {'weight': tensor([[1., 1.]]), 'bias': tensor([0.])})
    """
    values = posterior_means(guide)
    return _plain_copy(_only_converted_net(model_or_net), lambda site, own: _value(values, site, own))


def with_own_weights(net: nn.Module) -> nn.Module:
    """Return a plain copy of a converted network, with the weights that the network had before the conversion."""
    return _plain_copy(net, lambda site, own: nn.Parameter(own.clone()))


def _plain_copy(net: nn.Module, value_of: Callable[[str, Tensor], nn.Parameter]) -> nn.Module:
    """Return a plain copy of a converted network; ``value_of`` takes a site and the network's own weight."""
    plain = copy.deepcopy(net)
    made: dict[tuple[int, str], nn.Parameter] = {}
    for path, module in plain.named_modules():
        if plain_type(module) is None:
            raise UnsupportedError(
                f"{path or 'The network'!r} is a {type(module).__name__}, which was written as a PyroModule and has no "
                "plain form: pass the part of the model that to_bayesian_ converted"
            )
        for attribute, prior in getattr(module, "_pyro_samples", {}).items():
            if isinstance(prior, SitePrior) and not isinstance(prior, TiedPrior):
                site = ".".join(filter(None, (module._pyro_name, attribute)))
                made[id(module), attribute] = value_of(site, prior.shown_value(module))
    modules = list(plain.modules())
    for module in modules:
        _restore_parameters(module, made)
    for module in modules:  # up to here, shared parameters need each other's Pyro attributes
        _remove_pyro(module)
    return plain


def posterior_means(guide: Any) -> dict[str, Tensor]:
    """Return the medians of the latents; for a Normal posterior, these are the means.

    Args:
        guide: a guide with a ``median()`` method, like all autoguides, or a mapping from site names to values, for
            example one posterior draw.

    Raises:
        GuideError: if the guide has no median, or is not initialised.
    """
    if isinstance(guide, Mapping):
        return dict(guide)
    if getattr(guide, "prototype_trace", True) is None:
        raise GuideError(
            f"The {type(guide).__name__} is not initialised: train it, or call it with the model's arguments"
        )
    return {name: value.detach() for name, value in guide.median().items()}


def _only_converted_net(model: nn.Module) -> nn.Module:
    """Return the largest plain module that holds converted parameters."""

    def inside(module: nn.Module) -> list[nn.Module]:
        if plain_type(module) is not None:
            return [module] if any(map(was_converted, module.modules())) else []
        return [net for child in module.children() for net in inside(child)]

    nets = inside(model)
    if len(nets) != 1:
        raise ModelError(
            f"{type(model).__name__} contains {len(nets)} networks that to_bayesian_ converted: pass one, as model.net"
        )
    return nets[0]


def _value(values: Mapping[str, Tensor], site: str, like: Tensor) -> nn.Parameter:
    value = values[site]
    if value.shape != like.shape:
        raise GuideError(
            f"The guide's value for {site!r} has the shape {tuple(value.shape)}, but the weight has the shape "
            f"{tuple(like.shape)}: pass the guide of the model that contains this network"
        )
    return nn.Parameter(value.detach().to(like).clone())


def _restore_parameters(module: nn.Module, made: dict[tuple[int, str], nn.Parameter]) -> None:
    """Replace priors by weights, in the original order."""
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
    for name in ("_pyro_name", "_pyro_context", "_pyro_params", "_pyro_samples"):
        module.__dict__.pop(name, None)
    module.__class__ = plain  # type: ignore[assignment]
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()
