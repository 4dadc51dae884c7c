# SPDX-License-Identifier: Apache-2.0
"""A predictor that is prepared once and then called on tensors, for serving.

Its function of tensors is recorded as a graph of torch operators that is valid for any number of rows, with three
numbers of rows. Results that are equal each time, and are not computed from the inputs, become constants of the graph,
so that everything that depends only on the weights is computed once. Integers that differ between the recordings must
be linear functions of the number of rows.
"""

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import pyro
import torch
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map, tree_structure

from pyro_dvi.core.batches import mapped, tensors_in
from pyro_dvi.core.graph_passes import has_effect
from pyro_dvi.core.recorder import Recorder, draws, tensors
from pyro_dvi.core.undisturbed import device_of, layer_by_layer, seeder
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

Function = Callable[..., Sequence[Tensor]]


def recorded(function: Function, *arguments: Sequence[Tensor]) -> fx.GraphModule:
    """Return a function as a module of torch operators, with its constants as buffers.

    Args:
        function: takes and returns tensors.
        arguments: three sets of arguments, with different numbers of rows and, if possible, different values.

    Raises:
        UnsupportedError: if the operators depend on the values of the inputs or nonlinearly on the number of rows, draw
            random numbers, or change a constant in place.
    """
    _run(function, arguments[0])  # first, so that caches of the function are filled
    return _Common([_run(function, inputs) for inputs in arguments], list(map(rows_of, arguments))).module()


def rows_of(inputs: Sequence[Tensor]) -> int:
    """Return the number of rows of the first argument that has rows."""
    return next(len(value) for value in inputs if value.dim())


def _run(function: Function, inputs: Sequence[Tensor]) -> fx.Graph:
    with layer_by_layer(), Recorder(inputs, any_rows=True) as recorder:
        results = function(*inputs)
    return recorder.graph(results)


class _Common:
    """The common graph of runs with different numbers of rows.

    Nodes at the same position compute the same function, and have the same name.
    """

    def __init__(self, runs: Sequence[fx.Graph], rows: Sequence[int]) -> None:
        if any(list(map(_kind, run.nodes)) != list(map(_kind, runs[0].nodes)) for run in runs):
            raise UnsupportedError("the operators depend on the number of rows")
        self._places: list[tuple[fx.Node, ...]] = list(zip(*(run.nodes for run in runs), strict=True))
        self._rows = rows
        self._graph = fx.Graph()
        self._nodes: dict[fx.Node, fx.Node] = {}  # nodes of the common graph, by the nodes of the first run
        self._held: dict[str, Tensor] = {}
        self._kept = {node for node in runs[0].nodes if node.op in ("placeholder", "output")}
        self._written: set[StorageWeakRef] = set()  # memory that these nodes write to

    def module(self) -> fx.GraphModule:
        self._find_kept()
        for nodes in self._places:
            if (first := nodes[0]) in self._kept:
                args, kwargs = tree_map(self._shared, *((node.args, node.kwargs) for node in nodes))
                self._nodes[first] = self._graph.create_node(first.op, first.target, args, kwargs)
        self._graph.eliminate_dead_code(lambda node: has_effect(node) and not draws(node))
        if drawn := next(filter(draws, self._graph.nodes), None):
            raise UnsupportedError(f"the model draws random numbers ({drawn.target})")
        return fx.GraphModule(self._held, self._graph)

    def _find_kept(self) -> None:
        """Find the nodes that depend on inputs or on the number of rows, and the memory that they write to."""
        before = len(self._written)
        for nodes in self._places:
            first, given = nodes[0], nodes[0].all_input_nodes
            met = set[StorageWeakRef]().union(*(node.meta.get("memory", ()) for node in (first, *given)))
            known = self._kept.isdisjoint(given) and self._written.isdisjoint(met)
            if first.op == "call_function" and not (known and _agree(nodes)):
                self._kept.add(first)
                self._written.update(first.meta.get("written", ()))
        if before < len(self._written):  # other nodes may read this memory
            self._find_kept()

    def _shared(self, first: Any, *others: Any) -> Any:
        """Return an argument of an operator in the common graph, from the arguments in all runs."""
        if any(repr(first) != repr(other) for other in others):  # compared as text, in which NaN equals NaN
            return self._size(first, *others)
        if isinstance(first, fx.Node) and first not in self._nodes:
            self._nodes[first] = self._constant(first, *others)
        return self._nodes.get(first, first)

    def _constant(self, *nodes: fx.Node) -> fx.Node:
        if not self._written.isdisjoint(nodes[0].meta["memory"]):
            raise UnsupportedError("the model changes a stored tensor in place")
        if not _agree(nodes):
            raise UnsupportedError(
                "a tensor that is created in Python depends on the inputs or on the number of rows"
            )
        name = f"constant_{len(self._held)}"
        # Contiguous, because torch.export.save warns about other tensors.
        self._held[name] = nodes[0].meta["value"].detach().clone(memory_format=torch.contiguous_format)
        return self._graph.get_attr(name)

    def _size(self, *values: Any) -> fx.Node:
        """Return the node of an integer ``slope * rows + offset``."""
        if all(isinstance(value, (int, float)) for value in values):
            slope = (values[1] - values[0]) // (self._rows[1] - self._rows[0])
            offset = values[0] - slope * self._rows[0]
            if all(value == slope * rows + offset for value, rows in zip(values, self._rows, strict=True)):
                node = self._graph.call_function(operator.mul, (self._num_rows, slope))
                return self._graph.call_function(operator.add, (node, offset)) if offset else node
        raise UnsupportedError(
            f"the operators contain integers, {values} for {self._rows} rows, that are not linear in the number of rows"
        )

    @cached_property
    def _num_rows(self) -> fx.Node:
        first = next(nodes[0] for nodes in self._places if nodes[0].meta["value"].dim())
        return self._graph.call_function(torch.ops.aten.sym_size.int, (self._nodes[first], 0))


def _kind(node: fx.Node) -> Any:
    return node.op, node.target, tree_structure((node.args, node.kwargs))


def _agree(nodes: Sequence[fx.Node]) -> bool:
    """Return True if the results of the nodes are equal tensors."""
    first, *others = (tensors(node.meta["value"]) for node in nodes)
    return all(
        a.shape == b.shape and a.dtype == b.dtype and bool(torch.isclose(a, b, 0, 0, equal_nan=True).all())
        for other in others
        for a, b in zip(first, other, strict=True)
    )


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
    operators does not depend on values: ``AtMean()``, ``Moments()``, ``Samples(n)`` with the same n draws in every
    call, and ``Linearised()`` unless the Laplace posterior solves a system for each input, as ``ConjugateGradient``.

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
