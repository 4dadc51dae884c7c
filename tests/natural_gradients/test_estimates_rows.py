# SPDX-License-Identifier: Apache-2.0
"""Layers whose rows are no examples, or whose uses cannot be seen, are measured in another way or refused."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pyro_dvi.bayesian import LearnedScale, classifier, to_bayesian_
from pyro_dvi.errors import DviWarning, ModelError, UnsupportedError
from pyro_dvi.natural_gradients.ivon import IVON
from pyro_dvi.natural_gradients.natural_elbo import NaturalGradientELBO
from pyro_dvi.natural_gradients.precision_guide import NaturalGradientGuide
from pyro_dvi.natural_gradients.updates import VOGN
from tests.objectives.loops import M, N, assert_equal, squares_at_mean, weights, x_and_y

pytestmark = pytest.mark.usefixtures("double")


LABELS = torch.arange(M) % 2

# Batch normalisation in training mode --------------------------------------------------------------------------


class Normalised(nn.Module):
    """A layer before batch normalisation: with examples in its rows, or with as many positions."""

    def __init__(self, positions_first: bool) -> None:
        super().__init__()
        self.positions_first = positions_first
        self.embed, self.norm, self.head = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.transpose(0, 1)).transpose(0, 1) if self.positions_first else self.embed(x)
        return self.head(self.norm(h.mean(1)).tanh())


def test_examples_under_batch_norm_count_their_own_rows_in_whatever_dimension():
    x = torch.randn(M, M, 3)
    net = to_bayesian_(Normalised(True), prior_scale=1.0)
    second, _ = squares_at_mean(classifier(net, num_data=N), x, LABELS)
    pyro.clear_param_store()
    net.positions_first = False
    found, exact = squares_at_mean(classifier(net, num_data=N), x, LABELS)
    assert_equal(second, found)
    rows, others = exact.pop("net.embed.weight"), found.pop("net.embed.weight")
    assert not torch.allclose(rows, others, rtol=1e-3)  # by the layer's own rows, as in the paper
    torch.testing.assert_close(found.pop("net.head.weight"), exact.pop("net.head.weight"))


def test_the_second_look_leaves_no_trace():
    x = torch.randn(M, M, 3)
    net = to_bayesian_(Normalised(True), prior_scale=1.0)
    model = classifier(net, num_data=N)
    guide = NaturalGradientGuide(model)
    guide.initialize(x, LABELS)
    elbo = NaturalGradientELBO()
    after = []
    for _ in range(2):  # it looks in the first step only
        torch.manual_seed(3)
        SVI(model, guide, VOGN({}), loss=elbo).step(x, LABELS)
        after.append(torch.rand(()))
    assert int(net.norm.num_batches_tracked) == 2
    assert after[0] == after[1]


# Examples that see others --------------------------------------------------------------------------------------


class Seeing(nn.Module):
    """An example reads another, by a matrix that may be exchanged."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.matrix, self.embed, self.head = matrix, nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.matrix @ self.embed(x).tanh())


def lagged(rows: int, lag: int) -> Tensor:
    return torch.eye(rows) - torch.diag(torch.ones(rows - lag), -lag)


@pytest.mark.parametrize(("rows", "lag"), [(48, 12), (16, 8), (12, 4), (7, 2)])
@pytest.mark.parametrize("forwards", [True, False])
def test_examples_that_read_far_away_ones_are_found_out(rows, lag, forwards):
    matrix = lagged(rows, lag)
    net = to_bayesian_(Seeing(matrix if forwards else matrix.T), prior_scale=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DviWarning)
        assert_equal(
            *squares_at_mean(classifier(net, num_data=rows), torch.randn(rows, 3), torch.arange(rows) % 2)
        )


def test_examples_that_begin_to_see_others_are_an_error():
    x = torch.randn(M, 3)
    net = to_bayesian_(Seeing(torch.eye(M)), prior_scale=1.0)
    model = classifier(net, num_data=N)
    guide = NaturalGradientGuide(model)
    svi = SVI(model, guide, VOGN({}), loss=NaturalGradientELBO())
    for _ in range(3):
        svi.step(x, LABELS)
    net.matrix = torch.full((M, M), 1 / M)
    with pytest.raises(ModelError, match=r"site 'obs' depend on rows of other examples"):
        svi.step(x, LABELS)


def test_every_model_gets_a_look_of_its_own():
    """One objective may train several models of the same shapes."""
    elbo, x = NaturalGradientELBO(), torch.randn(M, 3)
    squares: list[Tensor] = []
    for objective in (elbo, elbo, NaturalGradientELBO()):
        pyro.clear_param_store()
        torch.manual_seed(0)
        net = to_bayesian_(Seeing(lagged(M, 2) if squares else torch.eye(M)), prior_scale=1.0)
        model = classifier(net, num_data=N)
        guide = NaturalGradientGuide(model)
        guide.initialize(x, LABELS)
        torch.manual_seed(1)
        objective.loss_and_grads(model, guide, x, LABELS)
        squares.append(guide.precision_parameter("net.embed.weight").grad.clone())
    torch.testing.assert_close(squares[1], squares[2])
    assert not torch.allclose(squares[0], squares[1])


# Several sites -------------------------------------------------------------------------------------------------


def test_the_same_layers_may_keep_the_examples_of_one_site_apart_and_mix_those_of_another():
    def model(x, y):
        h = torch.tanh(x @ weights((3, M)))
        with pyro.plate("data", M):
            pyro.sample("y", dist.Normal(h.sum(1), 0.5), obs=y)
            pyro.sample("z", dist.Normal((h.T @ h).sum(1), 0.5), obs=y)

    assert_equal(*squares_at_mean(model, *x_and_y()))


# Checkpoints ---------------------------------------------------------------------------------------------------


def block(h: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(torch.nn.functional.linear(h, v)) @ w


def checkpointed(use_reentrant: bool):
    def model(x, y):
        h = x @ weights((3, 4), "u")
        mean = checkpoint(block, h, weights((4, 4), "v"), weights((4,)), use_reentrant=use_reentrant)
        with pyro.plate("data", N, subsample=torch.arange(len(x))):
            pyro.sample("y", dist.Normal(mean, 0.5), obs=y)

    return model


def test_checkpoints_that_record_gradients_are_exact():
    found, exact = squares_at_mean(checkpointed(False), *x_and_y())
    assert exact.keys() == {"u", "v", "w"}
    assert_equal(found, exact)


@pytest.mark.filterwarnings(
    "ignore:None of the inputs:UserWarning"
)  # torch's, where the guide looks at the model
@pytest.mark.parametrize("optimizer", [VOGN, IVON])
def test_reentrant_checkpoints_are_refused(optimizer):
    model = checkpointed(True)
    svi = SVI(model, NaturalGradientGuide(model), optimizer({}), loss=NaturalGradientELBO())
    with pytest.raises(UnsupportedError, match=r"pass use_reentrant=False"):
        svi.step(*x_and_y())


class Checkpointed(nn.Module):
    """Its checkpoint reads the weights of a module."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.block, self.first(x), use_reentrant=self.use_reentrant))


@pytest.mark.filterwarnings("ignore:None of the inputs:UserWarning")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("prior", [1.0, LearnedScale()], ids=["fixed", "learned"])
def test_checkpoints_that_would_redraw_weights_are_refused(use_reentrant, prior):
    model = classifier(to_bayesian_(Checkpointed(use_reentrant), prior_scale=prior), num_data=N)
    elbo = NaturalGradientELBO()
    guide = NaturalGradientGuide(model)
    with pytest.raises(UnsupportedError, match=r"use_reentrant=False"):
        elbo.loss_and_grads(model, guide, torch.randn(M, 3), LABELS)


def test_checkpoints_of_layers_without_latents_serve():
    net = to_bayesian_(Checkpointed(False), prior_scale=1.0, exclude="block.*")
    assert_equal(*squares_at_mean(classifier(net, num_data=N), torch.randn(M, 3), LABELS))


# Layers without a rule -----------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, layer: type = nn.LSTM) -> None:
        super().__init__()
        self.layer, self.head = layer(3, 2, batch_first=True), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


@pytest.mark.parametrize(
    ("make", "function"),
    [(Recurrent, "lstm"), (lambda: Recurrent(nn.GRU), "gru")],
    ids=["LSTM", "GRU"],
)
def test_layers_without_a_rule_are_exact_and_say_what_they_cost(make, function):
    x, y = torch.randn(40, 3, 3), torch.arange(40) % 2
    net = to_bayesian_(make(), prior_scale=1.0, include=nn.Module)
    model = classifier(net, num_data=40)
    with pytest.warns(DviWarning) as caught:
        found, exact = squares_at_mean(model, x, y)
    assert_equal(found, exact)
    (text,) = [str(w.message) for w in caught]
    assert f"'net.layer.weight_ih_l0' is used by {function}, which has no rule" in text
    assert "40 backward passes in each step (with IVON, only before" in text and "smaller minibatches" in text
