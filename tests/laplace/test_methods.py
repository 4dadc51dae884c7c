"""Every method against the dense matrix, and against closed forms of linear regression."""

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

from pyro_dvi import to_bayesian_
from pyro_dvi.errors import (
    ArgumentError,
    DviWarning,
    NotConvergedError,
    NotPositiveDefiniteError,
    UnsupportedError,
)
from pyro_dvi.guides.laplace import (
    GGN,
    Accept,
    ConjugateGradient,
    Dense,
    Diagonal,
    Hessian,
    KroneckerFactored,
    LaplaceGuide,
    LaplacePosterior,
    Method,
    PosteriorSamples,
    PrecisionMatrix,
    TopEigen,
)
from pyro_dvi.guides.laplace.query import Query
from tests.laplace.problems import LinearRegression, SineRegression, guide_at

DRAWS = 1000


@dataclass
class Case:
    """A method and what it can do.

    Attributes:
        exact: its covariance is that of the dense matrix.
        relative_error: standard error of a variance, where it is random.
        unsupported: operations that it refuses.
    """

    method: Method
    exact: bool = True
    relative_error: float = 0.0
    unsupported: tuple[str, ...] = ()


CASES = {
    "dense": Case(Dense()),
    "cg": Case(
        ConjugateGradient(tolerance=1e-9), unsupported=("draw", "marginal_variance", "log_determinant")
    ),
    "preconditioned": Case(
        ConjugateGradient(tolerance=1e-9, preconditioner=Diagonal()),
        unsupported=("draw", "marginal_variance", "log_determinant"),
    ),
    "top eigenvectors": Case(TopEigen(1000)),
    "samples": Case(
        PosteriorSamples(DRAWS),
        relative_error=(2 / DRAWS) ** 0.5,
        unsupported=("log_determinant", "solve"),
    ),
    "diagonal": Case(Diagonal(), exact=False),
    "kronecker": Case(KroneckerFactored(), exact=False),
}
HESSIAN = {
    "dense": Dense(Hessian()),
    "cg": ConjugateGradient(Hessian(), tolerance=1e-9),
    "top eigenvectors": TopEigen(1000, Hessian()),
}


@pytest.fixture(scope="module")
def sine() -> tuple[SineRegression, LaplaceGuide]:
    problem = SineRegression(hidden=5)
    return problem, problem.trained(60)


def assert_within(found: Tensor, expected: Tensor, case: Case) -> None:
    """Equal, or equal within 5 standard errors: the failure rate is below 1e-6 for each entry."""
    if case.relative_error == 0:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
        return
    spread = torch.diagonal(expected, dim1=-2, dim2=-1).clamp_min(1e-12).sqrt()
    scale = spread.unsqueeze(-1) * spread.unsqueeze(-2)
    assert float(((found - expected).abs() / scale).max()) < 5 * case.relative_error


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.exact])
def test_linear_regression_has_its_closed_form(name: str) -> None:
    problem, case = LinearRegression(), CASES[name]
    guide = problem.guide()
    posterior = fit(guide, problem.batches, case.method, seed=1)
    queries = torch.linspace(-2, 2, 12, dtype=torch.float64).reshape(4, 3)
    expected = queries @ torch.linalg.solve(problem.precision(), queries.T)
    query = query_of(guide, problem.model, queries)
    assert_within(posterior.joint_covariance(query), expected, case)
    variance = posterior.covariance(query)
    torch.testing.assert_close(variance[:, 0, 0], posterior.joint_covariance(query).diagonal())
    torch.testing.assert_close(guide.predictive(queries).variance, variance[:, 0, 0])
    if "log_determinant" not in case.unsupported:
        assert float(posterior.log_determinant()) == pytest.approx(
            float(problem.precision().logdet()), abs=1e-9
        )


@pytest.mark.parametrize("name", CASES)
def test_a_network_has_the_covariance_of_the_dense_matrix(
    name: str, sine: tuple[SineRegression, LaplaceGuide]
) -> None:
    problem, guide = sine
    case = CASES[name]
    posterior = fit(guide, problem.batches, case.method, seed=2)
    dense = fit(guide, problem.batches, Dense())
    if name == "diagonal":
        dense.precision.copy_(dense.precision.diagonal().diag())
        dense = type(dense)(dense.mode, dense.precision)
    elif not case.exact:
        return  # has tests of its own
    query = query_of(guide, problem.model, torch.linspace(-5, 5, 4, dtype=torch.float64).unsqueeze(-1))
    assert_within(posterior.covariance(query), dense.covariance(query), case)
    assert_within(posterior.joint_covariance(query), dense.joint_covariance(query), case)
    if "marginal_variance" not in case.unsupported:
        expected = dense.marginal_variance()
        error = (posterior.marginal_variance() / expected - 1).abs().max()
        assert float(error) <= max(1e-6, 5 * case.relative_error)
    if "log_determinant" not in case.unsupported:
        torch.testing.assert_close(posterior.log_determinant(), dense.log_determinant())
    if "solve" not in case.unsupported:
        vectors = torch.randn(3, len(dense.mode), dtype=torch.float64)
        torch.testing.assert_close(posterior.solve(vectors), dense.solve(vectors), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", CASES)
def test_what_a_method_cannot_do_is_refused(name: str, sine: tuple[SineRegression, LaplaceGuide]) -> None:
    problem, guide = sine
    posterior = fit(guide, problem.batches, CASES[name].method)
    arguments = {"draw": (1, torch.Generator()), "solve": (posterior.mode.unsqueeze(0),)}
    for operation in ("draw", "solve", "marginal_variance", "log_determinant"):
        call = getattr(posterior, operation)
        if operation in CASES[name].unsupported:
            with pytest.raises(UnsupportedError, match=type(posterior).__name__):
                call(*arguments.get(operation, ()))
        else:
            call(*arguments.get(operation, ()))


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if "draw" not in c.unsupported])
def test_draws_have_the_covariance_of_the_posterior(
    name: str, sine: tuple[SineRegression, LaplaceGuide]
) -> None:
    """5 standard errors for each entry: the failure rate is below 1e-4 in all."""
    problem, guide = sine
    posterior = fit(guide, problem.batches, CASES[name].method, seed=3)
    query = query_of(guide, problem.model, torch.tensor([[-4.0], [0.5], [3.0]], dtype=torch.float64))
    draws = posterior.draw(DRAWS, torch.Generator().manual_seed(4)) - posterior.mode
    moved = query.forward(draws).flatten(1)
    found = moved.T @ moved / DRAWS
    assert_within(
        found, posterior.joint_covariance(query), Case(CASES[name].method, relative_error=(2 / DRAWS) ** 0.5)
    )
    assert float((moved.mean(0) / found.diagonal().sqrt()).abs().max()) < 5 / DRAWS**0.5


@pytest.mark.parametrize("name", CASES)
def test_a_posterior_is_made_again_from_what_a_file_holds(
    name: str, sine: tuple[SineRegression, LaplaceGuide]
) -> None:
    problem, guide = sine
    posterior = fit(guide, problem.batches, CASES[name].method)
    if posterior.stored is None:
        with pytest.raises(UnsupportedError, match="again after loading"):
            posterior.state()
        return
    file = io.BytesIO()
    torch.save(posterior.state(), file)
    file.seek(0)
    again = LaplacePosterior.of_kind(type(posterior).__name__, torch.load(file, weights_only=True))
    query = query_of(guide, problem.model, problem.x[:3])
    torch.testing.assert_close(again.covariance(query), posterior.covariance(query))


@pytest.mark.parametrize("name", HESSIAN)
def test_the_hessian_serves_as_well(name: str) -> None:
    problem = LinearRegression()
    guide = problem.guide()
    posterior = fit(guide, problem.batches, HESSIAN[name])
    queries = torch.eye(3, dtype=torch.float64)
    expected = torch.linalg.inv(problem.precision())
    torch.testing.assert_close(posterior.joint_covariance(query_of(guide, problem.model, queries)), expected)


def test_the_diagonal_of_the_hessian(sine: tuple[SineRegression, LaplaceGuide]) -> None:
    problem = LinearRegression()
    posterior = fit(problem.guide(), problem.batches, Diagonal(Hessian()))
    torch.testing.assert_close(posterior.marginal_variance(), 1 / problem.precision().diagonal())
    with pytest.raises(ArgumentError, match="costs"):
        fit(problem.guide(), problem.batches, Diagonal(Hessian(), max_size=2))


def fit(guide: LaplaceGuide, batches: list, method: Method, **options: Any) -> Any:
    return guide.fit(batches, method, unconverged=Accept(), **options)


def query_of(guide: LaplaceGuide, model: Callable, *inputs: Tensor) -> Query:
    locs = guide.unconstrained_mode()
    return Query(model, inputs, locs, guide.energy([inputs]).layout)


# --- networks --------------------------------------------------------------------------------------------------


@dataclass
class Network:
    """A classifier with convolutions, normalisation and dense layers, and some data for it."""

    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    num_data: int = 14

    def __post_init__(self) -> None:
        torch.manual_seed(6)
        layers = [
            nn.Conv2d(1, 3, 3),
            nn.BatchNorm2d(3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(12, 4),
        ]
        self.net = nn.Sequential(*layers, nn.Tanh(), nn.Linear(4, 3)).to(self.device, self.dtype)
        to_bayesian_(self.net)
        self.x = torch.randn(self.num_data, 1, 6, 6).to(self.device, self.dtype)
        self.y = torch.randint(3, (self.num_data,), device=self.device)

    def model(self, x: Tensor, y: Tensor | None = None) -> Any:
        logits = self.net(x)
        with pyro.plate("data", self.num_data, subsample_size=len(x)):
            return pyro.sample("y", dist.Categorical(logits=logits), obs=y)

    @property
    def batches(self) -> list:
        return list(zip(self.x.split(5), self.y.split(5), strict=True))

    def guide(self) -> LaplaceGuide:
        guide = LaplaceGuide(self.model)
        guide.initialize(self.x, self.y)
        return guide


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("subset", [None, "net.7.*", "*.bias"])
def test_matrix_and_rows_from_single_examples_are_those_of_products(
    dtype: torch.dtype, subset: str | None
) -> None:
    network = Network(dtype)
    guide = network.guide()
    subset = None if subset is None else subset.removeprefix("net.")
    energy = guide.energy(network.batches, subset=subset)
    local = energy.at(energy.start)
    expected = PrecisionMatrix.matrix(GGN(), local)
    tolerance = {"rtol": 1e-3, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-10}
    torch.testing.assert_close(GGN().matrix(local), expected, **tolerance)
    posterior = fit(guide, network.batches, Diagonal(), subset=subset)
    torch.testing.assert_close(posterior.precision, expected.diagonal(), **tolerance)
    query = Query(network.model, (network.x,), guide.unconstrained_mode(), energy.layout)
    rows = torch.cat(list(query.rows(8)))
    torch.testing.assert_close(rows, torch.cat(list(query._rows_by_products(8))), **tolerance)


def test_examples_that_see_the_next_but_one_are_not_taken_apart() -> None:
    """Pairs (0, 2), (1, 3), (4, 6), ...: neither halves of the rows nor every other row tell them apart."""
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1)).double()
    to_bayesian_(net)
    x, y = torch.randn(8, 2, dtype=torch.float64), torch.randn(8, dtype=torch.float64)

    def model(x: Tensor, y: Tensor | None = None) -> Any:
        h = net[0](x).tanh().reshape(-1, 2, 2, 4)
        f = net[1]((h + 0.5 * h.flip(1)).reshape(-1, 4))[:, 0]
        with pyro.plate("data", 8, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(f, 0.5), obs=y)

    guide = LaplaceGuide(model)
    guide.initialize(x, y)
    energy = guide.energy([(x, y)])
    local = energy.at(energy.start)
    torch.testing.assert_close(GGN().matrix(local), PrecisionMatrix.matrix(GGN(), local))
    diagonal = fit(guide, [(x, y)], Diagonal()).precision
    torch.testing.assert_close(diagonal, PrecisionMatrix.matrix(GGN(), local).diagonal())
    query = query_of(guide, model, x)
    torch.testing.assert_close(torch.cat(list(query.rows(8))), torch.cat(list(query._rows_by_products(8))))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_last_layer_of_a_classifier(name: str, dtype: torch.dtype, device: str) -> None:
    network, case = Network(dtype, device), CASES[name]
    guide = network.guide()
    expected = guide_covariance(guide, network, Dense())
    found = guide_covariance(guide, network, case.method)
    assert found.dtype == dtype and found.shape == (network.num_data, 3, 3)
    assert bool((torch.linalg.eigvalsh(found) > 0).all())
    if case.exact:
        bound = 5 * case.relative_error if case.relative_error else {torch.float32: 1e-3}.get(dtype, 1e-6)
        spread = torch.diagonal(expected, dim1=1, dim2=2).sqrt()
        error = (found - expected) / (spread.unsqueeze(-1) * spread.unsqueeze(-2))
        assert float(error.abs().max()) < bound


def guide_covariance(guide: LaplaceGuide, network: Network, method: Method) -> Tensor:
    fit(guide, network.batches, method, subset="7.*", seed=5)
    return guide.predictive(network.x).covariance


def test_the_backward_pass_of_a_subset_stops_at_it() -> None:
    network = Network()
    energy = network.guide().energy(network.batches, subset="7.*")
    _, run = next(iter(energy.runs(energy.start)))
    names, stack = set(), [run.sites[0].fn.logits.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None:
            names.add(node.name())
            stack.extend(parent for parent, _ in node.next_functions)
    assert "AddmmBackward0" in names and "ConvolutionBackward0" not in names and "TanhBackward0" not in names


# --- Kronecker factors -------------------------------------------------------------------------------------------


def linear_layers(x: Tensor, y: Tensor | None = None) -> Any:
    """One dense layer with its bias and three outputs: the Fisher information is the same for all examples."""
    weight = pyro.sample("weight", dist.Normal(x.new_zeros(3, 4), 0.5).to_event(2))
    bias = pyro.sample("bias", dist.Normal(x.new_zeros(3), 2.0).to_event(1))
    with pyro.plate("data", len(x)):
        noise = x.new_tensor([0.3, 0.5, 0.9])
        return pyro.sample("y", dist.Normal(nn.functional.linear(x, weight, bias), noise).to_event(1), obs=y)


def test_kronecker_factors_are_exact_for_one_dense_layer_and_a_prior_scale_for_weight_and_bias() -> None:
    torch.manual_seed(8)
    x, y = torch.randn(9, 4, dtype=torch.float64), torch.randn(9, 3, dtype=torch.float64)
    zeros = {"weight": torch.zeros(3, 4, dtype=torch.float64), "bias": torch.zeros(3, dtype=torch.float64)}
    guide = guide_at(linear_layers, (x, y), zeros)
    batches = [(x[:5], y[:5]), (x[5:], y[5:])]
    dense, found = fit(guide, batches, Dense()), fit(guide, batches, KroneckerFactored())
    torch.testing.assert_close(found.log_determinant(), dense.log_determinant())
    torch.testing.assert_close(found.marginal_variance(), dense.marginal_variance())
    query = query_of(guide, linear_layers, x)
    torch.testing.assert_close(found.joint_covariance(query), dense.joint_covariance(query))
    vectors = torch.randn(2, 15, dtype=torch.float64)
    torch.testing.assert_close(found.solve(vectors), dense.solve(vectors))


def test_kronecker_factors_of_a_network_are_those_of_a_loop_over_examples() -> None:
    """Inputs and gradients of each layer example by example, then the Kronecker product as a matrix."""
    torch.manual_seed(9)
    net = nn.Sequential(nn.Conv2d(2, 3, 2, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)).double()
    plain = copy.deepcopy(net)
    to_bayesian_(net)
    x, y = torch.randn(5, 2, 4, 4, dtype=torch.float64), torch.randint(3, (5,))

    def model(x: Tensor, y: Tensor | None = None) -> Any:
        logits = net(x)
        with pyro.plate("data", 5, subsample_size=len(x)):
            return pyro.sample("y", dist.Categorical(logits=logits), obs=y)

    guide = LaplaceGuide(model)
    guide.initialize(x, y)
    found = fit(guide, [(x[:3], y[:3]), (x[3:], y[3:])], KroneckerFactored())
    factors: dict[int, list[Any]] = {0: [0.0, 0.0], 3: [0.0, 0.0]}
    for i in range(5):
        h = plain[0](x[i : i + 1])
        f = plain[3](plain[2](plain[1](h)))
        log_p = f.log_softmax(-1)[0]
        patches = nn.functional.unfold(x[i : i + 1], 2, stride=2)[0].T
        inputs = {0: patches, 3: plain[2](plain[1](h)).detach()}
        for layer, out in ((0, h), (3, f)):
            a = torch.cat([inputs[layer], torch.ones(len(inputs[layer]), 1, dtype=torch.float64)], 1)
            factors[layer][0] += a.T @ a
            for k in range(3):
                (delta,) = torch.autograd.grad(log_p[k], out, retain_graph=True)
                delta = delta[0].flatten(1) if layer == 0 else delta.T
                factors[layer][1] += log_p[k].exp().detach() * delta @ delta.T / (5 * delta.shape[1])
    local = guide.energy([(x, y)])
    prior = local.at(local.start).prior_diagonal()
    spans = dict(
        zip(local.layout.names, prior.split([v.numel() for v in local.layout.split(prior)]), strict=True)
    )
    total = torch.zeros((), dtype=torch.float64)
    for layer, (a, b) in factors.items():
        rows = [spans[f"{layer}.weight"].reshape(len(b), -1), spans[f"{layer}.bias"].unsqueeze(-1)]
        block = torch.kron(b, a) + torch.cat(rows, 1).flatten().diag()
        total = total + block.logdet()
    torch.testing.assert_close(found.log_determinant(), total)


def test_sites_without_factors_are_named_and_keep_their_diagonal() -> None:
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, dtype=torch.float64)

    def model(x: Tensor, y: Tensor | None = None) -> Any:
        scale = pyro.sample("scale", dist.Normal(x.new_ones(3), 1.0).to_event(1))
        weight = pyro.sample("weight", dist.Normal(x.new_zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal((x * scale) @ weight, 0.5), obs=y)

    locs = {"scale": torch.ones(3, dtype=torch.float64), "weight": torch.randn(3, dtype=torch.float64)}
    guide = guide_at(model, (x, y), locs)
    with pytest.warns(DviWarning, match="1 sites.*scale"):
        found = fit(guide, [(x, y)], KroneckerFactored())
    diagonal = fit(guide, [(x, y)], Diagonal())
    torch.testing.assert_close(found.marginal_variance()[:3], diagonal.marginal_variance()[:3])


# --- errors ----------------------------------------------------------------------------------------------------


def hierarchical(x: Tensor, y: Tensor | None = None) -> Any:
    scale = pyro.sample("scale", dist.LogNormal(x.new_zeros(()), 0.5))
    weight = pyro.sample("weight", dist.Normal(0.0, scale.expand(x.shape[1])).to_event(1))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(x @ weight, 0.5), obs=y)


def at_hierarchical() -> tuple[LaplaceGuide, list, LinearRegression]:
    data = LinearRegression()
    locs = {"scale": torch.zeros((), dtype=torch.float64), "weight": 0.3 * torch.ones(3, dtype=torch.float64)}
    return guide_at(hierarchical, (data.x, data.y), locs), [(data.x, data.y)], data


@pytest.mark.parametrize("method", [PosteriorSamples(8), TopEigen(2), KroneckerFactored()], ids=repr)
def test_a_hierarchical_prior_is_refused_by_name_where_it_has_no_diagonal(method: Method) -> None:
    guide, batches, _ = at_hierarchical()
    with pytest.raises(UnsupportedError, match="'scale' and 'weight'"):
        fit(guide, batches, method)
    fit(guide, batches, method, subset="weight")


def test_a_hierarchical_prior_is_no_obstacle_to_solves() -> None:
    guide, batches, data = at_hierarchical()
    dense = fit(guide, batches, Dense()).covariance(query_of(guide, hierarchical, data.x))
    found = fit(guide, batches, ConjugateGradient()).covariance(query_of(guide, hierarchical, data.x))
    torch.testing.assert_close(found, dense, rtol=1e-6, atol=1e-9)


def test_negative_curvature_and_unfinished_solves_are_errors(
    sine: tuple[SineRegression, LaplaceGuide],
) -> None:
    problem, _ = sine
    guide = problem.trained(3)
    query = torch.linspace(-5, 5, 9, dtype=torch.float64).unsqueeze(-1)
    fit(guide, problem.batches, ConjugateGradient(Hessian()))
    with pytest.raises(NotPositiveDefiniteError, match="no minimum") as caught:
        guide.predictive(query)
    assert caught.value.curvature < 0
    with pytest.raises(NotPositiveDefiniteError, match="no minimum"):
        fit(guide, problem.batches, TopEigen(1000, Hessian()))
    fit(guide, problem.batches, ConjugateGradient(max_iterations=1))
    with pytest.raises(NotConvergedError, match="after 1 iterations"):
        guide.predictive(query[:3])
    with pytest.raises(NotConvergedError, match="after 1 iterations"):
        fit(guide, problem.batches, PosteriorSamples(4, max_iterations=1))


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: PosteriorSamples(0), ArgumentError),
        (lambda: PosteriorSamples(8, Hessian()), UnsupportedError),
        (lambda: TopEigen(0), ArgumentError),
        (lambda: ConjugateGradient(tolerance=0.0), ArgumentError),
        (lambda: KroneckerFactored(Hessian()), UnsupportedError),
    ],
)
def test_methods_refuse_what_they_cannot_be(make: Callable[[], Method], error: type[Exception]) -> None:
    with pytest.raises(error):
        make()
