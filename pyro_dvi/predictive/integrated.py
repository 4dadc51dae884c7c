# SPDX-License-Identifier: Apache-2.0
r"""The predictive of Gaussian outputs, :math:`\int p(y \mid f)\,\mathcal N(f; \hat f, \Sigma)\,\mathrm df`.

Outputs are the real-valued parameters of any observed distribution (:mod:`pyro_dvi.handlers.outputs`). Their whole
covariance is used: between classes, between elements of a vector, between a mean and the logarithm of its noise scale.
"""

from typing import Any

import pyro.distributions as dist
from torch import Tensor
from torch import distributions as td

from pyro_dvi.expectations.logistic import logit_of_expected_sigmoid
from pyro_dvi.handlers.distributions import innermost
from pyro_dvi.handlers.outputs import Outputs
from pyro_dvi.links import ClassLink
from pyro_dvi.links.classes import average_logits
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.predictive.cells import Cells
from pyro_dvi.predictive.gaussian_noise import normal, normal_vectors
from pyro_dvi.predictive.point_mixture import PointMixture

__all__ = ["integrated"]

_CLASSES = (td.Categorical, td.OneHotCategorical)


def integrated(outputs: Outputs, covariance: Tensor, link: ClassLink, num_points: int) -> Any:
    """Return the predictive distribution, of the batch and event shape of the observed one.

    Status: exact for a Normal, LogNormal or MultivariateNormal whose mean only is uncertain, and for Bernoulli; class
    probabilities as exact as ``link``; an uncertain noise scale by 20 Gauss-Hermite nodes; other distributions are
    mixtures over points. Several labels of one example (``to_event``) have the right probabilities each, and count as
    independent of each other.

    Args:
        outputs: outputs at the mode.
        covariance: of all outputs of each example, ``[B, K, K]``.
        link: from Gaussian logits to class probabilities.
        num_points: points where more than two numbers of one density are uncertain.
    """
    cells = Cells(outputs.detached(), covariance.detach(), num_points)
    base, names = cells.base, cells.uncertain
    if not names:
        return cells.fn
    if isinstance(base, td.Bernoulli) and len(names) == 1:
        return _bernoulli(cells)
    if isinstance(base, _CLASSES) and len(names) == 1 and names <= {"logits", "probs"}:
        return _classes(cells, link)
    if type(base) in (dist.Normal, dist.LogNormal) and cells.is_plain:
        if not cells.fn.event_shape:
            return normal(cells)
        if type(base) is dist.Normal:
            return normal_vectors(cells)
    if type(base) is dist.MultivariateNormal and cells.fn is base and names == {"loc"}:
        places = cells.places("loc")
        total = base.covariance_matrix + cells.arranged(cells.between(places, places))
        return dist.MultivariateNormal(base.loc, covariance_matrix=total)
    values, weights = cells.points()
    if isinstance(base, (*_CLASSES, td.Bernoulli)):
        return _with_logits(cells, average_logits(innermost(cells.outputs.with_values(values)), weights))
    return PointMixture(cells.outputs, values, weights)


def _bernoulli(cells: Cells) -> Any:
    """The average probability of either answer."""
    (name,) = cells.uncertain
    f, variance = (cells.part(name, v) for v in (cells.outputs.values, cells.variances))
    return _with_logits(
        cells, logit_of_expected_sigmoid(GaussianMoments(f, variance)).movedim(0, cells.position)
    )


def _classes(cells: Cells, link: ClassLink) -> Any:
    """The average probabilities of the classes of each label, by the covariance of its logits."""
    (name,) = cells.uncertain
    f = cells.part(name, cells.outputs.values)
    places = cells.places(name).reshape(-1, f.shape[-1])
    covariance = cells.between(places, places).reshape(*f.shape, f.shape[-1])
    return _with_logits(cells, link.log_probabilities(f, covariance).movedim(0, cells.position))


def _with_logits(cells: Cells, logits: Tensor) -> Any:
    kinds = {td.Bernoulli: dist.Bernoulli, td.Categorical: dist.Categorical}
    cls = next((ours for kind, ours in kinds.items() if isinstance(cells.base, kind)), dist.OneHotCategorical)
    return cells.outputs.rebuilt({"logits": logits}, cls=cls)
