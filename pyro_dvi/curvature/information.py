# SPDX-License-Identifier: Apache-2.0
r"""Expected Fisher information of a likelihood's own parameters, in factored form.

For a distribution p(y | f(u)), the expected Fisher information in u is :math:`\sum_k (w_k\,\partial_u f_k)^2`, a sum
over a few scalar parameters :math:`f_k` with weights :math:`w_k`. Each rule returns the pairs :math:`(f, w)` with shape
``[*batch_shape, K]``. Distributions with finite support need no rule, because :math:`f_k = \log p(k)` and
:math:`w_k = \sqrt{p(k)}`. If parameters have cross terms in the Fisher information, they are replaced by parameters
that have none. In an exponential family (Gamma, Beta), these are one expectation parameter and the natural parameters
of the others.

To add a rule, register a function for the distribution class with :func:`information_rule`.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, distributions as td

from pyro_dvi.core.densities import mask_of, parent_in, untransformed, with_any
from pyro_dvi.core.registry import registering
from pyro_dvi.core.undisturbed import widest
from pyro_dvi.curvature.linearisation import ObservedSite
from pyro_dvi.errors import UnsupportedError

Pairs = list[tuple[Tensor, Tensor]]
_RULES: dict[type, Callable[..., Pairs]] = {}


def information_rule(*classes: type) -> Callable[[Callable[..., Pairs]], Callable[..., Pairs]]:
    """Register the expected information of ``classes``, and of subclasses that do not override ``log_prob``."""
    return registering(_RULES, classes)


def expected_information(fn: td.Distribution, site: str) -> Pairs:
    r"""Return pairs (f, w) of shape ``[*batch_shape, K]`` with information :math:`\sum_k (w_k \partial f_k)^2`.

    Args:
        fn: the observed site's distribution.
        site: name of the site, for error messages.

    Raises:
        UnsupportedError: there is no closed form for this distribution.

    Example:
        >>> f = torch.zeros(3, requires_grad=True)
        >>> (loc, weight), _ = expected_information(td.Normal(f, 0.5), "y")
        >>> weight.squeeze(-1)
        tensor([2., 2., 2.])
    """
    base, shape, mask = untransformed(fn), fn.batch_shape, mask_of(fn)
    parent = parent_in(_RULES, type(base))
    pairs = _finite_support(base, site) if parent is None else _RULES[parent](base)
    whole = (shape + fn.event_shape)[: len(shape + fn.event_shape) - len(base.event_shape)]
    pairs = [(f.expand(whole + f.shape[len(base.batch_shape) :]), w) for f, w in pairs]
    if mask is not None:
        keep = with_any(mask, len(base.event_shape))
        pairs = [(f, w * keep[(...,) + (None,) * (f.dim() - keep.dim())].to(w.device)) for f, w in pairs]
    return [(f.reshape(*shape, -1), w.expand_as(f).reshape(*shape, -1)) for f, w in pairs]


def of_site(pairs: Pairs, site: ObservedSite) -> Pairs:
    """Keep the pairs through which gradients flow, and include the site's scale and mask in the weights."""
    found = []
    for f, w in pairs:
        if not f.requires_grad:  # for example, a fixed noise scale
            continue
        w = w * torch.as_tensor(site.scale, dtype=w.dtype, device=w.device).sqrt().unsqueeze(-1)
        if site.mask is not None and site.mask is not True:
            w = w * torch.as_tensor(site.mask, device=w.device).unsqueeze(-1)
        found.append((f, w.expand_as(f)))
    return found


def _finite_support(fn: td.Distribution, site: str) -> Pairs:
    try:
        support = fn.enumerate_support(expand=False)
    except NotImplementedError as error:
        raise UnsupportedError(
            f"{type(fn).__name__} at site {site!r} has no closed-form Fisher information: use "
            "TaylorELBO(curvature=Fisher()), or register a rule with pyro_dvi.curvature.information.information_rule"
        ) from error
    log_prob = fn.log_prob(support).movedim(0, -1)
    return [(log_prob, (0.5 * log_prob).exp())]


def _check_fixed(parameter: Tensor, name: str) -> None:
    if parameter.requires_grad:
        raise UnsupportedError(
            f"the closed-form Fisher information needs fixed {name}: use Fisher() if they are learned or uncertain"
        )


@information_rule(td.Normal, td.LogNormal)
def _normal(fn: td.Normal | td.LogNormal) -> Pairs:  # of the logarithm
    return [(fn.loc, 1 / fn.scale), (fn.scale, 2**0.5 / fn.scale)]


@information_rule(td.Laplace)
def _laplace(fn: td.Laplace) -> Pairs:
    return [(fn.loc, 1 / fn.scale), (fn.scale, 1 / fn.scale)]


@information_rule(td.StudentT)
def _student_t(fn: td.StudentT) -> Pairs:
    # Lange, Little & Taylor (1989). The degrees of freedom must be fixed: their information has cross terms.
    _check_fixed(fn.df, "degrees of freedom in StudentT")
    root = (fn.df + 3).rsqrt() / fn.scale
    return [(fn.loc, (fn.df + 1).sqrt() * root), (fn.scale, (2 * fn.df).sqrt() * root)]


@information_rule(td.Poisson)
def _poisson(fn: td.Poisson) -> Pairs:
    return [(fn.rate, fn.rate.rsqrt())]


@information_rule(td.Exponential)
def _exponential(fn: td.Exponential) -> Pairs:
    return [(fn.rate, 1 / fn.rate)]


@information_rule(td.MultivariateNormal)
def _multivariate_normal(fn: td.MultivariateNormal) -> Pairs:
    root = fn._unbroadcasted_scale_tril
    _check_fixed(root, "covariance in MultivariateNormal")
    whitened = torch.linalg.solve_triangular(root, fn.loc.unsqueeze(-1), upper=False).squeeze(-1)
    return [(whitened, torch.ones_like(whitened))]


@information_rule(td.Multinomial)
def _multinomial(fn: td.Multinomial) -> Pairs:
    # One Categorical for each of the n draws.
    return [(fn.logits, fn.total_count**0.5 * (0.5 * fn.logits).exp())]


@information_rule(td.Binomial)
def _binomial(fn: td.Binomial) -> Pairs:
    # n p (1 - p) in the logits, computed with logarithms, which do not round 1 - p to zero.
    log_variance = F.logsigmoid(fn.logits) + F.logsigmoid(-fn.logits)
    return [(fn.logits, fn.total_count.sqrt() * (0.5 * log_variance).exp())]


@information_rule(td.NegativeBinomial)
def _negative_binomial(fn: td.NegativeBinomial) -> Pairs:
    _check_fixed(fn.total_count, "total_count in NegativeBinomial")
    return [(fn.logits, fn.total_count.sqrt() * (0.5 * F.logsigmoid(fn.logits)).exp())]


@information_rule(td.Geometric)
def _geometric(fn: td.Geometric) -> Pairs:
    return [(fn.logits, (0.5 * F.logsigmoid(-fn.logits)).exp())]


@information_rule(td.Gamma)
def _gamma(fn: td.Gamma) -> Pairs:
    # The mean is orthogonal to the shape a, whose information is then trigamma(a) - 1/a. As a difference, it is
    # computed in float64.
    a = fn.concentration
    wide = a.to(widest(a.device))
    shape = (torch.polygamma(1, wide) - 1 / wide).sqrt().to(a.dtype)
    return [(a.log() - fn.rate.log(), a.sqrt()), (a, shape)]


@information_rule(td.Beta)
def _beta(fn: td.Beta) -> Pairs:
    # E log(1 - y) = digamma(b) - digamma(a + b) is orthogonal to a; the differences are computed in float64.
    a, b = fn.concentration1, fn.concentration0
    wide = widest(a.device)
    of_a, of_b, of_sum = (torch.polygamma(1, value.to(wide)) for value in (a, b, a + b))
    spread = of_b - of_sum  # the variance of log(1 - y)
    rest = of_a - of_sum - of_sum.square() / spread
    expected = (torch.digamma(b.to(wide)) - torch.digamma((a + b).to(wide))).to(a.dtype)
    return [(expected, spread.rsqrt().to(a.dtype)), (a, rest.sqrt().to(a.dtype))]
