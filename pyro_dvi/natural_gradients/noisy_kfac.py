# SPDX-License-Identifier: Apache-2.0
"""Noisy K-FAC: natural gradients for a matrix normal per layer, as optimizers for torch and for Pyro."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_dvi.curvature.kronecker import damped_factors
from pyro_dvi.errors import GuideError, NotPositiveDefiniteError
from pyro_dvi.natural_gradients.estimates import Estimate
from pyro_dvi.natural_gradients.kronecker_guide import LayerFisher, flattened, unflattened
from pyro_dvi.natural_gradients.optimizer import DEFAULTS
from pyro_dvi.natural_gradients.site_update import SiteUpdate, Tensors
from pyro_dvi.natural_gradients.updates import Consistent, NaturalGradientOptim, VOGNOptimizer
from pyro_dvi.optim.joint_optim import Options, for_svi


class NoisyKFACOptimizer(VOGNOptimizer):
    r"""Noisy K-FAC as a torch optimizer.

    With running averages A and B of the factors of a layer, the prior precision :math:`\tilde\delta` of one example and
    damping :math:`\gamma`,

    .. math::
        V &= \hat m, \qquad
        M \leftarrow M - \alpha\,\bigl[B^{\tilde\delta + \gamma}\bigr]^{-1} V
        \bigl[A^{\tilde\delta + \gamma}\bigr]^{-1}, \\
        A^\gamma &= A + \pi\sqrt\gamma\, I, \quad B^\gamma = B + \tfrac1\pi\sqrt\gamma\, I,
        \quad \pi^2 = \frac{\operatorname{tr} A / \dim A}{\operatorname{tr} B / \dim B},

    where :math:`\hat m` is the average of :math:`\hat g + \tilde\delta(M - M_0)`, and the posterior is
    :math:`\mathcal{MN}\bigl(M, [B^{\tilde\delta}]^{-1}, \tfrac{\beta T}{N}[A^{\tilde\delta}]^{-1}\bigr)`. Weights and
    biases outside layers are updated as in :class:`VOGNOptimizer`. For K-FAC without noise, use
    ``NoisyKFAC({"estimate": LayerFisher(at_mean=True)})``.

    Status: a stochastic natural-gradient step whose curvature is the Fisher information, approximated by a Kronecker
    product in each layer. Splitting :math:`\tilde\delta` between the factors adds
    :math:`\sqrt{\tilde\delta}(\pi\, B \otimes I + \tfrac1\pi I \otimes A)` to the precision, which narrows the
    posterior. If a layer has several prior scales, their precisions are approximated by the nearest :math:`r c^\top`,
    except in the gradient, which is exact.

    Args:
        params: means, and any other parameters, which are updated with Adam.
        lr: :math:`\alpha`; 1, the default, is a full natural-gradient step if labels are drawn from the model.
        damping: :math:`\gamma`, the paper's extrinsic damping, in units of the curvature of one example. It does not
            change the posterior.
        factor_interval: number of steps between measurements of the factors, the paper's :math:`T_{stats}`.
        inverse_interval: number of steps between inversions of the factors, the paper's :math:`T_{inv}`. Each inversion
            sets the posterior covariances.
        estimate: estimate of the curvature; by default, ``LayerFisher()``.
        **options: further options of :class:`VOGNOptimizer`. The formulation is always ``Consistent()``. The option
            ``initial_curvature`` does not apply to the Kronecker factors: their averages start with the factors of the
            first minibatch. The decay of these averages counts measurements, not steps.

    Raises:
        ArgumentError: an option is out of range.
        GuideError: in a step, the loss was not a ``NaturalGradientELBO``, or weight and bias of a layer have different
            options.
        NotPositiveDefiniteError: a factor is numerically singular.

    Source: Zhang, Sun, Duvenaud & Grosse (2018), "Noisy natural gradient as variational inference", the algorithm of
    noisy K-FAC. Implemented from the equations.
    """

    estimate = LayerFisher()
    formulations: ClassVar = (Consistent, "Consistent(), the only formulation of NoisyKFAC")
    estimates: ClassVar = (LayerFisher, "LayerFisher()")
    options: ClassVar = {
        **{name: value for name, value in DEFAULTS.items() if name != "initial_curvature"},
        "lr": 1.0,
        "factor_interval": 5,
        "inverse_interval": 10,
    }

    @property
    def wanted(self) -> Estimate:
        """The curvature to measure in the next step."""
        return replace(self.estimate, rest_only=self.steps_done % self.param_groups[0]["factor_interval"] > 0)

    def _rates(self, update: SiteUpdate) -> tuple[float, float, float]:
        if update.is_layer:
            update.measurements = 1 + (update.count - 1) // update.group["factor_interval"]
        return super()._rates(update)

    def _move(self, update: SiteUpdate) -> None:
        if update.is_layer:
            (curvature,), p = update.curvatures, update.parameters[0].shape[0]
            rows, columns = unflattened(curvature, p)
            if (
                update.parameters[0].dim() < 2
                or len(columns) != update.parameters[0][0].numel() + len(update.parameters) - 1
            ):
                raise GuideError(
                    "weight and bias of a layer have different options, or only one of them has a gradient. Give both "
                    "the same options, and freeze both or neither. Pyro's schedulers make one optimizer for each "
                    "parameter, which is not supported: use a torch scheduler with NoisyKFACOptimizer"
                )
            update.is_new &= not update.step.measured.rest_only
        super()._move(update)

    def _preconditioned(self, update: SiteUpdate) -> Tensors:
        if not update.is_layer:
            return super()._preconditioned(update)
        weight, memory, p = update.parameters[0], update.memories[0], update.parameters[0].shape[0]
        if (update.count - 1) % update.group["inverse_interval"] == 0:
            averages = unflattened(update.curvatures[0], p)
            prior = _matrix(
                [d.expand_as(loc) for d, loc in zip(update.priors, update.parameters, strict=True)]
            )
            rows, columns = _inverse_roots(*damped_factors(*averages, prior))
            update.precisions[0].copy_(flattened(rows, columns / update.numbers.inverse_temperature**0.5))
            if update.group["damping"]:
                rows, columns = _inverse_roots(*damped_factors(*averages, prior + update.numbers.damping))
            memory["inverses"] = flattened(rows @ rows.mT, columns @ columns.mT)
        rows, columns = unflattened(memory["inverses"], p)
        step = rows @ _matrix(update.momenta) @ columns
        q = weight[0].numel()
        return [step[:, :q].reshape(weight.shape), *step[:, q:].unbind(1)]


def _matrix(tensors: Sequence[Tensor]) -> Tensor:
    """Join a weight and its bias, if there is one, into a matrix."""
    return torch.cat([tensors[0].flatten(1), *(t.unsqueeze(-1) for t in tensors[1:])], 1)


def _inverse_roots(*factors: Tensor) -> list[Tensor]:
    """Return a lower triangular L for each factor, such that L L' is the inverse of the factor."""
    found = []
    for factor in factors:
        root, info = torch.linalg.cholesky_ex(factor.flip(-2, -1))
        if info:
            raise NotPositiveDefiniteError(
                "a Kronecker factor is numerically singular: train in float64, scale the inputs to about one, or use a "
                "narrower prior"
            )
        eye = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
        found.append(torch.linalg.solve_triangular(root.flip(-2, -1).mT, eye, upper=False))
    return found


@for_svi(NoisyKFACOptimizer)
def NoisyKFAC(optim_args: Options, clip_args: Any = None) -> NaturalGradientOptim:  # noqa: N802 (Pyro's style)
    """Noisy K-FAC for SVI, with one :class:`NoisyKFACOptimizer` for all parameters; arguments as in :func:`VOGN`.

    Use it with a :class:`~pyro_dvi.natural_gradients.KroneckerGuide` and ``NaturalGradientELBO``.

    Example:
        >>> import pyro_dvi as dvi
        >>> from pyro.infer import SVI
        >>> net = dvi.to_bayesian_(torch.nn.Linear(2, 1))
        >>> model = dvi.regressor(net, num_data=20, noise_scale=0.5)
        >>> guide, x = dvi.KroneckerGuide(model), torch.randn(20, 2)
        >>> svi = SVI(model, guide, NoisyKFAC({}), loss=dvi.NaturalGradientELBO())
        >>> losses = [svi.step(x, x.sum(1, keepdim=True)) for _ in range(3)]
        >>> guide.layers, guide.roots("net.weight")[1].shape
        ({'net.weight': 'net.bias'}, torch.Size([3, 3]))
    """
    return NaturalGradientOptim(NoisyKFACOptimizer, optim_args, clip_args)
