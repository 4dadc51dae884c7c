# SPDX-License-Identifier: Apache-2.0
"""Saving, copying and moving a LaplaceGuide."""

import copy
import io
import pickle

import pyro
import pytest
import torch
from pyro import optim
from pyro.infer import SVI, Trace_ELBO
from torch import Tensor

import pyro_dvi as dvi
from pyro_dvi import LaplaceGuide, predict
from pyro_dvi.errors import (
    DviWarning,
    GuideError,
)
from pyro_dvi.laplace import (
    ConjugateGradient,
    Diagonal,
    HessianFree,
    KroneckerFactored,
    PosteriorSamples,
    TopEigen,
)
from pyro_dvi.runs.fingerprint import Fingerprint
from tests.laplace.problems import guide_at
from tests.laplace.slope import LOCS, PointSolver, X, Y, fitted, model


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


def network(seed=0, prior_scale=1.0, noise=0.1, activation=torch.nn.Tanh, num_data=10):
    """Deterministic first layer, batch normalisation, Bayesian last layer."""
    torch.manual_seed(seed)
    net = torch.nn.Sequential(
        torch.nn.Linear(1, 3), torch.nn.BatchNorm1d(3), activation(), torch.nn.Linear(3, 1)
    ).double()
    dvi.to_bayesian_(net, prior_scale=prior_scale, exclude="0.*")
    return dvi.regressor(net, num_data=num_data, noise_scale=noise)


OTHERS = [
    ({"prior_scale": 3.0}, "prior of site 'net.3.weight': scale 1 → 3"),
    ({"noise": 0.9}, "site 'obs': scale 0.1 → 0.9"),
    ({"activation": torch.nn.ReLU}, "site 'obs': loc"),
]


@pytest.mark.parametrize(("options", "message"), OTHERS, ids=[next(iter(o)) for o, _ in OTHERS])
def test_a_gaussian_is_refused_by_another_model_and_taken_by_the_same_one_built_again(options, message):
    x, y = X[:, None], Y[:, None]
    first = network()
    guide = LaplaceGuide(first)
    guide.initialize(x, y)
    guide.fit([(x, y)], unconverged="accept")
    expected = predict(first, guide, x).variance
    state, weights = _through_a_file(guide.state_dict()), _through_a_file(first.state_dict())
    weights = {name: value for name, value in weights.items() if "_initial" not in name}  # start values only

    def loaded(model, full=True):
        pyro.clear_param_store()
        if full:
            model.load_state_dict(weights, strict=False)
        other = LaplaceGuide(model)
        other.load_state_dict(state)
        return other

    again = network(seed=5)
    torch.testing.assert_close(predict(again, loaded(again), x).variance, expected)
    torch.testing.assert_close(loaded(again).predictive(x).variance, expected - 0.1**2)
    unlike = network(seed=5, **options)
    guides = loaded(unlike)
    for use in (
        lambda: predict(unlike, guides, x),
        lambda: guides.predictive(x),
        lambda: dvi.to_arviz(unlike, guides, x),
    ):
        with pytest.raises(GuideError, match=message):
            use()
    without_its_weights = network(seed=5)
    with pytest.raises(GuideError, match="site 'obs': loc.*with its state"):
        predict(without_its_weights, loaded(without_its_weights, full=False), x)


def test_batches_that_cannot_be_cut_are_kept_whole():
    def whole(x, y=None, scale=1.0):
        w = pyro.sample("w", pyro.distributions.Normal(x.new_zeros(()), scale))
        with pyro.plate("data", 10):
            return pyro.sample("y", pyro.distributions.Normal(w * x, 1.0), obs=y)

    guide = guide_at(whole, (X, Y), {"w": torch.tensor(0.7).double()})
    guide.fit([(X, Y)], unconverged="accept")
    predict(whole, guide, X)
    with pytest.raises(GuideError, match="prior of site 'w': scale 1 → 2"):
        predict(lambda x, y=None: whole(x, y, scale=2.0), guide, X)


def test_a_deterministic_site_more_is_no_other_model():
    def shown(x, y=None):
        w = pyro.sample("w", pyro.distributions.Normal(x.new_zeros(()), 1.0))
        pyro.deterministic("f", w * x)
        with pyro.plate("data", 10, subsample_size=len(x)):
            return pyro.sample("y", pyro.distributions.Normal(w * x, 1.0), obs=y)

    def further(x, y=None):
        pyro.sample("v", pyro.distributions.Normal(x.new_zeros(()), 1.0))
        return shown(x, y)

    hidden = pyro.poutine.block(shown, hide=["f"])
    latents = {"w": torch.tensor(0.7)}
    for first, second in ((shown, hidden), (hidden, shown)):
        assert Fingerprint.of(first, (X, Y), {}, latents).differences(second, latents) == ""
    assert Fingerprint.of(shown, (X, Y), {}, latents).differences(further, latents) == "site 'v' is new"
    assert Fingerprint.of(further, (X, Y), {}, latents).differences(shown, latents) == "site 'v' is missing"


def test_rounding_of_another_dtype_is_no_difference():
    x = X[:, None]
    first = network()
    latents = {"net.3.weight": torch.ones(1, 3).double(), "net.3.bias": torch.ones(1).double()}
    found = Fingerprint.of(first, (x, Y[:, None]), {}, latents)
    state = {n: v.float() for n, v in first.state_dict().items()}
    short = network().float()
    short.load_state_dict(state)
    rounded = Fingerprint(tuple(v.float() for v in found.args), {}, found.sites)
    assert rounded.differences(short, {n: v.float() for n, v in latents.items()}) == ""
    with torch.no_grad():
        short.net[0].weight.mul_(1.1)
    assert "loc" in rounded.differences(short, {n: v.float() for n, v in latents.items()})


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
    guide.fit([(X, Y)], PointSolver(), unconverged="accept")
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
    guide.fit([(x, y)], method, unconverged="accept")
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
    guide.fit([(X, Y)], method, unconverged="accept")
    with pytest.warns(DviWarning, match="fit again"):
        assert guide.state_dict()["_extra_state"]["gaussian"] is None


def test_a_change_of_dtype_moves_the_gaussian():
    guide = fitted()
    expected = guide.predictive(X).variance
    guide.float()
    found = guide.predictive(X.float()).variance
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=0)


def test_a_change_of_device_moves_the_gaussian(device):
    guide = fitted()
    expected = guide.predictive(X).variance
    guide.to(device)
    torch.testing.assert_close(guide.predictive(X.to(device)).variance.cpu(), expected)
    assert guide.sample(3)["slope"].device == device
