# SPDX-License-Identifier: Apache-2.0
"""Laplace approximations of classifiers beside those of laplace-torch: time, memory, scores, and equal results.

One process and one thread; both libraries take turns on the same trained weights and the same data. Each row is a
network, a structure of the precision and a seed.

laplace-torch and its backends come with the extra ``bench``.
"""

import copy
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi
from benchmarks.laplace.peer_report import report
from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings
from benchmarks.shared.images import digits_split, load_split, outside_images
from benchmarks.shared.memory import peak_growth
from benchmarks.shared.networks import lenet, mlp
from pyro_dvi.bayesian import classifier, to_bayesian_
from pyro_dvi.laplace import ByEvidence, ByValidation, Dense, Diagonal, KroneckerFactored
from pyro_dvi.predictive.metrics import auroc, expected_calibration_error, nll

BATCH_SIZE, NUM_VALIDATION, NUM_TEST, NUM_QUERIES, NUM_COMPARED = 250, 150, 250, 200, 50
DECADES, GRID = (-1, 5), 7  # of the prior precision, for validation
# Their tuning takes a determinant in each step: where it is of more than 2,000 rows, few and larger steps.
MANY, FEW_STEPS, FAST_RATE = 2000, 10, 0.5
LARGEST_DENSE = 8000
LARGE = {("CNN", "dense"), ("LeNet", "Kronecker"), ("ResNet-18", "last layer")}  # minutes for each seed

STRUCTURES: dict[str, tuple[Any, str, str]] = {  # our method; their structure and subset
    "last layer": (Dense(), "full", "last_layer"),
    "Kronecker": (KroneckerFactored(), "kron", "all"),
    "diagonal": (Diagonal(), "diag", "all"),
    "dense": (Dense(), "full", "all"),
}


def small_cnn() -> nn.Module:
    """Two convolutions and a dense layer, for 8x8 grey images."""
    first, second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))


def resnet18() -> nn.Module:
    """Torchvision's, as it is."""
    import torchvision

    return torchvision.models.resnet18(num_classes=10)


@dataclass(frozen=True)
class Task:
    """A network, its data, and what is fitted to it."""

    build: Callable[[], nn.Module]
    data: str
    num_train: int
    epochs: int
    last: str
    structures: tuple[str, ...]


TASKS = {
    "MLP 64-5-10": Task(lambda: mlp((64, 5, 10), nn.ReLU), "digits", 600, 100, "3.*", tuple(STRUCTURES)),
    "MLP 64-100-10": Task(
        lambda: mlp((64, 100, 10), nn.ReLU),
        "digits",
        600,
        100,
        "3.*",
        ("last layer", "Kronecker", "diagonal"),
    ),
    "CNN": Task(small_cnn, "digits", 600, 60, "5.*", tuple(STRUCTURES)),
    "LeNet": Task(
        lambda: lenet(activation=nn.ReLU),
        "FashionMNIST",
        2000,
        10,
        "11.*",
        ("last layer", "Kronecker", "diagonal"),
    ),
    "ResNet-18": Task(resnet18, "CIFAR10", 1000, 3, "fc.*", ("last layer",)),
}
OUTSIDE = {"digits": "turned by 90 degrees", "FashionMNIST": "MNIST", "CIFAR10": "noise"}


@dataclass
class Data:
    """Images and labels of a seed, and images of another kind."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    outside: Tensor

    @property
    def loader(self) -> DataLoader:
        return DataLoader(TensorDataset(*self.train), BATCH_SIZE)


def load(task: Task, seed: int, data_dir: str | None) -> Data:
    """Return the data of a seed."""
    if task.data == "digits":
        split = digits_split(task.num_train, NUM_VALIDATION, seed)
        test = (split.test[0][:NUM_TEST], split.test[1][:NUM_TEST])
        return Data(split.train, split.validation, test, test[0].rot90(1, (2, 3)))
    split = load_split(task.data, task.num_train, NUM_VALIDATION, NUM_TEST, seed, data_dir)
    outside = outside_images(OUTSIDE[task.data], task.data, NUM_TEST, data_dir)
    return Data(split.train, split.validation, split.test, outside)


def train(net: nn.Module, data: Data, epochs: int, decayed: list[Tensor]) -> None:
    """Train to the mode under standard normal priors of some weights."""
    loader = DataLoader(TensorDataset(*data.train), 100, shuffle=True)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            squares = torch.stack([p.square().sum() for p in decayed]).sum()
            (nn.functional.cross_entropy(net(x), y) + 0.5 * squares / len(data.train[0])).backward()
            optimizer.step()
            schedule.step()
    net.eval()


class Ours:
    """This library."""

    def __init__(self, net: nn.Module, task: Task, structure: str, data: Data) -> None:
        include = {"include": task.last} if structure == "last layer" else {}
        self.data, self.method = data, STRUCTURES[structure][0]
        self.model = classifier(
            to_bayesian_(copy.deepcopy(net), prior_scale=1.0, **include), num_data=len(data.train[0])
        )
        self.guide = pyro_dvi.LaplaceGuide(self.model)
        self.guide.initialize(*(v[:2] for v in data.train))

    def fit(self) -> None:
        self.guide.scale_factors = {}
        self.guide.fit(self.data.loader, self.method, unconverged="accept")

    def tune(self, by: str) -> float:
        self.guide.scale_factors = {}
        validation = {
            "criterion": ByValidation([self.data.validation]),
            "values": torch.logspace(*DECADES, GRID),
            "refinements": 0,
        }
        options: dict[str, Any] = {"criterion": ByEvidence()} if by == "evidence" else validation
        return self.guide.tune(self.data.loader, method=self.method, progress=False, **options).best

    def predict(self, x: Tensor) -> Tensor:
        return pyro_dvi.predict(self.model, self.guide, x).probabilities

    def covariance(self, x: Tensor) -> Tensor:
        return self.guide.predictive(x).covariance

    def log_evidence(self) -> float:
        return float(self.guide.log_evidence(self.data.loader).value)


class Theirs:
    """laplace-torch with its default backend."""

    def __init__(self, net: nn.Module, task: Task, structure: str, data: Data) -> None:
        _, self.structure, self.subset = STRUCTURES[structure]
        self.net, self.data = copy.deepcopy(net), data

    def fit(self) -> None:
        from laplace import Laplace

        self.la = Laplace(
            self.net,
            "classification",
            subset_of_weights=self.subset,
            hessian_structure=self.structure,
        )
        self.la.fit(self.data.loader)

    def tune(self, by: str) -> float:
        self.fit()
        if by == "evidence":
            large = self.structure == "full" and self.la.n_params > MANY
            few = {"n_steps": FEW_STEPS, "lr": FAST_RATE} if large else {}
            self.la.optimize_prior_precision(method="marglik", prior_structure="scalar", **few)
        else:
            self.la.optimize_prior_precision(
                method="gridsearch",
                pred_type="glm",
                link_approx="probit",
                val_loader=DataLoader(TensorDataset(*self.data.validation), BATCH_SIZE),
                log_prior_prec_min=DECADES[0],
                log_prior_prec_max=DECADES[1],
                grid_size=GRID,
                loss=mean_nll,  # the default is a running metric, which goes on over the values of the grid
            )
        return float(self.la.prior_precision)

    def predict(self, x: Tensor) -> Tensor:
        return self.la(x, pred_type="glm", link_approx="probit").detach()

    def covariance(self, x: Tensor) -> Tensor:
        return self.la._glm_predictive_distribution(x)[1].detach()

    def log_evidence(self) -> float:
        return float(self.la.log_marginal_likelihood())


def mean_nll(probabilities: Tensor, labels: Tensor) -> Tensor:
    """What laplace-torch compares values by on validation data."""
    return nn.functional.nll_loss(probabilities.log(), labels)


def measure(side: Ours | Theirs, data: Data, by: str) -> dict[str, Any]:
    """Return times, memory and scores of one way of tuning; predictions are timed after the evidence's."""
    queries = data.test[0][:NUM_QUERIES]
    seconds: list[float] = []
    with peak_growth() as memory:
        start = time.process_time()
        precision = side.tune(by)
        tuned = time.process_time()
        for _ in range(4 if by == "evidence" else 0):
            begin = time.process_time()
            side.predict(queries)
            seconds.append(time.process_time() - begin)
    parts = {"test": data.test[0], "outside": data.outside}
    found = {
        name: torch.cat([side.predict(x) for x in whole.split(BATCH_SIZE)]) for name, whole in parts.items()
    }
    timed = {"first_prediction": seconds[0], "predict": median(seconds[1:])} if seconds else {}
    return {
        "fit_and_tune": tuned - start,
        **timed,
        **memory,
        "precision": precision,
        "log_evidence": side.log_evidence(),
        **scores(found, data.test[1]),
    }


def scores(found: dict[str, Tensor], labels: Tensor) -> dict[str, float]:
    """Scores of test images, and how well entropy tells them from the others."""
    found = {name: p.double() / p.double().sum(-1, keepdim=True) for name, p in found.items()}
    return {
        "nll": float(nll(found["test"].log().gather(1, labels[:, None])[:, 0]).value),
        "ece": float(expected_calibration_error(found["test"], labels)),
        "auroc": float(auroc(*(torch.special.entr(found[name]).sum(-1) for name in ("test", "outside")))),
    }


def compare(ours: Ours, theirs: Theirs, exact: Ours | None, x: Tensor) -> dict[str, Any]:
    """Return how far both are from each other, and from the exact matrix, with the prior of training."""
    for side in (ours, theirs):
        side.fit()
    a, b = ours.covariance(x), theirs.covariance(x)
    found: dict[str, Any] = {
        "variance_gap": _distance(b, a),
        "evidence_gap": theirs.log_evidence() - ours.log_evidence(),
        "size": len(ours.guide.posterior.mode),
    }
    if exact is not None:
        exact.fit()
        c, evidence = exact.covariance(x), exact.log_evidence()
        for name, side, covariance in (("ours", ours, a), ("theirs", theirs, b)):
            found[f"{name}_from_exact"] = _distance(covariance, c)
            # The evidences differ by half of the log determinants only.
            found[f"{name}_log_determinant"] = 2 * (evidence - side.log_evidence())
    return found


def _distance(found: Tensor, exact: Tensor) -> float:
    """Frobenius norm of the difference, relative, over all inputs."""
    return float((found - exact).norm() / exact.norm())


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Three seeds; one of what takes minutes for each. Older lines forced a backend, and do not count."""
    return [
        {"network": name, "structure": structure, "seed": seed, "backend": "default"}
        for seed in range(3)
        for name, task in TASKS.items()
        for structure in task.structures
        if seed == 0 or budget == "gpu" or (name, structure) not in LARGE
    ]


def run(settings: Settings, data_dir: str | None) -> Row:
    """Train a network, and let both libraries take turns on it."""
    warnings.simplefilter("ignore")  # values at the edge of the grid show in the table
    task, structure, seed = TASKS[settings["network"]], settings["structure"], settings["seed"]
    data = load(task, seed, data_dir)
    net = task.build()
    decayed = [
        p for n, p in net.named_parameters() if task.structures != ("last layer",) or n.startswith("fc.")
    ]
    train(net, data, task.epochs, decayed)
    sides: dict[str, Any] = {
        "ours": Ours(net, task, structure, data),
        "theirs": Theirs(net, task, structure, data),
    }
    row: Row = {}
    if seed == 0:
        wanted = structure in ("Kronecker", "diagonal") and sum(p.numel() for p in decayed) <= LARGEST_DENSE
        exact = Ours(net, task, "dense", data) if wanted else None
        row |= compare(sides["ours"], sides["theirs"], exact, data.test[0][:NUM_COMPARED])
    for by in ("evidence", "validation"):
        for who in list(sides) if seed % 2 == 0 else list(sides)[::-1]:
            row[f"{who}_{by}"] = measure(sides[who], data, by)
    with torch.no_grad():
        parts = {"test": data.test[0], "outside": data.outside}
        row["mode"] = scores({k: net(x).softmax(-1) for k, x in parts.items()}, data.test[1])
    packages = ("laplace-torch", "curvlinops-for-pytorch")
    row["backend_class"] = type(sides["theirs"].la.backend).__name__
    return {**row, "packages": ", ".join(f"{package} {version(package)}" for package in packages)}


BENCHMARK = Benchmark(
    "laplace_torch",
    "Are results, time and memory those of laplace-torch?",
    plan,
    run,
    report,
    timed=True,
)
