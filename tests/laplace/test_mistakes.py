# SPDX-License-Identifier: Apache-2.0
"""What a LaplaceGuide refuses, and what it says."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from pyro_dvi import AtMean, LaplaceGuide, Linearised, predict
from pyro_dvi.errors import (
    ArgumentError,
    DataError,
    GuideError,
    ModelError,
    NonFiniteError,
    NotPositiveDefiniteError,
    UnsupportedError,
)
from pyro_dvi.laplace import (
    ByLanczos,
    ConjugateGradient,
    Dense,
    Hessian,
    HessianFree,
    Method,
)
from tests.laplace.problems import SineRegression, guide_at, ragged
from tests.laplace.slope import LOCS, X, Y, fitted, model


class TestMistakes:
    def test_nothing_was_fitted(self):
        with pytest.raises(GuideError, match="no Gaussian"):
            LaplaceGuide(model).predictive(X)

    def test_not_fitted(self):
        with pytest.raises(GuideError, match=r"guide.fit\(batches, method\)"):
            guide_at(model, (X, Y), LOCS).predictive(X)

    def test_no_minimum(self):
        with pytest.raises(NotPositiveDefiniteError, match="polish"):
            guide_at(_saddle, (X,), {"u": torch.zeros(2).double()}).fit(
                [(X,)], Dense(precision=Hessian()), unconverged="accept"
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

        for method, unconverged in (
            (Dense(), "refuse"),
            (Dense(), "accept"),
            (ConjugateGradient(), "accept"),
        ):
            with pytest.raises(DataError, match="changed between two passes"):
                guide_at(model, (X, Y), LOCS).fit(Augmented(), method, unconverged=unconverged)

    def test_rows_that_are_dropped(self):
        loader = DataLoader(TensorDataset(X, Y), batch_size=4, drop_last=True)
        with pytest.raises(DataError, match="drop_last=False"):
            guide_at(model, (X, Y), LOCS).fit(loader, Dense())

    def test_queries(self):
        problem = SineRegression()
        guide = problem.trained(steps=5)
        guide.fit(problem.batches, Dense(), unconverged="accept")
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

    def test_query_on_another_device(self, device):
        if device.type == "cpu":
            pytest.skip("needs two devices")
        with pytest.raises(Exception, match="device"):
            fitted().predictive(X.to(device))

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
        with pytest.raises(UnsupportedError, match="all data in one batch"):
            guide.fit(ragged(X, Y, 4), Dense())
        guide.fit([(X, Y)], Dense(), unconverged="accept")
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

    def test_a_method_without_a_precision(self):
        class Bare(Method):
            def fit(self, local, *, seed):
                raise AssertionError

        with pytest.raises(
            ArgumentError, match=r"^precision must be .* GGN\(\) or Hessian\(\), as an attribute"
        ):
            guide_at(model, (X, Y), LOCS).fit([(X, Y)], Bare())

    def test_inputs_of_the_wrong_guide(self):
        assert isinstance(fitted(), LaplaceGuide)
        with pytest.raises(ArgumentError, match=r"method must be .* write Linearised\(\.\.\.\)"):
            predict(model, fitted(), X, Linearised)


def _saddle(x: Tensor) -> None:
    u = pyro.sample("u", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
    pyro.sample("product", dist.Normal(u[0] * u[1], 0.5), obs=x.new_tensor(3.0))


def _improper(noise, shift=lambda x: 0.0):
    """A regression through the origin, on slope ``w``, whose likelihood is none."""

    def regression(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(()).double(), 1.0))
        with pyro.plate("data", len(x)):
            mean = torch.relu(w) * x + shift(x)
            pyro.sample("y", dist.Normal(mean, noise(w), validate_args=False), obs=y)

    return regression


_IMPROPER = {
    "draws": (_improper(torch.ones_like, torch.rand_like), ModelError, "two runs at the same latents differ"),
    "NaN": (_improper(lambda w: w - 2), NonFiniteError, "joint density, is nan"),
    "infinite": (_improper(lambda w: torch.full_like(w, 1e-200)), NonFiniteError, "joint density, is inf"),
}


@pytest.mark.parametrize("kind", _IMPROPER)
@pytest.mark.parametrize("determinant", [None, ByLanczos(num_probes=2, steps=2)])
def test_an_improper_likelihood_has_no_evidence(kind, determinant):
    improper, error, message = _IMPROPER[kind]
    guide = guide_at(improper, (X, Y), {"w": torch.ones(()).double()})
    with pytest.raises(error, match=message):
        guide.log_evidence([(X, Y)], determinant=determinant)


@pytest.mark.parametrize("kind", _IMPROPER)
@pytest.mark.parametrize(
    ("method", "unconverged"),
    [
        (Dense(), "accept"),
        (ConjugateGradient(Hessian()), "accept"),
        (HessianFree(), "accept"),
    ],
)
def test_an_improper_likelihood_has_no_gaussian_under_any_policy(kind, method, unconverged):
    improper, error, message = _IMPROPER[kind]
    guide = guide_at(improper, (X, Y), {"w": torch.ones(()).double()})
    with pytest.raises(error, match=message):
        guide.fit([(X, Y)], method, unconverged=unconverged)
    assert guide.posterior is None


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ({"slope": -1}, r"scale_factors\['slope'\] must be a positive number, not -1"),
        ({"slope": 0.0}, "must be a positive number"),
        ({"slope": torch.tensor(torch.nan)}, "must be a positive number"),
        ({"slope": torch.ones(2)}, "must be a positive number"),
        (
            {"y": 2.0, "slop": 2.0},
            r"the model has no site 'slop'; its sites are \['slope', 'scale', 'y'\]",
        ),
        ({"*": 2.0}, r"no site '\*'"),
    ],
)
def test_scale_factors_that_are_none(factors, message):
    guide = guide_at(model, (X, Y), LOCS)
    guide.scale_factors = factors
    for use in (guide.fit, guide.log_evidence, guide.diagnose, guide.polish, guide.tune):
        with pytest.raises(ArgumentError, match=message):
            use([(X, Y)])
    if "y" not in factors and "*" not in factors:  # a prediction knows no data to run the whole model with
        with pytest.raises(ArgumentError, match=message):
            predict(model, guide, X, AtMean())


def test_scale_factors_may_be_tensors_of_one_number():
    guide, other = guide_at(model, (X, Y), LOCS), guide_at(model, (X, Y), LOCS)
    guide.scale_factors, other.scale_factors = {"slope": torch.tensor(2.0), "y": 1}, {"slope": 2.0}
    assert guide.log_evidence([(X, Y)]).value == other.log_evidence([(X, Y)]).value
