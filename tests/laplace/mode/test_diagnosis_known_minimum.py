# SPDX-License-Identifier: Apache-2.0
"""A mode that was found to be a minimum is not diagnosed again, until something changes."""

import contextlib
import copy
import pickle

import pytest
import torch

from pyro_dvi.errors import DviWarning, UnconvergedError
from pyro_dvi.laplace import ConjugateGradient, Dense, Diagonal, Hessian, PriorPrecision
from pyro_dvi.laplace.energy.energy import Energy
from tests.laplace.problems import SineRegression

PROBLEM = SineRegression(hidden=2)
SIZE = 7
QUIET = {"progress": False}


@pytest.fixture(scope="module")
def mode():
    guide = PROBLEM.trained(500)
    report = guide.polish(PROBLEM.batches, **QUIET)
    assert report.converged
    return guide


@pytest.fixture
def polished(mode):
    return copy.deepcopy(mode)


@pytest.fixture
def spent(monkeypatch):
    """The work since the last call, in gradients of all data."""
    done = [0]
    count = Energy.count

    def counted(energy, work):
        done[0] += work
        count(energy, work)

    monkeypatch.setattr(Energy, "count", counted)

    def since():
        found, done[0] = done[0], 0
        return found

    return since


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("method", "work"),
    [(Dense(Hessian()), 1 + 2 * SIZE), (ConjugateGradient(Hessian()), 1), (Dense(), 2), (Diagonal(), 2)],
)
@pytest.mark.parametrize("subset", [None, "w*"])
def test_a_fit_after_polish_takes_one_gradient_more(polished, spent, method, work, subset):
    polished.fit(PROBLEM.batches, method, subset=subset)
    assert spent() <= work


def test_other_batches_of_the_same_rows_are_the_same_data(polished, spent):
    polished.fit([(PROBLEM.x, PROBLEM.y)], ConjugateGradient(Hessian()))
    assert spent() == 1


def _move(guide):
    with torch.no_grad():
        guide.locs.w1.add_(1e-9)


def _temper(guide):
    guide.kl_weight = 1.01


def fitted_again(guide, batches=PROBLEM.batches):
    """A fit that finds the mode to be a minimum or not."""
    with contextlib.suppress(UnconvergedError):
        guide.fit(batches, ConjugateGradient(Hessian()))


@pytest.mark.parametrize("change", [_move, _temper])
def test_a_change_ends_it(polished, spent, change):
    change(polished)
    fitted_again(polished)
    assert spent() > SIZE


def test_other_data_end_it(polished, spent):
    x, y = PROBLEM.x.clone(), PROBLEM.y.clone()
    y[3] += 0.1
    fitted_again(polished, [(x, y)])
    assert spent() > SIZE


def test_labels_of_other_rows_are_other_data(polished, spent):
    order = torch.randperm(len(PROBLEM.x), generator=torch.Generator().manual_seed(1))
    fitted_again(polished, [(PROBLEM.x[order], PROBLEM.y[order])])
    assert spent() == 1
    with pytest.warns(DviWarning, match="not a minimum"):
        polished.fit([(PROBLEM.x, PROBLEM.y[order])], Dense())


def test_another_model_ends_it(polished, spent, monkeypatch):
    monkeypatch.setattr(PROBLEM, "noise", 0.31)
    fitted_again(polished)
    assert spent() > SIZE


def test_a_minimum_over_some_sites_is_none_over_all(spent):
    guide = PROBLEM.trained(50)
    guide.polish(PROBLEM.batches, subset="*2", **QUIET)
    spent()
    guide.fit(PROBLEM.batches, ConjugateGradient(Hessian()), subset="w2")
    assert spent() == 1
    with pytest.raises(UnconvergedError):
        guide.fit(PROBLEM.batches, ConjugateGradient(Hessian()))


def test_what_one_fit_has_seen_serves_the_next(polished, spent):
    polished._minimum = None
    polished.fit(PROBLEM.batches, ConjugateGradient(Hessian()))
    assert spent() > SIZE
    polished.fit(PROBLEM.batches, ConjugateGradient(Hessian()))
    assert spent() == 1


def test_a_diagnosis_serves_the_fit(polished, spent):
    polished._minimum = None
    assert polished.diagnose(PROBLEM.batches).converged
    spent()
    polished.fit(PROBLEM.batches, ConjugateGradient(Hessian()))
    assert spent() == 1


def test_it_survives_copies_but_not_a_new_dtype(polished, spent):
    again = pickle.loads(pickle.dumps(polished))
    assert again._point_mass().change_since(again._minimum.point) is None
    fitted_again(copy.deepcopy(polished))
    assert spent() == 1
    polished.double()  # may have rounded the mode
    fitted_again(polished)
    assert spent() > SIZE


def test_tuned_scales_are_looked_at_where_the_mode_was_trained(polished, spent):
    polished.tune(
        PROBLEM.batches, PriorPrecision("w1"), method=Diagonal(), values=[0.01, 0.5, 5, 500], **QUIET
    )
    spent()
    assert polished.scale_factors
    polished.fit(PROBLEM.batches, ConjugateGradient(Hessian()))  # at the minimum of U before it was tuned
    assert spent() == 2  # U with either scale
    polished.polish(PROBLEM.batches, **QUIET)
    spent()
    polished.fit(PROBLEM.batches, ConjugateGradient(Hessian()))
    assert spent() == 1


@pytest.mark.slow
def test_the_gauss_newton_matrix_is_no_proof_for_the_hessian(spent):
    guide = PROBLEM.trained(800)
    guide.fit(PROBLEM.batches, Diagonal())
    assert spent() <= 4  # the gradient, perhaps a product, and the fit
    guide.fit(PROBLEM.batches, Dense(Hessian()))
    assert spent() > 2 * SIZE


def test_a_mode_that_is_far_is_warned_of_again():
    guide = PROBLEM.trained(5)
    for _ in range(2):
        with pytest.warns(DviWarning, match="not a minimum"):
            guide.fit(PROBLEM.batches, Diagonal())
