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
from pyro_dvi.guides.laplace import (
    Accept,
    ConjugateGradient,
    Diagonal,
    HessianFree,
    KroneckerFactored,
    PosteriorSamples,
    TopEigen,
)
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


def test_a_change_of_device_moves_the_gaussian(device):
    guide = fitted()
    expected = guide.predictive(X).variance
    guide.to(device)
    torch.testing.assert_close(guide.predictive(X.to(device)).variance.cpu(), expected)
    assert guide.sample(3)["slope"].device == device
