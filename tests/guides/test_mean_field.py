# SPDX-License-Identifier: Apache-2.0
"""The mean-field guide: where it starts, what it says about its posterior, and how it is saved and loaded."""

import copy
import io
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal, init_to_value
from pyro.infer.reparam import ProjectedNormalReparam
from torch import Tensor

import pyro_dvi as dvi
from pyro_dvi.curvature import GGNDiagonal
from pyro_dvi.errors import GuideError, ModelError
from pyro_dvi.guides import MeanFieldGuide, PerSite, PerWeight, SGDStepSize
from pyro_dvi.laplace import LaplaceGuide
from pyro_dvi.moment_propagation.multiplicative_noise import MultiplicativeNoiseGuide
from pyro_dvi.natural_gradients.precision_guide import NaturalGradientGuide
from pyro_dvi.objectives.sampled import SampledELBO
from pyro_dvi.variational_laplace.taylor import TaylorELBO
from tests.guides.networks import Net
from tests.models import GUIDES, LinearRegression, gradients

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1)


def constrained(x: Tensor | None = None) -> None:
    pyro.sample("rate", dist.Gamma(torch.tensor([2.0, 3.0]), 1.0).to_event(1))
    pyro.sample("s", dist.LogNormal(0.3, 0.4))
    pyro.sample("share", dist.Beta(2.0, 3.0))
    pyro.sample("mix", dist.Dirichlet(torch.tensor([1.0, 2.0, 3.0])))
    pyro.sample("y", dist.Normal(0.0, 1.0), obs=torch.tensor(0.1))


# Start ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("local_params", [False, True])
def test_starts_at_the_weights_of_the_network(local_params):
    with pyro.settings.context(module_local_params=local_params):
        model = Net()
        guide = MeanFieldGuide(model)
        guide.initialize(X, Y)
        median = guide.median()
        assert set(median) == {"net.0.weight", "net.0.bias", "net.3.weight", "net.3.bias"}
        for site, value in median.items():
            torch.testing.assert_close(value, model.weights[site.removeprefix("net.")])
        scale = torch.tensor(0.5) * torch.tensor(-3.0).exp()
        for site in median:
            layer = guide.scales.net._modules[site.split(".")[1]]
            torch.testing.assert_close(getattr(layer, site.split(".")[2]), scale.expand(median[site].shape))


@pytest.mark.parametrize("training", [True, False])
def test_set_up_leaves_batch_norm_statistics_alone(training):
    model = Net().train(training)
    before = {k: v.clone() for k, v in model.net[1].state_dict().items()}
    guide = MeanFieldGuide(model)
    guide.initialize(X, Y)
    torch.testing.assert_close(dict(model.net[1].state_dict()), before, rtol=0, atol=0)
    TaylorELBO().loss(model, guide, X, Y)  # the first look, then one run
    assert model.net[1].num_batches_tracked == before["num_batches_tracked"] + training


def test_the_covariance_families():
    problem = LinearRegression()
    for family, shape in ((PerWeight(), (3,)), (PerSite(), (1,))):
        pyro.clear_param_store()
        guide = MeanFieldGuide(problem.model, scale=family)
        guide.initialize(problem.x, problem.y)
        assert guide.scales.weight.shape == shape
        expected = torch.full(shape, 0.7, dtype=torch.float64) * torch.tensor(-3.0).double().exp()
        torch.testing.assert_close(guide.scales.weight, expected, rtol=1e-6, atol=0)
    guide = MeanFieldGuide(problem.model, scale=SGDStepSize(lr=0.1, batch_size=5))
    guide.initialize(problem.x, problem.y)
    assert [name for name, _ in guide.named_parameters()] == [
        "locs.weight_unconstrained",
        "locs.bias_unconstrained",
    ]
    assert guide.get_posterior()["weight"].base_dist.scale[0].item() == pytest.approx(0.1)
    assert PerWeight(-1.0) == PerWeight(-1.0) and repr(PerSite()) == "PerSite(log_offset=-3.0)"


@pytest.mark.every(2)
@pytest.mark.parametrize("elbo", [Trace_ELBO, SampledELBO])
@pytest.mark.parametrize("case", [case for case in GUIDES if case.shared_scales], ids=lambda case: case.name)
def test_a_shared_scale_with_drawn_weights_has_the_gradients_of_the_closed_form(case, elbo):
    """Each weight has noise of its own. z-tests at 4.5 of 6 numbers: false alarm about once in 24,000 seeds."""
    problem = LinearRegression()
    pyro.set_rng_seed(3)
    guide, sampled, draws = case.start(problem), elbo(), []
    for _ in range(250):
        sampled.loss_and_grads(problem.model, guide, problem.x, problem.y)
        draws.append(torch.cat([gradient.reshape(-1) for gradient in gradients().values()]))
    problem.loss(case.moments(guide)).backward()
    expected = torch.cat([gradient.reshape(-1) for gradient in gradients().values()])
    found = torch.stack(draws)
    assert ((found.mean(0) - expected) / found.std(0) * len(draws) ** 0.5).abs().max() < 4.5


def test_any_initialisation_strategy_of_pyro():
    problem = LinearRegression()
    values = {"weight": torch.arange(3.0).double(), "bias": torch.tensor(4.0).double()}
    guide = MeanFieldGuide(problem.model, init_loc_fn=init_to_value(values=values))
    guide.initialize(problem.x, problem.y)
    torch.testing.assert_close(guide.median(), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parameters_follow_the_models_dtype(dtype):
    model = Net().to(dtype)
    guide = MeanFieldGuide(model)
    elbo = TaylorELBO()
    loss = elbo.differentiable_loss(model, guide, X.to(dtype), Y.to(dtype))
    assert loss.dtype == dtype and {p.dtype for p in guide.parameters()} == {dtype}
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in guide.parameters())


# Reading -------------------------------------------------------------------------------------------------------


def test_constrained_latents():
    guide = MeanFieldGuide(constrained)
    guide.initialize()
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    draws = guide.sample(4000)
    assert {k: v.shape[1:] for k, v in draws.items()} == {
        "rate": (2,), "s": (), "share": (), "mix": (3,),
    }  # fmt: skip
    assert (draws["rate"] > 0).all() and (draws["s"] > 0).all()
    assert ((draws["share"] > 0) & (draws["share"] < 1)).all()
    torch.testing.assert_close(draws["mix"].sum(-1), torch.ones(4000))
    medians, quantiles = guide.median(), guide.quantiles([0.1, 0.5, 0.9])
    for name in ("rate", "s", "share"):  # monotone transforms
        torch.testing.assert_close(medians[name], quantiles[name][1])
        below = (draws[name] < quantiles[name][0]).float().mean(0)
        torch.testing.assert_close(below, torch.full_like(below, 0.1), atol=0.03, rtol=0)
        below = (draws[name] < quantiles[name][2]).float().mean(0)
        torch.testing.assert_close(below, torch.full_like(below, 0.9), atol=0.03, rtol=0)
    torch.testing.assert_close(medians["mix"].sum(), torch.tensor(1.0))
    for name, posterior in guide.get_posterior().items():
        assert torch.isfinite(posterior.log_prob(draws[name][:5])).all()
        assert posterior.event_shape == guide.prototype_trace.nodes[name]["fn"].event_shape
    assert guide.sample((2, 3))["mix"].shape == (2, 3, 3)
    assert guide.sample()["s"].shape == ()


def test_forward_draws_what_the_posterior_says():
    """Two-sample z-test at 4 on means and on variances."""
    guide = MeanFieldGuide(constrained)
    guide.initialize()
    ours = torch.stack([guide()["s"].log() for _ in range(300)]).detach()
    direct = guide.sample(20000)["s"].log()
    assert abs((ours.mean() - direct.mean()) / (direct.std() / 300**0.5)) < 4
    assert (ours.var() / direct.var()).item() == pytest.approx(1, abs=4 * (2 / 300) ** 0.5)


def test_predictive_draws_weights_and_labels():
    model = Net().eval()
    guide = MeanFieldGuide(model)
    guide.initialize(X, Y)
    draws = Predictive(model, guide=guide, num_samples=7)(X)
    assert draws["net.0.weight"].shape[-2:] == (4, 3) and draws["y"].shape == (7, 6)
    assert draws["net.0.weight"].std(0).min() > 0


def local(index: Tensor) -> None:
    with pyro.plate("rows", 10, subsample=index):
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(z.sum(-1), 0.5), obs=index.float())


@pytest.mark.parametrize("family, shape", [(PerWeight(), (10, 2)), (PerSite(), (10, 1))])
def test_local_latents_have_parameters_for_the_whole_plate(family, shape):
    guide = MeanFieldGuide(
        local, scale=family, create_plates=lambda index: pyro.plate("rows", 10, subsample=index)
    )
    svi = SVI(local, guide, pyro.optim.Adam({"lr": 0.1}), loss=TaylorELBO())
    svi.step(torch.tensor([1, 4]))
    assert guide.locs.z.shape == (10, 2) and guide.scales.z.shape == shape
    before = guide.locs.z.detach().clone()
    svi.step(torch.tensor([0, 7, 9]))
    moved = (guide.locs.z != before).any(-1)
    assert moved[[0, 7, 9]].all()
    assert guide.median()["z"].shape == (10, 2) and guide.sample(3)["z"].shape == (3, 10, 2)


# Pyro's own objectives -----------------------------------------------------------------------------------------


def test_mean_field_elbo_of_pyro_has_its_analytic_kl():
    """Only the likelihood is sampled, so with a constant likelihood the loss does not vary."""
    scale = torch.tensor(0.5)

    def model() -> None:
        pyro.sample("w", dist.Normal(torch.zeros(3), 0.7).to_event(1))
        pyro.sample("y", dist.Normal(0.0, 1.0), obs=scale)

    guide = MeanFieldGuide(model)
    guide.initialize()
    elbo = TraceMeanField_ELBO()
    losses = {elbo.loss(model, guide) for _ in range(3)}
    assert len(losses) == 1
    assert losses.pop() == pytest.approx(TaylorELBO().loss(model, guide), rel=1e-5)


@pytest.mark.slow
def test_trains_with_pyros_trace_elbo():
    problem = LinearRegression()
    guide = MeanFieldGuide(problem.model)
    svi = SVI(problem.model, guide, pyro.optim.ClippedAdam({"lr": 0.05, "lrd": 0.99}), loss=Trace_ELBO())
    for _ in range(300):
        svi.step(problem.x, problem.y)
    moments = {
        "weight": (guide.locs.weight, guide.scales.weight),
        "bias": (guide.locs.bias, guide.scales.bias),
    }
    precision = problem.information().diagonal() + problem.prior_scale**-2
    best = {
        "weight": (guide.locs.weight, precision[:3].rsqrt()),
        "bias": (guide.locs.bias, precision[3].rsqrt()),
    }
    assert problem.loss(moments) - problem.loss(best) < 0.3


# Saving --------------------------------------------------------------------------------------------------------


def train(model: Callable, guide: MeanFieldGuide, steps: int) -> list[float]:
    """Plain torch training, whose result depends on nothing but the guide's parameters."""
    module = TaylorELBO()(model, guide)
    if guide.prototype_trace is None:
        guide.initialize(X, Y)
    optimizer = torch.optim.SGD(guide.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = module(X, Y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.every(5)
@pytest.mark.parametrize("family", [PerWeight(), PerSite(), SGDStepSize(0.1, 4)], ids=repr)
@pytest.mark.parametrize("local_params", [False, True])
def test_state_dict_loads_into_a_fresh_guide(local_params, family):
    with pyro.settings.context(module_local_params=local_params):
        model = Net()
        guide = MeanFieldGuide(model, scale=family)
        train(model, guide, 5)
        buffer = io.BytesIO()
        torch.save({"guide": guide.state_dict(), "model": model.state_dict()}, buffer)
        expected = (guide.median(), train(model, guide, 3))

        pyro.clear_param_store()
        buffer.seek(0)
        state = torch.load(buffer)
        again = Net()
        again.load_state_dict(state["model"])
        fresh = MeanFieldGuide(again, scale=family)
        assert fresh.load_state_dict(state["guide"]).missing_keys == []
        fresh.initialize(X, Y)
        torch.testing.assert_close(fresh.median(), expected[0], rtol=0, atol=0)
        assert train(again, fresh, 3) == expected[1]


def test_loading_into_a_guide_that_exists_overwrites_it():
    model = Net()
    guide = MeanFieldGuide(model)
    train(model, guide, 2)
    state = {k: v.clone() for k, v in guide.state_dict().items()}
    train(model, guide, 2)
    guide.load_state_dict(state)
    torch.testing.assert_close(dict(guide.state_dict()), state, rtol=0, atol=0)


def test_a_state_of_another_model_is_refused():
    guide = MeanFieldGuide(Net())
    guide.initialize(X, Y)
    state = guide.state_dict()
    other = MeanFieldGuide(constrained)
    other.initialize()
    with pytest.raises(GuideError, match=r"(?s)construct guide and model as saved.*Missing key"):
        other.load_state_dict(state)


@pytest.mark.parametrize("other", [LaplaceGuide, NaturalGradientGuide, MultiplicativeNoiseGuide])
@pytest.mark.parametrize("seen", [False, True])
def test_a_state_of_another_guide_is_refused(other, seen):
    """Into a guide that has seen its model, and into one that has not; the right state loads after it."""
    states = {}
    for kind in (MeanFieldGuide, other):
        guide = kind(Net())
        guide.initialize(X, Y)
        states[kind] = guide.state_dict()
    for kind, foreign in ((MeanFieldGuide, other), (other, MeanFieldGuide)):
        guide = kind(Net())
        if seen:
            guide.initialize(X, Y)
        with pytest.raises(GuideError, match="MultiplicativeNoiseGuide|construct guide and model as saved"):
            guide.load_state_dict(states[foreign])
            guide.initialize(X, Y)
        guide = kind(Net())
        guide.load_state_dict(states[kind])


def test_what_is_no_state_is_refused():
    with pytest.raises(GuideError, match="does not fit this MeanFieldGuide"):
        MeanFieldGuide(Net()).load_state_dict(3)


def test_local_latents_load_before_the_first_call():
    plates = lambda index: pyro.plate("rows", 10, subsample=index)  # noqa: E731
    guide = MeanFieldGuide(local, create_plates=plates)
    guide.initialize(torch.tensor([1, 4]))
    with torch.no_grad():
        guide.locs.z_unconstrained.normal_()
    fresh = MeanFieldGuide(local, create_plates=plates)
    fresh.load_state_dict(guide.state_dict())
    index = torch.tensor([2, 3, 5])
    assert TaylorELBO().loss(local, fresh, index) > 0
    torch.testing.assert_close(fresh.median(), guide.median())


@pytest.mark.parametrize("local_params", [False, True])
def test_deepcopy_is_independent(local_params):
    with pyro.settings.context(module_local_params=local_params):
        model = Net()
        guide = MeanFieldGuide(model)
        guide.initialize(X, Y)
        twin = copy.deepcopy(guide)
        before = guide.median()
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.add_(1.0)
        torch.testing.assert_close(guide.median(), before)
        assert (twin.median()["net.3.bias"] - before["net.3.bias"]).item() == pytest.approx(1.0)
        assert TaylorELBO().loss(model, guide, X, Y) > 0, "the original still knows its model"


def test_whole_guide_survives_torch_save():
    model = Net()
    guide = MeanFieldGuide(model)
    guide.initialize(X, Y)
    buffer = io.BytesIO()
    torch.save(guide, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    torch.testing.assert_close(loaded.median(), guide.median())
    assert loaded.sample(3)["net.3.bias"].shape == (3, 1)
    assert TaylorELBO().loss(model, loaded, X, Y) > 0
    assert TaylorELBO().loss(model, guide, X, Y) > 0, "saving must not change the guide"


def test_two_guides_have_their_own_parameters_where_pyro_is_told_so():
    with pyro.settings.context(module_local_params=True):
        first, second = MeanFieldGuide(Net()), MeanFieldGuide(LinearRegression().model)
        first.initialize(X, Y)
        second.initialize(X, Y)
        assert set(first.median()) != set(second.median())
        assert not len(pyro.get_param_store())


def test_agrees_with_pyros_auto_normal():
    """The same means and scales give the same loss, constrained latents included."""

    def model(x: Tensor) -> None:
        s = pyro.sample("s", dist.LogNormal(0.0, 0.5))
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, s), obs=Y)

    ours, theirs = MeanFieldGuide(model), AutoNormal(model)
    ours(X)
    theirs(X)
    with torch.no_grad():
        for name in ("s", "w"):
            getattr(theirs.locs, f"{name}_unconstrained").copy_(getattr(ours.locs, name))
            softplus_inverse = getattr(ours.scales, name).expm1().log()
            getattr(theirs.scales, f"{name}_unconstrained").copy_(softplus_inverse)
    elbo = TaylorELBO(curvature=GGNDiagonal())
    assert elbo.loss(model, ours, X) == pytest.approx(elbo.loss(model, theirs, X), rel=1e-5)


@pytest.mark.parametrize("guide", [MeanFieldGuide, dvi.MultiplicativeNoiseGuide, dvi.LaplaceGuide])
def test_a_latent_on_a_sphere_is_named_with_the_way_out(guide):
    def model(x, y):
        direction = pyro.sample("direction", dist.ProjectedNormal(torch.zeros(3)))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ direction, 0.5), obs=y)

    x, y = torch.randn(5, 3), torch.zeros(5)
    with pytest.raises(
        ModelError, match=r"'direction' \(ProjectedNormal\).*'direction': .*ProjectedNormalReparam"
    ):
        guide(model)(x, y)
    reparam = {"direction": ProjectedNormalReparam()}
    guide(pyro.poutine.reparam(model, config=reparam))(x, y)


def test_the_logarithm_of_a_scale_is_what_an_optimizer_sees():
    problem = LinearRegression()
    guide = MeanFieldGuide(problem.model)
    guide.initialize(problem.x, problem.y)
    seen = dict(guide.scales.named_parameters())
    assert seen
    for name, value in guide.scales.named_pyro_params():
        assert torch.equal(value, seen[f"{name}_unconstrained"].exp())


@pytest.mark.parametrize("family", [dist.Normal, dist.LogNormal])
def test_a_mixture_of_equal_priors_is_one_of_them(family):
    x, y = torch.linspace(-1, 1, 6), torch.linspace(-1, 2, 6)

    def divergence(prior):
        pyro.clear_param_store()

        def model(x, y=None):
            w = pyro.sample("w", prior)
            with pyro.plate("data", len(x)):
                return pyro.sample("y", dist.Normal(w * x, 1.0), obs=y)

        guide = MeanFieldGuide(model, init_loc_fn=init_to_value(values={"w": torch.tensor(0.7)}))
        elbo = TaylorELBO()
        elbo.loss(model, guide, x, y)
        return elbo.terms["kl"]

    parts = family(torch.zeros(2), torch.ones(2))
    mixture = dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), parts)
    torch.testing.assert_close(divergence(mixture), divergence(family(0.0, 1.0)), rtol=1e-5, atol=0)
