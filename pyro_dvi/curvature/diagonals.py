# SPDX-License-Identifier: Apache-2.0
r"""Curvatures from squared gradients, of the summed log-likelihood or of single examples, and from the Hessian.

With labels drawn from the model, the squared gradient of the summed log-likelihood estimates the Fisher information.
This is the default curvature of Variational Laplace. With observed labels, the squared gradient of the sum is the
quantity that stochastic gradient descent penalises implicitly. The other curvatures sum squared gradients of single
examples, :math:`\sum_i (\partial_u \ell_i)^2`. The diagonal of the Hessian need not be positive.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_count
from pyro_dvi.curvature.information import expected_information, of_site
from pyro_dvi.curvature.linearisation import (
    Curvature,
    Linearisation,
    ObservedSite,
    half_sum,
    half_weighted_squares,
    sum_of,
)
from pyro_dvi.curvature.per_example.proof import Proofs, Served
from pyro_dvi.curvature.products import batched_gradients
from pyro_dvi.curvature.second_derivatives import FastSecondDerivatives
from pyro_dvi.curvature.squared_gradients import SquaredGradients, pass_per_example
from pyro_dvi.errors import ArgumentError


class Fisher(Curvature):
    r"""Squared gradient of the log-likelihood of labels drawn from the model.

    .. math::
        c_\lambda = \tilde g_\lambda^2, \qquad
        \tilde g = \nabla_u \sum_s \sqrt{\mathrm{scale}_s}\, \log p_s(\tilde y_s \mid u), \quad
        \tilde y \sim p(\cdot \mid \mu)

    Status: unbiased for the diagonal of the summed expected Fisher information (cross terms of independent labels
    average out), and therefore for the generalised Gauss-Newton diagonal of exponential-family likelihoods. The noise
    per weight decreases with the number of label draws, not with the minibatch size.

    Args:
        num_label_samples: number of label draws per step; each additional one costs a double backward pass.
        every: k; the penalty is computed only in every k-th training step and multiplied by k, so that its average over
            steps is unbiased.

    Source: Unlu & Aitchison (2021), Eqs. 25-30, where :math:`\tilde g` is g with sampled labels.

    Example:
        >>> Fisher(num_label_samples=2, every=4)
        Fisher(num_label_samples=2, every=4)
    """

    def __init__(self, num_label_samples: int = 1, every: int = 1) -> None:
        check_count("num_label_samples", num_label_samples)
        check_count("every", every)
        self.num_label_samples, self.every = num_label_samples, every

    def weight(self, step: int) -> float:
        return float(self.every) if step % self.every == 0 else 0.0

    def recorder(self, used_values: Sequence[Tensor | None]) -> FastSecondDerivatives:
        return FastSecondDerivatives()

    def penalty(self, likelihood: Linearisation) -> Tensor:
        likelihood.require_labels("Fisher")
        draws = [[site.sample_labels() for site in likelihood.sites] for _ in range(self.num_label_samples)]
        penalties = [_squared_gradient(likelihood, likelihood.sites, labels) for labels in draws]
        return sum_of(penalties) / self.num_label_samples

    def __repr__(self) -> str:
        changed = [f"{name}={value}" for name, value in vars(self).items() if value != 1]
        return f"Fisher({', '.join(changed)})"


class MinibatchGradient(Curvature):
    r"""Squared gradient of the summed log-likelihood of the observed labels.

    .. math:: c_\lambda = g_\lambda^2, \qquad g = \nabla_u \sum_s \sqrt{\mathrm{scale}_s}\,\log p_s(y_s \mid u)

    This is the empirical Fisher with one term per minibatch: averaged over the minibatches j of an epoch, c is
    :math:`\sum_j g_{j\lambda}^2` with unscaled gradients. :class:`EmpiricalFisher` has one term per example instead.

    Status: deterministic, because no labels are drawn, but not an estimate of the Hessian. Away from the optimum, the
    summed gradient grows with the minibatch size M, so c grows with :math:`M^2`. The sum of c over minibatches differs
    from c for the full batch. With ``MeanFieldGuide(scale=SGDStepSize(lr, batch_size))``, this curvature gives the
    objective that relates the step size of SGD to the variance of a fixed posterior.

    Source: Unlu & Aitchison (2021), Eq. 27, and Eq. 29 (arXiv), written with the mean gradient, for the relation to
    SGD; Smith et al. (2021) for the implicit regulariser of SGD.

    Example:
        >>> MinibatchGradient()
        MinibatchGradient()
    """

    def recorder(self, used_values: Sequence[Tensor | None]) -> FastSecondDerivatives:
        return FastSecondDerivatives()

    def penalty(self, likelihood: Linearisation) -> Tensor:
        sites = [*likelihood.sites, *likelihood.factors]
        return _squared_gradient(likelihood, sites, [site.value for site in sites])


def _squared_gradient(
    likelihood: Linearisation, sites: Sequence[ObservedSite], labels: Sequence[Tensor]
) -> Tensor:
    """Return half the weighted squared gradient of all log-likelihoods, each multiplied by the root of its scale.

    With several sites, scaling the joint gradient afterwards would give wrong weights to their cross terms.
    """
    terms = [(site.log_prob(y) * site.scale**0.5).sum() for site, y in zip(sites, labels, strict=True)]
    return half_weighted_squares(likelihood.scales, likelihood.gradients(sum_of(terms)))


class _ExampleSquares(Curvature):
    """Base class of curvatures that sum squared gradients of single examples."""

    def __init__(self) -> None:
        self._proofs = Proofs()

    def recorder(self, used_values: Sequence[Tensor | None]) -> SquaredGradients:
        return SquaredGradients(used_values, differentiable=True)

    def penalty(self, likelihood: Linearisation) -> Tensor:
        terms, total = list(self._terms(likelihood)), None
        recorder = likelihood.recorder
        if not isinstance(recorder, SquaredGradients):
            recorder = SquaredGradients([])
        served = {
            count: self._served(likelihood, recorder, [f for f, _ in terms if f.shape == (count,)])
            for count in {len(f) for f, _ in terms if f.dim() == 1}
        }
        for outputs, cotangent in terms:
            uses = served[len(outputs)] if outputs.dim() == 1 else {}
            squares = summed_squared_gradients(likelihood.values, outputs, cotangent, recorder, uses)
            total = squares if total is None else [a + b for a, b in zip(total, squares, strict=True)]
        return half_sum(likelihood.scales, total or [torch.zeros_like(u) for u in likelihood.values])

    def _served(self, likelihood: Linearisation, recorder: SquaredGradients, outputs: list[Tensor]) -> Served:
        """Return the uses of the latents for which rules give the gradients of single examples."""
        served = recorder.served(len(outputs[0]))
        if not served:
            return served
        model = self if likelihood.model is None else likelihood.model
        (site, *_), key = likelihood.sites or likelihood.factors, (len(outputs[0]), len(outputs))
        look = partial(recorder.examined, served, torch.stack(outputs, 1))
        return self._proofs.proved(model, key, served, look, site.name, likelihood.names)

    @abstractmethod
    def _terms(self, likelihood: Linearisation) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the outputs f and weights w, as in :func:`summed_squared_gradients`."""


class GGNDiagonal(_ExampleSquares):
    r"""Diagonal of the expected Fisher information in closed form, without sampled labels.

    .. math::
        c_\lambda = \sum_s \mathrm{scale}_s \sum_{i,k} \bigl(w_{ik}\,\partial_\lambda f_{ik}\bigr)^2

    with the parameters f of each observed distribution and the square-root factors w of their Fisher information.

    Status: exact for the expected Fisher information, which equals the generalised Gauss-Newton diagonal for
    exponential families in natural parameters. With batch normalisation in training mode, only the path through an
    example's own row of the activations is included. For dense and convolutional weights, the cost is one backward pass
    per distribution parameter (ten for ten classes).

    Source: Unlu & Aitchison (2021), Eqs. 25-30, with sampled labels; Martens (2020) for the equivalence.

    Example:
        >>> GGNDiagonal()
        GGNDiagonal()
    """

    def _terms(self, likelihood: Linearisation) -> Iterator[tuple[Tensor, Tensor]]:
        likelihood.require_labels("GGNDiagonal")
        for site in likelihood.sites:
            for f, w in of_site(expected_information(site.fn, site.name), site):
                yield from zip(f.unbind(-1), w.unbind(-1), strict=True)


class EmpiricalFisher(_ExampleSquares):
    r"""Sum over examples of squared gradients at the observed labels.

    .. math:: c_\lambda = \sum_s \mathrm{scale}_s \sum_i \bigl(\partial_\lambda \log p_s(y_{si} \mid u)\bigr)^2

    Status: deterministic. The expectation of this curvature is the Fisher information only if the model is correct. For
    examples that are fitted perfectly, the curvature vanishes. An example is an element of the site's batch shape. The
    paper has one term per minibatch instead (:class:`MinibatchGradient`); the two agree for M = 1. Dense, convolutional
    and bias weights cost about one extra pass; other weights cost one backward pass per example.

    Source: Unlu & Aitchison (2021), Eq. 27, with an example in place of a minibatch; Kunstner et al. (2019) on its
    limitations.

    Example:
        >>> EmpiricalFisher()
        EmpiricalFisher()
    """

    def _terms(self, likelihood: Linearisation) -> Iterator[tuple[Tensor, Tensor]]:
        for site in (*likelihood.sites, *likelihood.factors):
            log_prob = site.log_prob(site.value)
            yield log_prob, (log_prob.new_ones(()) * site.scale**0.5).expand_as(log_prob)


def summed_squared_gradients(
    values: Sequence[Tensor], outputs: Tensor, cotangent: Tensor, recorder: SquaredGradients, served: Served
) -> list[Tensor]:
    r"""Return :math:`\sum_i (w_i\,\partial_u f_i)^2` for every latent, differentiable with respect to the means.

    Status: exact with one backward pass per example. The rules of layers include, for example i, only the gradient
    through its own row of the activations. They are exact, too, unless rows are coupled, as in batch normalisation in
    training mode.

    Args:
        values: the means u of the latents.
        outputs: f, one entry per example; gradients flow to the latent means.
        cotangent: w, of the same shape; may also depend on the means.
        recorder: recorder of the uses of the latents.
        served: the uses that have rules.
    """
    if not outputs.requires_grad:  # everything is masked, or no latent affects the observed site
        return [torch.zeros_like(u) for u in values]
    found = recorder.measured(served, outputs, cotangent)
    if rest := [k for k in range(len(values)) if k not in found]:
        slow = pass_per_example(outputs, cotangent, [values[k] for k in rest], create_graph=True)
        found.update(zip(rest, slow, strict=True))
    return [found[k].reshape(u.shape) for k, u in enumerate(values)]


class HessianDiagonal(Curvature):
    r"""Diagonal of the negative Hessian of the log-likelihood, raised where the variance would have no optimum.

    .. math::
        c_\lambda = \begin{cases} h_\lambda & h_\lambda > -\beta/s_\lambda^2 \\
            -m\,\beta/s_\lambda^2 & \text{otherwise} \end{cases} \qquad
        h_\lambda = -\partial^2_\lambda \sum_s \mathrm{scale}_s \log p_s(y_s \mid u)

    The objective has an optimum in the variance, :math:`\sigma_\lambda^2 = \beta/(\beta/s_\lambda^2 + h_\lambda)`, only
    for a positive denominator. On single minibatches, the denominator is often negative. This is harmless, because the
    margin m < 1 keeps the variance finite. If the denominator of a weight is negative in most steps, the weight has no
    optimal variance: use a positive curvature, such as :class:`Fisher`, or a narrower prior. If the prior is not
    Normal, negative h are replaced by zero.

    Status: with ``num_probes=None``, the exact second-order expansion of Eq. 20 wherever the optimum exists; this takes
    one Hessian column per weight, so it suits only small networks. With probes, h is Hutchinson's estimate, which is
    unbiased before negative values are replaced. Both require third derivatives.

    Args:
        num_probes: number of Rademacher probes of Hutchinson's estimator, or None for the exact diagonal.
        margin: m, in [0, 1).

    Source: Unlu & Aitchison (2021), Eqs. 20-24, "VL (H)"; Hutchinson (1989).

    Example:
        >>> HessianDiagonal(num_probes=4)
        HessianDiagonal(num_probes=4)
    """

    def __init__(self, num_probes: int | None = None, margin: float = 0.9) -> None:
        if num_probes is not None:
            check_count("num_probes", num_probes)
        if not 0 <= margin < 1:
            raise ArgumentError(f"margin must lie in [0, 1), got {margin}")
        self.num_probes = num_probes
        self.margin = margin

    def penalty(self, likelihood: Linearisation) -> Tensor:
        log_prob = sum_of([site.log_likelihood() for site in (*likelihood.sites, *likelihood.factors)])
        gradients = likelihood.gradients(log_prob)
        if self.num_probes is None:
            curvatures = [-_diagonal(g, u) for g, u in zip(gradients, likelihood.values, strict=True)]
        else:
            curvatures = self._hutchinson(gradients, likelihood)
        limits = likelihood.precision_limits()
        defined = [
            c.clamp(min=0) if limit is None else torch.where(c > -limit, c, -self.margin * limit.detach())
            for c, limit in zip(curvatures, limits, strict=True)
        ]
        return half_sum(likelihood.scales, defined)

    def _hutchinson(self, gradients: list[Tensor], likelihood: Linearisation) -> list[Tensor]:
        assert self.num_probes is not None
        totals = [torch.zeros_like(u) for u in likelihood.values]
        for _ in range(self.num_probes):
            probes = [torch.randint_like(u, 2).mul_(2).sub_(1) for u in likelihood.values]
            projected = sum_of([(g * v).sum() for g, v in zip(gradients, probes, strict=True)])
            products = likelihood.gradients(projected)
            totals = [t - v * hv for t, v, hv in zip(totals, probes, products, strict=True)]
        return [t / self.num_probes for t in totals]

    def __repr__(self) -> str:
        return f"HessianDiagonal({'' if self.num_probes is None else f'num_probes={self.num_probes}'})"


def _diagonal(gradient: Tensor, value: Tensor) -> Tensor:
    """Return the exact diagonal of the Jacobian of ``gradient`` with respect to ``value``, differentiable."""
    flat = gradient.reshape(-1)
    if not flat.requires_grad:
        return torch.zeros_like(value)
    (rows,) = batched_gradients(flat, [value], torch.eye(flat.numel()).to(flat), 64, create_graph=True)
    return rows.reshape(len(rows), -1).diagonal().reshape(value.shape)
