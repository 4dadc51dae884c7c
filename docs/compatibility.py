# SPDX-License-Identifier: Apache-2.0
"""Which guide, objective, optimizer and prediction rule go together: each pair is tried on a tiny classifier.

As an extension of Sphinx it writes ``generated/compatibility.md``, which ``reference/compatibility.md`` includes. A
pair works, warns or is refused; what warnings and errors say is quoted below the tables.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.errors import PyroDviError

GENERATED = Path(__file__).parent / "generated" / "compatibility.md"
X, Y = (
    torch.tensor([[0.0, 1.0], [1.0, 0.5], [-1.0, 0.2], [0.3, -1.0]]),
    torch.tensor([0, 1, 0, 1]),
)


def build() -> Any:
    """Return an untrained classifier."""
    net = nn.Sequential(nn.Linear(2, 3), nn.Softplus(), nn.Linear(3, 2))
    return dvi.classifier(dvi.to_bayesian_(net), num_data=len(X))


def ensemble(model: Any) -> Any:
    """Return the guide of two trained members."""

    def train() -> tuple[Any, Any]:
        member = build()
        guide = dvi.MeanFieldGuide(member)
        dvi.fit(
            SVI(member, guide, dvi.optim.Adam({"lr": 0.01}), dvi.TaylorELBO()),
            [(X, Y)],
            1,
            progress=False,
        )
        return member, guide

    return dvi.train_ensemble(train, 2, progress=False)[1]


GUIDES: dict[str, Callable[[Any], Any]] = {
    "MeanFieldGuide": dvi.MeanFieldGuide,
    "MultiplicativeNoiseGuide": dvi.MultiplicativeNoiseGuide,
    "NaturalGradientGuide": dvi.NaturalGradientGuide,
    "KroneckerGuide": dvi.KroneckerGuide,
    "LastLayerGuide": partial(dvi.LastLayerGuide, layer="net.2"),
    "LaplaceGuide": dvi.LaplaceGuide,
    "EnsembleGuide": ensemble,
    "AutoNormal": AutoNormal,
    "AutoDiagonalNormal": AutoDiagonalNormal,
    "AutoMultivariateNormal": AutoMultivariateNormal,
    "AutoLowRankMultivariateNormal": partial(AutoLowRankMultivariateNormal, rank=2),
    "AutoDelta": AutoDelta,
}
OBJECTIVES: dict[str, Callable[[], Any]] = {
    "TaylorELBO": dvi.TaylorELBO,
    "MomentPropagationELBO": dvi.MomentPropagationELBO,
    "NaturalGradientELBO": dvi.NaturalGradientELBO,
    "SampledELBO": dvi.SampledELBO,
    "Trace_ELBO": Trace_ELBO,
    "TraceMeanField_ELBO": TraceMeanField_ELBO,
}
RATE = {"lr": 0.01}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "dvi.optim.Adam": partial(dvi.optim.Adam, RATE),
    "dvi.optim.SGD": partial(dvi.optim.SGD, RATE),
    "pyro.optim.Adam": partial(pyro.optim.Adam, RATE),
    "pyro.optim.ClippedAdam": partial(pyro.optim.ClippedAdam, RATE),
    "pyro.optim.AdamW": partial(pyro.optim.AdamW, RATE),
    "VOGN": partial(dvi.VOGN, {}),
    "OGN": partial(dvi.OGN, {}),
    "IVON": partial(dvi.IVON, {}),
    "NoisyKFAC": partial(dvi.NoisyKFAC, {}),
}
RULES: dict[str, Any] = {
    "AtMean()": dvi.AtMean(),
    "Samples(n)": dvi.Samples(4),
    "Moments()": dvi.Moments(),
    "Moments(ReverseDelta())": dvi.Moments(propagation=dvi.ReverseDelta()),
    "Linearised()": dvi.Linearised(),
}


@dataclass
class Table:
    """Pairs that were tried, and what each said: nothing where it works, or its warning or error."""

    title: str
    corner: str
    cells: dict[tuple[str, str], str] = field(default_factory=dict)

    def markdown(self, notes: list[str]) -> str:
        """Return the table, whose numbers refer to ``notes``; new ones are added there."""
        rows, columns = (
            list(dict.fromkeys(keys)) for keys in zip(*self.cells, strict=True)
        )
        lines = [
            [self.corner, *(f"`{column}`" for column in columns)],
            ["---"] * (len(columns) + 1),
        ]
        for row in rows:
            lines.append(
                [f"`{row}`", *(self._cell(row, column, notes) for column in columns)]
            )
        return f"## {self.title}\n\n" + "".join(
            f"| {' | '.join(line)} |\n" for line in lines
        )

    def _cell(self, row: str, column: str, notes: list[str]) -> str:
        kind, _, message = self.cells[row, column].partition(": ")
        if not message:
            return "yes"
        for name in (str(RULES.get(column)), column, row, row.rpartition(".")[2]):
            message = message.replace(
                name, "…"
            )  # one note for all pairs that hear the same
        if message not in notes:
            notes.append(message)
        return f"{kind} [{notes.index(message) + 1}]"


def step(model: Any, guide: Any, objective: str, optimizer: str) -> None:
    """Take two steps of training."""
    svi = SVI(model, guide, OPTIMIZERS[optimizer](), loss=OBJECTIVES[objective]())
    history = dvi.fit(svi, [(X, Y)], 2, progress=False)
    if not math.isfinite(history["loss"][-1]):
        raise RuntimeError("the loss is not finite")


def train(guide: str, objective: str, optimizer: str = "") -> Any:
    """Train a new model; without an optimizer, by the one that the objective needs."""
    model = build()
    posterior = GUIDES[guide](model)
    natural = "NoisyKFAC" if guide == "KroneckerGuide" else "VOGN"
    suited = natural if objective == "NaturalGradientELBO" else "dvi.optim.Adam"
    step(model, posterior, objective, optimizer or suited)
    return model, posterior


TRAINED_BY = {
    "MeanFieldGuide": "TaylorELBO",
    "MultiplicativeNoiseGuide": "MomentPropagationELBO",
    "NaturalGradientGuide": "NaturalGradientELBO",
    "KroneckerGuide": "NaturalGradientELBO",
    "LastLayerGuide": "MomentPropagationELBO",
    "LaplaceGuide": "TaylorELBO",
}


def predict(guide: str, rule: str) -> None:
    """Predict by a rule after the training that suits a guide."""
    if guide == "EnsembleGuide":
        posterior = ensemble(None)
        model = posterior.model
    else:
        model, posterior = train(guide, TRAINED_BY.get(guide, "SampledELBO"))
    if guide == "LaplaceGuide":
        posterior.fit([(X, Y)], dvi.laplace.Dense(), unconverged="accept")
    total = dvi.predict(model, posterior, X, RULES[rule], seed=0).probabilities.sum(-1)
    torch.testing.assert_close(total, torch.ones(len(X)))


def outcome(attempt: Callable[[], Any]) -> str:
    """Return "" for what works, else "warns: ..." or "refused: ..." with what was said."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            attempt()
        except PyroDviError as error:
            return f"refused: {error}"
    said = " ".join(dict.fromkeys(str(w.message) for w in caught))
    return said and f"warns: {said}"


def tables() -> list[Table]:
    """Try all pairs."""
    first = Table("Guide and objective", "guide")
    for guide, objective in product(GUIDES, OBJECTIVES):
        first.cells[guide, objective] = outcome(partial(train, guide, objective))
    second = Table("Optimizer and objective", "optimizer")
    for optimizer, objective in product(OPTIMIZERS, OBJECTIVES):
        natural = "KroneckerGuide" if optimizer == "NoisyKFAC" else "NaturalGradientGuide"
        guide = natural if objective == "NaturalGradientELBO" else "MeanFieldGuide"
        second.cells[optimizer, objective] = outcome(
            partial(train, guide, objective, optimizer)
        )
    third = Table("Guide and prediction rule", "guide")
    for guide, rule in product(GUIDES, RULES):
        third.cells[guide, rule] = outcome(partial(predict, guide, rule))
    pyro.clear_param_store()
    return [first, second, third]


def page(found: list[Table]) -> str:
    """Return the tables, with their notes below."""
    notes: list[str] = []
    parts = [table.markdown(notes) for table in found]
    quoted = [
        f"{number}. {message.replace('*', chr(92) + '*')}"
        for number, message in enumerate(notes, 1)
    ]
    return "\n".join([*parts, "## Messages\n", *quoted, ""])


def write(app: Any) -> None:
    """Write the tables for the page that includes them."""
    GENERATED.parent.mkdir(exist_ok=True)
    text = page(tables())
    if not GENERATED.exists() or GENERATED.read_text() != text:
        GENERATED.write_text(text)


def setup(app: Any) -> dict[str, bool]:
    """Write the tables when a build begins."""
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True}
