# SPDX-License-Identifier: Apache-2.0
"""Training that a process begins, or takes up where a killed one left it."""

import os
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import Adam
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.natural_gradients.ivon import IVON
from pyro_dvi.natural_gradients.updates import VOGN
from pyro_dvi.optim import learning_rates
from tests.training.problems import NUM_DATA, data, sequence, shuffled

EPOCHS = 6


def adam() -> Any:
    return Adam(learning_rates(0.01))


METHODS: dict[str, Any] = {
    "TaylorELBO": (dvi.MeanFieldGuide, dvi.TaylorELBO, adam),
    "MomentPropagationELBO": (dvi.MultiplicativeNoiseGuide, dvi.MomentPropagationELBO, adam),
    "VOGN": (dvi.NaturalGradientGuide, dvi.NaturalGradientELBO, lambda: VOGN({})),
    "IVON": (dvi.NaturalGradientGuide, dvi.NaturalGradientELBO, lambda: IVON({})),
    "NoisyKFAC": (dvi.KroneckerGuide, dvi.NaturalGradientELBO, lambda: dvi.NoisyKFAC({})),
    "MAP and LaplaceGuide": (dvi.LaplaceGuide, Trace_ELBO, adam),
}


def train(method: str, folder: Path, begun: Any = None) -> None:
    """Train with a checkpoint each epoch, from the last one if there is one; leave the result in a file."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pyro.clear_param_store()
    make_guide, make_elbo, make_optimizer = METHODS[method]
    path = folder / "run.pt"
    torch.manual_seed(os.getpid() if path.exists() else 0)  # what a file does not bring back differs
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Softplus(), nn.Linear(4, 1), nn.Flatten(0))
    model = dvi.regressor(dvi.to_bayesian_(net), num_data=NUM_DATA, noise_scale=0.3)
    guide = make_guide(model)
    svi, loader = SVI(model, guide, make_optimizer(), loss=make_elbo()), shuffled()
    history = dvi.load(path, svi, loader=loader) if path.exists() else None
    if begun is not None:
        begun.set()
    history = dvi.fit(
        svi,
        loader,
        EPOCHS - (0 if history is None else history.epoch),
        history=history,
        checkpoint=path,
        validate=sequence(),
        progress=False,
    )
    x, y = data()
    if isinstance(guide, dvi.LaplaceGuide):
        guide.fit([(x, y)], unconverged="accept")
    weights = {**guide.state_dict(), **model.state_dict()}
    result = {
        "history": repr({**history.to_dict(), "epochs": {**history.epochs, "seconds": []}}),
        "weights": {name: value for name, value in weights.items() if torch.is_tensor(value)},
        "variance": dvi.predict(model, guide, x, seed=0).variance,
    }
    torch.save(result, folder / "result.unfinished")
    os.replace(folder / "result.unfinished", folder / "result.pt")
    torch.set_num_threads(threads)
