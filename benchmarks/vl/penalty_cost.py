# SPDX-License-Identifier: Apache-2.0
"""How much of its penalty does Variational Laplace need? Test NLL against the cost of a step.

``Fisher(every=k)`` computes the penalty in every k-th step. The committed results also have penalties on a fraction
of the minibatch, from an earlier version of the library; a run of today asks for whole minibatches only. Each setting
chooses its KL weight by validation, for each fold or seed of its own. Costs are floating-point operations of a step,
averaged over a cycle of k steps, over those of a MAP step. Two UCI sets by 10-fold cross-validation, with the
networks and the recipe of ``uci.py`` but softplus units, one noise variance and 2,000 steps; LeNet on 2,000 MNIST
images with three seeds.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro import poutine
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.moments.uci import tune_and_test
from benchmarks.moments.uci_methods import Method, Recipe
from benchmarks.moments.uci_network import Networks
from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings
from benchmarks.shared.figures import COLOURS, MARKERS
from benchmarks.shared.images import load_split
from benchmarks.shared.networks import lenet
from benchmarks.shared.regressions import TrainingSets, folds, load
from benchmarks.shared.tables import paired, provenance, table
from pyro_dvi import predict
from pyro_dvi.bayesian import classifier, fan_in, init_to_module, to_bayesian_
from pyro_dvi.curvature import Fisher
from pyro_dvi.guides import MeanFieldGuide
from pyro_dvi.optim import learning_rates
from pyro_dvi.predictive import AtMean
from pyro_dvi.variational_laplace.taylor import TaylorELBO

UCI_SETS, IMAGES = ("concrete", "energy"), "MNIST, 2,000 images"
SEEDS, KL_WEIGHTS, EPOCHS, BATCH_SIZE = (0, 1, 2), (0.03, 0.1), 12, 100


@dataclass(frozen=True)
class Setting:
    """A penalty in every ``every``-th step; MAP, without one, at ``every`` = 0."""

    every: int

    @property
    def name(self) -> str:
        return f"every {self.every}, fraction 1" if self.every else "MAP"

    def guide(self, model: Any, init: Any) -> Any:
        return MeanFieldGuide(model, init_loc_fn=init) if self.every else AutoDelta(model, init_loc_fn=init)

    def elbo(self, kl_weight: Any = 1.0) -> TaylorELBO:
        curvature = Fisher(every=self.every) if self.every else None
        return TaylorELBO(kl_weight=kl_weight, curvature=curvature)

    def operations(self, loss: Callable[[], Tensor]) -> float:
        """Floating-point operations of a training step, averaged over a cycle of steps."""
        cycle = max(self.every, 1)
        for _ in range(cycle):  # the first step looks at the model
            loss()
        with FlopCounterMode(display=False) as counter:
            for _ in range(cycle):
                loss().backward()
        return counter.get_total_flops() / cycle


MAP, WHOLE = Setting(0), Setting(1)
SETTINGS = (MAP, *(Setting(every) for every in (1, 2, 4, 8)))


class OneNoise(Networks):
    """The networks of ``uci.py`` with softplus units, and with one noise variance for each network."""

    def __init__(self, num_inputs: int, sizes: Tensor, kl_weights: Tensor) -> None:
        super().__init__(num_inputs, sizes, kl_weights=kl_weights)
        del self.shapes["noise"]

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        hidden, to_mean = self.weights()
        units = F.softplus(x.transpose(0, 1) @ hidden + self.hidden_bias)
        mean = (units @ to_mean + self.mean_bias).squeeze(-1).t()
        with (
            pyro.plate("networks of examples", len(self.sizes), dim=-1),
            pyro.plate("examples", len(x), dim=-2),
            poutine.scale(scale=self.sizes / len(x)),
        ):
            return pyro.sample("y", dist.Normal(mean, (0.5 * self.noise_bias.view(-1)).exp()), obs=y)


class Penalised(Method):
    """Networks trained by ``TaylorELBO``."""

    tuned = "KL weight"
    candidates = (0.03, 0.1, 0.3, 1.0)
    rule = AtMean()

    def __init__(self, setting: Setting) -> None:
        super().__init__(Recipe(steps=2000))
        self.setting = setting

    def model(self, num_inputs: int, sizes: Tensor, values: Tensor) -> Networks:
        return OneNoise(num_inputs, sizes, values)

    def posterior(self, model: Networks, init: Any) -> tuple[Any, Callable[..., Tensor]]:
        guide, elbo = self.setting.guide(model, init), self.setting.elbo(self.recipe.kl_schedule)
        return guide, lambda x, y: elbo.differentiable_loss(model, guide, x, y)


def regression(name: str, setting: Setting, data_dir: str | None) -> Row:
    """Test NLL of each fold at its KL weight, which is chosen by validation rows."""
    x, y = load(name, data_dir)
    parts = folds(len(y))
    found = tune_and_test(Penalised(setting), x, y, parts)["folds"]
    data = TrainingSets(x, y, [train for train, _ in parts])
    batch = next(data.minibatches(32, 0))

    def operations(setting: Setting) -> float:
        method = Penalised(setting)
        pyro.clear_param_store()
        model = method.model(x.shape[1], data.sizes, torch.ones(len(parts)))
        _, loss = method.posterior(model, init_to_module)
        return setting.operations(lambda: loss(batch.x, batch.y))

    return {
        "nll": [-fold["single"]["log_likelihood"] for fold in found],
        "kl_weights": [fold["chosen"] for fold in found],
        "cost": operations(setting) / operations(MAP),
    }


def classification(setting: Setting, data_dir: str | None) -> Row:
    """Test NLL of each seed at its KL weight, which is chosen by validation images."""
    chosen = []
    for seed in SEEDS:
        data = load_split("MNIST", 2000, 2000, 5000, seed, data_dir)
        runs = []
        for kl_weight in KL_WEIGHTS:
            model, guide = trained(setting, kl_weight, data.train, seed)

            def nll(x: Tensor, y: Tensor, model: Any = model, guide: Any = guide) -> float:
                return -predict(model, guide, x, AtMean()).log_likelihood(y).mean().item()

            runs.append((nll(*data.validation), kl_weight, nll(*data.test)))
        chosen.append(min(runs))
    x, y = data.train[0][:BATCH_SIZE], data.train[1][:BATCH_SIZE]

    def operations(setting: Setting) -> float:
        pyro.clear_param_store()
        model = bayesian_lenet(len(x), 0)
        guide, elbo = setting.guide(model, init_to_module), setting.elbo()
        return setting.operations(lambda: elbo.differentiable_loss(model, guide, x, y))

    return {
        "nll": [nll for _, _, nll in chosen],
        "kl_weights": [kl_weight for _, kl_weight, _ in chosen],
        "cost": operations(setting) / operations(MAP),
    }


def bayesian_lenet(num_data: int, seed: int) -> Any:
    torch.manual_seed(seed)
    return classifier(to_bayesian_(lenet(), prior_scale=fan_in), num_data=num_data)


def trained(setting: Setting, kl_weight: float, data: tuple[Tensor, Tensor], seed: int) -> tuple[Any, Any]:
    """Return model and guide after ``EPOCHS`` epochs."""
    pyro.clear_param_store()
    x, y = data
    model = bayesian_lenet(len(x), seed)
    guide = setting.guide(model, init_to_module)
    svi = SVI(model, guide, pyro.optim.Adam(learning_rates(3e-3)), setting.elbo(kl_weight))
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(BATCH_SIZE):
            svi.step(x[rows], y[rows])
    return model, guide


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Ask for every setting on every task, at every budget."""
    return [{"task": task, "setting": setting.name} for task in (*UCI_SETS, IMAGES) for setting in SETTINGS]


def run(settings: Settings, data_dir: str | None) -> Row:
    """Train one setting for all folds or seeds."""
    pyro.enable_validation(False)
    setting = next(setting for setting in SETTINGS if setting.name == settings["setting"])
    if settings["task"] == IMAGES:
        return classification(setting, data_dir)
    return regression(settings["task"], setting, data_dir)


def report(rows: list[Row], folder: Path) -> str:
    """Return a table for each task, and draw the figure."""
    text = [
        "Cost in floating-point operations, relative to MAP; mean test NLL; difference in NLL from the full penalty "
        "(whole minibatch, every step), paired by fold or seed, ± half the 95 % interval; median of the chosen KL "
        "weights.",
    ]
    for task in dict.fromkeys(row["task"] for row in rows):
        found = {row["setting"]: row for row in rows if row["task"] == task}
        lines = []
        for name, row in found.items():
            gap = difference(row, found[WHOLE.name])
            cells = [name, f"{row['cost']:.2f}", f"{statistics.mean(row['nll']):.4f}"]
            weight = f"{statistics.median(row['kl_weights']):g}"
            lines.append([*cells, None if name == WHOLE.name else "{:+.4f} ± {:.4f}".format(*gap), weight])
        header = ["penalty", "cost", "test NLL", "difference", "KL weight"]
        text += ["", f"**{task}**", "", table(header, lines).rstrip()]
    _draw(rows, folder / "vl_penalty_cost.png")
    return "\n".join([*text, "", provenance("vl_penalty_cost", rows)])


def difference(row: Row, reference: Row) -> tuple[float, float]:
    """Mean and standard error of the differences in test NLL."""
    found = paired(row["nll"], reference["nll"])
    return found.mean, found.error


def _draw(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure, axes = plt.subplots(1, len(tasks), figsize=(3.2 * len(tasks), 3.2), layout="constrained")
    for axis, task in zip(axes, tasks, strict=True):
        found = {row["setting"]: row for row in rows if row["task"] == task}
        for fraction, colour, marker in zip(("1", "0.5", "0.25"), COLOURS, MARKERS, strict=False):
            group = [row for name, row in found.items() if name.endswith(f"fraction {fraction}")]
            if not group:
                continue
            pairs = [difference(row, found[WHOLE.name]) for row in group]
            means, errors = zip(*pairs, strict=True)
            costs = [row["cost"] for row in group]
            style = {"marker": marker, "color": colour, "capsize": 2}
            axis.errorbar(costs, means, errors, label=f"fraction {fraction}", **style)
        mean, error = difference(found[MAP.name], found[WHOLE.name])
        axis.errorbar([1.0], [mean], [error], marker="x", ls="", color="black", capsize=2, label="MAP")
        axis.axhline(0, color="grey", lw=0.5)
        axis.set(title=task, xlabel="operations of a step over MAP")
    axes[0].set_ylabel("test NLL minus that of the whole penalty")
    axes[-1].legend(fontsize="small")
    figure.savefig(path, dpi=110)


BENCHMARK = Benchmark(
    name="vl_penalty_cost",
    question="How much of its penalty does Variational Laplace need?",
    plan=plan,
    run=run,
    report=report,
)
