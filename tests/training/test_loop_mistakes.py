# SPDX-License-Identifier: Apache-2.0
"""A table of mistakes: what is passed, what it raises, and what the message names."""

import pyro
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam, ExponentialLR
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pyro_dvi.errors import ArgumentError, DataError, GuideError, UnsupportedError
from pyro_dvi.training import EarlyStopping, fit
from pyro_dvi.variational_laplace.taylor import TaylorELBO
from tests.training.problems import Net, data, module_of, sequence, svi_of, weights_of

NET = "AutoNormal + Trace_ELBO"


def svi():
    return svi_of(NET)


def short_loader():
    return DataLoader(TensorDataset(*data()), batch_size=100, drop_last=True)


class EmptyIterable:
    def __iter__(self):
        return iter(())


class OnlyOnce:
    """Iterable again and again, but with nothing left the second time."""

    def __init__(self):
        self.source = iter(sequence())

    def __iter__(self):
        yield from self.source


def module_route(**options):
    module, optimizer = module_of(NET)
    return fit(module, sequence(), 1, **{"optimizer": optimizer, **options}, progress=False)


def unfinished_guide():
    model = Net()
    module = Trace_ELBO()(model, AutoNormal(model))
    return fit(module, sequence(), 1, optimizer=torch.optim.Adam(model.parameters()), progress=False)


def stale_optimizer():
    module, _ = module_of(NET)
    return fit(module, sequence(), 1, optimizer=torch.optim.Adam(module.model.parameters()), progress=False)


def svi_with_local_parameters():
    with pyro.settings.context(module_local_params=True):
        return fit(svi(), sequence(), 1, progress=False)


def foreign_scheduler():
    optimizer = ExponentialLR({"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.1}, "gamma": 0.5})
    return fit(svi(), sequence(), 1, lr_schedule=optimizer, progress=False)


def functional_module_route():
    guide = nn.Linear(1, 1)
    return fit(Trace_ELBO()(lambda: None, guide), [()], 1, optimizer=torch.optim.Adam(guide.parameters()))


def run(loader=None, epochs=1, **options):
    return fit(svi(), sequence() if loader is None else loader, epochs, progress=False, **options)


def loss_without_gradients(loss):
    model = Net()
    target = SVI(model, AutoNormal(model), Adam({"lr": 0.1}), loss=loss)
    return fit(target, sequence(), 1, progress=False)


MISTAKES = [
    ("zero epochs", lambda: run(epochs=0), ArgumentError, "epochs must be a positive whole number, not 0"),
    ("negative epochs", lambda: run(epochs=-3), ArgumentError, "epochs must be a positive whole number"),
    ("half an epoch", lambda: run(epochs=0.5), ArgumentError, "epochs must be a positive whole number"),
    ("boolean epochs", lambda: run(epochs=True), ArgumentError, "epochs must be a positive whole number"),
    ("empty list", lambda: run([]), DataError, "loader is empty"),
    ("drop_last of a small data set", lambda: run(short_loader()), DataError, "drop_last=True"),
    ("nothing yielded", lambda: run(EmptyIterable()), DataError, "no batch in epoch 1"),
    (
        "exhausted generator",
        lambda: run((b for b in sequence()), 2),
        DataError,
        "generator.*ends after one pass",
    ),
    ("exhausted iterable", lambda: run(OnlyOnce(), 2), DataError, "no batch in epoch 2"),
    ("tensor as loader", lambda: run(torch.ones(3, 2)), ArgumentError, "rows would be treated as batches"),
    (
        "pair as loader",
        lambda: run([torch.ones(3, 2), torch.ones(3)]),
        ArgumentError,
        "a list of tensors, which",
    ),
    (
        "batch as loader",
        lambda: run((torch.ones(3, 2), torch.ones(3))),
        ArgumentError,
        r"one batch: pass \[\(x, y\)\]",
    ),
    ("not iterable", lambda: run(3), ArgumentError, "must yield batches"),
    (
        "model instead of SVI",
        lambda: fit(Net(), sequence(), 1),
        ArgumentError,
        "Expected SVI.*not Net",
    ),
    (
        "patience alone",
        lambda: run(validate=lambda: 1.0, early_stopping=3),
        ArgumentError,
        r"early_stopping must .*EarlyStopping\(patience=10\), not 3",
    ),
    ("model and guide", lambda: fit(Net(), "guide", sequence()), ArgumentError, "Expected SVI.model, guide"),
    (
        "class as loss",
        lambda: fit(SVI(Net(), None, Adam({"lr": 0.1}), loss=TaylorELBO), sequence(), 1),
        ArgumentError,
        r"write loss=TaylorELBO\(\)",
    ),
    (
        "method as loss",
        lambda: loss_without_gradients(TaylorELBO().loss),
        ArgumentError,
        r"method Objective.loss of .*, has no gradient.*loss=elbo instead of loss=elbo.loss",
    ),
    (
        "Pyro's method as loss",
        lambda: loss_without_gradients(Trace_ELBO().loss),
        ArgumentError,
        r"method Trace_ELBO.loss of .*, has no gradient",
    ),
    (
        "function without gradients as loss",
        lambda: loss_without_gradients(lambda *args: torch.tensor(1.0)),
        ArgumentError,
        "lambda.*, has no gradient.*depends on the parameters",
    ),
    (
        "optimizer for SVI",
        lambda: run(optimizer=torch.optim.SGD([torch.ones(1)])),
        ArgumentError,
        "has its own",
    ),
    ("no torch optimizer", lambda: module_route(optimizer=None), ArgumentError, "needs a torch optimizer"),
    (
        "Pyro optimizer",
        lambda: module_route(optimizer=Adam({"lr": 1})),
        ArgumentError,
        "work only with pyro.infer.SVI",
    ),
    ("optimizer before the guide", unfinished_guide, GuideError, "AutoNormal, which has none yet"),
    (
        "optimizer without the guide",
        stale_optimizer,
        GuideError,
        "lacks 4 parameters.*AutoNormal.locs.last",
    ),
    ("SVI with local parameters", svi_with_local_parameters, UnsupportedError, "module_local_params=True"),
    (
        "function with torch optimizer",
        functional_module_route,
        UnsupportedError,
        "model of the ELBOModule is a function",
    ),
    ("early stopping alone", lambda: run(early_stopping=EarlyStopping()), ArgumentError, "needs validate="),
    (
        "unknown metric",
        lambda: run(validate=lambda: {"nll": 1.0}, early_stopping=EarlyStopping(monitor="NLL")),
        ArgumentError,
        "monitors 'NLL', but validate reports .*nll",
    ),
    ("empty validation", lambda: run(validate=[]), DataError, "validate is empty"),
    (
        "validation once",
        lambda: run(validate=iter(sequence()), epochs=2),
        DataError,
        "validate is an iterator",
    ),
    ("no patience", lambda: EarlyStopping(patience=0), ArgumentError, "patience must be"),
    ("torch scheduler for SVI", foreign_scheduler, ArgumentError, "pass the scheduler to its optimizer"),
    (
        "number as schedule",
        lambda: module_route(lr_schedule=0.1),
        ArgumentError,
        "lr_schedule must be .*torch.optim.lr_scheduler",
    ),
]


@pytest.mark.parametrize(
    ("call", "error", "message"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES]
)
def test_mistake(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_differentiable_function_as_loss_trains():
    """Pyro differentiates it."""
    model = Net()
    target = SVI(model, AutoNormal(model), Adam({"lr": 0.1}), loss=Trace_ELBO().differentiable_loss)
    target.guide(*sequence()[0])
    before = weights_of(target)
    fit(target, sequence(), 1, progress=False)
    after = weights_of(target)
    assert not any(torch.equal(before[name], after[name]) for name in before if "locs" in name)


def test_settings_survive_a_mistake():
    """What fit sets for a while is undone when the model raises."""
    target = svi_of("MeanFieldGuide + TaylorELBO")
    target.model.eval()
    with pytest.raises(DataError, match=r"\(1, 9\)"):
        fit(target, DataLoader(TensorDataset(torch.ones(4, 9), torch.ones(4))), 1, progress=False)
    assert target.loss.__self__.num_data is None
    assert not any(module.training for module in target.model.modules())
