# SPDX-License-Identifier: Apache-2.0
r"""Factors that correct the propagated variance of each layer by a few draws of the weights.

Where a layer's inputs are dependent its propagated variance is off by a factor, much the same for all its units. With
:math:`\hat v_l` the average variance of the outputs of layer l over draws, and :math:`v_l` the average propagated one,
given that all earlier layers are corrected already,

.. math:: c_l = \hat v_l / v_l, \qquad \mathrm{Var}[y_l] \leftarrow c_l \mathrm{Var}[y_l].
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_dvi.core.choice import check_count
from pyro_dvi.core.devices import device_of
from pyro_dvi.core.progress import progress_bar
from pyro_dvi.errors import ModelError
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.dispatch import observed_by
from pyro_dvi.moments.tensor_like import name_of
from pyro_dvi.moments.weight_uses import WeightTracker, parts_of
from pyro_dvi.predictive.engine.batches import batches
from pyro_dvi.predictive.engine.run import Response, evaluation_mode, respond, seeded
from pyro_dvi.predictive.posterior import posterior_gaussians
from pyro_dvi.predictive.rules.propagation import Propagation
from pyro_dvi.predictive.rules.rule import Samples
from pyro_dvi.runs.moment_run import PosteriorMoments, median
from pyro_dvi.runs.uncertain import uncertain_likelihoods

Use = tuple[str, str]  # names of the weights, and of the function


@dataclass(frozen=True)
class Calibrated(Propagation):
    """Propagate with one factor for the variance of each function that uses a weight.

    Made by :func:`calibrate`; can be pickled.

    Attributes:
        factors: of the functions that use weights, in the order in which the model calls them.
        uses: names of their weights, and the function: ``("net.0.weight, net.0.bias", "torch.nn.functional.linear")``.

    Status: corrects the size of variances, not their order among outputs or examples.
    """

    factors: tuple[float, ...]
    uses: tuple[Use, ...]

    def respond(self, weights: Mapping[str, GaussianMoments], run: Callable[[], Response]) -> Response:
        """Run the model, multiplying variances on the way.

        Raises:
            ModelError: the model uses other weights than it did in :func:`calibrate`.
        """

        def scale(k: int, use: Use, output: GaussianMoments) -> None:
            if k >= len(self.uses) or self.uses[k] != use:
                raise _other_model(self.uses[k] if k < len(self.uses) else None, use)
            output._variance = self.factors[k] * output.variance

        scaling = _Uses(weights, scale)
        with observed_by(scaling):
            response = run()
        if scaling.count != len(self.uses):
            raise _other_model(self.uses[scaling.count], None)
        return response


def calibrate(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    data: Any,
    num_samples: int = 32,
    *,
    site: str | None = None,
    observed: str | None = None,
    batch_size: int = 1000,
    seed: int | None = None,
    progress: bool = False,
) -> Calibrated:
    """Fit factors that bring the propagated variances of each layer to those of draws from the guide.

    Every function that uses a latent weight gets one factor, for all its outputs and examples. Predictions then cost
    what they cost without. Fit on inputs like those to predict; a few hundred will do.

    Args:
        model: the Pyro model.
        guide: its trained guide, a factorised Gaussian.
        data: as in :func:`~pyro_dvi.predict`; used are the first ``batch_size`` examples, or the first batch of a
            loader.
        num_samples: draws of the weights. The relative error of a factor is at most about ``sqrt(2 / num_samples)``,
            less where many weights contribute.
        site: observed site, where the model has several.
        observed: the model's argument that holds the observation; by default the one whose default is None.
        batch_size: number of examples to use.
        seed: of the draws.
        progress: show a progress bar over draws.

    Returns:
        A propagation for ``Moments(propagation=...)``.

    Raises:
        ArgumentError: fewer than two draws.
        GuideError: the guide is not a factorised Gaussian.
        UnsupportedError: a function of the model has no rule.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> from pyro.infer.autoguide import AutoNormal
        >>> def model(x, y=None):
        ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         return pyro.sample("obs", dist.Normal(slope * x, 0.5), obs=y)
        >>> guide = AutoNormal(model)
        >>> x = torch.linspace(-1, 1, 5)
        >>> _ = guide(x, x)
        >>> calibrate(model, guide, x, 1000, seed=0).uses
        (('slope', 'torch.mul'),)
    """
    check_count("num_samples", num_samples, least=2)
    device = device_of(model, guide)
    batch = next(iter(batches(model, data, observed=observed, batch_size=batch_size, device=device)))
    with evaluation_mode(model, guide), seeded(seed, device) as seed:
        torch.manual_seed(seed)
        centre, marginals = posterior_gaussians(guide, batch.inputs)
        Calibrated((), ()).check(marginals)
        run = partial(respond, model, batch, site=site)
        weights = PosteriorMoments(marginals, median)
        with uncertain_likelihoods(), weights:
            run(centre)  # to see which sites are moments
        uses: list[Use] = []
        sampled: list[RunningMoments] = []

        def see(k: int, use: Use, output: GaussianMoments) -> None:
            if k == len(uses):
                uses.append(use)
                sampled.append(RunningMoments())
            if use != uses[k]:
                raise _other_model(uses[k], use)
            sampled[k].add(output.loc)

        draws = Samples(num_samples).draws(guide, batch.inputs)
        for draw in progress_bar(progress, num_samples, unit="draw", label="calibrate", of=draws):
            values = {name: draw[name] if name in weights.given else centre[name] for name in centre}
            certain = _CertainMoments(weights.given.keys())
            with uncertain_likelihoods(), certain, observed_by(_Uses(certain.given, see)):
                run(values)
        weights = PosteriorMoments(marginals, median)
        targets, factors = [found.variance.mean().item() for found in sampled], []

        def fit(k: int, use: Use, output: GaussianMoments) -> None:
            propagated = output.variance.mean().item()
            factors.append(targets[k] / propagated if propagated > 0 else 1.0)
            output._variance = factors[-1] * output.variance

        with uncertain_likelihoods(), weights, observed_by(_Uses(weights.given, fit)):
            run(centre)
    return Calibrated(tuple(factors), tuple(uses))


class _CertainMoments(Messenger):
    """Hand out draws as moments without variance, so that the model runs the same functions as with variance."""

    def __init__(self, names: Any) -> None:
        super().__init__()
        self.names = set(names)
        self.given: dict[str, GaussianMoments] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if not msg["is_observed"] and msg["name"] in self.names:
            value: Tensor = msg["value"]
            self.given[msg["name"]] = msg["value"] = GaussianMoments(value, torch.zeros_like(value))


class _Uses:
    """Observe the functions that use weights, one after the other.

    Args:
        weights: the moments of the latent sites.
        see: is given the number of the use, its name and its output.
    """

    def __init__(
        self, weights: Mapping[str, GaussianMoments], see: Callable[[int, Use, GaussianMoments], None]
    ) -> None:
        self.tracker, self.see, self.count = WeightTracker(weights), see, 0

    def entering(self) -> None:
        self.tracker.entering()

    def __call__(self, func: Callable, args: tuple, kwargs: dict[str, Any], result: Any) -> Any:
        found = self.tracker.found(func, args, kwargs, result)
        outputs = list(parts_of(result))
        if found and len(outputs) == 1:
            self.see(self.count, (", ".join(name for _, name in found), name_of(func)), outputs[0])
            self.count += 1
        return result


class RunningMoments:
    """Mean and variance of values that come one after the other, by Welford's recursion."""

    def __init__(self) -> None:
        self.count, self.mean, self._squares = 0, torch.zeros(()), torch.zeros(())

    def add(self, value: Tensor) -> None:
        """Add one value."""
        self.count += 1
        if self.count == 1:
            self.mean, self._squares = value.clone(), torch.zeros_like(value)
            return
        change = value - self.mean
        self.mean += change / self.count
        self._squares += change * (value - self.mean)

    @property
    def variance(self) -> Tensor:
        """Their variance."""
        return self._squares / (self.count - 1)


def _other_model(expected: Any, found: Any) -> ModelError:
    texts = ["nothing more" if use is None else f"{use[0]!r} in {use[1]}" for use in (found, expected)]
    return ModelError(
        f"the model uses {texts[0]} where it used {texts[1]} when it was calibrated: calibrate this model, and let "
        "which weights it uses not depend on their values"
    )
