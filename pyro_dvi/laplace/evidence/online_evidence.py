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
from pyro_dvi.laplace.fitted import rescaled_model
from pyro_dvi.laplace.guide import LaplaceGuide
from pyro_dvi.laplace.methods.kronecker_factored import Diagonal
from pyro_dvi.laplace.methods.method import Method, check_method


class OnlineEvidence:
    r"""A callback of :func:`~pyro_dvi.fit` that sets scales to maximise the evidence, every few epochs.

    .. math:: c \leftarrow \arg\max_c\; \log p_c(D, u) - \tfrac12 \log\det(G + \Pi_c)

    at the current weights u; training continues with the new scales. Pass the :attr:`model` of this object to ``SVI``;
    its scales are updated. Needs no validation data.

    Status: converges to the optimum of the evidence for linear models with Gaussian noise, an exact method and enough
    epochs. For networks, it is a heuristic: training ignores the effect of the weights on the determinant, so the
    evidence may decrease; compare :meth:`LaplaceGuide.log_evidence` after training with and without this callback.

    Args:
        guide: the guide that is trained, with ``kl_weight=1``.
        batches: all the data, as for :meth:`LaplaceGuide.tune`; without augmentation.
        scales: scales to choose, one after the other: ``PriorPrecision()``, the default, ``PriorPrecision("net.0.*")``
            for layers of their own, ``NoiseScale()``.
        method: Laplace method that provides the determinant; ``Diagonal()`` by default.
        every: epochs between two choices, each of which costs a few fits of the method for every scale.

    Attributes:
        model: the model with its present scales, to be trained; predictions take the model itself.
        values: for each choice the values of the scales, relative to the model as it is written.

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

        self.model = functools.update_wrapper(model, plain, assigned=(), updated=())  # the signature is known

    def __call__(self, state: Any) -> None:
        """Choose the scales after every few epochs.

        Raises:
            ArgumentError: another model is trained, whose scales stay as they are.
        """
        if state.model is not self.model:
            raise ArgumentError("OnlineEvidence has its own model: train SVI(online.model, guide, ...)")
        if state.epoch % self.every:
            return
        now = dict(self.values[-1]) if self.values else {}
        for scale in self.scales:
            near = [now[scale] * 2.0**k for k in range(-2, 3)] if scale in now else None
            with warnings.catch_warnings():
                # The next search continues from an edge, and there are no validation data.
                warnings.filterwarnings("ignore", "the best of|class probabilities", DviWarning)
                now[scale] = self.guide.tune(
                    self.batches,
                    scale,
                    method=self.method,
                    values=near,
                    refinements=10,
                    unconverged="accept",
                    progress=False,
                ).best
        self.guide._fitted = None  # training moves its weights on
        self.values.append(now)
