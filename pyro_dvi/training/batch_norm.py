# SPDX-License-Identifier: Apache-2.0
"""Statistics of batch normalisation for the network at the posterior mean."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from pyro import poutine
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pyro_dvi.core.batches import batches, check_loader
from pyro_dvi.core.undisturbed import modules_met
from pyro_dvi.errors import GuideError, ModelError
from pyro_dvi.runs.posterior_run import PosteriorMeans


def recompute_batch_norm(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    loader: Iterable[Any],
    *,
    device: torch.device | None = None,
) -> list[nn.Module]:
    r"""Recompute the statistics of batch normalisation, with the weights at the posterior mean.

    The running statistics of training belong to weights that moved, and, under a sampling ELBO, to sampled weights.
    Call this after :func:`~pyro_dvi.training.fit` for predictions at the mean. The statistics are replaced by

    .. math::
        m = \frac1B \sum_b m_b(\mu), \qquad v = \frac1B \sum_b v_b(\mu)

    over minibatches :math:`b` with weights :math:`\mu`. Normalisation runs in training mode meanwhile, everything else
    (dropout) in evaluation mode.

    Status: exact average over the minibatches; each counts the same, whatever its size.

    Args:
        model: a Pyro model, a module or a function around modules.
        guide: its guide; called before at least once.
        loader: training batches, as for :func:`~pyro_dvi.training.fit`.
        device: where to move the batches.

    Returns:
        The normalisation modules whose statistics were replaced.

    Raises:
        ModelError: if the model calls no batch normalisation with running statistics.
        GuideError: if the guide has no mean.
        DataError: if the loader is empty. After an error the statistics are as before.

    Source: Izmailov et al. (2018), "Averaging Weights Leads to Wider Optima and Better Generalization", section 3.2.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> norm = nn.BatchNorm1d(1)
        >>> def model(x):
        ...     w = pyro.sample("w", dist.Normal(2.0, 1.0))
        ...     return norm(w * x)
        >>> def guide(x):
        ...     pyro.sample("w", dist.Normal(torch.tensor(3.0), 0.1))
        >>> _ = recompute_batch_norm(model, guide, [(torch.tensor([[1.0], [3.0]]),)])
        >>> norm.running_mean, norm.running_var
        (tensor([6.]), tensor([18.]))
    """
    check_loader(loader, passes=1)
    found: list[nn.Module] = []
    with torch.no_grad(), poutine.block(), _cumulative_statistics(found, model, guide):
        for args, kwargs in batches(loader, device):
            _at_mean(model, guide, args, kwargs)(*args, **kwargs)
        if not found:
            raise ModelError(
                "recompute_batch_norm: no batch, or a model that calls no BatchNorm with track_running_stats=True"
            )
    return found


@contextmanager
def _cumulative_statistics(found: list[nn.Module], *parts: Any) -> Iterator[None]:
    """Put each BatchNorm that is called into cumulative averaging; undo everything but the result.

    Modules are met through a forward hook: a model that is a function does not list them.
    """
    with ExitStack() as undo, ExitStack() as after_failure:
        met: set[nn.Module] = set()

        def switch_off(module: nn.Module) -> None:
            if module not in met:
                met.add(module)
                undo.callback(setattr, module, "training", module.training)
                module.training = False

        def accumulate(module: nn.Module) -> None:
            if isinstance(module, _BatchNorm) and module.track_running_stats and module not in found:
                found.append(module)
                undo.callback(setattr, module, "momentum", module.momentum)
                for buffer in module.buffers(recurse=False):
                    after_failure.callback(buffer.copy_, buffer.clone())
                module.reset_running_stats()
                module.momentum = None  # torch's cumulative average
                module.training = True

        with modules_met(switch_off, *parts), modules_met(accumulate):
            yield
        after_failure.pop_all()


def _at_mean(
    model: Callable[..., Any], guide: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Any]:
    """Return the model with its latents at the mean of the guide for these arguments."""
    try:
        with PosteriorMeans() as means:
            guide(*args, **kwargs)
        return poutine.replay(model, trace=means.trace)
    except GuideError as error:
        # A dependent guide has no independent means to run at, but Pyro's automatic ones know their median.
        median_of = getattr(guide, "median", None)
        if not callable(median_of):
            raise
        try:
            return poutine.condition(model, data=median_of(*args, **kwargs))
        except (NotImplementedError, AttributeError):
            raise error from None
