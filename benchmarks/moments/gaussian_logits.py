# SPDX-License-Identifier: Apache-2.0
"""How exact and how costly are the averages over Gaussian logits: estimators of the loss, links of predictions."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, distributions as td

from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings
from benchmarks.shared.tables import provenance, table
from pyro_dvi.expectations import Sobol, TiltedBound
from pyro_dvi.expectations.expectation import expected_log_prob
from pyro_dvi.expectations.logits import LogitEstimator
from pyro_dvi.links import Probit, SobolSoftmax
from pyro_dvi.links.class_links import ClassLink
from pyro_dvi.moments import GaussianMoments

REPEATS, EXAMPLES, CLASSES = 50, 32, 10
VARIANCES = (0.1, 1.0, 4.0)


@dataclass(frozen=True)
class MonteCarlo(LogitEstimator):
    """Independent random points for every example, for comparison."""

    num_samples: int

    def expected_logsumexp(self, logits: GaussianMoments) -> Tensor:
        """Average over the samples."""
        noise = torch.randn(self.num_samples, *logits.shape, dtype=logits.dtype)
        return (logits.loc + logits.variance.sqrt() * noise).logsumexp(-1).mean(0)


@dataclass(frozen=True)
class Taylor2(LogitEstimator):
    """The expansion to second order at the mean, for comparison."""

    def expected_logsumexp(self, logits: GaussianMoments) -> Tensor:
        """Evaluate the expansion."""
        p = torch.softmax(logits.loc, -1)
        return torch.logsumexp(logits.loc, -1) + 0.5 * (p * (1 - p) * logits.variance).sum(-1)


ESTIMATORS: list[LogitEstimator] = [
    Sobol(16), Sobol(64), Sobol(256), MonteCarlo(64), MonteCarlo(500), TiltedBound(), Taylor2(),
]  # fmt: skip
LINKS: list[ClassLink] = [SobolSoftmax(64), SobolSoftmax(256), SobolSoftmax(1024), Probit()]


def problem(variance: float, num_classes: int) -> GaussianMoments:
    """Mean logits of deviation 1.5; variances between half and one and a half times the given one."""
    generator = torch.Generator().manual_seed(0)
    loc = 1.5 * torch.randn(EXAMPLES, num_classes, generator=generator, dtype=torch.float64)
    return GaussianMoments(
        loc, variance * (0.5 + torch.rand(loc.shape, generator=generator, dtype=torch.float64))
    )


def reference(x: GaussianMoments, num_points: int = 2**17) -> tuple[Tensor, Tensor]:
    """Mean log-normaliser and mean softmax by many independent draws in antithetic pairs."""
    generator = torch.Generator().manual_seed(1)
    total, probabilities = torch.zeros(x.shape[0]).double(), torch.zeros(x.shape).double()
    for _ in range(num_points // 1024):
        noise = torch.randn(512, *x.shape, generator=generator, dtype=torch.float64)
        for sign in (1, -1):
            values = x.loc + sign * x.variance.sqrt() * noise
            total += torch.logsumexp(values, -1).sum(0)
            probabilities += torch.softmax(values, -1).sum(0)
    return total / num_points, probabilities / num_points


def errors(
    estimator: LogitEstimator, x: GaussianMoments, exact: tuple[Tensor, Tensor]
) -> tuple[float, float, float]:
    """Bias, root mean squared error of one example, and that of its gradient in one mean logit."""
    values, slopes = [], []
    for _ in range(REPEATS):
        loc = x.loc.clone().requires_grad_()
        value = estimator.expected_logsumexp(GaussianMoments(loc, x.variance))
        slopes.append(torch.autograd.grad(value.sum(), loc)[0] - exact[1])
        values.append(value.detach() - exact[0])
    v, s = torch.stack(values), torch.stack(slopes)
    return v.mean().item(), v.square().mean().sqrt().item(), s.square().mean().sqrt().item()


def milliseconds(step: Callable[[], object], repeats: int = 100) -> float:
    """Lower quartile of the time of a step."""
    times = []
    for _ in range(repeats + 10):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return 1e3 * sorted(times[10:])[repeats // 4]


def cost(estimator: LogitEstimator) -> float:
    """Forward and backward of 128 examples in float32."""
    loc, variance = (
        torch.randn(128, CLASSES, requires_grad=True),
        torch.rand(128, CLASSES, requires_grad=True),
    )
    y = torch.randint(0, CLASSES, (128,))

    def step() -> None:
        logits = GaussianMoments(loc, variance)
        expected_log_prob(td.Categorical, {"logits": logits}, y, estimator).sum().backward()

    return milliseconds(step)


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Ask for three variances of ten classes, for fewer and for more classes."""
    cases = [(CLASSES, variance) for variance in VARIANCES] + [(2, 1.0), (100, 1.0)]
    return [{"classes": classes, "variance": variance} for classes, variance in cases]


def run(settings: Settings, data_dir: str | None) -> Row:
    """Errors of every link, and for ten classes of every estimator."""
    classes = settings["classes"]
    x = problem(settings["variance"], classes)
    exact = reference(x, 2**17 if classes < 100 else 2**15)
    gaps = {str(link): link.probabilities(x.loc, x.variance) - exact[1] for link in LINKS}
    row: Row = {"links": {link: 0.5 * gap.abs().sum(-1).mean().item() for link, gap in gaps.items()}}
    if classes == CLASSES:
        row["estimators"] = {str(one): [*errors(one, x, exact), cost(one)] for one in ESTIMATORS}
    return row


def report(rows: list[Row], folder: Path) -> str:
    """A table of estimators and one of links."""
    rows = sorted(rows, key=lambda row: (row["classes"], row["variance"]))
    tens = [row for row in rows if row["classes"] == CLASSES]
    lines = []
    for name in tens[0]["estimators"] if tens else ():
        found = [row["estimators"][name] for row in tens]
        cells = ["{:+.4f}; {:.4f}; {:.4f}".format(*numbers) for numbers in found]
        lines.append([f"`{name}`", *cells, f"{min(numbers[3] for numbers in found):.2f}"])
    about = (
        f"{EXAMPLES} examples; the mean logits have a standard deviation of 1.5. The reference uses 2¹⁷ samples in "
        "antithetic pairs (2¹⁵ for 100 classes)."
    )
    text = [
        provenance("gaussian_logits", rows),
        about,
        f"**Expected log-normaliser of {CLASSES} classes**",
        "Each cell shows the bias, the root mean squared error for one example, and the root mean squared error of its "
        "gradient with respect to one mean logit. Cost: forward and backward pass for 128 examples, float32.",
        table(["estimator", *(f"variance {row['variance']:g}" for row in tens), "ms"], lines).rstrip(),
        "**Class probabilities**",
        "Mean total variation distance from the averaged softmax.",
    ]
    header = ["link", *(f"{row['classes']} classes, variance {row['variance']:g}" for row in rows)]
    lines = [[f"`{link}`", *(f"{row['links'][link]:.4f}" for row in rows)] for link in rows[0]["links"]]
    return "\n\n".join([*text, table(header, lines)])


BENCHMARK = Benchmark(
    "gaussian_logits",
    "How accurate and how costly are averages over Gaussian logits?",
    plan,
    run,
    report,
    timed=True,
)
