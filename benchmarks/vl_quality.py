# SPDX-License-Identifier: Apache-2.0
"""How good are the predictions of Variational Laplace? A comparison on Fashion-MNIST, paired by seed.

MAP, mean-field VI (AutoNormal + Trace_ELBO) and Variational Laplace (MeanFieldGuide + TaylorELBO) train the same
convolutional network with the same priors, optimizer and epochs. For each of them the KL weight comes from one
shared grid and the stopping epoch from the same checkpoints, both by validation NLL; test images are looked at
once per selected checkpoint. Further parts train variants of Variational Laplace at its chosen KL weight.

    python benchmarks/vl_quality.py --data-dir DIR             # everything, about an hour on two cores
    python benchmarks/vl_quality.py --parts main --sizes 2000  # the heart of it
    python benchmarks/vl_quality.py --report                   # only rewrite the tables from the results

Each finished run is a line of results/vl_quality.jsonl; runs that are already there are not repeated.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoNormal
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from benchmarks.shared.images import ImageSplit, load_split
from benchmarks.shared.networks import conv_net, mlp, num_weights
from pyro_dvi.bayesian import classifier, fan_in, init_to_module, to_bayesian_
from pyro_dvi.curvature import Fisher, GGNDiagonal, MinibatchGradient
from pyro_dvi.elbos import TaylorELBO
from pyro_dvi.guides import MeanFieldGuide, PerSite, SGDStepSize
from pyro_dvi.metrics import accuracy, expected_calibration_error
from pyro_dvi.optim import learning_rates

RESULTS = Path(__file__).parent / "results" / "vl_quality.jsonl"
KL_WEIGHTS = {
    ("conv_net", 2000): (0.01, 0.03, 0.1, 0.3, 1.0),
    ("conv_net", 10000): (0.01, 0.03),
    ("conv_net, width 16", 10000): (0.03, 0.1),
}
NETWORKS: dict[str, Callable[[], torch.nn.Module]] = {
    "conv_net": conv_net,
    "conv_net, width 16": lambda: conv_net(width=16),
    "mlp": lambda: mlp((784, 100, 100, 10)),
}
SEEDS = (0, 1, 2)
BATCH_SIZE, LR, NUM_SAMPLES = 100, 3e-3, 10
EPOCHS = {("conv_net", 10000): 16, ("conv_net, width 16", 10000): 16}  # otherwise 40
CHECKPOINTS = 8  # evenly spaced epochs at which training may be stopped


@dataclass(frozen=True)
class Run:
    """One training run; every field takes part in its identity."""

    part: str
    method: str
    kl_weight: float
    seed: int
    num_train: int
    network: str = "conv_net"
    scale_multiplier: float = 10.0


class KLWeight(poutine.messenger.Messenger):
    """Scale the log-densities of latent sites: the KL weight for Pyro's own ELBOs."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = weight

    def _pyro_sample(self, msg: Any) -> None:
        if not msg["is_observed"]:
            msg["scale"] = msg["scale"] * self.weight


def build(run: Run) -> tuple[Any, Any, SVI]:
    """Return model, guide and SVI of a run."""
    torch.manual_seed(run.seed)
    model = classifier(to_bayesian_(NETWORKS[run.network](), prior_scale=fan_in), num_data=run.num_train)
    rates = learning_rates(LR, scale_multiplier=run.scale_multiplier)
    optimizer = pyro.optim.Adam(rates)
    if run.method == "MAP":
        guide: Any = AutoDelta(model, init_loc_fn=init_to_module)
        return model, guide, SVI(model, guide, optimizer, TaylorELBO(kl_weight=run.kl_weight))
    if run.method == "VI":
        guide = AutoNormal(model, init_loc_fn=init_to_module, init_scale=0.01)
        tempered = KLWeight(run.kl_weight)
        return model, guide, SVI(tempered(model), KLWeight(run.kl_weight)(guide), optimizer, Trace_ELBO())
    guide = MeanFieldGuide(model, scale=_SCALES.get(run.method))
    elbo = TaylorELBO(kl_weight=run.kl_weight, curvature=_CURVATURES.get(run.method, Fisher)())
    return model, guide, SVI(model, guide, optimizer, elbo)


_SCALES = {
    "VL, one scale per site": PerSite(),
    "VL, fixed variance 1e-4": SGDStepSize(lr=2e-2, batch_size=100),
    "VL, SGD variance, minibatch gradient": SGDStepSize(lr=2e-2, batch_size=100),
}
_CURVATURES: dict[str, Any] = {
    "VL, SGD variance, minibatch gradient": MinibatchGradient,
    "VL, every 8th step": lambda: Fisher(every=8),
    "VL, quarter of the batch in every 4th step": lambda: Fisher(every=4, fraction=0.25),
    "VL, exact GGN": GGNDiagonal,
}
VARIANTS = (
    "VL, every 8th step",
    "VL, quarter of the batch in every 4th step",
    "VL, one scale per site",
    "VL, fixed variance 1e-4",
    "VL, SGD variance, minibatch gradient",
)


def train(run: Run, data_dir: str | None) -> dict[str, Any]:
    """Train one run and return its identity, settings, and metrics at the checkpoints."""
    torch.set_num_threads(1)
    pyro.clear_param_store()
    data = load_split("FashionMNIST", run.num_train, 2000, 5000, run.seed, data_dir)
    model, guide, svi = build(run)
    generator = torch.Generator().manual_seed(run.seed)
    loader = DataLoader(TensorDataset(*data.train), BATCH_SIZE, shuffle=True, generator=generator)
    rules = {"mean": 0, "samples": NUM_SAMPLES} if run.method != "MAP" else {"mean": 0}
    epochs = EPOCHS.get((run.network, run.num_train), 40)
    history: list[dict[str, Any]] = []
    best = dict.fromkeys(rules, float("inf"))
    losses, seconds = [], 0.0
    for epoch in range(1, epochs + 1):
        start = time.perf_counter()
        losses.append(sum(svi.step(x, y) for x, y in loader) / len(loader))
        seconds += time.perf_counter() - start
        if epoch % (epochs // CHECKPOINTS) == 0:
            checkpoint: dict[str, Any] = {
                "epoch": epoch,
                "loss": losses[-1],
                **untempered(svi, model, guide, data),
            }
            for rule, draws in rules.items():
                checkpoint[rule], best[rule] = score(model, guide, data, draws, best[rule])
            history.append(checkpoint)
    return {
        **asdict(run),
        "weights": num_weights(NETWORKS[run.network]()),
        "seconds_per_epoch": seconds / epochs,
        "checkpoints": history,
    }


def untempered(svi: SVI, model: Any, guide: Any, data: ImageSplit) -> dict[str, float]:
    """The ELBO at KL weight 1 per training example, whatever the training used; Taylor objectives only."""
    elbo = getattr(svi.loss, "__self__", None)
    if not isinstance(elbo, TaylorELBO):
        return {}
    model.eval()
    x, y = data.train[0][:1000], data.train[1][:1000]
    elbo.loss(model, guide, x, y)
    model.train()
    terms = {k: v.item() for k, v in elbo.terms.items()}
    value = terms["log_likelihood"] - terms["penalty"] - terms["kl"]
    return {"untempered_elbo": value / len(data.train[0]), "penalty": terms["penalty"], "kl": terms["kl"]}


def score(
    model: Any, guide: Any, data: ImageSplit, draws: int, best: float
) -> tuple[dict[str, float], float]:
    """Validation NLL, and the test metrics where it is the best so far (no other test prediction is ever used)."""
    state = torch.get_rng_state()
    model.eval()
    valid = log_probabilities(model, guide, data.validation[0], draws)
    result = {"validation_nll": nll(valid, data.validation[1])}
    if result["validation_nll"] < best:
        best = result["validation_nll"]
        y = data.test[1]
        test = log_probabilities(model, guide, data.test[0], draws)
        temperature = fit_temperature(valid, data.validation[1])
        result |= {
            "nll": nll(test, y),
            "ece": expected_calibration_error(test.exp(), y),
            "accuracy": accuracy(test.exp(), y),
            "temperature": temperature,
            "nll_temperature_scaled": nll((test / temperature).log_softmax(-1), y),
        }
    model.train()
    torch.set_rng_state(state)
    return result, best


@torch.no_grad()
def log_probabilities(model: Any, guide: Any, x: Tensor, draws: int) -> Tensor:
    """Log class probabilities at the posterior mean (draws = 0) or averaged over posterior draws, in float64."""
    values = [guide.median()] if draws == 0 else [guide() for _ in range(draws)]
    per_draw = []
    for value in values:
        parts = []
        for batch in x.split(1000):
            trace = poutine.trace(poutine.condition(model, data=value)).get_trace(batch)
            (fn,) = [
                s["fn"] for s in trace.nodes.values() if s["type"] == "sample" and hasattr(s["fn"], "logits")
            ]
            parts.append(fn.logits.double().log_softmax(-1))
        per_draw.append(torch.cat(parts))
    return torch.stack(per_draw).logsumexp(0) - torch.tensor(float(len(per_draw))).log()


def nll(log_probs: Tensor, y: Tensor) -> float:
    return -log_probs.gather(1, y[:, None]).mean().item()


def fit_temperature(log_probs: Tensor, y: Tensor) -> float:
    grid = torch.linspace(0.5, 3.0, 251, dtype=torch.float64)
    return float(min(grid.tolist(), key=lambda t: nll((log_probs / t).log_softmax(-1), y)))


# What to run -----------------------------------------------------------------------------------------------------


def runs(parts: list[str], sizes: list[int], seeds: list[int], kl_weight: float) -> Iterator[Run]:
    """All runs of the chosen parts."""
    if "main" in parts:
        for (network, n), weights in KL_WEIGHTS.items():
            if n not in sizes:
                continue
            for weight in weights:
                for method in ("VL", "MAP", "VI"):
                    yield from (Run("main", method, weight, seed, n, network) for seed in seeds)
    for n in sizes:
        if "variants" in parts and n == min(sizes):
            for method in VARIANTS:
                yield from (Run("variants", method, kl_weight, seed, n) for seed in seeds)
        if "scale_lr" in parts and n == min(sizes):
            for multiplier in (1.0, 30.0):
                yield from (
                    Run("scale_lr", "VL", kl_weight, seed, n, scale_multiplier=multiplier) for seed in seeds
                )
        if "mlp" in parts and n == min(sizes):
            for weight in (0.03, 0.3):
                for method in ("MAP", "VI", "VL"):
                    yield from (Run("mlp", method, weight, seed, n, network="mlp") for seed in seeds)
        if "exact" in parts and n == min(sizes):  # slow: a backward pass for each class
            yield from (Run("variants", "VL, exact GGN", kl_weight, seed, n) for seed in seeds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data-dir", help="folder with FashionMNIST/raw (else PYRO_DVI_DATA, else a download)"
    )
    parser.add_argument("--parts", nargs="+", default=["main", "variants", "scale_lr", "mlp", "exact"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[2000, 10000])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--kl-weight", type=float, default=0.03, help="KL weight of the variants")
    parser.add_argument("--jobs", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--report", action="store_true", help="only rewrite the tables")
    options = parser.parse_args()
    if not options.report:
        RESULTS.parent.mkdir(exist_ok=True)
        done = {tuple(row[k] for k in asdict(Run("", "", 0, 0, 0))) for row in read_results()}
        wanted = runs(options.parts, options.sizes, options.seeds, options.kl_weight)
        todo = [run for run in wanted if tuple(asdict(run).values()) not in done]
        with ProcessPoolExecutor(options.jobs) as pool:
            futures = [pool.submit(train, run, options.data_dir) for run in todo]
            for future in tqdm(as_completed(futures), total=len(futures), desc="runs"):
                row = {**future.result(), "torch": torch.__version__, "machine": platform.machine()}
                with RESULTS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    from benchmarks.vl_quality_report import write_report

    write_report(read_results(), RESULTS.with_suffix(".md"))


def read_results() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


if __name__ == "__main__":
    main()
