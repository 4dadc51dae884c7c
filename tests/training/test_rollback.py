# SPDX-License-Identifier: Apache-2.0
"""Where numbers are not finite, parameters go back to those of the last good epoch; other errors pass."""

import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam, PyroOptim
from torch import nn

from pyro_dvi.errors import DataError, NonFiniteError
from pyro_dvi.training import History, fit
from pyro_dvi.variational_laplace.taylor import TaylorELBO
from tests.training.problems import (
    BOTH,
    METHODS,
    Net,
    module_of,
    same,
    sequence,
    svi_of,
    weights_of,
)


class Poison:
    """A loader whose batches turn bad at one step."""

    def __init__(self, at, spoil):
        self.at, self.spoil, self.count = at, spoil, 0

    def __iter__(self):
        for x, y in sequence():
            self.count += 1
            if self.count == self.at:
                x = self.spoil(x)
            yield x, y


# Pyro's own ELBOs also warn of a NaN; that is theirs to say.
NAN_WARNING = pytest.mark.filterwarnings("ignore:Encountered (NaN|\\+?-?inf):UserWarning")


@pytest.mark.every(3)
@NAN_WARNING
@BOTH
@pytest.mark.parametrize("elbo_module", [False, True], ids=["SVI", "ELBOModule"])
@pytest.mark.parametrize("validate", [False, True], ids=["unvalidated", "validated"])
def test_nan_restores_the_last_good_epoch(method, elbo_module, validate):
    def spoil(x):
        x = x.clone()
        x[0, 0] = math.nan
        return x

    kept = []
    with pyro.settings.context(validate_distributions_pyro=validate), pyro.validation_enabled(validate):
        options: dict[str, Any] = {"progress": False}
        if elbo_module:
            target, options["optimizer"] = module_of(method)
        else:
            target = svi_of(method)
        options["callbacks"] = [lambda state: kept.append(weights_of(target))]
        with pytest.raises(NonFiniteError) as caught:
            fit(target, Poison(8, spoil), 5, **options)
    error = caught.value
    assert (error.epoch, error.step) == (3, 8)
    assert "argument 1 (1 of 16 elements)" in str(error)
    assert len(error.history) == 2 and error.history.step == 7
    assert error.history.stopped == "non-finite"
    assert same(weights_of(target), kept[-1])
    # Training goes on from there as it would have.
    options.pop("callbacks")
    history = fit(target, sequence(), 1, history=error.history, **options)
    assert history["epoch"] == [1, 2, 3]


@NAN_WARNING
@BOTH
def test_divergence_in_the_first_epoch_restores_the_start(method):
    svi = svi_of(method)
    svi.guide(*sequence()[0])
    start = weights_of(svi)
    with pytest.raises(NonFiniteError, match="as they were before training") as caught:
        fit(svi, Poison(2, lambda x: x * math.inf), 1, progress=False)
    assert (caught.value.epoch, caught.value.step) == (1, 2)
    assert same(weights_of(svi), start)
    assert all(math.isfinite(loss) for loss in caught.value.history.steps["loss"])


def test_bad_parameters_are_named():
    svi = svi_of("MeanFieldGuide + TaylorELBO")

    def spoil(state):
        with torch.no_grad():
            dict(state.guide.named_parameters())["scales.last.weight_unconstrained"].fill_(math.nan)

    # The callback comes after the epoch's snapshot: the next step meets the bad parameter.
    with pytest.raises(NonFiniteError, match=r"parameters: MeanFieldGuide\.scales\.last\.weight[;.]"):
        fit(svi, sequence(), 2, callbacks=[spoil], progress=False)
    assert all(torch.isfinite(value).all() for value in weights_of(svi).values())


def test_bad_terms_are_named():
    class Broken(TaylorELBO):
        def evaluate(self, *args, **kwargs):
            terms = super().evaluate(*args, **kwargs)
            if self.step == 4:
                terms["penalty"] = terms["penalty"] * math.inf
                terms["loss"] = terms["loss"] + terms["penalty"]
            return terms

    svi = svi_of("MeanFieldGuide + TaylorELBO", elbo=Broken())
    with pytest.raises(NonFiniteError, match="terms of the loss: penalty=inf"):
        fit(svi, sequence(), 3, progress=False)
    assert svi.loss.__self__.step == 3


@NAN_WARNING
def test_an_update_that_overflows_is_found_at_the_end_of_the_epoch():
    svi = svi_of("AutoNormal + Trace_ELBO", optimizer=pyro.optim.SGD({"lr": 1e38}))
    with pytest.raises(NonFiniteError):
        fit(svi, sequence()[:1], 1, progress=False)


class Explodes(PyroOptim):
    """Makes every parameter huge, but finite, at one step."""

    calls = 0

    def __call__(self, params, *args, **kwargs):
        super().__call__(params, *args, **kwargs)
        type(self).calls += 1
        if type(self).calls == type(self).at:
            with torch.no_grad():
                for p in params:
                    p.mul_(type(self).factor)


@pytest.mark.every(5)
@NAN_WARNING
@BOTH
@pytest.mark.parametrize("factor", [1e31, -1e31])
@pytest.mark.parametrize("family", ["logits", "scale"])
@pytest.mark.parametrize(
    "at_step", [2, 3, 5], ids=["within an epoch", "in its last step", "in the next epoch"]
)
def test_parameters_that_are_finite_but_far_too_large_are_a_divergence(method, factor, family, at_step):
    class Extreme(Net):
        def forward(self, x, y=None):
            f = self.last(nn.functional.softplus(self.norm(self.first(x)))).squeeze(-1)
            with pyro.plate("data", self.num_data, subsample_size=len(x)):
                fn = (
                    dist.Normal(f - f, f.exp())
                    if family == "scale"
                    else dist.Bernoulli(logits=(f * f - f * f))
                )
                return pyro.sample("obs", fn, obs=None if y is None else (y > 0).to(f))

    class Once(Explodes):
        at = at_step

    Once.factor = factor
    torch.manual_seed(0)
    guide_class, elbo_class = METHODS[method]
    model = Extreme()
    svi = SVI(model, guide_class(model), Adam({"lr": 1e-4}), elbo_class())
    svi.guide(*sequence()[0])
    start = weights_of(svi)
    svi.optim.__class__ = Once
    kept = [start]
    with pytest.raises(NonFiniteError, match="the largest parameter is|Not finite") as caught:
        fit(svi, sequence(), 3, progress=False, callbacks=[lambda state: kept.append(weights_of(svi))])
    assert caught.value.step == at_step + 1
    assert same(weights_of(svi), kept[at_step // 4])
    assert caught.value.history.stopped == "non-finite"


@NAN_WARNING
@BOTH
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", [1, 2])
def test_bad_numbers_in_the_first_batch_are_reported_as_in_later_ones(method, bad, at):
    def spoil(x):
        x = x.clone()
        x[0, 0] = bad
        return x

    svi = svi_of(method)
    with pytest.raises(NonFiniteError, match=r"argument 1 \(1 of 16 elements\).*Drop or mask") as caught:
        fit(svi, Poison(at, spoil), 1, progress=False)
    assert (caught.value.epoch, caught.value.step) == (1, at)
    assert fit(svi, sequence(), 1, history=caught.value.history, progress=False).epoch == 1


def test_an_error_of_a_batch_that_would_fail_before_too_passes_and_changes_nothing():
    svi = svi_of("AutoNormal + Trace_ELBO")
    fit(svi, sequence(), 1, progress=False)
    kept = svi.guide.median()
    x, y = sequence()[0]
    with pytest.raises(ValueError, match="not broadcastable"):
        fit(svi, [(x, y[:-1])], 1, progress=False)
    assert same(svi.guide.median(), kept)


@BOTH
@pytest.mark.parametrize("at", [5, 6, 9])
def test_an_error_that_comes_once_in_the_model_passes_and_changes_nothing(method, at):
    svi = svi_of(method)
    fit(svi, sequence(), 1, progress=False)
    plain, steps = svi.model.norm.forward, []

    def failing(x):
        if svi.model.training and torch.is_grad_enabled():  # a step, no evaluation
            steps.append(weights_of(svi))
            if len(steps) == at:
                raise ValueError("my own server did not answer")
        return plain(x)

    svi.model.norm.forward = failing
    history = History()
    with pytest.raises(ValueError, match="^my own server did not answer"):
        fit(svi, sequence(), 5, history=history, progress=False)
    assert same(weights_of(svi), steps[-1])
    assert history.stopped is None


def test_the_message_of_a_divergence_quotes_the_error_as_it_is():
    svi = svi_of("AutoNormal + Trace_ELBO")
    fit(svi, sequence(), 1, progress=False)
    plain = svi.model.norm.forward

    def failing(x):
        if svi.model.first.weight.isnan().any():
            raise ValueError("iPad and iPhone differ")
        return plain(x)

    def spoil(state):
        with torch.no_grad():
            svi.model.first.weight[0, 0] = math.nan

    svi.model.norm.forward = failing
    with pytest.raises(
        NonFiniteError, match=r"step 4: iPad and iPhone differ\. Not finite: parameters: first\."
    ):
        fit(svi, sequence(), 5, callbacks=[spoil], history=History(), progress=False)


def test_an_error_of_the_first_batch_is_explained_with_any_guide():
    svi = svi_of("AutoNormal + Trace_ELBO")
    with pytest.raises(DataError, match=r"float32 \(3, 5\).*shapes cannot be multiplied") as caught:
        fit(svi, [(torch.ones(3, 5), torch.ones(3))], 1, progress=False)
    assert "Trace Shapes" not in str(caught.value)


@BOTH
@pytest.mark.parametrize("epochs_before", [0, 1])
def test_an_ordinary_error_in_a_model_with_a_mask_of_minus_infinity_passes(method, epochs_before):
    svi = svi_of(method)
    svi.model.first.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
    if epochs_before:
        fit(svi, sequence(), 1, progress=False)
    with pytest.raises((RuntimeError, DataError), match="shapes cannot be multiplied"):
        fit(svi, [(torch.ones(3, 5), torch.ones(3))], 1, progress=False)
