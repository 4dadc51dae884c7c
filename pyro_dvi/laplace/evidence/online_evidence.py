# SPDX-License-Identifier: Apache-2.0
"""Scales of priors and noise, tuned by maximising the evidence while the mode is trained."""

import functools
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from pyro_dvi.core.arguments import check_count
from pyro_dvi.core.batches import check_loader
from pyro_dvi.errors import ArgumentError, DviWarning
from pyro_dvi.laplace.evidence.candidates import PriorPrecision, Scale, check_scales
from pyro_dvi.laplace.guide import LaplaceGuide
from pyro_dvi.laplace.methods.kronecker_factored import Diagonal
from pyro_dvi.laplace.methods.method import Method, check_method
from pyro_dvi.runs.log_joint import rescaled_model


class OnlineEvidence:
    r"""A callback for :func:`~pyro_dvi.fit` that sets scales to maximise the evidence, every few epochs.

    .. math:: c \leftarrow \arg\max_c\; \log p_c(D, u) - \tfrac12 \log\det(G + \Pi_c)

    at the current weights u; training continues with the new scales. Pass the :attr:`model` of this object to ``SVI``,
    because only its scales are updated. No validation data are needed.

    Status: for linear models with Gaussian noise, converges to the maximum of the evidence if the method is exact and
    there are enough epochs. For networks, it is a heuristic: training ignores the effect of the weights on the
    determinant, so the evidence may decrease. Compare :meth:`LaplaceGuide.log_evidence` after training with and without
    this callback.

    Args:
        guide: the guide that is trained, with ``kl_weight=1``.
        batches: all the data without augmentation, as in :meth:`LaplaceGuide.tune`.
        scales: scales to tune, one after the other: ``PriorPrecision()`` (the default), ``PriorPrecision("net.0.*")``
            for a single layer, or ``NoiseScale()``.
        method: Laplace method that provides the determinant; by default, ``Diagonal()``.
        every: number of epochs between updates, each of which costs a few fits of the method per scale.

    Attributes:
        model: the model with the current scales, for training; use the original model for predictions.
        values: for each update, the values of the scales, relative to the scales in the code of the model.

    Source: Immer et al. (2021), "Scalable marginal likelihood estimation", Algorithm 1, with a search in place of
    gradient steps.

    Example:
        >>> import pyro, pyro_dvi as dvi, torch
        >>> pyro.clear_param_store()
        >>> net = dvi.to_bayesian_(torch.nn.Linear(1, 1, bias=False), prior_scale=1.0)
        >>> x = torch.linspace(-1, 1, 20).unsqueeze(-1)
        >>> guide = dvi.LaplaceGuide(dvi.regressor(net, num_data=20, noise_scale=0.1))
        >>> online = OnlineEvidence(guide, [(x, 3 * x)])
        >>> svi = pyro.infer.SVI(
        ...     online.model, guide, dvi.optim.Adam({"lr": 0.1}), pyro.infer.Trace_ELBO()
        ... )
        >>> _ = dvi.fit(svi, [(x, 3 * x)], epochs=100, callbacks=[online], progress=False)
        >>> round(
        ...     guide.scale_factors["net.weight"], 1
        ... )  # the prior scale that explains a weight of 3
        3.0
    """

    def __init__(
        self,
        guide: LaplaceGuide,
        batches: Iterable[Any],
        scales: Sequence[Scale] = (PriorPrecision(),),
        *,
        method: Method | None = None,
        every: int = 10,
    ) -> None:
        check_count("every", every)
        check_loader(batches, passes=2, role="batches")
        check_scales("scales", scales)
        self.guide, self.batches, self.scales, self.every = guide, batches, scales, every
        self.method = Diagonal() if method is None else method
        check_method(self.method)
        self.values: list[dict[Scale, float]] = []
        plain = guide._plain_model.get()

        def model(*args: Any, **kwargs: Any) -> Any:
            return rescaled_model(plain, guide.scale_factors)(*args, **kwargs)

        self.model = functools.update_wrapper(model, plain, assigned=(), updated=())  # keeps the signature

    def __call__(self, state: Any) -> None:
        """Update the scales after every few epochs.

        Raises:
            ArgumentError: another model is trained, whose scales would not be updated.
        """
        if state.model is not self.model:
            raise ArgumentError(
                "OnlineEvidence updates the scales of its own model: train SVI(online.model, guide, ...)"
            )
        if state.epoch % self.every:
            return
        now = dict(self.values[-1]) if self.values else {}
        for scale in self.scales:
            near = [now[scale] * 2.0**k for k in range(-2, 3)] if scale in now else None
            with warnings.catch_warnings():
                # If a value is at an edge, the next search continues from there; there are no validation data.
                warnings.filterwarnings("ignore", "the best value of|class probabilities", DviWarning)
                now[scale] = self.guide.tune(
                    self.batches,
                    scale,
                    method=self.method,
                    values=near,
                    refinements=10,
                    unconverged="accept",
                    progress=False,
                ).best
        self.guide._fitted = None  # training continues to move the weights
        self.values.append(now)
