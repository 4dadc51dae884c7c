# SPDX-License-Identifier: Apache-2.0
"""A predictor that is prepared once and then called on tensors, for serving."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pyro
import torch
from torch import Tensor, fx, nn

from pyro_dvi.core.batches import mapped, tensors_in
from pyro_dvi.core.recorded_function import Function, recorded, rows_of
from pyro_dvi.core.undisturbed import device_of, seeder
from pyro_dvi.errors import DataError, UnsupportedError
from pyro_dvi.predictive.engine.inputs import batches
from pyro_dvi.predictive.engine.model_runs import Latents, Response, evaluation_mode, seeded, sites_at
from pyro_dvi.predictive.engine.posterior_values import predicted_model
from pyro_dvi.predictive.engine.vectorised import ManyDraws, agrees
from pyro_dvi.predictive.predict import predict
from pyro_dvi.predictive.predictive_distribution import statistics
from pyro_dvi.predictive.predictive_mixture import Mixture
from pyro_dvi.predictive.rules.rule import FromDraws, PredictionRule
from pyro_dvi.runs.explained import bad_values

EXAMPLES = 4  # number of rows with which the model is recorded


class Predicted(NamedTuple):
    """Predictions for a batch: the tensors of a :class:`~pyro_dvi.predictive.Prediction`, without its methods.

    Attributes:
        mean: ``[N, ...]``; for classes, the probabilities ``[N, ..., C]``; for a Bernoulli, the probability of label 1.
        variance: variance due to noise and posterior together, in squared units of the observation; for classes, the
            variance of the one-hot encoding.
        epistemic: the part of the variance that is due to the posterior; None if the rule does not separate it.
    """

    mean: Tensor
    variance: Tensor
    epistemic: Tensor | None = None


class Predictor(nn.Module):
    """A module of torch operators that takes tensors and returns :class:`Predicted`; created by :func:`predictor`.

    It stores the required parts of the posterior in buffers, so that ``to``, ``state_dict``, ``torch.save`` and
    ``copy.deepcopy`` work as for any module. No gradients are recorded. A change of dtype rounds the buffers, which
    were computed in the model's dtype.

    It works with ``torch.compile`` and with ``torch.export.export(serve, (x,), dynamic_shapes=[({0: Dim("rows")},)])``,
    in both cases for any number of rows. An exported predictor returns a plain tuple, and runs without this library.

    Attributes:
        site: the observed site that is predicted.
        method: the prediction rule.
        operators: the graph of operators.
    """

    def __init__(
        self, site: str, method: PredictionRule, operators: fx.GraphModule, inputs: Iterable[Tensor]
    ) -> None:
        super().__init__()
        self.site, self.method, self.operators = site, method, operators
        self._shapes = [tuple(value.shape[1:]) if value.dim() else None for value in inputs]
        tensors = (*operators.buffers(), *inputs)
        floating = next((value for value in tensors if value.is_floating_point()), torch.empty(0))
        self.register_buffer("_like", floating.new_empty(0), persistent=False)

    def forward(self, *inputs: Tensor) -> Predicted:
        """Predict.

        Args:
            inputs: tensors as in the example, with any number of rows; all rows are in memory at once.

        Raises:
            DataError: if the number or shapes of the inputs differ from the example's, if an input contains NaN, or if
                it contains infinities and the predicted mean is not finite.
        """
        shapes = [tuple(value.shape[1:]) if value.dim() else None for value in inputs]
        rows = [value.shape[0] for value in inputs if value.dim()]
        if shapes != self._shapes or rows != rows[:1] * len(rows):
            raise DataError(
                f"inputs have {rows} rows of shapes {shapes}, but need equally many rows of shapes {self._shapes}"
            )
        with torch.no_grad():
            mean, *spread = self.operators(*inputs)
            for value in inputs:  # a NaN input makes the prediction NaN, whatever the model computes
                if value.dim() and value.is_floating_point():
                    nan = value.isnan().reshape(value.shape[0], -1).any(1)
                    nan = nan.reshape(-1, *[1] * (mean.dim() - 1))
                    # Files of older versions of torch cannot contain a constant NaN.
                    mean = mean.masked_fill(nan, 0.0) / ~nan
        outputs: Any = mean, *spread
        finite = torch.compiler.is_compiling() or math.isfinite(mean.sum())
        if not finite and (error := bad_values(inputs, {})):  # otherwise, the distribution has no mean
            raise error
        # An exported program must not refer to classes of this library, so that it runs without the library.
        return outputs if torch.compiler.is_exporting() else Predicted(*outputs)

    def extra_repr(self) -> str:
        """Return the predicted site and the rule."""
        return f"site={self.site!r}, method={self.method}"

    def _apply(self, fn: Any, recurse: bool = True) -> "Predictor":
        before = self._like
        super()._apply(fn, recurse)
        after = {"device": self._like.device, "dtype": self._like.dtype}
        for node in self.operators.graph.nodes:  # tensors created in the graph are moved as well
            for name, new in after.items():
                if node.kwargs.get(name) == getattr(before, name):
                    node.update_kwarg(name, new)
        self.operators.recompile()
        return self


def predictor(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    example: Any,
    method: PredictionRule | None = None,
    *,
    site: str | None = None,
    observed: str | None = None,
    seed: int | None = None,
) -> Predictor:
    r"""Prepare predictions once, for repeated calls with tensors, as in a service.

    Everything that :func:`~pyro_dvi.predict` does in Python is done once: checks, Pyro's traces, moment objects, draws
    of the weights, and all computations that depend only on the weights. The result is a graph of torch operators from
    inputs to predictions. Every distribution with a mean and a variance is supported. So is every rule whose choice of
    operators does not depend on values: ``AtMean()``, ``Moments()``, and ``Samples(n)`` with the same n draws in every
    call. ``Linearised()`` chooses operators by values, so it raises an error.

    Status: equal to :func:`~pyro_dvi.predict` with the same seed, up to rounding; this is checked on the example.

    Args:
        model: the Pyro model; modules run in evaluation mode.
        guide: its trained guide. Later training does not change the predictor.
        example: some inputs, in the form of ``data`` of :func:`~pyro_dvi.predict`; four rows are sufficient.
            Observations are ignored. Inputs that are not tensors become constants of the predictor.
        method: prediction rule; by default the guide's, as in :func:`~pyro_dvi.predict`.
        site: observed site to predict, if the model has several.
        observed: the model's argument that holds the observation, as in :func:`~pyro_dvi.predict`.
        seed: seed of the draws; by default drawn from the global generator.

    Returns:
        A module that takes the tensors of the model's inputs by position, in the order of the example.

    Raises:
        UnsupportedError: if the distribution has no mean or variance, if the model draws random numbers itself or
            chooses operators by the values of its inputs, if draws of the guide depend on the inputs, or if the
            predictions for the example differ from those of ``predict``.

    Example:
        >>> import torch, pyro_dvi as dvi
        >>> model = dvi.regressor(dvi.to_bayesian_(torch.nn.Linear(3, 1)), 10, noise_scale=0.1)
        >>> guide, x = dvi.MeanFieldGuide(model), torch.randn(10, 3)
        >>> _ = guide(x, x[:, 0])
        >>> serve = dvi.predictor(model, guide, x, dvi.Moments())
        >>> serve(torch.zeros(2, 3)).mean.shape
        torch.Size([2])
    """
    device = device_of(model, guide)
    batch = next(batches(model, example, observed=observed, batch_size=EXAMPLES, device=device))
    inputs = batch.inputs
    leaves = tensors_in(inputs)
    with evaluation_mode(model, guide), seeded(seed, device) as seed:
        expected = predict(model, guide, inputs, method, site=site, seed=seed, progress=False)
        rule, part = expected.method, expected._parts[0]
        if not expected.has_moments:
            raise UnsupportedError(f"site {expected.site!r} ({part.kind}) has no mean and variance")
        try:
            with pyro.validation_enabled(False):
                run = _Run(predicted_model(guide, model), guide, expected.site, part.axis, seed)
                function = run.averaging(rule, inputs) if isinstance(rule, FromDraws) else run.by(rule)
                rows = [[_with_rows(v, batch.num_rows, more) for v in leaves] for more in (1, 2, 4)]
                graph = recorded(lambda *tensors: function(*_nested(inputs, tensors)), *rows)
                prepared = Predictor(expected.site, rule, graph, leaves)
            found = prepared(*leaves)._asdict()
            if not agrees(found, {"mean": expected.mean, "variance": expected.variance}):
                raise UnsupportedError("the recorded operators and predict give different results")
        except UnsupportedError as error:
            raise UnsupportedError(
                f"predictions with {rule} cannot be prepared: {str(error).rstrip(':.')}. Use predict, or a rule "
                "such as AtMean(), Moments() or Samples(n)"
            ) from error
    return prepared


@dataclass(frozen=True)
class _Run:
    """Runs of the model up to the predicted site, without checks."""

    model: Callable[..., Any]
    guide: Any
    site: str
    axis: int
    seed: int

    def by(self, rule: PredictionRule) -> Function:
        """Return a function that maps inputs to predictions with the given rule."""

        def predicted(*inputs: Tensor) -> list[Tensor]:
            seeder()(self.seed)
            mixture = Mixture(None, rows_of(tensors_in(inputs)))
            for response in rule.components(self.guide, inputs, partial(self._respond, inputs)):
                mixture.add(response)
            return _read(mixture, rule)

        return predicted

    def averaging(self, rule: FromDraws, example: tuple[Any, ...]) -> Function:
        """Draw the latents now, and return a function that maps inputs to averages over these draws.

        Raises:
            UnsupportedError: if draws may depend on the inputs, or if the model must be run with one draw at a time.
        """
        if not rule.repeats(self.guide):
            raise UnsupportedError(f"draws of {type(self.guide).__name__} may depend on the inputs")
        seeder()(self.seed)
        first, *others = rule.draws(self.guide, example)
        way, node = ManyDraws(), self._node(example)
        chunks = way.chunks(first, iter(others), lambda draw: statistics(node(draw)["fn"], None))
        if any(found is None for _, found in chunks):
            raise UnsupportedError("the model is random, stores values between runs, or returns NaN")

        def predicted(*inputs: Tensor) -> list[Tensor]:
            mixture, node = Mixture(None, rows_of(tensors_in(inputs))), self._node(inputs)
            mixture.add(self._respond(inputs, first))
            if others:
                many = way.run(others, lambda draw: mixture.statistics(node(draw)))
                mixture.add_statistics(many, len(others))
            return _read(mixture, rule)

        return predicted

    def _node(self, inputs: tuple[Any, ...]) -> Callable[[Latents], Any]:
        run = sites_at(self.model, inputs, {}, [self.site])
        return lambda latents: run(latents)[self.site]

    def _respond(self, inputs: tuple[Any, ...], latents: Latents) -> Response:
        fn = self._node(inputs)(latents)["fn"]
        return Response(self.site, fn, torch.empty(0), False, self.axis, None)


def _read(mixture: Mixture, rule: PredictionRule) -> list[Tensor]:
    values = mixture.finish().values
    mean, epistemic = values["mean"], values["epistemic"]
    is_told = rule.tells_noise_apart or "function_variance" in values
    return [mean, values["aleatoric"] + epistemic, *([epistemic] if is_told else [])]


def _nested(like: tuple[Any, ...], tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Return nested arguments, with their tensors replaced by ``tensors``."""
    left = iter(tensors)
    return mapped(lambda v: next(left) if torch.is_tensor(v) else v, like)  # type: ignore[no-any-return]


def _with_rows(value: Tensor, count: int, more: int) -> Tensor:
    """Repeat the rows of a tensor up to ``count + more`` rows, and divide floating-point values by ``more``."""
    if value.dim():
        value = value[torch.arange(count + more, device=value.device) % count]
    return value / more if value.is_floating_point() else value
