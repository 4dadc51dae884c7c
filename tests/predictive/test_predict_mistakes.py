# SPDX-License-Identifier: Apache-2.0
"""Mistakes in a prediction and what they are answered."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi as dvi
from pyro_dvi import (
    AtMean,
    LaplaceGuide,
    MeanFieldGuide,
    MultiplicativeNoiseGuide,
    NaturalGradientGuide,
    Samples,
    predict,
    to_arviz,
)
from pyro_dvi.errors import ArgumentError, DataError, GuideError, ModelError, NonFiniteError, UnsupportedError

X = torch.linspace(-1, 1, 10)


def model(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", 10, subsample_size=len(x)):
        return pyro.sample("obs", dist.Normal(w * x, 1.0), obs=y)


def classes(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        return pyro.sample("obs", dist.Categorical(logits=torch.stack([w * x, -w * x], -1)), obs=y)


def pairs_of_labels(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        return pyro.sample("obs", dist.Bernoulli(logits=torch.stack([w * x, x], -1)).to_event(1), obs=y)


def two_sites(x, y=None, z=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("height", dist.Normal(w * x, 1.0), obs=y)
        pyro.sample("weight", dist.Normal(-w * x, 1.0), obs=z)


def own_subsample(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", 10, subsample_size=4) as index:
        return pyro.sample("obs", dist.Normal(w * x[index], 1.0), obs=None if y is None else y[index])


def fixed_plate(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", 10):
        return pyro.sample("obs", dist.Normal(w * x, 1.0), obs=y)


def one_event(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    return pyro.sample("obs", dist.Normal(w * x, 1.0).to_event(1), obs=y)


def no_response(x, y=None):
    return pyro.sample("w", dist.Normal(0.0, 1.0)) * x


def guide(x, y=None, z=None):
    pyro.sample("w", dist.Normal(2.0, 0.1))


def other_guide(x, y=None):
    pyro.sample("v", dist.Normal(2.0, 0.1))


NAN = torch.full((10,), math.nan)

MISTAKES = {
    "guide never run": (
        lambda: predict(model, MeanFieldGuide(model), X),
        GuideError,
        r"is not initialised.*guide\(x, y\)",
    ),
    "Pyro guide never run": (
        lambda: predict(model, AutoNormal(model), X),
        GuideError,
        "AutoNormal is not initialised",
    ),
    "SVI in place of the guide": (
        lambda: predict(model, SVI(model, guide, Adam({"lr": 0.1}), Trace_ELBO()), X),
        GuideError,
        "type SVI: pass svi.guide",
    ),
    "guide belongs to another model": (
        lambda: predict(model, other_guide, X),
        ModelError,
        r"does not cover: \['w', 'obs'\].*site=",
    ),
    "no observed site": (lambda: predict(no_response, guide, X), ModelError, "no observed site to predict"),
    "several sites": (lambda: predict(two_sites, guide, X), ModelError, r"\['height', 'weight'\].*site="),
    "unknown site": (
        lambda: predict(model, guide, X, site="y"),
        ModelError,
        r"no observed site 'y'; it has \['obs'\]",
    ),
    "unknown argument": (
        lambda: predict(model, guide, X, observed="labels"),
        ValueError,
        "'labels' is not in list",
    ),
    "method as text": (
        lambda: predict(model, guide, X, "mean"),
        ArgumentError,
        r"AtMean\(\) or Samples\(30\), not 'mean'",
    ),
    "method as class": (lambda: predict(model, guide, X, AtMean), ArgumentError, r"write AtMean\(\.\.\.\)"),
    "no draws": (lambda: Samples(0), ArgumentError, "num_samples must be a positive whole number, not 0"),
    "half a draw": (lambda: Samples(1.5), ArgumentError, "not 1.5"),
    "batch size": (lambda: predict(model, guide, X, batch_size=0), ArgumentError, "batch_size.*not 0"),
    "NaN input": (lambda: predict(model, guide, NAN), DataError, "input 0 .*contains 10 NaN"),
    "NaN observed": (lambda: predict(model, guide, (X, NAN)), DataError, "the observation.*contains 10 NaN"),
    "array": (lambda: predict(model, guide, X.numpy()), DataError, "type ndarray.*torch.as_tensor"),
    "list of tensors": (lambda: predict(model, guide, [X, X]), DataError, "type list.*tuple"),
    "text": (lambda: predict(model, guide, "x"), DataError, "type str"),
    "batches of text": (
        lambda: predict(model, guide, ["x"]),
        DataError,
        "batches are of type str, not tensors",
    ),
    "unknown entry": (
        lambda: predict(model, guide, {"images": X}),
        DataError,
        r"\['images'\] beyond the model's arguments",
    ),
    "no examples": (lambda: predict(model, guide, X[:0]), DataError, "no examples"),
    "empty loader": (lambda: predict(model, guide, []), DataError, "no examples"),
    "no tensor": (lambda: predict(model, guide, (1.0,)), DataError, "no tensor of examples"),
    "unequal lengths": (lambda: predict(model, guide, (X, X[:5])), DataError, r"have \[10, 5\] rows"),
    "observed shape": (
        lambda: predict(model, guide, (X, X[:, None])),
        DataError,
        r"'obs' \(Normal\): observed values have shape \(10, 1\), but predictions \(10,\)",
    ),
    "label out of range": (
        lambda: predict(classes, guide, (X, torch.full((10,), 2))),
        DataError,
        "'obs'.*from 2 to 2, are outside the support of Categorical",
    ),
    "label between classes": (
        lambda: predict(classes, guide, (X, X.abs() / 2)),
        DataError,
        "outside the support of Categorical",
    ),
    "late labels of another length": (
        lambda: predict(model, guide, X, AtMean()).metrics(X[:5]),
        DataError,
        r"10 predictions need as many observed values; their shape is \(5,\)",
    ),
    "no labels": (
        lambda: predict(model, guide, X).metrics(),
        DataError,
        r"pass y, or predict from data.*\(x, y\)",
    ),
    "mixture not kept": (
        lambda: predict(pairs_of_labels, guide, X, Samples(3)).log_likelihood(torch.zeros(10, 2)),
        UnsupportedError,
        r"its 3 distributions \(Bernoulli\).*from \(x, y\)",
    ),
    "entropy of a mixture": (
        lambda: predict(model, guide, X, Samples(3)).entropy,
        UnsupportedError,
        r"entropy in closed form at site 'obs' cannot be computed for.*\(Normal\)",
    ),
    "probabilities of a regression": (
        lambda: predict(model, guide, X).probabilities,
        UnsupportedError,
        r"'obs' \(Normal\) has no class probabilities",
    ),
    "model that subsamples itself": (
        lambda: predict(own_subsample, guide, X),
        DataError,
        "no dimension indexes the 10",
    ),
    "plate without subsample size": (
        lambda: predict(fixed_plate, guide, X[:5]),
        DataError,
        r"does not accept 5 rows.*subsample_size=len\(x\)",
    ),
    "one event": (
        lambda: predict(one_event, guide, X),
        DataError,
        r"'obs' with batch shape \(\) and event shape \(10,\)",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_remedy(mistake):
    run, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message):
        run()


def test_values_in_another_order_than_a_shuffled_loader_are_refused():
    shuffled = DataLoader(TensorDataset(X, 2 * X), batch_size=3, shuffle=True)
    prediction = predict(model, guide, shuffled, AtMean())
    assert prediction.metrics()["rmse"] < 1e-6  # its own values came along
    with pytest.raises(DataError, match="shuffle=False"):
        prediction.metrics(2 * X)


def test_one_of_several_sites_can_be_chosen():
    prediction = predict(two_sites, guide, {"x": X, "z": X}, AtMean(), site="weight", observed="z")
    torch.testing.assert_close(prediction.mean, -2 * X)
    assert predict(two_sites, guide, X, AtMean(), site="height").site == "height"


def test_a_guide_set_up_without_observations_is_recognised():
    automatic = AutoNormal(model)
    automatic(X)  # obs has become a latent site
    with pytest.raises(ModelError, match="set up with the observed values"):
        predict(model, automatic, X)


@pytest.mark.parametrize(
    "guide_class", [MeanFieldGuide, MultiplicativeNoiseGuide, NaturalGradientGuide, LaplaceGuide]
)
def test_a_guide_that_was_loaded_sees_its_model_with_the_first_data(guide_class):
    first = guide_class(model)
    first.initialize(X, X)
    method = AtMean() if guide_class is LaplaceGuide else None
    expected = predict(model, first, X, method, seed=0).mean
    state = first.state_dict()
    for use in (
        lambda g: predict(model, g, X, method, seed=0).mean,
        lambda g: predict(model, g, (X, X), method, seed=0).mean,
        lambda g: to_arviz(model, g, X, method=method, seed=0) and predict(model, g, X, method, seed=0).mean,
    ):
        pyro.clear_param_store()
        again = guide_class(model)
        again.load_state_dict(state)
        assert torch.equal(use(again), expected)
        assert [name for name, _ in again.prototype_trace.iter_stochastic_nodes()] == ["w"]


def test_a_guide_that_was_loaded_predicts_and_then_trains_on_smaller_batches():
    first = MeanFieldGuide(model)
    first.initialize(X, X)
    state = first.state_dict()
    pyro.clear_param_store()
    again = MeanFieldGuide(model)
    again.load_state_dict(state)
    predict(model, again, X, AtMean())
    svi = SVI(model, again, pyro.optim.Adam({"lr": 0.01}), dvi.TaylorELBO())
    assert dvi.fit(svi, [(X[:5], X[:5]), (X[5:], X[5:])], 1, progress=False).step == 2


def test_a_response_is_not_taken_for_a_latent_of_a_loaded_guide():
    first = MeanFieldGuide(model)
    first.initialize(X, X)
    state = first.state_dict()
    pyro.clear_param_store()
    again = MeanFieldGuide(model)
    again.load_state_dict(state)
    with pytest.raises(GuideError, match="has no site 'obs'.*pass the observed values"):
        again(X)
    again.initialize(X, X)
    assert set(again.median()) == {"w"}


def test_latents_of_single_examples_are_not_taken_for_those_of_the_first_data_after_loading():
    def local(x, y=None):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            return pyro.sample("obs", dist.Normal(z, 1.0), obs=y)

    first = MeanFieldGuide(local)
    first.initialize(X, X)
    state = first.state_dict()
    pyro.clear_param_store()
    again = MeanFieldGuide(local)
    again.load_state_dict(state)
    with pytest.raises(GuideError, match="is not initialised"):
        predict(local, again, X)


@pytest.mark.parametrize("store", ["locs", "scales"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_named(store, bad):
    guide = MeanFieldGuide(model)
    guide.initialize(X, X)
    with torch.no_grad():
        getattr(guide, store).w_unconstrained.fill_(bad)
    for method in (AtMean(), Samples(2)):
        with pytest.raises(NonFiniteError, match=rf"'{store}\.w\w*' of MeanFieldGuide is not finite"):
            predict(model, guide, X, method)
    with pytest.raises(NonFiniteError, match=rf"'{store}\.w\w*' of MeanFieldGuide"):
        to_arviz(model, guide, X)


def test_running_statistics_that_are_not_finite_are_named():
    net = dvi.to_bayesian_(
        torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    )
    network = dvi.regressor(net, num_data=10)
    guide = MeanFieldGuide(network)
    guide.initialize(X[:, None], X[:, None])
    net[1].running_var[0] = math.nan
    with pytest.raises(NonFiniteError, match=r"'net\.1\.running_var' of Regressor is not finite"):
        predict(network, guide, X[:, None])


class Causal(torch.nn.Module):
    """One layer of attention to earlier positions only, with its mask as most transformers keep it."""

    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(4, 4)
        self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
        self.bound = torch.nn.Parameter(torch.tensor(math.inf), requires_grad=False)

    def forward(self, x):
        h = self.project(x)
        attention = (h @ h.mT + self.mask).softmax(-1)
        return (attention @ h).mean((-2, -1)).clamp(max=self.bound)


@pytest.mark.parametrize("spoilt", [False, True], ids=["a mask", "NaN in the mask"])
def test_a_mask_of_minus_infinity_is_no_damage(spoilt):
    net = dvi.to_bayesian_(Causal())
    network, x = dvi.regressor(net, num_data=5), torch.randn(5, 3, 4)
    guide = MeanFieldGuide(network)
    guide.initialize(x, x[:, 0, 0])
    if not spoilt:
        assert predict(network, guide, x, Samples(2)).mean.isfinite().all()
        return
    net.mask[0, 1] = math.nan
    with pytest.raises(NonFiniteError, match=r"'net\.mask' of Regressor is not finite"):
        predict(network, guide, x, Samples(2))
