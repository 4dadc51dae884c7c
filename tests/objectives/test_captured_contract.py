# SPDX-License-Identifier: Apache-2.0
"""What captured steps do not follow: a broken contract is an error that names the first void step."""

import re
import weakref
from collections import ChainMap
from contextvars import ContextVar
from types import SimpleNamespace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi as dvi
from pyro_dvi.errors import CaptureError
from pyro_dvi.objectives import Captured, SampledELBO
from pyro_dvi.objectives.schedules import LinearWarmup
from pyro_dvi.training import History, fit
from pyro_dvi.training.known_code import runs_known_code

X = torch.linspace(-1, 1, 20)
Y = 2 * X


class Base:
    factor = 1.0


def in_a_list():
    kept = [1.0]
    return lambda: kept[0], lambda: kept.__setitem__(0, 0.3)


def in_a_closure():
    factor = 1.0

    def change():
        nonlocal factor
        factor = 0.3

    return lambda: factor, change


def in_a_class():
    Base.factor = 1.0
    return lambda: Base.factor, lambda: setattr(Base, "factor", 0.3)


def in_an_object():
    kept = SimpleNamespace(factor=1.0)
    return lambda: kept.factor, lambda: setattr(kept, "factor", 0.3)


def in_an_array():
    kept = np.ones(1)
    return lambda: float(kept[0]), lambda: kept.fill(0.3)


def in_a_tensor_of_a_list():
    kept = [torch.ones(())]
    return lambda: kept[0], lambda: kept.__setitem__(0, torch.tensor(0.3))


def in_a_set():
    kept = {1.0}
    return lambda: 1.0 if kept else 0.3, kept.clear


def in_the_keys_of_a_dictionary():
    kept = {1.0: None}
    return lambda: list(kept)[-1], lambda: kept.update({0.3: None})


def behind_a_weak_reference():
    kept = Base()
    kept.factor = 1.0
    reference = weakref.ref(kept)
    return lambda: reference().factor, lambda: setattr(kept, "factor", 0.3)


def in_a_chain_of_dictionaries():
    kept = {"factor": 1.0}
    chain = ChainMap({}, kept)
    return lambda: chain["factor"], lambda: kept.update(factor=0.3)


def in_the_context():
    kept = ContextVar("factor", default=1.0)
    return kept.get, lambda: kept.set(0.3)


def in_a_metaclass():
    kind = type("Kind", (type,), {"factor": 1.0})
    return lambda: kind("Of", (), {}).factor, lambda: setattr(kind, "factor", 0.3)


def in_the_data_set():
    loader = DataLoader(TensorDataset(X))
    loader.dataset.factor = 1.0
    return lambda: loader.dataset.factor, lambda: setattr(loader.dataset, "factor", 0.3)


def in_an_objective():
    elbo = SampledELBO()
    return lambda: elbo.kl_weight, lambda: setattr(elbo, "kl_weight", 0.3)


OUTSIDE = [
    in_a_list,
    in_a_closure,
    in_a_class,
    in_an_object,
    in_an_array,
    in_a_tensor_of_a_list,
    in_a_set,
    in_the_keys_of_a_dictionary,
    behind_a_weak_reference,
    in_a_chain_of_dictionaries,
    in_the_context,
    in_a_metaclass,
    in_the_data_set,
    in_an_objective,
]


def line(factor):
    """Return a model whose factor is read where captured steps do not look."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 20):
            pyro.sample("y", dist.Normal(w * x * factor(), 0.5), obs=y)

    return model


def svi_of(model, elbo):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    return SVI(model, AutoDelta(model), dvi.optim.Adam({"lr": 0.05}), loss=elbo)


@pytest.mark.every(4)
@pytest.mark.parametrize("place", OUTSIDE, ids=lambda place: place.__name__)
def test_the_error_names_the_first_void_step(place):
    losses = []
    for elbo in (SampledELBO(), Captured(SampledELBO())):
        factor, change = place()
        svi = svi_of(line(factor), elbo)
        found: list[float] = []
        losses.append(found)
        for k in range(60):
            if k == 30:
                change()
            try:
                found.append(svi.step(X, Y))
            except CaptureError as error:
                first = int(re.search("since step ([0-9]+)", str(error)).group(1))
                assert elbo.step == k  # the step was not taken
                break
    ordinary, captured = losses
    assert captured[: first - 1] == ordinary[: first - 1]
    assert first - 1 <= 30 < len(captured) < 60


def test_training_may_go_on_after_the_error():
    factor, change = in_a_list()
    elbo = Captured(SampledELBO())
    svi = svi_of(line(factor), elbo)
    for _ in range(25):
        svi.step(X, Y)
    change()
    with pytest.raises(CaptureError, match="differs in a replay in step"):
        for _ in range(40):
            svi.step(X, Y)
    losses = [svi.step(X, Y) for _ in range(300)]
    assert losses[-1] < 0.5 * losses[0]
    assert len(elbo.recordings) == 1


def test_the_first_step_after_a_callback_is_compared():
    factor, change = in_a_list()
    history = History()
    with pytest.raises(CaptureError, match="in step 91"):
        fit(
            svi_of(line(factor), SampledELBO()),
            [(X, Y)] * 3,
            40,
            capture=True,
            progress=False,
            callbacks=[lambda state: change() if state.epoch == 30 else None],
            history=history,
        )
    assert history.step == 90


def test_fit_stops_where_the_contract_is_broken():
    factor, change = in_a_list()

    class Batches(list):
        passes = 0

        def __iter__(self):
            self.passes += 1
            for k, batch in enumerate(super().__iter__()):
                if (self.passes, k) == (20, 1):
                    change()
                yield batch

    history = History()
    with pytest.raises(CaptureError, match="are void"):
        fit(
            svi_of(line(factor), SampledELBO()),
            Batches([(X, Y)] * 3),
            60,
            capture=True,
            progress=False,
            history=history,
        )
    assert 57 <= history.step < 180


def test_a_handler_with_other_data_breaks_it():
    data = {"z": torch.tensor(0.5)}

    def model(x, y=None):
        w, z = pyro.sample("w", dist.Normal(0.0, 1.0)), pyro.sample("z", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 20):
            pyro.sample("y", dist.Normal(w * x + z, 0.5), obs=y)

    svi = svi_of(poutine.condition(model, data=data), Captured(SampledELBO()))
    for _ in range(20):
        svi.step(X, Y)
    data["z"] = torch.tensor(-0.5)
    with pytest.raises(CaptureError):
        for _ in range(40):
            svi.step(X, Y)


# By default ---------------------------------------------------------------------------------------------------------


class Own(nn.Module):
    """A network with code of its own, which counts its runs."""

    def __init__(self):
        super().__init__()
        self.layer, self.runs = nn.Linear(2, 2), [0]

    def forward(self, x):
        self.runs[0] += 1
        return self.layer(x)


def classifier_of(net, **priors):
    return dvi.classifier(dvi.to_bayesian_(net, **priors), num_data=24)


def torchs():
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Dropout(), nn.Linear(3, 2))


def with_weight_norm():
    net = torchs()
    nn.utils.parametrizations.weight_norm(net[0])
    return net


def with_a_hook():
    net = torchs()
    net[2].register_forward_hook(lambda module, args, out: out)
    return net


def with_a_patched_method():
    net = torchs()
    net[2].forward = lambda x: x.tanh()
    return net


class OwnELBO(dvi.TaylorELBO):
    pass


class OwnGuide(dvi.MeanFieldGuide):
    pass


class OwnNormal(dist.Normal):
    pass


KNOWN = {
    "layers of torch": lambda: (classifier_of(torchs()), dvi.MeanFieldGuide, dvi.TaylorELBO()),
    "transformer": lambda: (
        classifier_of(nn.TransformerEncoderLayer(4, 2, 8)),
        dvi.MeanFieldGuide,
        dvi.TaylorELBO(),
    ),
    "weight norm": lambda: (classifier_of(with_weight_norm()), dvi.MeanFieldGuide, dvi.TaylorELBO()),
    "Pyro's guide": lambda: (classifier_of(torchs()), AutoDelta, SampledELBO()),
    "learned scale": lambda: (
        classifier_of(torchs(), prior_scale=dvi.bayesian.LearnedScale()),
        dvi.MeanFieldGuide,
        dvi.TaylorELBO(),
    ),
    "prior by name": lambda: (
        classifier_of(torchs(), prior_scale=lambda name, value: 1.0 if "bias" in name else 0.5),
        dvi.MeanFieldGuide,
        dvi.TaylorELBO(),
    ),
    "schedule": lambda: (
        classifier_of(torchs()),
        dvi.NaturalGradientGuide,
        dvi.NaturalGradientELBO(kl_weight=LinearWarmup(10, start=0.1)),
    ),
    "regressor": lambda: (
        dvi.regressor(dvi.to_bayesian_(nn.Linear(2, 1)), 24, dvi.bayesian.LearnedScale()),
        dvi.MultiplicativeNoiseGuide,
        dvi.MomentPropagationELBO(),
    ),
}
UNKNOWN = {
    "own class": lambda: (classifier_of(Own()), dvi.MeanFieldGuide, dvi.TaylorELBO()),
    "own class inside": lambda: (
        classifier_of(nn.Sequential(Own(), nn.Linear(2, 2))),
        dvi.MeanFieldGuide,
        dvi.TaylorELBO(),
    ),
    "hook": lambda: (classifier_of(with_a_hook()), dvi.MeanFieldGuide, dvi.TaylorELBO()),
    "patched method": lambda: (classifier_of(with_a_patched_method()), dvi.MeanFieldGuide, dvi.TaylorELBO()),
    "own model": lambda: (line(lambda: 1.0), dvi.MeanFieldGuide, dvi.TaylorELBO()),
    "own guide": lambda: (classifier_of(torchs()), OwnGuide, dvi.TaylorELBO()),
    "own objective": lambda: (classifier_of(torchs()), dvi.MeanFieldGuide, OwnELBO()),
    "own prior": lambda: (
        classifier_of(torchs(), prior_scale=OwnNormal(0.0, 1.0)),
        dvi.MeanFieldGuide,
        dvi.TaylorELBO(),
    ),
}


@pytest.mark.parametrize("name", [*KNOWN, *UNKNOWN])
def test_known_code(name):
    model, guide, elbo = {**KNOWN, **UNKNOWN}[name]()
    assert runs_known_code(model, guide(model), elbo) == (name in KNOWN)


@pytest.mark.every(3)
@pytest.mark.parametrize("capture", [None, True, False])
def test_code_of_ones_own_is_captured_when_asked(capture):
    net = Own()
    model = classifier_of(net)
    svi = SVI(model, dvi.MeanFieldGuide(model), dvi.optim.Adam(0.01), loss=dvi.TaylorELBO())
    data = TensorDataset(torch.randn(24, 2), torch.arange(24) % 2)
    fit(svi, DataLoader(data, 8), 40, capture=capture, progress=False)
    assert net.runs[0] < 30 if capture else net.runs[0] >= 120
