# SPDX-License-Identifier: Apache-2.0
"""One torch optimizer for all parameters is a drop-in for Pyro's, which makes one for each."""

import copy
import math
import pickle
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceGraph_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import PyroOptim
from pyro.optim.clipped_adam import ClippedAdam

from pyro_dvi.optim import learning_rates
from pyro_dvi.optim.joint_optim import JointOptim

Adam = torch.optim.Adam
X = torch.randn(30, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def regression(x=X, grown=False):
    """Weights, a noise scale with a constraint, and a latent of a branch that comes later."""
    w = pyro.sample("w", dist.Normal(x.new_zeros(3, 2), 1.0).to_event(2))
    noise = pyro.sample("noise", dist.LogNormal(x.new_zeros(2), 1.0).to_event(1))
    shift = pyro.sample("shift", dist.Normal(x.new_zeros(2), 1.0).to_event(1)) if grown else 0.0
    pyro.sample("y", dist.Normal(x @ w + shift, noise).to_event(2), obs=x @ x.new_ones(3, 2))


def functional_guide(x=X, grown=False):
    """Parameters of a function, one of them constrained, which live in Pyro's store alone."""
    positive = dist.constraints.positive
    for name, size, kind in (("w", (3, 2), dist.Normal), ("noise", (2,), dist.LogNormal)):
        loc = pyro.param(f"{name}_loc", lambda size=size: x.new_zeros(size))
        scale = pyro.param(f"{name}_sigma", lambda size=size: 0.1 * x.new_ones(size), constraint=positive)
        pyro.sample(name, kind(loc, scale).to_event(len(size)))
    if grown:
        loc = pyro.param("shift_loc", lambda: x.new_zeros(2))
        scale = pyro.param("shift_sigma", lambda: 0.1 * x.new_ones(2), constraint=positive)
        pyro.sample("shift", dist.Normal(loc, scale).to_event(1))


def trained(optim, steps=20, guide=None, loss=Trace_ELBO, between=lambda step, svi: None, grows_at=1000):
    """Parameters after some steps; ``between`` is called before each."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    svi = SVI(regression, guide or AutoNormal(regression), optim, loss())
    for step in range(steps):
        between(step, svi)
        svi.step(X, grown=step >= grows_at)
    return {name: value.detach().clone() for name, value in pyro.get_param_store().named_parameters()}


def assert_same(one, other, rtol):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=rtol, atol=rtol)


OPTIONS = {
    "dictionary": {"lr": 0.05},
    "scales apart": learning_rates(0.05),
    "function of two names": lambda module, name: {"lr": 0.05 if module else 0.01},
}


@pytest.mark.every(4)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("clip", [None, {"clip_norm": 1.0}, {"clip_value": 0.5}])
def test_numbers_are_those_of_pyro(options, clip):
    assert_same(trained(JointOptim(Adam, options, clip)), trained(PyroOptim(Adam, options, clip)), rtol=1e-12)


def clipped_together(clip_args, steps=8):
    """Plain descent, with the gradients of each step and how far it moves the parameters."""
    gradients, moved, before = [], [], {}

    def between(step, svi):
        store = pyro.get_param_store()
        if step == 0:
            handed_on = svi.optim

            def stepped(params):
                params = list(params)
                gradients.append({store.param_name(p): p.grad.clone() for p in params})
                before.update({store.param_name(p): p.detach().clone() for p in params})
                handed_on(params)
                moved.append({n: before[n] - p.detach() for n, p in store.named_parameters()})

            svi.optim = stepped

    trained(JointOptim(torch.optim.SGD, {"lr": 1e-3}, clip_args), steps, between=between)
    return gradients, moved


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("others", [{}, {"clip_value": 30.0}])
def test_gradients_are_clipped_together(norm_type, others):
    """All are divided by the norm of all where it exceeds the bound, after each has been clipped by itself."""
    shortened = 0
    options = {"max_norm": 20.0, **({} if norm_type == 2.0 else {"norm_type": norm_type}), **others}
    for gradients, moved in zip(*clipped_together(options), strict=True):
        most = others.get("clip_value", math.inf)
        limited = {name: gradient.clamp(-most, most) for name, gradient in gradients.items()}
        norm = torch.cat([gradient.flatten() for gradient in limited.values()]).norm(norm_type)
        shortened += int(norm > 20)
        expected = {name: 1e-3 * gradient / max(1.0, float(norm) / 20) for name, gradient in limited.items()}
        assert_same(moved, expected, rtol=1e-6)
    assert shortened > 2


@pytest.mark.parametrize("kernel", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_kernels_that_are_named_are_used(kernel):
    options = learning_rates(0.05, **kernel)
    ours = JointOptim(Adam, options)
    assert_same(trained(ours), trained(PyroOptim(Adam, options)), rtol=1e-13)
    for optimizer in ours.optim_objs.values():
        assert {name: optimizer.param_groups[0][name] for name in kernel} == kernel


CONSTRUCTORS = [
    getattr(torch.optim, name) for name in ("SGD", "AdamW", "RMSprop", "Adagrad", "NAdam", "Rprop")
]
OTHERS = [
    (torch.optim.SGD, {"momentum": 0.9}),
    (ClippedAdam, {"lrd": 0.9}),
]  # the latter changes its rate itself


@pytest.mark.every(4)
@pytest.mark.parametrize(("constructor", "options"), [(c, {}) for c in CONSTRUCTORS] + OTHERS)
def test_every_optimizer_also_where_parameters_come_later(constructor, options):
    ours, theirs = (
        trained(make(constructor, {"lr": 0.005, **options}), guide=functional_guide, grows_at=10)
        for make in (JointOptim, PyroOptim)
    )
    assert "shift_sigma" in ours
    assert_same(ours, theirs, rtol=1e-11)


@pytest.mark.parametrize("constructor", [torch.optim.SGD, torch.optim.SparseAdam])
@pytest.mark.parametrize("dense_before", [True, False])
def test_sparse_gradients(constructor, dense_before):
    """The fused kernels of torch have none."""
    options = {"lr": 0.1, "momentum": 0.9} if constructor is torch.optim.SGD else {"lr": 0.1}
    after = []
    for make in (JointOptim, PyroOptim):
        pyro.clear_param_store()
        table, optim = pyro.param("table", torch.ones(5, 2)), make(constructor, options)
        if dense_before and constructor is torch.optim.SGD:
            table.grad = torch.ones(5, 2)
            optim([table])
        for rows in ([0, 1], [1, 1]):
            table.grad = None
            torch.nn.functional.embedding(torch.tensor(rows), table, sparse=True).square().sum().backward()
            optim([table])
        after.append(table.detach().clone())
    torch.testing.assert_close(*after)


@pytest.mark.parametrize("loss", [Trace_ELBO, TraceGraph_ELBO])
def test_functional_guides_and_latents_that_come_later(loss):
    optim = JointOptim(Adam, learning_rates(0.05, scale_pattern="_sigma$"))
    plain = PyroOptim(Adam, optim.pt_optim_args)
    ours, theirs = (trained(o, guide=functional_guide, loss=loss, grows_at=10) for o in (optim, plain))
    assert "shift_sigma" in ours
    assert_same(ours, theirs, rtol=1e-12)
    assert len(set(optim.optim_objs.values())) == 2


def test_parameters_of_another_step_stay_with_their_gradients():
    optim = JointOptim(torch.optim.SGD, {"lr": 1.0, "momentum": 0.9})
    one, other = pyro.param("one", torch.zeros(2)), pyro.param("other", torch.zeros(2))
    (one + other).sum().backward()
    optim([one, other])
    assert one.grad is None and other.grad is None
    (one + other).sum().backward()
    optim([one])
    torch.testing.assert_close(one.detach(), torch.full((2,), -2.9))
    torch.testing.assert_close(other.detach(), torch.full((2,), -1.0))
    assert one.grad is None and torch.equal(other.grad, torch.ones(2))


def test_mixed_dtypes_share_an_optimizer():
    optim = JointOptim(Adam, {"lr": 0.1})
    parameters = [
        pyro.param(str(dtype), torch.ones(3, dtype=dtype))
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
    ]
    for _ in range(3):
        sum((p.double() ** 2).sum() for p in parameters).backward()
        optim(parameters)
    assert len(set(optim.optim_objs.values())) == 1
    for p in parameters:
        torch.testing.assert_close(p.detach().double(), torch.full((3,), 0.7).double(), rtol=0.01, atol=0)


@pytest.mark.parametrize("layout", [lambda g: g.t().contiguous().t(), lambda g: g[:1].expand(3, 2)])
@pytest.mark.parametrize("constructor", [Adam, torch.optim.SGD])
def test_gradients_of_another_layout(constructor, layout):
    """The fused kernels of torch read them wrongly."""
    gradient = layout(torch.arange(6.0).reshape(3, 2) + 1)
    after = []
    for make in (JointOptim, PyroOptim):
        pyro.clear_param_store()
        weights, optim = pyro.param("weights", torch.zeros(3, 2)), make(constructor, {"lr": 0.1})
        for factor in (1.0, -0.5):
            weights.grad = factor * gradient if factor < 0 else gradient
            optim([weights])
        after.append(weights.detach().clone())
    torch.testing.assert_close(*after)


@pytest.mark.parametrize("change", [lambda m: m.double(), lambda m: m.to(memory_format=torch.channels_last)])
def test_a_module_that_was_converted_keeps_its_moments(change):
    def weights(optim, convert):
        torch.manual_seed(0)
        pyro.clear_param_store()
        layer = torch.nn.Conv2d(2, 3, 2)
        for step in range(6):
            if step == 3:
                convert(layer)
            weight = layer.weight
            pyro.get_param_store()._params, pyro.get_param_store()._param_to_name = (
                {"w": weight},
                {weight: "w"},
            )
            (layer.weight.flatten() * torch.arange(24.0)).sum().backward()
            optim([weight])
        return layer.weight.detach().clone()

    converted = weights(JointOptim(Adam, {"lr": 0.1}), change)
    kept = weights(JointOptim(Adam, {"lr": 0.1}), lambda layer: None)
    torch.testing.assert_close(converted.float(), kept)


@pytest.mark.parametrize("constructor", ["Adam", "SGD", "Adagrad", "RMSprop"])
def test_two_devices_and_a_module_that_moves(constructor, device):
    """The module moves between two steps; a parameter beside it stays on the CPU."""

    def weights(make, moves):
        pyro.clear_param_store()
        torch.manual_seed(0)
        layer, optim = torch.nn.Linear(3, 2), make(getattr(torch.optim, constructor), {"lr": 0.1})
        beside = pyro.param("beside", torch.ones(2))
        for step in range(6):
            if moves and step == 3:
                layer.to(device)
            parameters = [pyro.param("weight", layer.weight), pyro.param("bias", layer.bias), beside]
            for size, parameter in enumerate(parameters):
                parameter.grad = parameter.detach() * (1 + size)
            optim(parameters)
            for parameter in parameters:
                parameter.grad = None
        assert parameters[0].device.type == (device.type if moves else "cpu")
        return [parameter.detach().cpu() for parameter in parameters]

    for ours, theirs in zip(weights(JointOptim, True), weights(PyroOptim, False), strict=True):
        torch.testing.assert_close(ours, theirs)


# -- States ---------------------------------------------------------------------------------------

MAKERS = {"ours": JointOptim, "Pyro's": PyroOptim}


def replaced(before, after, options=OPTIONS["scales apart"]):
    """Train with an optimizer whose place another one takes in the middle, in the state of the first."""

    def between(step, svi):
        if step == 10:
            state = pickle.loads(pickle.dumps(svi.optim.get_state()))
            svi.optim = after(Adam, options)
            svi.optim.set_state(state)

    return trained(before(Adam, options), between=between)


@pytest.mark.every(3)
@pytest.mark.parametrize("after", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("before", MAKERS.values(), ids=MAKERS)
def test_states_are_exchanged_with_pyro(before, after):
    uninterrupted = trained(PyroOptim(Adam, OPTIONS["scales apart"]))
    assert_same(replaced(before, after), uninterrupted, rtol=1e-12)


def test_a_state_brings_its_options_and_joins_parameters_again():
    optim = JointOptim(Adam, {"lr": 0.5})
    trained(optim, steps=2)
    state = optim.get_state()
    for held in state.values():
        held["param_groups"][0]["lr"] = 0.25
    optim.set_state(state)
    (held,) = set(optim.optim_objs.values())
    assert held.param_groups[0]["lr"] == 0.25 and len(held.param_groups[0]["params"]) == 4


def test_a_state_acts_at_once_and_is_copied():
    """Back to an earlier state, parameters included, and on from there: the same steps again."""
    optim = JointOptim(Adam, OPTIONS["scales apart"])
    kept: dict[str, Any] = {}

    def between(step, svi):
        if step == 5:
            kept["state"], kept["random"] = copy.deepcopy(optim.get_state()), torch.get_rng_state()
            kept["weights"] = {k: v.detach().clone() for k, v in pyro.get_param_store().named_parameters()}
        if step == 10:
            optim.set_state(kept["state"])
            torch.set_rng_state(kept["random"])
            with torch.no_grad():
                for name, value in pyro.get_param_store().named_parameters():
                    value.copy_(kept["weights"][name])

    again = trained(optim, steps=15, between=between)
    assert_same(again, trained(JointOptim(Adam, OPTIONS["scales apart"]), steps=10), rtol=0)
    steps = {int(held["state"][0]["step"]) for held in kept["state"].values()}
    assert steps == {5}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_go_on_with_the_parameters_of_the_store(copied):
    def between(step, svi):
        if step == 10:
            svi.optim = copied(svi.optim)

    options = OPTIONS["scales apart"]
    through = trained(JointOptim(Adam, options, {"clip_norm": 1.0}), between=between)
    assert_same(through, trained(JointOptim(Adam, options, {"clip_norm": 1.0})), rtol=0)


def test_files(tmp_path):
    def between(step, svi):
        if step == 10:
            svi.optim.save(tmp_path / "optim")
            svi.optim = JointOptim(Adam, {"lr": 0.05})
            svi.optim.load(tmp_path / "optim")
            assert len(svi.optim.get_state()) == 4  # though no step was taken

    through = trained(JointOptim(Adam, {"lr": 0.05}), between=between)
    assert_same(through, trained(JointOptim(Adam, {"lr": 0.05})), rtol=0)


def test_a_state_of_another_optimizer_leaves_things_as_they_were():
    optim = JointOptim(Adam, {"lr": 0.05})
    trained(optim, steps=2)
    name = "AutoNormal.locs.w"
    wrong = {name: {**optim.get_state()[name], "param_groups": []}}
    with pytest.raises(ValueError, match=r"."):
        optim.set_state(wrong)
    assert int(optim.get_state()[name]["state"][0]["step"]) == 2
