# SPDX-License-Identifier: Apache-2.0
"""Does bfloat16 train what float32 trains? Every objective on six networks, under ``torch.autocast``.

At parameters that twenty steps in float32 have moved, the loss, its gradient and the predictions are computed in both
precisions from the same random state. Then each network is trained from the start in float32, in one autocast context
around all steps, and in a context for each step. The labels of the task are learnable but noisy.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta
from torch import Tensor, nn

import pyro_dvi as dvi
from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings, device
from benchmarks.shared.tables import provenance, table

NUM_DATA, BATCH, CLASSES, WARM_UP, STEPS = 512, 64, 4, 20, 200


class Attention(nn.Module):
    """A transformer layer over eight tokens."""

    def __init__(self, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.encode = nn.TransformerEncoderLayer(8, 2, 16, 0.0, activation(), batch_first=True)
        self.classify = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.encode(x.view(-1, 8, 8)).flatten(1))


class Recurrent(nn.Module):
    """An LSTM over eight tokens, whose last state is classified."""

    def __init__(self, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.read = nn.LSTM(8, 16, batch_first=True)
        self.classify = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.read(x.view(-1, 8, 8))[0][:, -1])


class Residual(nn.Module):
    """Two linear layers around which their input passes."""

    def __init__(self, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 32), activation(), nn.Linear(32, 64))
        self.act, self.classify = activation(), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.act(x + self.inner(x)))


def convolutions(activation: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        activation(),
        nn.Flatten(),
        nn.Linear(288, CLASSES),
    )


def dense(width: int, activation: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), activation(), nn.Linear(width, CLASSES))


NETWORKS: dict[str, Callable[[Callable[[], nn.Module]], nn.Module]] = {
    "dense": partial(dense, 32),
    "convolution, batch norm": convolutions,
    "attention": Attention,
    "LSTM": Recurrent,
    "residual": Residual,
    "wide": partial(dense, 512),
}
Parts = tuple[Callable[[Any], Any], Callable[..., Any], Callable[[], Any], Callable[[], nn.Module]]


def _adam() -> Any:
    return dvi.optim.Adam(0.01)


def _mode(model: Any) -> Any:
    return AutoDelta(model, init_loc_fn=dvi.bayesian.init_to_module)


METHODS: dict[str, Parts] = {
    "MAP": (_mode, dvi.SampledELBO, _adam, nn.ReLU),
    "sampled VI": (dvi.MeanFieldGuide, dvi.SampledELBO, _adam, nn.ReLU),
    "Variational Laplace": (dvi.MeanFieldGuide, dvi.TaylorELBO, _adam, nn.Softplus),
    "MNVI": (dvi.MultiplicativeNoiseGuide, dvi.MomentPropagationELBO, _adam, nn.ReLU),
    "mean-field moments": (dvi.MeanFieldGuide, dvi.MomentPropagationELBO, _adam, nn.ReLU),
    "VOGN": (dvi.NaturalGradientGuide, dvi.NaturalGradientELBO, lambda: dvi.VOGN({}), nn.ReLU),
    "IVON": (dvi.NaturalGradientGuide, dvi.NaturalGradientELBO, lambda: dvi.IVON({}), nn.ReLU),
}


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training and test data."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * NUM_DATA, 64, generator=generator)
    scores = x.view(-1, 8, 8)[..., :CLASSES].sum(1) + torch.randn(len(x), CLASSES, generator=generator)
    return tuple(part.to(device()) for pair in (x, scores.argmax(1)) for part in pair.chunk(2))  # type: ignore[return-value]


def training(settings: Settings) -> SVI:
    """Return an untrained network with its objective, always with the same initial weights."""
    guide, elbo, optimizer, activation = METHODS[settings["method"]]
    pyro.clear_param_store()
    torch.manual_seed(0)
    net = NETWORKS[settings["network"]](activation).to(device())
    model = dvi.classifier(dvi.to_bayesian_(net), num_data=NUM_DATA)
    return SVI(model, guide(model), optimizer(), loss=elbo(temperature=0.1))


def autocast(on: bool = True) -> Any:
    return torch.autocast(device().type, torch.bfloat16, enabled=on)


def run(settings: Settings, data_dir: str | None) -> Row:
    """One method on one network."""
    x, x_test, y, y_test = data()
    batches = [(x[k : k + BATCH], y[k : k + BATCH]) for k in range(0, NUM_DATA, BATCH)]

    def train(steps: int, each: Any = nullcontext) -> SVI:
        svi = training(settings)
        for k in range(steps):
            with each():
                svi.step(*batches[k % len(batches)])
        return svi

    def nll(svi: SVI) -> float:
        return dvi.predict(svi.model, svi.guide, (x_test, y_test), seed=0).metrics()["nll"]

    svi, found = train(WARM_UP), []
    for on in (False, True):
        torch.manual_seed(1)
        with autocast(on):
            loss = svi.loss_and_grads(svi.model, svi.guide, *batches[0])
            prediction = dvi.predict(svi.model, svi.guide, x_test, seed=0).probabilities.float()
        tensors = [*svi.guide.parameters(), *svi.model.parameters()]
        gradient = torch.cat([p.grad.flatten() for p in tensors if p.grad is not None])
        for p in tensors:
            p.grad = None
        found.append((loss, gradient, prediction))
    (loss, gradient, prediction), (half_loss, half_gradient, half_prediction) = found
    row: Row = {
        "loss": abs(half_loss / loss - 1),
        "cosine": torch.cosine_similarity(gradient, half_gradient, 0).item(),
        "probabilities": (half_prediction - prediction).abs().max().item(),
        "float32": nll(train(STEPS)),
        "each step": nll(train(STEPS, autocast)),
    }
    with autocast():
        svi = train(STEPS)
    return {**row, "one context": nll(svi)}


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Each method on each network, on the CPU or on a GPU."""
    where = "cpu" if budget == "small" else "cuda"
    return [{"network": n, "method": m, "device": where} for n in NETWORKS for m in METHODS]


def report(rows: list[Row], folder: Path) -> str:
    """A table for each device."""
    text = [
        provenance("mixed_precision", rows),
        f"After {WARM_UP} steps in float32: relative difference of the loss in bfloat16, cosine of the angle of the "
        f"gradients, and largest difference of predicted probabilities. Then test NLL after {STEPS} steps in float32, "
        "in one bfloat16 context around all steps, and in a context for each step.",
    ]
    header = ["network", "method", "loss", "cosine", "probabilities", "float32", "one context", "each step"]
    for where in sorted({row["device"] for row in rows}):
        some = [row for row in rows if row["device"] == where]
        some.sort(key=lambda row: (list(NETWORKS).index(row["network"]), list(METHODS).index(row["method"])))
        cells = [[row["network"], row["method"], *_numbers(row)] for row in some]
        text += [f"**{where}**", table(header, cells).rstrip()]
    return "\n\n".join(text)


def _numbers(row: Row) -> list[str]:
    changes = [f"{100 * row['loss']:.2f} %", f"{row['cosine']:.4f}", f"{row['probabilities']:.4f}"]
    return [*changes, *(f"{row[name]:.3f}" for name in ("float32", "one context", "each step"))]


BENCHMARK = Benchmark(
    "mixed_precision",
    "Does training in bfloat16 give what float32 gives?",
    plan,
    run,
    report,
)
