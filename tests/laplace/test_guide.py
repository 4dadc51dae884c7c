# SPDX-License-Identifier: Apache-2.0
"""LaplaceGuide as a Pyro guide: training, draws, saving, copying, and what it refuses."""

import copy
import io
import pickle
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import optim
from pyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi as dvi
from pyro_dvi import LaplaceGuide, Linearised, MomentPropagationELBO, Samples, TaylorELBO, predict
from pyro_dvi.errors import (
    ArgumentError,
    DataError,
    DviWarning,
    GuideError,
    ModelError,
    NotPositiveDefiniteError,
    UnsupportedError,
)
from pyro_dvi.guides.laplace import (
    Accept,
    ConjugateGradient,
    Dense,
    Diagonal,
    Hessian,
    HessianFree,
    KroneckerFactored,
    LaplacePosterior,
    Method,
    PosteriorSamples,
    TopEigen,
)
from tests.laplace.problems import LinearRegression, SineRegression, guide_at, ragged

X = torch.linspace(-1, 1, 10, dtype=torch.float64)
Y = 0.8 * X + 0.2 * torch.cos(9 * X)


def model(x: Tensor, y: Tensor | None = None) -> Tensor:
    """A slope and a positive noise scale."""
    slope = pyro.sample("slope", dist.Normal(x.new_zeros(()), 1.0))
    scale = pyro.sample("scale", dist.LogNormal(x.new_zeros(()), 1.0))
    with pyro.plate("data", 10, subsample_size=len(x)):
        return pyro.sample("y", dist.Normal(slope * x, scale), obs=y)


LOCS = {"slope": torch.tensor(0.7).double(), "scale": torch.tensor(-1.5).double()}


def fitted(**options: object) -> LaplaceGuide:
    guide = guide_at(model, (X, Y), LOCS)
    guide.fit(ragged(X, Y, 4), Dense(), unconverged=Accept(), **options)
    return guide


class PointSolver(Method):
    """A method that keeps what no file can hold, and knows nothing but covariances."""

    curvature = Hessian()

    def fit(self, local, *, seed, progress):
        return Solutions(local)


class Solutions(LaplacePosterior):
    def __init__(self, local):
        self.mode, self.local = local.point, local

    def covariance(self, query):
        return torch.ones(query.num_rows, query.size, query.size, dtype=torch.float64)


# Training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss",
    [
        lambda k: Trace_ELBO(),
        lambda k: TraceMeanField_ELBO(),
        lambda k: TaylorELBO(kl_weight=k),
        lambda k: MomentPropagationELBO(kl_weight=k),
    ],
    ids=["Trace_ELBO", "TraceMeanField_ELBO", "TaylorELBO", "MomentPropagationELBO"],
)
@pytest.mark.parametrize("kl_weight", [1.0, 0.3])
def test_every_elbo_has_the_gradient_of_the_energy(loss, kl_weight):
    elbo = loss(kl_weight)
    if kl_weight != 1 and isinstance(elbo, Trace_ELBO):
        pytest.skip("Pyro's objectives have no such weight")
    guide = guide_at(model, (X, Y), LOCS, kl_weight=kl_weight)
    locs = list(guide.parameters())
    elbo.differentiable_loss(model, guide, X, Y).backward()
    gradient = torch.stack([loc.grad for loc in locs])
    energy = guide.energy([(X, Y)])
    expected = kl_weight * energy.at(energy.start).gradient
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-6)


def test_training_finds_the_mode_of_a_linear_regression():
    problem = LinearRegression()
    guide = LaplaceGuide(problem.model)
    svi = SVI(problem.model, guide, optim.Adam({"lr": 0.1}), Trace_ELBO())
    dvi.fit(svi, [(problem.x, problem.y)], epochs=150)
    torch.testing.assert_close(guide.median()["weight"], problem.mode(), rtol=0, atol=0.02)


def test_a_trained_network_is_a_mode_already():
    net = torch.nn.Sequential(torch.nn.Linear(1, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
    weight = net[0].weight.detach().clone()
    bayesian = dvi.regressor(dvi.to_bayesian_(net), num_data=10, noise_scale=0.3)
    guide = LaplaceGuide(bayesian)
    guide.initialize(X[:, None], Y[:, None])
    found = {name: value for name, value in guide.median().items() if name.endswith("0.weight")}
    torch.testing.assert_close(next(iter(found.values())), weight)
    guide.fit([(X[:, None], Y[:, None])], Dense(), unconverged=Accept())
    assert (predict(bayesian, guide, X[:, None]).variance > 0).all()


def test_training_goes_on_after_a_fit():
    guide = fitted()
    svi = SVI(model, guide, optim.SGD({"lr": 1e-3}), Trace_ELBO())
    svi.step(X, Y)  # at the mode, without a warning of draws
    with pytest.raises(GuideError, match="has moved since guide.fit"):
        guide.predictive(X)
    with pytest.raises(GuideError, match="moved"):
        guide.sample()
    with pytest.warns(DviWarning, match="point mass until it is fitted again"):
        drawn = Predictive(model, guide=guide, num_samples=2)(X)
    torch.testing.assert_close(drawn["slope"].reshape(-1), guide.median()["slope"].expand(2))


# Reading the posterior --------------------------------------------------------------------------------------------


def test_before_the_fit_it_is_a_point_mass():
    guide = guide_at(model, (X, Y), LOCS)
    drawn = guide.sample(3)
    torch.testing.assert_close(drawn["scale"], LOCS["scale"].exp().expand(3))
    predictive = Predictive(model, guide=guide, num_samples=4)(X)
    assert (predictive["slope"] == LOCS["slope"]).all()
    assert guide.posterior is None


def test_draws_are_those_of_the_gaussian():
    guide = fitted()
    covariance = torch.linalg.inv(guide.posterior.precision)
    drawn = guide.sample((40, 500))
    assert drawn["slope"].shape == (40, 500)
    flat = torch.stack([drawn["slope"].flatten(), drawn["scale"].log().flatten()])
    torch.testing.assert_close(
        flat.cov(), covariance, rtol=0.06, atol=0.06 * covariance.diagonal().prod().sqrt()
    )
    pyro.set_rng_seed(0)
    first = guide.sample()
    pyro.set_rng_seed(0)
    assert torch.equal(guide.sample()["slope"], first["slope"])


def test_median_and_quantiles():
    guide = fitted()
    deviation = torch.linalg.inv(guide.posterior.precision).diagonal().sqrt()
    assert torch.equal(guide.median()["scale"], LOCS["scale"].exp())
    levels = torch.tensor([0.1, 0.5, 0.9]).double()
    found = guide.quantiles([0.1, 0.5, 0.9])
    z = dist.Normal(0.0, 1.0).icdf(levels)
    torch.testing.assert_close(found["slope"], LOCS["slope"] + deviation[0] * z)
    torch.testing.assert_close(found["scale"], (LOCS["scale"] + deviation[1] * z).exp())
    torch.testing.assert_close(guide.get_posterior()["slope"].stddev, deviation[0])


def test_sites_outside_the_subset_stay_at_their_mode():
    guide = fitted(subset="slope")
    drawn = guide.sample(5)
    assert drawn["slope"].std() > 0
    assert torch.equal(drawn["scale"], LOCS["scale"].exp().expand(5))
    assert torch.equal(guide.quantiles([0.1])["scale"], LOCS["scale"].exp().expand(1))
    with pytest.warns(DviWarning, match="drawn"):
        predictive = Predictive(model, guide=guide, num_samples=3)(X)
    assert torch.equal(predictive["scale"].flatten(), LOCS["scale"].exp().expand(3))


@pytest.mark.parametrize("parallel", [False, True])
def test_predictive_warns_and_draws(parallel):
    guide = fitted()
    with pytest.warns(DviWarning, match=r"Linearised\(\)"):
        found = Predictive(model, guide=guide, num_samples=600, parallel=parallel)(X)
    slope, scale = found["slope"].flatten(), found["scale"].flatten()
    covariance = torch.linalg.inv(guide.posterior.precision)
    assert len(slope) == 600
    torch.testing.assert_close(torch.stack([slope, scale.log()]).cov(), covariance, rtol=0.3, atol=0.004)
    assert found["y"].shape[-1] == 10


def test_samples_rule_warns_and_averages_draws():
    guide = fitted()
    with pytest.warns(DviWarning, match="drawn"):
        found = predict(model, guide, (X, Y), Samples(100), seed=1, batch_size=5)
    # The model is linear in the slope: draws lead to the same mean and variance, up to their noise.
    linearised = predict(model, guide, (X, Y))
    torch.testing.assert_close(found.mean, linearised.mean, rtol=0, atol=0.05)
    torch.testing.assert_close(found.log_likelihood(), linearised.log_likelihood(), rtol=0, atol=0.1)


def test_losses_of_draws_are_refused():
    guide = fitted()
    svi = SVI(model, guide, optim.SGD({"lr": 1e-3}), Trace_ELBO())
    with pytest.warns(DviWarning), pytest.raises(UnsupportedError, match="before guide.fit"):
        svi.evaluate_loss(X, Y)


def test_a_method_without_draws_says_so():
    guide = guide_at(model, (X, Y), LOCS)
    guide.fit([(X, Y)], PointSolver(), unconverged=Accept())
    with pytest.raises(UnsupportedError, match="PosteriorSamples"):
        guide.sample()
    with pytest.raises(UnsupportedError, match="variances of single latents"):
        guide.quantiles([0.5])
    with pytest.raises(UnsupportedError, match="joint"):
        guide.predictive(X, joint=True)
    assert torch.equal(guide.median()["slope"], LOCS["slope"])
    assert "nll" in predict(model, guide, (X, Y)).metrics()


def test_export_to_arviz():
    pytest.importorskip("arviz")
    guide = fitted()
    with warnings.catch_warnings():
        warnings.simplefilter("error", DviWarning)  # draws that are only exported predict nothing
        data = dvi.to_arviz(model, guide, (X, Y), num_samples=200, seed=0)
    assert data["posterior"]["slope"].shape == (1, 200)
    deviation = torch.linalg.inv(guide.posterior.precision)[0, 0].sqrt().item()
    assert float(data["posterior"]["slope"].std()) == pytest.approx(deviation, rel=0.25)
    assert data["posterior_predictive"]["y"].shape == (1, 200, 10)
    log_likelihood = torch.tensor(data["log_likelihood"]["y"].values[0, 0])
    torch.testing.assert_close(log_likelihood, predict(model, guide, (X, Y)).log_likelihood())
    pyro.clear_param_store()
    solver = guide_at(model, (X, Y), LOCS)
    solver.fit([(X, Y)], PointSolver(), unconverged=Accept())
    assert "posterior" not in dvi.to_arviz(model, solver, (X, Y), num_samples=5, sites=[])


# Saving, copying, moving ------------------------------------------------------------------------------------------


def _through_a_file(state: object) -> dict[str, Tensor]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("initialised", [False, True])
def test_state_dict_holds_the_gaussian(initialised):
    guide = fitted(subset="slope")
    state = _through_a_file(guide.state_dict())
    with pyro.settings.context(module_local_params=True):
        other = LaplaceGuide(model)
        if initialised:
            other.initialize(X, Y)
        other.load_state_dict(state)
        other.initialize(X, Y)
    torch.testing.assert_close(other.predictive(X).variance, guide.predictive(X).variance)
    with torch.no_grad():
        other.locs.slope.add_(0.1)
    with pytest.raises(GuideError, match="moved"):
        other.predictive(X)


def test_state_dict_of_a_mode_alone():
    guide = guide_at(model, (X, Y), LOCS)
    state = _through_a_file(guide.state_dict())
    other = fitted()
    other.load_state_dict(state)
    assert other.posterior is None
    assert torch.equal(other.median()["slope"], LOCS["slope"])


@pytest.mark.parametrize("fresh", [False, True])
def test_checkpoint_holds_the_gaussian(tmp_path, fresh):
    guide = fitted()
    svi = SVI(model, guide, optim.SGD({"lr": 0.0}), Trace_ELBO())
    svi.step(X, Y)
    expected = predict(model, guide, X).variance
    dvi.save(tmp_path / "run.pt", svi)
    if fresh:
        pyro.clear_param_store()
        guide = LaplaceGuide(model)
        svi = SVI(model, guide, optim.SGD({"lr": 0.0}), Trace_ELBO())
    dvi.load(tmp_path / "run.pt", svi, example=(X, Y))
    torch.testing.assert_close(predict(model, guide, X).variance, expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda guide: pickle.loads(pickle.dumps(guide))])
def test_copies_predict(copied):
    guide = fitted()
    twin = copied(guide)
    assert torch.equal(predict(model, twin, X).variance, predict(model, guide, X).variance)
    with torch.no_grad():
        twin.locs.slope.add_(0.1)
    assert (guide.predictive(X).variance > 0).all()


def test_a_deep_copy_has_its_model_a_pickle_has_not():
    guide = fitted()
    torch.testing.assert_close(copy.deepcopy(guide).predictive(X).mean, guide.predictive(X).mean)
    with pytest.raises(GuideError, match=r"predict\(model, guide, x\)"):
        pickle.loads(pickle.dumps(guide)).predictive(X)


def test_methods_that_need_the_data_are_left_out_of_files():
    guide = guide_at(model, (X, Y), LOCS)
    guide.fit([(X, Y)], PointSolver(), unconverged=Accept())
    with pytest.warns(DviWarning, match="fit again"):
        state = guide.state_dict()
    assert state["_extra_state"]["gaussian"] is None
    with pytest.warns(DviWarning, match="fit again"):
        twin = pickle.loads(pickle.dumps(guide))
    assert twin.posterior is None
    assert copy.deepcopy(guide).posterior is guide.posterior  # nothing changes a posterior: copies share it


@pytest.mark.parametrize(
    "method",
    [Diagonal(), KroneckerFactored(), TopEigen(3), PosteriorSamples(8)],
    ids=lambda m: type(m).__name__,
)
def test_every_method_that_can_comes_back_from_a_file(method):
    net = torch.nn.Sequential(torch.nn.Linear(1, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
    network = dvi.regressor(dvi.to_bayesian_(net), num_data=10, noise_scale=0.3)
    x, y = X[:, None], Y[:, None]
    guide = LaplaceGuide(network)
    guide.initialize(x, y)
    guide.fit([(x, y)], method, unconverged=Accept())
    state = _through_a_file(guide.state_dict())
    expected = guide.predictive(x).variance
    pyro.clear_param_store()
    other = LaplaceGuide(network)
    other.load_state_dict(state)
    other.initialize(x, y)
    torch.testing.assert_close(other.predictive(x).variance, expected)
    rounded = copy.deepcopy(guide).float().double().predictive(x).variance
    torch.testing.assert_close(rounded, expected, rtol=1e-4, atol=1e-6)
    drawn = guide.sample(2) if isinstance(method, PosteriorSamples) else {}
    assert all(value.shape[0] == 2 for value in drawn.values())


@pytest.mark.parametrize("method", [ConjugateGradient(), HessianFree()], ids=lambda m: type(m).__name__)
def test_methods_that_solve_stay_in_memory(method):
    guide = guide_at(model, (X, Y), LOCS)
    guide.fit([(X, Y)], method, unconverged=Accept())
    with pytest.warns(DviWarning, match="fit again"):
        assert guide.state_dict()["_extra_state"]["gaussian"] is None


def test_a_change_of_dtype_moves_the_gaussian():
    guide = fitted()
    expected = guide.predictive(X).variance
    guide.float()
    found = guide.predictive(X.float()).variance
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=0)


@pytest.mark.cuda
def test_a_change_of_device_moves_the_gaussian():
    guide = fitted()
    expected = guide.predictive(X).variance
    guide.to("cuda")
    torch.testing.assert_close(guide.predictive(X.cuda()).variance.cpu(), expected)
    assert guide.sample(3)["slope"].is_cuda


@pytest.mark.parametrize("batch", [(X, Y), {"x": X, "y": Y}], ids=["tuple", "mapping"])
def test_the_first_batch_shows_the_model(batch):
    guide = LaplaceGuide(model)
    assert guide.polish([batch], progress=False).converged
    assert guide.fit([batch], Dense(Hessian())).mode.shape == (2,)


# Mistakes -----------------------------------------------------------------------------------------------------------


class TestMistakes:
    def test_nothing_was_fitted(self):
        with pytest.raises(GuideError, match="point mass so far"):
            LaplaceGuide(model).predictive(X)

    def test_not_fitted(self):
        with pytest.raises(GuideError, match=r"guide.fit\(batches, method\)"):
            guide_at(model, (X, Y), LOCS).predictive(X)

    def test_no_minimum(self):
        with pytest.raises(NotPositiveDefiniteError, match="polish"):
            guide_at(_saddle, (X,), {"u": torch.zeros(2).double()}).fit(
                [(X,)], Dense(curvature=Hessian()), unconverged=Accept()
            )

    @pytest.mark.parametrize(
        "batches", [[], DataLoader(TensorDataset(X[:3], Y[:3]), batch_size=4, drop_last=True)]
    )
    def test_no_batches(self, batches):
        with pytest.raises(DataError, match="empty"):
            guide_at(model, (X, Y), LOCS).fit(batches, Dense())

    def test_batches_that_change(self):
        class Augmented:
            def __iter__(self):
                yield X + 0.01 * torch.randn(10), Y

        with pytest.raises(DataError, match="changed between two passes"):
            guide_at(model, (X, Y), LOCS).fit(Augmented(), Dense())

    def test_rows_that_are_dropped(self):
        loader = DataLoader(TensorDataset(X, Y), batch_size=4, drop_last=True)
        with pytest.raises(DataError, match="drop_last=False"):
            guide_at(model, (X, Y), LOCS).fit(loader, Dense())

    def test_queries(self):
        problem = SineRegression()
        guide = problem.trained(steps=5)
        guide.fit(problem.batches, Dense(), unconverged=Accept())
        with pytest.raises(DataError, match=r"\(4, 3\)"):
            guide.predictive(torch.zeros(4, 3, dtype=torch.float64))
        with pytest.raises(DataError, match="float32"):
            guide.predictive(torch.zeros(4, 1))
        with pytest.raises(DataError, match="no rows"):
            guide.predictive(torch.zeros(0, 1, dtype=torch.float64))
        with pytest.raises(DataError, match="NaN"):
            guide.predictive(torch.full((2, 1), torch.nan, dtype=torch.float64))
        with pytest.raises(DataError, match="input tensor"):
            guide.predictive()
        with pytest.raises(DataError, match=r"\(4, 3\)"):
            predict(problem.model, guide, torch.zeros(4, 3, dtype=torch.float64))
        with pytest.raises(ModelError, match="'z'"):
            guide.predictive(problem.x, site="z")

    @pytest.mark.cuda
    def test_query_on_another_device(self):
        with pytest.raises(Exception, match="device"):
            fitted().predictive(X.cuda())

    def test_discrete_latent(self):
        def discrete(x, y=None):
            k = pyro.sample("k", dist.Bernoulli(0.5))
            pyro.sample("y", dist.Normal(k, 1.0).expand([len(x)]).to_event(1), obs=y)

        with pytest.raises(ModelError, match="discrete"):
            LaplaceGuide(discrete).initialize(X, Y)

    def test_nothing_observed(self):
        def unobserved(x):
            pyro.sample("w", dist.Normal(x.new_zeros(()), 1.0))

        guide = LaplaceGuide(unobserved)
        guide.initialize(X)
        with pytest.raises(ModelError, match="no observed site"):
            guide.fit([(X,)], Dense())

    def test_observation_left_out(self):
        with pytest.raises(ModelError, match="neither observed nor in the guide"):
            guide_at(model, (X, Y), LOCS).fit([(X,)], Dense())

    @pytest.mark.parametrize("where", ["x", "y"])
    def test_nan_in_the_data(self, where):
        data = {"x": X.clone(), "y": Y.clone()}
        data[where][3] = torch.nan
        with pytest.raises(DataError, match="NaN"):
            guide_at(model, (X, Y), LOCS).fit([(data["x"], data["y"])], Dense())

    def test_latent_of_single_examples(self):
        def local(x, y=None):
            with pyro.plate("data", 10, subsample_size=len(x)):
                z = pyro.sample("z", dist.Normal(x, 1.0))
                pyro.sample("y", dist.Normal(z, 1.0), obs=y)

        guide = LaplaceGuide(local)
        guide.initialize(X, Y)
        with pytest.raises(UnsupportedError, match="all the data in one batch"):
            guide.fit(ragged(X, Y, 4), Dense())
        guide.fit([(X, Y)], Dense(), unconverged=Accept())
        torch.testing.assert_close(guide.predictive(X).variance, torch.full((10,), 0.5).double())

    def test_subset_of_nothing(self):
        with pytest.raises(ArgumentError, match="'slop'"):
            fitted(subset="slop")

    @pytest.mark.parametrize("weight", [0, -1.0, float("nan")])
    def test_weights_that_are_not_positive(self, weight):
        with pytest.raises(ArgumentError, match="kl_weight"):
            LaplaceGuide(model, kl_weight=weight)

    def test_method_is_an_object(self):
        with pytest.raises(ArgumentError, match=r"Dense\(\)"):
            guide_at(model, (X, Y), LOCS).fit([(X, Y)], "dense")

    def test_inputs_of_the_wrong_guide(self):
        assert isinstance(fitted(), LaplaceGuide)
        with pytest.raises(ArgumentError, match="rule"):
            predict(model, fitted(), X, Linearised)


def _saddle(x: Tensor) -> None:
    u = pyro.sample("u", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
    pyro.sample("product", dist.Normal(u[0] * u[1], 0.5), obs=x.new_tensor(3.0))
