# SPDX-License-Identifier: Apache-2.0
"""The posterior of one task as the prior of the next: against sequential Bayesian linear regression."""

import copy
import io
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI
from torch import Tensor, nn

import pyro_dvi as dvi
from pyro_dvi.curvature import GGNDiagonal
from pyro_dvi.errors import ArgumentError, GuideError, ModelError, UnsupportedError
from pyro_dvi.guides import MeanField, MeanFieldGuide
from pyro_dvi.moment_propagation.elbo import MomentPropagationELBO
from pyro_dvi.moment_propagation.multiplicative_noise import MultiplicativeNoiseGuide
from pyro_dvi.natural_gradients.natural_elbo import NaturalGradientELBO
from pyro_dvi.natural_gradients.precision_guide import NaturalGradientGuide
from pyro_dvi.natural_gradients.updates import OGN
from pyro_dvi.variational_laplace.taylor import TaylorELBO

NOISE, PRIOR = 0.7, 1.3


pytestmark = pytest.mark.usefixtures("double")


def task(k: int) -> tuple[Tensor, Tensor]:
    """Correlated inputs, so that the mean of a task depends on the covariances that mean-field drops."""
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(15, 3, generator=generator)
    x[:, 1] += x[:, 0]
    return x, x @ torch.tensor([1.0, -2.0, 0.5]) + NOISE * torch.randn(15, generator=generator)


def model(x: Tensor, y: Tensor | None = None) -> Tensor:
    w = pyro.sample("w", dist.Normal(torch.zeros(3), PRIOR).to_event(1))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(x @ w, NOISE), obs=y)


class Module(pyro.nn.PyroModule):
    """The same model as a module, with the weights in a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = dvi.to_bayesian_(nn.Linear(3, 1, bias=False), prior_scale=PRIOR)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        f = self.net(x)[:, 0]
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(f, NOISE), obs=y)


def sequential(tasks: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Mean-field inference, task by task: the exact mean under a factorised prior, the diagonal precision."""
    loc, precision = torch.zeros(3), torch.full((3,), PRIOR**-2)
    for x, y in tasks:
        information = x.T @ x / NOISE**2
        loc = torch.linalg.solve(information + precision.diag(), x.T @ y / NOISE**2 + precision * loc)
        precision = information.diagonal() + precision
    return loc, precision


def optimise(elbo, model, guide, x: Tensor, y: Tensor) -> None:
    """Minimise a deterministic objective to the precision of float64."""
    guide.initialize(x, y)
    parameters = list(guide.parameters())
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=100, line_search_fn="strong_wolfe", tolerance_grad=1e-11, tolerance_change=1e-15
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = elbo.differentiable_loss(model, guide, x, y)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)


@pytest.mark.every(3)
@pytest.mark.parametrize("make", [lambda: model, Module], ids=["function", "module"])
@pytest.mark.parametrize(
    "elbo", [MomentPropagationELBO, lambda: TaylorELBO(curvature=GGNDiagonal())], ids=["moments", "Taylor"]
)
def test_two_tasks_are_sequential_mean_field_inference(make, elbo):
    current = make()
    for k in range(2):
        pyro.clear_param_store()
        guide = MeanFieldGuide(current)
        optimise(elbo(), current, guide, *task(k))
        (site,) = guide.median()
        loc, precision = sequential([task(j) for j in range(k + 1)])
        posterior = guide.get_posterior()[site].base_dist
        torch.testing.assert_close(posterior.loc.reshape(-1), loc, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(posterior.scale.reshape(-1), precision.rsqrt(), rtol=1e-6, atol=0)
        current = guide.as_prior()(current)


@pytest.mark.slow
def test_natural_gradients_of_two_tasks():
    """At rest, the means are those of the exact posterior under the factorised prior; precisions add up."""
    current, prior_loc, prior_precision = model, torch.zeros(3), torch.full((3,), PRIOR**-2)
    for k in range(2):
        x, y = task(k)
        pyro.clear_param_store()
        guide = NaturalGradientGuide(current)
        optimizer = OGN({"lr": 0.2, "betas": (0.0, 0.9)})
        svi = SVI(current, guide, optimizer, loss=NaturalGradientELBO())
        for _ in range(500):
            svi.step(x, y)
        information = x.T @ x / NOISE**2
        loc = torch.linalg.solve(
            information + prior_precision.diag(), x.T @ y / NOISE**2 + prior_precision * prior_loc
        )
        gradients = (x @ loc - y)[:, None] * x / NOISE**2
        precision = gradients.square().sum(0) + prior_precision
        torch.testing.assert_close(guide.locs.w.detach(), loc, rtol=1e-7, atol=1e-8)
        torch.testing.assert_close(guide.precision_parameter("w").detach(), precision, rtol=1e-7, atol=0)
        current, prior_loc, prior_precision = guide.as_prior()(current), loc, precision


def test_the_same_guide_can_go_on():
    guide = MeanFieldGuide(model)
    optimise(MomentPropagationELBO(), model, guide, *task(0))
    second = guide.as_prior()(model)
    optimise(MomentPropagationELBO(), second, guide, *task(1))
    loc, precision = sequential([task(0), task(1)])
    torch.testing.assert_close(guide.locs.w.detach(), loc, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(guide.scales.w.detach(), precision.rsqrt(), rtol=1e-6, atol=0)


def test_three_tasks_replace_the_prior_each_time():
    current = model
    for k in range(3):
        pyro.clear_param_store()
        guide = MeanFieldGuide(current)
        optimise(MomentPropagationELBO(), current, guide, *task(k))
        current = guide.as_prior()(current)
        assert current.model is model, "no chain of wrappers"
    loc, precision = sequential([task(0), task(1), task(2)])
    torch.testing.assert_close(current.priors()["w"][0], loc, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(current.priors()["w"][1], precision.rsqrt(), rtol=1e-6, atol=0)


def test_multiplicative_noise_as_a_prior():
    x, y = task(0)
    net = Module()
    guide = MultiplicativeNoiseGuide(net, biases=MeanField())
    guide.initialize(x, y)
    base = guide.get_posterior()["net.weight"].base_dist
    second = guide.as_prior()(net)
    prior = poutine.trace(second).get_trace(x, y).nodes["net.weight"]["fn"]
    assert type(prior.base_dist) is dist.Normal and prior.shape() == (1, 3)
    torch.testing.assert_close(prior.base_dist.loc, base.loc)
    torch.testing.assert_close(prior.base_dist.scale, base.scale)
    elbo = MomentPropagationELBO()
    elbo.loss(second, guide, x, y)
    assert abs(elbo.terms["kl"]) < 1e-9, "the posterior is its own prior"
    with torch.no_grad():
        guide.locs.net.weight_unconstrained.add_(0.1)
    elbo.loss(second, guide, x, y)
    moved = guide.get_posterior()["net.weight"].base_dist
    expected = torch.distributions.kl_divergence(dist.Normal(moved.loc, moved.scale), prior.base_dist)
    torch.testing.assert_close(elbo.terms["kl"], expected.sum().detach())


class TwoHeads(pyro.nn.PyroModule):
    """A body, and a head of its own for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.body = dvi.to_bayesian_(nn.Linear(3, 4))
        self.head0 = dvi.to_bayesian_(nn.Linear(4, 1))
        self.head1 = dvi.to_bayesian_(nn.Linear(4, 2))

    def forward(self, x: Tensor, k: int, y: Tensor | None = None) -> Tensor:
        head = (self.head0, self.head1)[k]
        f = head(self.body(x).tanh())[:, 0]
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(f, NOISE), obs=y)


def test_heads_of_tasks_keep_their_own_priors():
    x, y = task(0)
    net = TwoHeads()
    first = MeanFieldGuide(net)
    SVI(net, first, pyro.optim.Adam({"lr": 0.01}), loss=MomentPropagationELBO()).step(x, 0, y)
    with pytest.raises(ModelError, match=r"'head0.bias', which is not in the model.*exclude="):
        poutine.trace(first.as_prior()(net)).get_trace(x, 1, y)
    prior = first.as_prior(exclude="head*")
    pyro.clear_param_store()
    second = prior(net)
    guide = MeanFieldGuide(second)
    SVI(second, guide, pyro.optim.Adam({"lr": 0.01}), loss=MomentPropagationELBO()).step(x, 1, y)
    assert set(guide.median()) == {"body.weight", "body.bias", "head1.weight", "head1.bias"}
    nodes = poutine.trace(second).get_trace(x, 1, y).nodes
    torch.testing.assert_close(nodes["body.weight"]["fn"].base_dist.loc, prior.gaussians["body.weight"][0])
    assert nodes["head1.weight"]["fn"].base_dist.scale.unique().item() == 1.0


def test_a_new_guide_starts_at_the_old_means_and_scales():
    guide = MeanFieldGuide(model)
    optimise(MomentPropagationELBO(), model, guide, *task(0))
    prior = guide.as_prior()
    pyro.clear_param_store()
    second = NaturalGradientGuide(prior(model), initial_scale=1.0)
    second.initialize(*task(1))
    loc, scale = prior.gaussians["w"]
    torch.testing.assert_close(second.median()["w"], loc)
    torch.testing.assert_close(second.precision_parameter("w").detach(), scale**-2)


def test_the_prior_is_a_copy():
    guide = MeanFieldGuide(model)
    guide.initialize(*task(0))
    prior = guide.as_prior()
    before = prior.gaussians["w"][0].clone()
    with torch.no_grad():
        guide.locs.w_unconstrained.add_(1.0)
    torch.testing.assert_close(prior.gaussians["w"][0], before)
    assert not prior.gaussians["w"][0].requires_grad


def test_state_survives_pickling_copies_and_state_dicts():
    x, y = task(0)
    guide = MeanFieldGuide(Module())
    guide.initialize(x, y)
    prior = guide.as_prior()
    function = MeanFieldGuide(model)
    function.initialize(x, y)
    for original in (prior(Module()), function.as_prior()(model)):
        for twin in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
            for (name, mine), theirs in zip(original.priors().items(), twin.priors().values(), strict=True):
                torch.testing.assert_close(mine, theirs)
                node = poutine.trace(twin).get_trace(x, y).nodes[name]
                torch.testing.assert_close(node["fn"].base_dist.loc, mine[0])
    module = prior(Module())
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    with torch.no_grad():
        guide.locs.net.weight_unconstrained.add_(1.0)
    fresh = guide.as_prior()(Module())
    buffer.seek(0)
    fresh.load_state_dict(torch.load(buffer))
    torch.testing.assert_close(fresh.priors(), module.priors())
    assert all(p.dtype == torch.float32 for pair in fresh.float().priors().values() for p in pair)


def test_the_wrapped_module_predicts_trains_and_is_summarised_like_its_model():
    x, y = task(0)
    net = Module()
    guide = MeanFieldGuide(net)
    optimise(MomentPropagationELBO(), net, guide, x, y)
    second = guide.as_prior()(net)
    assert second.net is net.net and [name for name, _ in second.named_buffers()][:2] == [
        "prior_loc_0",
        "prior_scale_0",
    ]
    prediction = dvi.predict(second, guide, (x, y))
    torch.testing.assert_close(prediction.mean, dvi.predict(net, guide, (x, y)).mean)
    for table in (dvi.summary(second, guide), dvi.summary(second, guide, x, y)):
        assert (table["site"], table["prior"]) == (["net.weight"], ["earlier posterior"])
    svi = SVI(second, guide, pyro.optim.Adam({"lr": 0.01}), loss=MomentPropagationELBO())
    history = dvi.fit(svi, [task(1)], 3, progress=False)
    assert len(history["loss"]) == 3
    assert not second.eval().model.training and second.train().model.training


def test_elbo_modules_train_under_local_parameters():
    with pyro.settings.context(module_local_params=True):
        net = Module()
        guide = MeanFieldGuide(net)
        optimise(MomentPropagationELBO(), net, guide, *task(0))
        second = guide.as_prior()(net)
        after = MeanFieldGuide(second)
        optimise(MomentPropagationELBO(), second, after, *task(1))
        loc, precision = sequential([task(0), task(1)])
        posterior = after.get_posterior()["net.weight"].base_dist
        torch.testing.assert_close(posterior.loc[0], loc, rtol=1e-6, atol=1e-7)
        module = MomentPropagationELBO()(second, after)
        optimizer = torch.optim.Adam(dvi.optim.parameter_groups(module, 1e-3))
        dvi.fit(module, [task(1)], 1, optimizer=optimizer, progress=False)


# Mistakes ------------------------------------------------------------------------------------------------------


def test_three_tasks_share_the_parameters_of_their_normalisation_layers_in_fit():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
    first = following = dvi.regressor(dvi.to_bayesian_(net, prior_scale=PRIOR), num_data=15)
    for k in range(3):
        guide = NaturalGradientGuide(following)
        guide._pyro_name = f"task_{k}"
        dvi.fit(
            SVI(following, guide, OGN({}), loss=NaturalGradientELBO()), [task(k)], epochs=2, progress=False
        )
        following = guide.as_prior()(following)
    assert following.model is first


def test_sites_that_cannot_become_priors_are_named():
    def with_scale(x: Tensor, y: Tensor | None = None) -> None:
        s = pyro.sample("s", dist.LogNormal(0.0, 1.0))
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, s), obs=y)

    x, y = task(0)
    guide = MeanFieldGuide(with_scale)
    with pytest.raises(GuideError, match="is not initialised"):
        guide.as_prior()
    guide.initialize(x, y)
    with pytest.raises(
        UnsupportedError, match=r"site 's' is not a factorised Gaussian.*constrained.*exclude=\['s'\]"
    ):
        guide.as_prior()
    assert set(guide.as_prior(exclude=["s"]).gaussians) == {"w"}
    with pytest.raises(ArgumentError, match=r"'heads\*'.*\['s', 'w'\]"):
        guide.as_prior(exclude="heads*")
    with_bias = dvi.regressor(dvi.to_bayesian_(nn.Linear(3, 1)), num_data=15, noise_scale=1.0)
    point = MultiplicativeNoiseGuide(with_bias)
    point.initialize(x, y)
    with pytest.raises(UnsupportedError, match=r"'net.bias' is not.*Delta.*mean-field"):
        point.as_prior()


def test_models_that_do_not_fit():
    x, y = task(0)
    guide = MeanFieldGuide(model)
    guide.initialize(x, y)
    prior = guide.as_prior()

    def wider(x: Tensor, y: Tensor | None = None) -> None:
        pyro.sample("w", dist.Normal(torch.zeros(4), 1.0).to_event(1))

    def positive(x: Tensor, y: Tensor | None = None) -> None:
        pyro.sample("w", dist.LogNormal(torch.zeros(3), 1.0).to_event(1))

    with pytest.raises(ModelError, match=r"'w' has the shape \(4,\).*MeanFieldGuide has the shape \(3,\)"):
        prior(wider)(x, y)
    with pytest.raises(ModelError, match=r"'w' has .* the support"):
        prior(positive)(x, y)
    with pytest.raises(ModelError, match="site 'w', which is not in the model"):
        prior(lambda x, y: None)(x, y)
