# SPDX-License-Identifier: Apache-2.0
"""Laplace approximations beside those of laplace-torch: time, memory, scores, and equal results.

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
from pyro_dvi.bayesian import classifier, regressor, to_bayesian_
from pyro_dvi.laplace import ByEvidence, ByValidation, Dense, Diagonal, KroneckerFactored
from pyro_dvi.predictive.metrics import auroc, expected_calibration_error, nll

BATCH_SIZE, NUM_VALIDATION, NUM_TEST, NUM_QUERIES, NUM_COMPARED = 250, 150, 250, 200, 50
NOISE = 0.3  # of the regression, known to both
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

    @property
    def classes(self) -> bool:
        return self.data != "curve"


TASKS = {
    "MLP 1-20-1": Task(lambda: mlp((1, 20, 1), nn.Tanh), "curve", 200, 300, "3.*", tuple(STRUCTURES)),
    "MLP 4-16-3": Task(lambda: mlp((4, 16, 3), nn.ReLU), "clusters", 200, 100, "3.*", tuple(STRUCTURES)),
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
OUTSIDE = {"FashionMNIST": "MNIST", "CIFAR10": "noise"}


@dataclass
class Data:
    """Inputs with their labels or targets of a seed, and inputs of another kind."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    outside: Tensor

    @property
    def loader(self) -> DataLoader:
        return DataLoader(TensorDataset(*self.train), BATCH_SIZE)


def curve(num: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """A sine with known noise and a gap in the middle; outside are inputs beyond its ends."""
    x = 2 * torch.rand(num, 1, generator=generator) - 1
    x = x + 0.5 * x.sign()
    y = (3 * x).sin() + NOISE * torch.randn(num, 1, generator=generator)
    return x, y, x[:NUM_TEST] + 1.5 * x[:NUM_TEST].sign()


def clusters(num: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Three overlapping Gaussian clusters in four dimensions; outside is wide noise."""
    y = torch.randint(3, (num,), generator=generator)
    x = 1.5 * torch.randn(3, 4, generator=generator)[y] + torch.randn(num, 4, generator=generator)
    return x, y, 5 * torch.randn(NUM_TEST, 4, generator=generator)


TABLES = {"curve": curve, "clusters": clusters}


def load(task: Task, seed: int, data_dir: str | None) -> Data:
    """Return the data of a seed."""
    if task.data in TABLES:
        num = task.num_train + NUM_VALIDATION + NUM_TEST
        x, y, outside = TABLES[task.data](num, torch.Generator().manual_seed(seed))
        sizes = [task.num_train, NUM_VALIDATION, NUM_TEST]
        train, validation, test = zip(x.split(sizes), y.split(sizes), strict=True)
        return Data(train, validation, test, outside)
    if task.data == "digits":
        split = digits_split(task.num_train, NUM_VALIDATION, seed)
        test = (split.test[0][:NUM_TEST], split.test[1][:NUM_TEST])
        return Data(split.train, split.validation, test, test[0].rot90(1, (2, 3)))
    split = load_split(task.data, task.num_train, NUM_VALIDATION, NUM_TEST, seed, data_dir)
    outside = outside_images(OUTSIDE[task.data], task.data, NUM_TEST, data_dir)
    return Data(split.train, split.validation, split.test, outside)


def train(net: nn.Module, data: Data, task: Task, decayed: list[Tensor]) -> None:
    """Train to the mode under standard normal priors of some weights."""
    loader = DataLoader(TensorDataset(*data.train), 100, shuffle=True)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, task.epochs * len(loader))
    for _ in range(task.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            squares = torch.stack([p.square().sum() for p in decayed]).sum()
            if task.classes:
                loss = nn.functional.cross_entropy(net(x), y)
            else:
                loss = 0.5 * nn.functional.mse_loss(net(x), y) / NOISE**2
            (loss + 0.5 * squares / len(data.train[0])).backward()
            optimizer.step()
            schedule.step()
    net.eval()


class Ours:
    """This library."""

    def __init__(self, net: nn.Module, task: Task, structure: str, data: Data) -> None:
        include = {"include": task.last} if structure == "last layer" else {}
        self.data, self.method, self.classes = data, STRUCTURES[structure][0], task.classes
        bayesian, num_data = to_bayesian_(copy.deepcopy(net), prior_scale=1.0, **include), len(data.train[0])
        self.model = classifier(bayesian, num_data) if task.classes else regressor(bayesian, num_data, NOISE)
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
        found = pyro_dvi.predict(self.model, self.guide, x)
        return found.probabilities if self.classes else torch.stack([found.mean, found.variance], -1)

    def covariance(self, x: Tensor) -> Tensor:
        return self.guide.predictive(x).covariance

    def log_evidence(self) -> float:
        return float(self.guide.log_evidence(self.data.loader).value)


class Theirs:
    """laplace-torch with its default backend."""

    def __init__(self, net: nn.Module, task: Task, structure: str, data: Data) -> None:
        _, self.structure, self.subset = STRUCTURES[structure]
        self.net, self.data, self.classes = copy.deepcopy(net), data, task.classes

    def fit(self) -> None:
        from laplace import Laplace

        self.la = Laplace(
            self.net,
            "classification" if self.classes else "regression",
            subset_of_weights=self.subset,
            hessian_structure=self.structure,
            **({} if self.classes else {"sigma_noise": NOISE}),
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
                loss=mean_nll
                if self.classes
                else gaussian_nll,  # the default is a running metric, which goes on over the values of the grid
            )
        return float(self.la.prior_precision)

    def predict(self, x: Tensor) -> Tensor:
        if self.classes:
            return self.la(x, pred_type="glm", link_approx="probit").detach()
        mean, variance = self.la(x, pred_type="glm")
        return torch.cat([mean, variance[..., 0] + NOISE**2], -1).detach()

    def covariance(self, x: Tensor) -> Tensor:
        return self.la._glm_predictive_distribution(x)[1].detach()

    def log_evidence(self) -> float:
        return float(self.la.log_marginal_likelihood())


def mean_nll(probabilities: Tensor, labels: Tensor) -> Tensor:
    """What laplace-torch compares values by on validation data."""
    return nn.functional.nll_loss(probabilities.log(), labels)


def gaussian_nll(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    """The same for a regression; laplace-torch leaves the noise out of the variance."""
    total = variance.reshape(mean.shape) + NOISE**2
    return -torch.distributions.Normal(mean, total.sqrt()).log_prob(y).mean()


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
        **scores(found, data.test[1], side.classes),
    }


def scores(found: dict[str, Tensor], y: Tensor, classes: bool) -> dict[str, float]:
    """Scores of test inputs, and how well entropy, or variance, tells them from the others."""
    found = {name: values.double() for name, values in found.items()}
    if not classes:
        mean, variance = found["test"].unbind(-1)
        log_prob = torch.distributions.Normal(mean, variance.sqrt()).log_prob(y[:, 0])
        inside, outside = (found[name][:, 1] for name in ("test", "outside"))
        return {"nll": float(nll(log_prob).value), "auroc": auroc(inside, outside)}
    found = {name: p / p.sum(-1, keepdim=True) for name, p in found.items()}
    return {
        "nll": float(nll(found["test"].log().gather(1, y[:, None])[:, 0]).value),
        "ece": float(expected_calibration_error(found["test"], y)),
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
    train(net, data, task, decayed)
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
        found = {k: net(x) for k, x in parts.items()}
        of_mode = {
            k: v.softmax(-1) if task.classes else torch.cat([v, torch.full_like(v, NOISE**2)], -1)
            for k, v in found.items()
        }
        row["mode"] = scores(of_mode, data.test[1], task.classes)
    packages = ("laplace-torch", "curvlinops-for-pytorch")
    row["backend_class"] = type(sides["theirs"].la.backend).__name__
    return {**row, "packages": ", ".join(f"{package} {version(package)}" for package in packages)}


BENCHMARK = Benchmark(
    "laplace_torch",
    "How do results, time and memory compare with laplace-torch?",
    plan,
    run,
    report,
    timed=True,
)
