# SPDX-License-Identifier: Apache-2.0
"""``to_bayesian_``: parameters of a torch module become latent variables, in place."""

from collections.abc import Sequence
from typing import TypeVar, cast

import torch
from pyro.nn.module import PyroModule, PyroSample, to_pyro_module_
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from pyro_dvi.bayesian.converted import accept_old_keys, remember
from pyro_dvi.bayesian.priors import Prior, PriorLike, as_prior
from pyro_dvi.bayesian.selection import DEFAULT_LAYERS, Candidate, Selection, chosen
from pyro_dvi.bayesian.site_prior import SitePrior, TiedPrior, buffer_name, set_attribute
from pyro_dvi.core.signatures import explained_calls
from pyro_dvi.errors import ArgumentError, ModelError, UnsupportedError, warn

M = TypeVar("M", bound=nn.Module)

_WRAPPERS = {
    "DataParallel": "convert the wrapped module, net.module; Pyro's sites cannot be replicated over threads",
    "DistributedDataParallel": "convert the module before wrapping it",
    "FullyShardedDataParallel": "convert the module before wrapping it; its flattened parameters have no "
    "sites",
    "FSDPModule": "convert the module before fully_shard is applied",
    "OptimizedModule": "convert the module before torch.compile, or pass net._orig_mod",
}


@explained_calls()
def to_bayesian_(
    module: M,
    prior_scale: PriorLike = 1.0,
    *,
    include: Selection = DEFAULT_LAYERS,
    exclude: Selection = (),
) -> M:
    r"""Turn parameters of ``module`` into latent variables with a prior, in place.

    .. math::
        w_\lambda \sim N(0, s_\lambda^2) \quad \text{for every chosen weight, unless a distribution is given}

    Linear, convolution, embedding, bilinear and attention layers become Bayesian with weights and biases;
    normalisation layers, recurrent layers and parameters of your own modules stay deterministic unless
    ``include`` names them. Frozen parameters (``requires_grad=False``) stay as they are, whatever ``include``
    says; they become buffers of the same name, because Pyro would set ``requires_grad`` again.

    The module's present weights, pretrained ones too, are kept as buffers (``weight_initial``), so that
    guides can start from them (:func:`~pyro_dvi.bayesian.init_to_module`), and checkpoints of the module from
    before the conversion still load. Load them *before* the guide is made: a guide copies its start. Priors
    follow ``module.to(device, dtype)``.

    Every chosen parameter is one Pyro site, named like the parameter. A parameter that two layers share stays
    one latent: the first layer has the site, the others repeat it as a deterministic one. Inside a Pyro run,
    one draw serves a whole call of the network. Outside, *each access redraws from the prior*: ``net.fc.weight`` twice
    gives two values, and ``net(x)`` is a network drawn from the prior. Predict with a guide.

    The padding row of an ``nn.Embedding`` becomes a latent like the others, though torch gives it no gradient: a
    warning says how to mask it.

    Of a layer under :func:`torch.nn.utils.parametrizations.weight_norm` the length and the direction become Bayesian.

    Status: exact; the model is the network with the stated prior.

    Args:
        module: any module; its class becomes the Pyro version of itself, so ``isinstance`` keeps working.
        prior_scale: the prior's standard deviation, in units of the weight: a number, ``fan_in``,
            ``LearnedScale()``, ``HierarchicalScale(...)``, a Pyro distribution (scalar, or of the parameter's
            shape), a callable of ``(name, parameter)`` that returns one of these, or a mapping from name
            patterns to these of which the first match decides.
        include: what becomes Bayesian: module types (the parameters such a module owns itself), name patterns
            (``"encoder.*"``), predicates of ``(name, module, parameter)``, or a list of these. A pattern with
            a wildcard passes over normalisation layers; name them exactly, by type or by predicate.
        exclude: what stays deterministic, in the same forms; it wins over ``include``.

    Returns:
        ``module``.

    Raises:
        ArgumentError: if ``prior_scale``, ``include`` or ``exclude`` has a value that it cannot have.
        ModelError: if nothing matches, a pattern matches nothing, a parameter is Bayesian already, is
            computed by another parametrization or a hook, does not suit its prior, or is shared by a chosen and an
            excluded layer; or if a lazy module has no weights yet. Nothing is changed then.
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
    priors = _checked(prior, groups)
    _warn_of_padding(groups)

    to_pyro_module_(module)
    remember(module)
    root = cast(PyroModule, module)
    for (owner, *others), its_prior in zip(groups, priors, strict=True):
        _make_site(owner, its_prior.place(owner, root))
        owner.module.register_buffer(buffer_name(owner.attribute), owner.parameter.detach())
        for other in others:
            _make_site(other, TiedPrior(other.attribute, f"= {owner.name}", owner.module, owner.attribute))
    return module


def _warn_of_padding(groups: Sequence[Sequence[Candidate]]) -> None:
    for owner in (candidate for group in groups for candidate in group):
        if isinstance(owner.module, nn.Embedding) and owner.module.padding_idx is not None:
            warn(
                f"{owner.name!r} has a padding row (padding_idx={owner.module.padding_idx}), which is a latent like "
                "the others here, but gets no gradient from torch: it keeps its prior, and draws of it enter the "
                "network. Mask what is padded, as by layer(tokens) * (tokens != padding_idx).unsqueeze(-1), or set "
                "padding_idx to None before the conversion, so that the row is learned."
            )


def _make_site(target: Candidate, prior: SitePrior) -> None:
    del target.module._parameters[target.attribute]
    set_attribute(target.module, target.attribute, PyroSample(prior))
    accept_old_keys(target.module)


def _checked(prior: Prior, groups: Sequence[Sequence[Candidate]]) -> list[Prior]:
    """Find the prior of every parameter, and every mistake, before the first is changed."""
    owners = [group[0] for group in groups]
    if (complaint := prior.unused(owners)) is not None:
        raise ModelError(complaint)
    priors = [prior.resolved(owner) for owner in owners]
    for owner, its_prior in zip(owners, priors, strict=True):
        its_prior.check(owner)
        if hasattr(owner.module, buffer_name(owner.attribute)):
            raise ModelError(
                f"{owner.name!r} cannot become Bayesian: its {type(owner.module).__name__} has an attribute "
                f"{buffer_name(owner.attribute)!r} already, where the initial weight would be kept. Rename "
                "that."
            )
    return priors


def _check_convertible(root: nn.Module) -> None:
    """Raise if some module below ``root`` cannot become a ``PyroModule``.

    Raises:
        ArgumentError: if ``root`` is no module.
        ModelError: if a lazy module has not seen data yet.
        UnsupportedError: for wrapped, compiled and scripted modules.
    """
    if not isinstance(root, nn.Module):
        raise ArgumentError(
            f"to_bayesian_ converts a torch.nn.Module, and got a {type(root).__name__}"
            + (" (the class itself: pass an instance)." if isinstance(root, type) else ".")
        )
    for path, module in root.named_modules():
        place = f"{path!r}, a {type(module).__name__}," if path else f"The module, a {type(module).__name__},"
        for ancestor in type(module).__mro__:
            if ancestor.__module__.startswith("torch.") and (advice := _WRAPPERS.get(ancestor.__name__)):
                raise UnsupportedError(f"{place} cannot be converted: {advice}.")
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError(f"{place} is TorchScript and fixed: convert the Python module instead.")
        if module._compiled_call_impl is not None:
            raise UnsupportedError(
                f"{place} was compiled in place with .compile(), so Pyro would not see its parameters: "
                "convert a fresh module."
            )
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
            raise ModelError(
                f"{place} is lazy and has no weights yet: run the network once on a batch, then convert it."
            )
