# SPDX-License-Identifier: Apache-2.0
"""Ready-made Pyro models: a network followed by a likelihood, in a plate over a minibatch of the data set."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.nn.module import PyroModule, PyroParam, PyroSample
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_dvi.bayesian.priors import LearnedScale, ScalePrior, check_scale_prior, positive
from pyro_dvi.core.arguments import check_count
from pyro_dvi.core.recorder import assumed
from pyro_dvi.errors import ArgumentError, DataError, ModelError, warn


@dataclass(frozen=True)
class Heteroscedastic:
    r"""A noise scale for each input, predicted by the second half of the network's outputs.

    .. math::
        f_w(x) = (\mu, c), \qquad \sigma(x) = e^{c/2}

    The last layer needs twice as many outputs as the target has columns: first the means, then the log-variances.

    Status: exact.

    Example:
        >>> mean, scale = Heteroscedastic().split(torch.tensor([[1.0, 0.0]]))
        >>> mean, scale
        (tensor([[1.]]), tensor([[1.]]))
    """

    def split(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the means and standard deviations, from the first and second half of the columns."""
        columns = outputs.shape[-1]
        if columns % 2:
            raise ModelError(
                f"Heteroscedastic() needs a mean and a log-variance for each column of y, not {columns} outputs"
            )
        mean, log_variance = outputs[..., : columns // 2], outputs[..., columns // 2 :]
        return mean, torch.exp(0.5 * log_variance)


class LikelihoodModule(PyroModule):
    """A network followed by a likelihood, as a Pyro model ``model(x, y=None)``.

    Args:
        net: the network. It may have been called before, which Pyro itself would reject.
        num_data: number of examples in the data set.
    """

    def __init__(self, net: nn.Module, num_data: int) -> None:
        super().__init__()
        if not isinstance(net, nn.Module):
            raise ArgumentError(f"net is a {type(net).__name__}: pass a torch.nn.Module.")
        check_count("num_data, len(loader.dataset),", num_data)
        for module in net.modules():
            # Forget the site names of earlier runs of the network.
            if isinstance(module, PyroModule) and not module._pyro_context.active:
                module._pyro_context.used = False
        self.net = net
        self.num_data = num_data

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; keyword arguments other than x and y are the labels and inputs of the network."""
        return super().__call__(*args, **self.own_names(kwargs))

    @staticmethod
    def own_names(named: Mapping[str, Any]) -> Mapping[str, Any]:
        """Convert a batch of named inputs, and ``labels`` or ``y``, to a batch with the keys ``x`` and ``y``."""
        if named.keys() <= {"x", "y"}:
            return named
        observation = "labels" if "labels" in named else "y"
        x = {name: value for name, value in named.items() if name != observation}
        return {"x": x, "y": named[observation]} if observation in named else {"x": x}

    def outputs(self, x: Any) -> Any:
        """Call the network. Tuples and mappings of inputs are unpacked, and half-precision outputs become float32.

        A log-likelihood sums over many examples, for which half precision is too coarse. If the outputs have names, the
        output ``logits`` is used.
        """
        named = x if isinstance(x, Mapping) else {}
        args = () if named else x if isinstance(x, tuple | list) else (x,)
        outputs = self.net(*args, **named)
        if not hasattr(outputs, "dim"):
            get = outputs.get if isinstance(outputs, Mapping) else partial(getattr, outputs)
            outputs = get("logits", outputs)
        if not hasattr(outputs, "dim"):
            raise ModelError(
                f"The network returned a {type(outputs).__name__}: it must return a tensor, or an output called logits"
            )
        half = getattr(outputs, "dtype", None) in (torch.bfloat16, torch.float16)
        return outputs.float() if half else outputs

    def data_plate(self, size: int, observed: bool) -> Any:
        """Return the plate over a minibatch; it scales the likelihood of the minibatch to the whole data set.

        Raises:
            DataError: if the model is trained on a minibatch that is larger than the data set.
        """
        if size > self.num_data and observed and self.training:
            raise DataError(
                f"The batch has {size} examples, but num_data is {self.num_data}: pass len(loader.dataset)"
            )
        # The indices are not used, but they save Pyro a random permutation of the data set in every step.
        return pyro.plate("data", max(self.num_data, size), subsample=torch.arange(size))


def _check_target(y: object, shape: torch.Size, outputs: torch.Size, meaning: str, hint: str) -> Tensor:
    """Return ``y`` if it has the shape that the likelihood needs.

    Raises:
        DataError: if it has another shape, which could silently be broadcast to [batch, batch].
    """
    given = f"has the shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"is a {type(y).__name__}"
    if not isinstance(y, Tensor) or y.shape != shape:
        raise DataError(
            f"y {given}; for outputs of shape {tuple(outputs)}, the {meaning} need the shape {tuple(shape)}. {hint}"
        )
    return y


class Classifier(LikelihoodModule):
    """The model of :func:`classifier`: ``model(x, y=None)`` samples the site ``obs``."""

    warned = False  # about a softmax at the end of the network, or axes that may be swapped

    def forward(self, x: Any, y: Tensor | None = None) -> Tensor:
        """Run the network on ``x`` and observe the labels ``y``, or draw them."""
        given = self.outputs(x)
        outputs = given.reshape(-1, 1) if given.dim() < 2 else given
        if outputs.shape[1] == 1:  # the logit of class 1 against class 0
            outputs = torch.cat([torch.zeros_like(outputs), outputs], 1)
        logits = outputs if outputs.dim() == 2 else outputs.movedim(1, -1)
        labels: Any = dist.Categorical(logits=logits)
        if y is not None:
            if isinstance(y, Tensor) and y.dim() == logits.dim() and y.shape[1] == 1:
                y = y.squeeze(1)  # [batch, 1] and [batch] mean the same
            hint = "For one-hot rows, pass y.argmax(1); for a regression, y.float(); for several labels, dist.Bernoulli"
            classes_last = given.dim() > 2 and getattr(y, "shape", None) == given.shape[:-1]
            if classes_last:
                hint = "If the last dimension holds the classes, return logits.movedim(-1, 1)"
            y = _check_target(y, logits.shape[:-1], given.shape, "class indices", hint)
            # Unlike values, the name of a node can be read without waiting for the device.
            last = type(getattr(given, "grad_fn", None)).__name__.removesuffix("Backward0")
            if not self.warned and last in ("Softmax", "Sigmoid"):
                self.warned = True
                warn(f"The network ends in {last.lower()}, but classifier() takes logits: remove nn.{last}.")
            # The result of movedim is not contiguous. Outputs that are moments follow a run with tensors.
            if classes_last and isinstance(given, Tensor) and given.is_contiguous() and not self.warned:
                self.warned = True
                warn(
                    f"The logits of shape {tuple(given.shape)} are read as [batch, classes, *positions]. {hint}"
                )
        # The label -100 is ignored, as in F.cross_entropy. A training step does not wait for an accelerator to look.
        waits = self.training and y is not None and y.device.type != "cpu"
        if y is not None and (waits or not assumed((y != -100).all())):
            labels, y = labels.mask(y != -100), y.masked_fill(y == -100, 0)
        with self.data_plate(logits.shape[0], observed=y is not None):
            drawn: Tensor = pyro.sample("obs", labels.to_event(logits.dim() - 2), obs=y)
        return drawn


def classifier(net: nn.Module, num_data: int) -> Classifier:
    r"""Wrap a network that returns logits in a Pyro model for classification.

    .. math::
        y_i \sim \operatorname{Categorical}(\operatorname{softmax} f_w(x_i)), \qquad i = 1, \dots, N

    Status: exact.

    Args:
        net: maps ``[batch, ...]`` to logits ``[batch, classes]``, or to ``[batch, classes, *positions]`` (a label for
            each pixel or token, as in ``F.cross_entropy``; a transformer returns ``logits.movedim(-1, 1)``). It returns
            the logits alone, or named outputs that include ``logits``. A single output, ``[batch]`` or ``[batch, 1]``,
            is the logit of class 1 of two classes. Convert the network with ``to_bayesian_`` first to make its weights
            Bayesian.
        num_data: :math:`N`, the number of examples (not batches) in the data set.

    Returns:
        A model ``model(x, y=None)`` with the observed site ``obs`` in the plate ``data``. ``x`` may be a tuple or
        mapping of inputs; ``y`` holds class indices ``[batch, *positions]`` or ``[batch, 1, *positions]``, in which
        -100 marks a label to ignore, as in ``F.cross_entropy``: it counts in no likelihood and in no score. A batch may
        also be a mapping with the network's inputs and ``labels``: ``model(input_ids=..., labels=...)``.

    Raises:
        ArgumentError: if ``num_data`` is not a positive integer.
        DataError: at run time, if labels have the wrong shape or are out of range.

    Example:
        >>> import pyro
        >>> from pyro_dvi.bayesian import to_bayesian_
        >>> model = classifier(to_bayesian_(nn.Linear(4, 3)), num_data=100)
        >>> trace = pyro.poutine.trace(model).get_trace(
        ...     torch.zeros(5, 4), torch.tensor([0, 1, 2, 0, 1])
        ... )
        >>> trace.nodes["obs"]["scale"]
        20.0
    """
    return Classifier(net, num_data)


class Regressor(LikelihoodModule):
    """The model of :func:`regressor`: ``model(x, y=None)`` samples the site ``obs``."""

    def __init__(self, net: nn.Module, num_data: int, noise_scale: Any) -> None:
        super().__init__(net, num_data)
        self.noise = noise_scale if isinstance(noise_scale, Heteroscedastic) else None
        self.register_buffer("target_mean", None)
        self.register_buffer("target_scale", None)
        if self.noise is None:
            self.noise_scale = self._scale(noise_scale)

    def _like(self) -> Tensor:
        """Return a tensor with the dtype and device of the network."""
        tensors = (*self.net.parameters(), *self.net.buffers())
        return next((t.detach() for t in tensors if t.is_floating_point()), torch.empty(0))

    def standardize(self, targets: Tensor) -> None:
        r"""Let the network predict standardised targets, :math:`y \sim N(m + s f_w(x), s^2 \sigma^2)`.

        Args:
            targets: all targets, ``[N]`` or ``[N, columns]``; each column has its mean m and standard deviation s.
        """
        rows = targets.squeeze(-1) if targets.dim() == 2 and targets.shape[-1] == 1 else targets
        spread, like = rows.std(0, correction=0), self._like()
        self.target_mean, self.target_scale = rows.mean(0).to(like), spread.where(spread > 0, 1.0).to(like)

    def _scale(self, given: Any) -> Any:
        """Return a number, or an object that becomes a parameter or a latent site as an attribute of this module."""
        like = self._like()
        if isinstance(given, LearnedScale):
            start = like.new_tensor(positive(given.init, "noise_scale"))
            return PyroParam(start, constraint=constraints.positive)
        if isinstance(given, int | float | Tensor):
            return positive(given, "noise_scale")
        check_scale_prior(given, "noise_scale (or a number, LearnedScale() or Heteroscedastic())")
        self.register_buffer("noise_like", like.new_ones(()), persistent=False)
        return PyroSample(ScalePrior(given, "noise_like"))

    def forward(self, x: Any, y: Tensor | None = None) -> Tensor:
        """Run the network on ``x`` and observe the targets ``y``, or draw them."""
        outputs = self.outputs(x)
        if outputs.dim() not in (1, 2):
            raise ModelError(
                f"The network's output has the shape {tuple(outputs.shape)}, not [batch] or [batch, columns]"
            )
        outputs = outputs.unsqueeze(-1) if outputs.dim() == 1 else outputs
        mean, scale = (outputs, self.noise_scale) if self.noise is None else self.noise.split(outputs)
        one_column = mean.shape[-1] == 1
        if one_column:  # [batch, 1] and [batch] mean the same
            mean = mean.squeeze(-1)
            # a tensor or moments, if it has columns
            scale = scale if isinstance(scale, float) or scale.ndim != 2 else scale.squeeze(-1)
            y = y.squeeze(-1) if isinstance(y, Tensor) and y.dim() == 2 and y.shape[-1] == 1 else y
        if self.target_scale is not None:
            mean, scale = mean * self.target_scale + self.target_mean, scale * self.target_scale
        if y is not None:
            hint = "For classes, pass integer labels, y.long()"
            if isinstance(y, Tensor) and self.noise is None and outputs.numel() == 2 * y.numel():
                hint += "; for means and log-variances, pass noise_scale=dvi.bayesian.Heteroscedastic()"
            y = _check_target(y, mean.shape, outputs.shape, "targets", hint)
        with self.data_plate(mean.shape[0], observed=y is not None):
            targets = dist.Normal(mean, scale).to_event(0 if one_column else 1)
            drawn: Tensor = pyro.sample("obs", targets, obs=y)
        return drawn


def regressor(net: nn.Module, num_data: int, noise_scale: Any = 1.0) -> Regressor:
    r"""Wrap a network that returns means in a Pyro model for regression.

    .. math::
        y_i \sim N(f_w(x_i), \sigma^2), \qquad i = 1, \dots, N

    Status: exact.

    Args:
        net: maps ``[batch, ...]`` to means ``[batch]``, ``[batch, 1]`` or ``[batch, columns]``; with
            ``Heteroscedastic()``, it returns twice as many columns. Convert it with ``to_bayesian_`` first to make its
            weights Bayesian.
        num_data: :math:`N`, the number of examples (not batches) in the data set.
        noise_scale: :math:`\sigma`, in units of ``y`` (standardise the targets, or choose a scale in their units): a
            number; a distribution over positive numbers (the latent site ``noise_scale``); ``LearnedScale(init)`` (an
            optimised parameter); or ``Heteroscedastic()`` (the network predicts a log-variance for each input).

    Returns:
        A model ``model(x, y=None)`` with the observed site ``obs`` in the plate ``data``. ``x`` may be a tuple or
        mapping of inputs; ``y`` is ``[batch]`` or ``[batch, columns]``, and ``[batch, 1]`` is treated as ``[batch]``. A
        batch may also be a mapping with the network's inputs and ``labels``.

    Raises:
        ArgumentError: if ``num_data`` is not a positive integer, or ``noise_scale`` does not have one of the forms
            above.
        ModelError: at run time, if the network's output has another shape.
        DataError: at run time, if targets have the wrong shape or are not finite.

    Example:
        >>> import pyro
        >>> from pyro_dvi.bayesian import to_bayesian_
        >>> model = regressor(to_bayesian_(nn.Linear(4, 1)), 100, noise_scale=dist.HalfNormal(1.0))
        >>> trace = pyro.poutine.trace(model).get_trace(torch.zeros(5, 4), torch.zeros(5))
        >>> list(trace.stochastic_nodes), trace.nodes["obs"]["scale"]
        (['net.weight', 'net.bias', 'noise_scale', 'data'], 20.0)
    """
    return Regressor(net, num_data, noise_scale)
