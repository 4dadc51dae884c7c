# SPDX-License-Identifier: Apache-2.0
"""Scores of densities, means, intervals and distributions of numbers."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.errors import DataError
from pyro_dvi.predictive.metrics.classification import numbers


@dataclass(frozen=True)
class Estimate:
    """A mean over examples with its standard error.

    Attributes:
        value: the mean.
        standard_error: standard deviation over examples divided by the square root of their number; NaN for one.
    """

    value: float
    standard_error: float

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        return f"{self.value:.4f} ± {self.standard_error:.4f}"


def nll(log_likelihood: Any) -> Estimate:
    r"""Mean negative log-likelihood, in nats for each example.

    .. math::
        \mathrm{NLL} = -\frac1n \sum_i \log p(y_i \mid x_i), \qquad
        \mathrm{SE} = \sqrt{\frac{1}{n(n-1)} \sum_i (\log p(y_i \mid x_i) + \mathrm{NLL})^2}

    The standard error describes the choice of test examples, not the training run.

    Args:
        log_likelihood: log of the predictive density of each example, any shape, in nats.

    Returns:
        The mean and its standard error.

    Raises:
        DataError: no values, or NaN or plus infinity among them.

    Source: the logarithmic score of Good (1952); Gneiting & Raftery (2007), section 4.

    Example:
        >>> print(nll([-1.0, -2.0, -3.0]))
        2.0000 ± 0.5774
    """
    values = numbers(log_likelihood, "log_likelihood").flatten()
    if (values == math.inf).any():
        raise DataError(
            "log_likelihood is plus infinity for some examples, which no score can rank: their density is infinite, as "
            "at the edge of a Beta's or Gamma's support or for a noise scale of zero"
        )
    error = float(values.std() / math.sqrt(len(values))) if len(values) > 1 else math.nan
    return Estimate(float(-values.mean()), error)


def rmse(mean: Any, observed: Any) -> float:
    r"""Root of the mean squared error of the predicted mean, in units of the observation.

    .. math::
        \sqrt{\frac1n \sum_i (m_i - y_i)^2}

    Args:
        mean: predicted means, any shape.
        observed: observed values of exactly the same shape (``[n]`` against ``[n, 1]`` would broadcast to ``[n, n]``).

    Returns:
        A number in units of ``observed``.

    Raises:
        DataError: shapes that differ, no values, or NaN.

    Example:
        >>> round(rmse([1.0, 2.0], [1.0, 4.0]), 6)
        1.414214
    """
    m, y = _alike(mean=mean, observed=observed)
    return float((m - y).square().mean().sqrt())


def coverage(lower: Any, upper: Any, observed: Any) -> float:
    r"""Prediction interval coverage probability (PICP): the share of observations inside their interval.

    .. math::
        \frac1n \sum_i 1[l_i \le y_i \le u_i]

    A calibrated 95 % interval covers 95 % of new observations, up to a binomial standard error.

    Args:
        lower: lower limits, any shape.
        upper: upper limits of the same shape.
        observed: observed values of the same shape.

    Returns:
        A number between 0 and 1.

    Raises:
        DataError: shapes that differ, no values, NaN, or a lower limit above its upper one.

    Source: Khosravi et al. (2011), Eq. 8.

    Example:
        >>> coverage([0.0, 0.0], [1.0, 1.0], [0.5, 2.0])
        0.5
    """
    low, high, y = _interval(lower, upper, observed)
    return float(((low <= y) & (y <= high)).double().mean())


def interval_width(lower: Any, upper: Any) -> float:
    r"""Mean width of prediction intervals, in units of the observation.

    Of two sets of intervals with equal :func:`coverage` the narrower is the better.

    Args:
        lower: lower limits, any shape.
        upper: upper limits of the same shape.

    Returns:
        A number in units of the observation, not negative.

    Raises:
        DataError: shapes that differ, no values, NaN, or a lower limit above its upper one.

    Example:
        >>> interval_width([0.0, 0.0], [1.0, 2.0])
        1.5
    """
    low, high, _ = _interval(lower, upper, lower)
    return float((high - low).mean())


def crps_gaussian(mean: Any, scale: Any, observed: Any) -> float:
    r"""Continuous ranked probability score of Gaussian predictions; 0 is perfect.

    .. math::
        \mathrm{CRPS} = \frac1n \sum_i \sigma_i \Bigl[z_i (2\Phi(z_i) - 1) + 2\phi(z_i) - \tfrac1{\sqrt\pi}\Bigr],
        \qquad z_i = \frac{y_i - m_i}{\sigma_i}

    Status: exact. A scale of zero gives the absolute error, as in the limit.

    Args:
        mean: predictive means, any shape.
        scale: predictive standard deviations of the same shape, not negative.
        observed: observed values of the same shape.

    Returns:
        A number in units of the observation.

    Raises:
        DataError: shapes that differ, no values, NaN, or a negative scale.

    Source: Gneiting & Raftery (2007), section 4.2, with the sign turned.

    Example:
        >>> round(crps_gaussian([0.0], [1.0], [0.0]), 6)
        0.233695
    """
    m, s, y = _alike(mean=mean, scale=scale, observed=observed)
    if s.min() < 0:
        raise DataError(f"scale is a standard deviation and must not be negative; found {float(s.min()):.6g}")
    return float((mean_distance(y - m, s) - s / math.sqrt(math.pi)).mean())


def mean_distance(distance: Tensor, scale: Tensor) -> Tensor:
    """Return the mean of abs(x) for Gaussian x with these means and standard deviations."""
    z = distance / scale.clamp_min(torch.finfo(scale.dtype).tiny)
    density = math.sqrt(2 / math.pi) * torch.exp(-0.5 * z.square())
    return scale * density + distance * torch.erf(z / math.sqrt(2))


def _interval(lower: Any, upper: Any, observed: Any) -> tuple[Tensor, ...]:
    low, high, y = _alike(lower=lower, upper=upper, observed=observed)
    if (low > high).any():
        raise DataError(f"{int((low > high).sum())} of {low.numel()} lower limits lie above the upper ones")
    return low, high, y


def _alike(**given: Any) -> tuple[Tensor, ...]:
    """Return the values in double precision; their shapes must be the same."""
    values = {name: numbers(value, name) for name, value in given.items()}
    if len({value.shape for value in values.values()}) > 1:
        shapes = " and ".join(f"{name} has shape {tuple(value.shape)}" for name, value in values.items())
        raise DataError(f"{shapes}: they must be the same")
    return tuple(values.values())
