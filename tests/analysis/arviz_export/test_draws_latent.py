# SPDX-License-Identifier: Apache-2.0
"""Every guide that Pyro and this library have exports, and so do draws in place of one."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, Predictive, TraceEnum_ELBO
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoDiscreteParallel,
    AutoGuideList,
    AutoIAFNormal,
    AutoLaplaceApproximation,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
    AutoStructured,
)

from pyro_dvi import (
    AtMean,
    LaplaceGuide,
    MeanFieldGuide,
    MultiplicativeNoiseGuide,
    NaturalGradientGuide,
    Samples,
    to_arviz,
)
from pyro_dvi.errors import ArgumentError, GuideError, ModelError, UnsupportedError
from pyro_dvi.guides.factors import PerSite, PerWeight
from pyro_dvi.laplace import (
    ConjugateGradient,
    Dense,
    Diagonal,
    Functional,
    KroneckerFactored,
    PosteriorSamples,
    TopEigen,
)
from tests.analysis.arviz_export.reading import groups, reopened, values

pytestmark = pytest.mark.filterwarnings("ignore:.* scores '.*point estimate")

X = torch.linspace(-1, 1, 12)
Y = 2 * X


def model(x, y=None):
    weight = pyro.sample("weight", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        return pyro.sample("obs", dist.Normal(weight.sum() * x, 0.5), obs=y)


def by_hand(x, y=None):
    loc = pyro.param("loc", torch.zeros(3))
    pyro.sample("weight", dist.Normal(loc, 0.2).to_event(1))


def ready(guide):
    guide(X, Y)
    return guide


def of_parts():
    guide = AutoGuideList(model)
    guide.append(AutoNormal(model))
    return ready(guide)


def pyro_laplace():
    return ready(AutoLaplaceApproximation(model)).laplace_approximation(X, Y)


def laplace(method):
    guide = LaplaceGuide(model)
    guide.initialize(X, Y)
    guide.fit([(X, Y)], method, unconverged="accept")
    return guide


GUIDES = {
    "AutoDelta": lambda: ready(AutoDelta(model)),
    "AutoNormal": lambda: ready(AutoNormal(model)),
    "AutoDiagonalNormal": lambda: ready(AutoDiagonalNormal(model)),
    "AutoMultivariateNormal": lambda: ready(AutoMultivariateNormal(model)),
    "AutoLowRankMultivariateNormal": lambda: ready(AutoLowRankMultivariateNormal(model)),
    "AutoIAFNormal": lambda: ready(AutoIAFNormal(model, hidden_dim=[4])),
    "AutoLaplaceApproximation": pyro_laplace,
    "AutoStructured": lambda: ready(AutoStructured(model)),
    "AutoGuideList": of_parts,
    "by hand": lambda: by_hand,
    "PerWeight": lambda: ready(MeanFieldGuide(model, scale=PerWeight())),
    "PerSite": lambda: ready(MeanFieldGuide(model, scale=PerSite())),
    "MultiplicativeNoiseGuide": lambda: ready(MultiplicativeNoiseGuide(model)),
    "NaturalGradientGuide": lambda: ready(NaturalGradientGuide(model)),
    "Dense": lambda: laplace(Dense()),
    "PosteriorSamples": lambda: laplace(PosteriorSamples(50)),
    "Functional": lambda: laplace(Functional()),
    "TopEigen": lambda: laplace(TopEigen(2)),
    "Diagonal": lambda: laplace(Diagonal()),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", GUIDES)
@pytest.mark.parametrize("method", [None, Samples(40)])
@pytest.mark.filterwarnings("ignore:weights are drawn")  # the Laplace guides' remark on Samples
def test_every_guide_exports(name, method, tmp_path):
    guide = GUIDES[name]()
    count = 40
    given = count if method is None else None
    exported = to_arviz(model, guide, (X, Y), given, method=method, seed=0)
    if method is None:
        exported = reopened(exported, tmp_path)
    draws = values(exported, "posterior", "weight")
    assert draws.shape == (1, count, 3)
    assert np.isfinite(draws).all()
    is_point = name in (
        "AutoDelta",
        "MultiplicativeNoiseGuide",
    )  # to the latter, vectors are biases without width
    assert (draws == draws[:, :1]).all() == is_point
    assert values(exported, "posterior_predictive", "obs").shape == (1, count, 12)
    if method is not None:  # the draws of the posterior are those of the predictions
        by_rows = dist.Normal(torch.as_tensor(draws[0]).sum(-1, keepdim=True) * X, 0.5).log_prob(Y)
        np.testing.assert_allclose(values(exported, "log_likelihood", "obs")[0], by_rows, rtol=1e-4)


def mixed(x, y=None):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    kind = pyro.sample("kind", dist.Categorical(torch.ones(3) / 3), infer={"enumerate": "parallel"})
    with pyro.plate("data", len(x)):
        return pyro.sample("obs", dist.Normal(slope * x + kind, 1.0), obs=y)


def test_discrete_latents_are_whole_numbers_and_have_no_mean():
    guide = AutoGuideList(mixed)
    guide.append(AutoNormal(poutine.block(mixed, expose=["slope"])))
    guide.append(AutoDiscreteParallel(poutine.block(mixed, expose=["kind"])))
    TraceEnum_ELBO(max_plate_nesting=1).loss(mixed, guide, X, Y)
    exported = to_arviz(mixed, guide, (X, Y), method=Samples(50), seed=0, prior=50)
    for group in ("posterior", "prior"):
        assert set(np.unique(values(exported, group, "kind"))) == {0, 1, 2}
    with pytest.raises(GuideError, match=r"no median.*Samples\(30\)"):
        to_arviz(mixed, guide, (X, Y), method=AtMean())


def test_kronecker_factors_export():
    net = pyro.nn.PyroModule[torch.nn.Linear](2, 1)
    net.weight = pyro.nn.PyroSample(dist.Normal(0.0, 1.0).expand([1, 2]).to_event(2))

    def regression(x, y=None):
        mean = net(x)
        with pyro.plate("data", 6, subsample_size=len(x)):
            return pyro.sample("obs", dist.Normal(mean, 0.5).to_event(1), obs=y)

    x, y = torch.randn(6, 2), torch.randn(6, 1)
    guide = LaplaceGuide(regression)
    guide.initialize(x, y)
    guide.fit([(x, y)], KroneckerFactored(), unconverged="accept")
    assert values(to_arviz(regression, guide, (x, y), 20), "posterior", "weight").shape == (1, 20, 1, 2)


def test_a_method_without_draws_exports_its_predictions():
    guide = laplace(ConjugateGradient())
    with pytest.raises(UnsupportedError, match="no draws"):
        to_arviz(model, guide, (X, Y))
    exported = to_arviz(model, guide, (X, Y), sites=[])
    assert groups(exported) == {
        "posterior_predictive",
        "log_likelihood",
        "observed_data",
        "constant_data",
    }


# Draws in place of a guide ----------------------------------------------------------------------------------------


def test_draws_of_mcmc_export_as_they_are():
    chain = MCMC(NUTS(model), num_samples=15, warmup_steps=5, disable_progbar=True)
    chain.run(X, Y)
    samples = chain.get_samples()
    exported = to_arviz(model, samples, (X, Y), seed=0, prior=4, predictions=X[:3])
    np.testing.assert_array_equal(values(exported, "posterior", "weight")[0], samples["weight"])
    densities = dist.Normal(samples["weight"].sum(-1, keepdim=True) * X, 0.5).log_prob(Y)
    np.testing.assert_allclose(values(exported, "log_likelihood", "obs")[0], densities, rtol=1e-5)
    assert values(exported, "predictions", "obs").shape == (1, 15, 3)
    assert exported.attrs["guide"] == "samples"
    assert exported.attrs["method"] == "GivenSamples(15)"
    # Batches share the draws; the noise of the predictions has their means.
    parts = to_arviz(model, samples, (X, Y), seed=0, batch_size=5)
    np.testing.assert_allclose(values(parts, "log_likelihood", "obs")[0], densities, rtol=1e-5)


def test_draws_of_predictive_lose_the_dimensions_of_absent_plates():
    guide = ready(AutoMultivariateNormal(model))
    samples = Predictive(model, guide=guide, num_samples=7, return_sites=["weight"])(X)
    assert samples["weight"].shape == (7, 1, 3)
    assert values(to_arviz(model, samples, (X, Y)), "posterior", "weight").shape == (1, 7, 3)


def test_draws_of_an_improper_prior():
    def improper(x, y=None):
        weight = pyro.sample("weight", dist.ImproperUniform(dist.constraints.real, (), (3,)))
        with pyro.plate("data", len(x)):
            return pyro.sample("obs", dist.Normal(weight.sum() * x, 0.5), obs=y)

    exported = to_arviz(improper, {"weight": torch.ones(4, 3)}, (X, Y))
    expected = dist.Normal(3 * X, 0.5).log_prob(Y).expand(4, 12)
    np.testing.assert_allclose(values(exported, "log_likelihood", "obs")[0], expected, rtol=1e-5)


def test_a_masked_value_need_not_be_possible_for_any_draw():
    def bounded(x, y=None):
        top = pyro.sample("top", dist.LogNormal(0.0, 1.0))
        with poutine.mask(mask=torch.tensor([True, False])), pyro.plate("data", 2):
            return pyro.sample("obs", dist.Uniform(0.0, top * x), obs=y)

    samples = {"top": torch.tensor([10.0, 0.5, 2.0])}
    exported = to_arviz(bounded, samples, (torch.ones(2), torch.tensor([0.1, 99.0])), seed=0)
    found = values(exported, "log_likelihood", "obs")[0]
    np.testing.assert_allclose(found[:, 0], -np.log([10.0, 0.5, 2.0]), rtol=1e-5)


def test_arrays_are_draws_as_well():
    assert values(to_arviz(model, {"weight": np.zeros((5, 3), "f4")}, X), "posterior", "weight").shape == (
        1,
        5,
        3,
    )


DRAWS = torch.zeros(5, 3)
MISTAKES = {
    "misspelt": (
        lambda: to_arviz(model, {"weigth": DRAWS}, (X, Y)),
        ModelError,
        r"several sites that the guide does not cover: \['weight', 'obs'\]",
    ),
    "a site is missing": (
        lambda: to_arviz(mixed, {"slope": torch.zeros(5)}, (X, Y)),
        ModelError,
        r"several sites that the guide does not cover: \['kind', 'obs'\]",
    ),
    "observed site": (
        lambda: to_arviz(model, {"weight": DRAWS, "obs": torch.zeros(5, 12)}, X),
        ModelError,
        "no observed site",
    ),
    "chains": (
        lambda: to_arviz(model, {"weight": torch.zeros(2, 5, 3)}, (X, Y)),
        ArgumentError,
        r"draw of site 'weight' has the shape \(5, 3\), but its value.* has the shape \(3,\).*group_by_chain",
    ),
    "a method": (
        lambda: to_arviz(model, {"weight": DRAWS}, (X, Y), method=AtMean()),
        ArgumentError,
        r"omit method=AtMean\(\)",
    ),
    "a number of draws": (
        lambda: to_arviz(model, {"weight": DRAWS}, (X, Y), 4),
        ArgumentError,
        r"num_samples=4 does not suit method=GivenSamples\(5\)",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_given_draws_is_named_with_its_remedy(mistake):
    run, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message):
        run()


def test_a_guide_predicted_by_draws_exports_as_many_as_are_asked_for():
    exported = to_arviz(model, ready(NaturalGradientGuide(model)), (X, Y), 7)
    assert values(exported, "posterior", "weight").shape == (1, 7, 3)
