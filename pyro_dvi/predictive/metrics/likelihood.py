# SPDX-License-Identifier: Apache-2.0
"""How likely the observations were."""

import math
from dataclasses import dataclass
from typing import Any

from pyro_dvi.errors import DataError
from pyro_dvi.predictive.metrics.checks import numbers


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
