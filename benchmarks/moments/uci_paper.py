# SPDX-License-Identifier: Apache-2.0
"""The protocol of the paper and of its authors' code, trained with this library.

Source: Schmitt & Roth (2021), "Sampling-free variational inference for neural networks with multiplicative activation
noise": results of Table 1, settings of Table 3 and of the code that they published.
"""

from dataclasses import dataclass
from itertools import islice
from typing import Any

import pyro
import torch
from pyro.infer.autoguide.initialization import init_to_value
from torch import Tensor

from benchmarks.moments.uci_methods import Fitted
from benchmarks.moments.uci_network import INPUT_AXIS, Networks
from benchmarks.shared.regressions import Rows, TrainingSets
from pyro_dvi.links import GaussHermite
from pyro_dvi.moment_propagation.elbo import MomentPropagationELBO
from pyro_dvi.moment_propagation.multiplicative_noise import MultiplicativeNoiseGuide
from pyro_dvi.predictive import Moments

AUTHORS_PROTOCOL = "MNVI, paper's protocol"
LARGE_BATCHES = ("kin8nm", "power-plant", "wine-quality-red")


@dataclass(frozen=True)
class Paper:
    """Raw targets, momentum SGD with steps, clipped gradients, KL weight raised at every step of the rate.

    Args:
        name: the data set, on which the size of minibatches and the prior depend.
        epochs: of training; the schedule has its steps at a half and three quarters.
        seed: of initial weights and minibatches.
    """

    name: str
    epochs: int = 200
    seed: int = 1

    def run(self, x: Tensor, y: Tensor, parts: list[tuple[Rows, Rows]]) -> list[dict[str, Any]]:
        """Train one network on each training part, and return the scores of each fold."""
        data = TrainingSets(x, y, [train for train, _ in parts], standardise_targets=False)
        fitted = self._fit(data)
        tests = [test for _, test in parts]
        matched = fitted.score(tests, Moments())
        mixture = fitted.score(tests, Moments(noise=GaussHermite(32)))
        results = []
        for fold, test in enumerate(tests):
            error = matched[1][: len(test), fold] - y[test]
            results.append(
                {
                    "single": {
                        "log_likelihood": matched[0][: len(test), fold].mean().item(),
                        "rmse": error.square().mean().sqrt().item(),
                    },
                    "mixture_log_likelihood": mixture[0][: len(test), fold].mean().item(),
                }
            )
        return results

    def _fit(self, data: TrainingSets) -> Fitted:
        pyro.clear_param_store()
        size = 128 if self.name in LARGE_BATCHES else 64
        precision = 0.01 if self.name == "yacht" else 0.1
        model = Networks(data.x.shape[-1], data.sizes, prior_scale=precision**-0.5)
        init = init_to_value(values=model.initial_weights(self.seed))
        guide = MultiplicativeNoiseGuide(model, init_loc_fn=init, input_axis=INPUT_AXIS)
        first = next(data.minibatches(size, self.seed))
        guide.initialize(first.x, first.y)
        parameters = [*model.parameters(), *guide.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        milestones = (self.epochs // 2, self.epochs * 3 // 4)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, gamma=0.1)
        batches = data.minibatches(size, self.seed, keep_rest=True)
        elbo = MomentPropagationELBO(kl_weight=0.01, variance_floor=1e-5)
        for epoch in range(self.epochs):
            elbo.kl_weight = 0.01 * 10 ** sum(epoch >= milestone for milestone in milestones)
            for batch in islice(batches, data.steps_per_epoch(size)):
                optimizer.zero_grad()
                elbo.differentiable_loss(model, guide, batch.x, batch.y, batch.mask).backward()
                clip_each_network_(parameters, data.sizes)
                optimizer.step()
            schedule.step()
        return Fitted(model, guide, data)


@torch.no_grad()
def clip_each_network_(parameters: list[Tensor], sizes: Tensor) -> None:
    """Turn gradients of sums over the data into those of means, and shorten those whose largest entry exceeds one."""
    gradients = [p.grad.div_(sizes[:, None, None]) for p in parameters if p.grad is not None]
    largest = torch.stack([gradient.abs().amax((1, 2)) for gradient in gradients]).amax(0)
    for gradient in gradients:
        gradient.div_(largest.clamp(min=1.0)[:, None, None])
