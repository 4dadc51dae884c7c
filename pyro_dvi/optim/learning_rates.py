# SPDX-License-Identifier: Apache-2.0
r"""Learning rates for posterior scales.

The optimizer updates the logarithm (or inverse softplus) of a posterior scale :math:`\sigma`. The gradient of this
logarithm is small, and its optimum is several units away from the initial value. With the learning rate of the means,
the logarithm would therefore converge much later than the means. This module gives scales their own learning rate, for
Pyro's optimizers (:func:`learning_rates`) and for torch's (:func:`parameter_groups`).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pyro.infer.autoguide import AutoGuide
from pyro.infer.elbo import ELBOModule
from pyro.nn import PyroModule
from torch import nn

from pyro_dvi.core.arguments import check_positive
from pyro_dvi.errors import GuideError, UnsupportedError

#: A pattern for names of log-scales: ``<Guide>.scales.<site>`` (MeanFieldGuide, AutoNormal), ``<Guide>.alphas.<site>``
#: (MultiplicativeNoiseGuide) and ``<Guide>.scale`` (AutoDiagonalNormal), also as a part of an AutoGuideList. All
#: patterns require the guide's name (a capitalised class name, or ``guide`` in an ELBOModule), because a network may
#: have a parameter called ``scale``, which must not silently get ten times the learning rate.
SCALE_PATTERN = r"(^|\.)([A-Z]\w*|guide)(\.\d+)*\.(scales\.|alphas\.|scale$)"


@dataclass(frozen=True)
class LearningRates:
    """A picklable function from parameter names to optimizer options."""

    base: float
    scale_multiplier: float
    scale_pattern: str | re.Pattern[str]
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        check_positive("base", self.base)
        check_positive("scale_multiplier", self.scale_multiplier)
        re.compile(self.scale_pattern)

    # This must take one argument. If it took two, PyroOptim would pass the module and the name of a parameter
    # separately.
    def __call__(self, param_name: str) -> dict[str, Any]:
        """Return the options of the optimizer of one parameter."""
        is_scale = re.search(self.scale_pattern, param_name) is not None
        return {**self.options, "lr": float(self.base * (self.scale_multiplier if is_scale else 1))}


def learning_rates(
    base: float,
    scale_multiplier: float = 10.0,
    *,
    scale_pattern: str | re.Pattern[str] = SCALE_PATTERN,
    **optimizer_options: Any,
) -> Any:  # LearningRates; Pyro's ClippedAdam accepts functions but declares a dict
    r"""Return options for a Pyro optimizer, with a separate learning rate for posterior scales.

    .. math::
        \eta_{\mu} = \eta, \qquad \eta_{\log\sigma} = c\,\eta

    Status: exact; this is a choice of step sizes, not an approximation.

    Args:
        base: :math:`\eta`, the learning rate of everything that is not a posterior scale.
        scale_multiplier: :math:`c`, the factor for posterior scales.
        scale_pattern: regular expression that is searched for in the parameter's name in Pyro's store (with dots). The
            default matches the scales of ``MeanFieldGuide``, ``AutoNormal`` and ``AutoDiagonalNormal``, and the
            relative variances of ``MultiplicativeNoiseGuide``. For a hand-written guide with
            ``pyro.param("weight_sigma", ...)``, pass ``r"_sigma$"``.
        **optimizer_options: further options of the optimizer, the same for every parameter (``betas=...``).

    Returns:
        A picklable function for the ``optim_args`` of any Pyro optimizer, including one inside a scheduler.

    Raises:
        ArgumentError: if a rate is not a positive finite number.
        re.error: if the pattern is not a regular expression.

    Source: the separate rate for log-variances in Unlu & Aitchison (2021), "Gradient regularization as
    approximate variational inference".

    Example:
        >>> from pyro_dvi.optim import Adam
        >>> options = learning_rates(1e-3, scale_multiplier=10, betas=(0.9, 0.99))
        >>> options("AutoNormal.locs.weight")["lr"], options("AutoNormal.scales.weight")["lr"]
        (0.001, 0.01)
        >>> optimizer = Adam(options)
    """
    return LearningRates(base, scale_multiplier, scale_pattern, optimizer_options)


def parameter_groups(
    module: nn.Module,
    base: float,
    scale_multiplier: float = 10.0,
    *,
    scale_pattern: str | re.Pattern[str] = SCALE_PATTERN,
    **options: Any,
) -> list[dict[str, Any]]:
    r"""Return parameter groups for a torch optimizer, with a separate learning rate for posterior scales.

    .. math::
        \eta_{\mu} = \eta, \qquad \eta_{\log\sigma} = c\,\eta

    Status: exact; this is a choice of step sizes, not an approximation.

    Args:
        module: the result of ``elbo(model, guide)``, a guide, a model, or a module that holds them (Lightning). Shared
            parameters appear once; parameters that do not require gradients are omitted.
        base: :math:`\eta`, the learning rate of everything that is not a posterior scale.
        scale_multiplier: :math:`c`, the factor for posterior scales.
        scale_pattern: as in :func:`learning_rates`.
        **options: further options of both groups (``weight_decay=...``).

    Returns:
        Groups with ``"params"``, ``"lr"`` and ``"name"`` (``"parameters"`` or ``"scales"``); empty groups are omitted.

    Raises:
        ArgumentError: if a rate is not a positive finite number.
        GuideError: if a guide is not initialised and therefore has no parameters yet.
        UnsupportedError: if the model or guide is a function, whose parameters exist only in Pyro's store.

    Example:
        >>> import torch, pyro, pyro.distributions as dist
        >>> from pyro.infer import Trace_ELBO
        >>> from pyro.infer.autoguide import AutoNormal
        >>> from pyro.nn import PyroModule, PyroSample
        >>> model = PyroModule()
        >>> model.weight = PyroSample(dist.Normal(0.0, 1.0))
        >>> model.forward = lambda: model.weight
        >>> guide = AutoNormal(model)
        >>> _ = guide()
        >>> optimizer = torch.optim.Adam(parameter_groups(Trace_ELBO()(model, guide), base=1e-3))
        >>> [(group["name"], group["lr"]) for group in optimizer.param_groups]
        [('parameters', 0.001), ('scales', 0.01)]
    """
    rates = LearningRates(base, scale_multiplier, scale_pattern, options)
    if isinstance(module, ELBOModule):
        check_parts(module)
    for part in module.modules():
        if isinstance(part, AutoGuide) and is_uninitialised(part):
            raise GuideError(
                f"parameter_groups: {type(part).__name__} has no parameters before its first call: call guide(*batch) "
                "before constructing the optimizer."
            )
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in parameter_names(module):
        if parameter.requires_grad:
            group = "scales" if re.search(scale_pattern, name) else "parameters"
            groups.setdefault(group, {"params": [], "name": group, **rates(name)})["params"].append(parameter)
    return [groups[group] for group in sorted(groups)]


def parameter_names(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every parameter of ``module`` once, with the name that it has in Pyro's optimizers.

    Pyro's names begin with the name of the root :class:`~pyro.nn.PyroModule` and omit torch's suffix of constrained
    parameters. For example, Pyro's name is ``AutoNormal.scales.weight`` for the parameter that ``named_parameters`` of
    an ``ELBOModule`` calls ``guide.scales.weight_unconstrained``.

    Args:
        module: any torch module.

    Yields:
        Pairs of dotted name and (unconstrained) parameter.

    Example:
        >>> from pyro.infer.autoguide import AutoNormal
        >>> import pyro, pyro.distributions as dist
        >>> guide = AutoNormal(lambda: pyro.sample("z", dist.Normal(0.0, 1.0)))
        >>> _ = guide()
        >>> [name for name, _ in parameter_names(guide)]
        ['AutoNormal.locs.z', 'AutoNormal.scales.z']
    """
    for path, parameter in module.named_parameters():
        prefix, _, name = path.rpartition(".")
        parent, bare = module.get_submodule(prefix), name.removesuffix("_unconstrained")
        constrained = parent._pyro_params if isinstance(parent, PyroModule) else {}
        root = _root_name(module, prefix)
        yield ".".join(filter(None, (root, bare if bare in constrained else name))), parameter


def _root_name(module: nn.Module, path: str) -> str:
    """Replace the part of ``path`` above the outermost PyroModule with the name that Pyro gives this module."""
    parts = path.split(".") if path else []
    for depth in range(len(parts) + 1):
        current = module.get_submodule(".".join(parts[:depth]))
        if isinstance(current, PyroModule):
            own = str(current._pyro_name)
            # Within a larger module, an unnamed root keeps its attribute's name, so that names stay unique.
            return ".".join([own, *parts[depth:]] if own else parts)
    return path


def check_parts(module: ELBOModule) -> None:
    """Raise an error if model or guide is a function, because torch optimizers do not find parameters in Pyro's store.

    Raises:
        UnsupportedError: if one of them is a function.
    """
    for role, part in (("model", module.model), ("guide", module.guide)):
        if not isinstance(part, nn.Module):
            raise UnsupportedError(
                f"The {role} of the ELBOModule is a function. Its parameters are in Pyro's store, where a torch "
                f"optimizer does not find them: train with pyro.infer.SVI, or write the {role} as a PyroModule."
            )


def is_uninitialised(guide: AutoGuide) -> bool:
    """Return whether an autoguide has no parameters yet, because it was neither called nor loaded."""
    return guide.prototype_trace is None and next(guide.parameters(), None) is None
