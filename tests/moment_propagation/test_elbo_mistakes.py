# SPDX-License-Identifier: Apache-2.0
"""What goes wrong when moments flow through a model, and the message that says how to go on."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDiagonalNormal
from torch import nn
from torch.nn import functional as F

import pyro_dvi as dvi
from pyro_dvi.errors import (
    ArgumentError,
    DataError,
    DviWarning,
    GuideError,
    ModelError,
    NonFiniteError,
    PyroDviError,
    UnsupportedError,
)
from pyro_dvi.moment_propagation.elbo import MomentPropagationELBO
from pyro_dvi.moments import GaussianMoments, moment_rule


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.linspace(-2, 2, 12)
    return x, 2 * x


def model_of(observe):
    """One uncertain weight; ``observe(w * x, x, y)`` holds the mistake."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(x.new_zeros(()), 1.0))
        observe(w * x, x, y)

    return model


def observed(fn, y):
    with pyro.plate("data", len(y)):
        pyro.sample("obs", fn, obs=y)


def control_flow(f, x, y):
    observed(dist.Normal(f if f.sum() > 0 else -f, 1.0), y)


def mixture(f, x, y):
    parts = dist.Normal(torch.stack([f, -f], -1), 1.0)
    observed(dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), parts), y)


def uncertain_transform(f, x, y):
    affine = torch.distributions.AffineTransform(f, 1.0)
    observed(dist.TransformedDistribution(dist.Normal(f, 1.0), [affine]), y)


def plain_torch(f, x, y):
    observed(torch.distributions.Normal(f, 1.0), y)


def plain_torch_without_checks(f, x, y):
    pyro.factor("obs", torch.distributions.Normal(f, 1.0).log_prob(y).sum())


def unbounded_scale(f, x, y):
    observed(dist.Normal(x, 3.0 + f), y)


def to_numpy(f, x, y):
    observed(dist.Normal(torch.as_tensor(f.detach().numpy()), 1.0), y)


MISTAKES = {
    "unknown function": (lambda f, x, y: observed(dist.Normal(torch.erfinv(f), 1.0), y), r"erfinv.*moment_rule"),
    "control flow": (control_flow, r"x\.loc, the mean"),
    "conversion": (to_numpy, r"value of an uncertain tensor.*\.item\(\)"),
    "mixture": (mixture, "MixtureSameFamily.*mixture"),
    "uncertain transform": (uncertain_transform, "AffineTransform has uncertain parameters"),
    "torch distribution": (plain_torch, "pyro.distributions|value of an uncertain tensor"),
    "torch log_prob": (plain_torch_without_checks, "pyro.distributions|value of an uncertain tensor"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MISTAKES)
def test_what_has_no_moments_is_refused_with_advice(data, kind):
    observe, message = MISTAKES[kind]
    model = model_of(observe)
    guide = dvi.MeanFieldGuide(model)
    with pytest.raises(PyroDviError, match=f"(?s){message}"):
        MomentPropagationELBO().loss(model, guide, *data)


def test_a_scale_that_may_be_negative_is_refused(data):
    def guide(x, y=None):
        pyro.sample("w", dist.Normal(x.new_zeros(()), 2.0))

    with pytest.raises(UnsupportedError, match=r"Normal.*scale.*(softplus|exp)"):
        MomentPropagationELBO().loss(model_of(unbounded_scale), guide, *data)


def test_a_negative_variance_of_a_users_rule_is_refused(data):
    @moment_rule(torch.special.i0e)
    def bessel(x):
        return GaussianMoments(x.loc, -x.variance)

    model = model_of(lambda f, x, y: observed(dist.Normal(torch.special.i0e(f), 1.0), y))
    with pytest.raises(UnsupportedError, match=r"bessel.*negative variance"):
        MomentPropagationELBO().loss(model, dvi.MeanFieldGuide(model), *data)


def test_a_guide_whose_sites_depend_on_each_other_is_refused(data):
    model = model_of(
        lambda f, x, y: observed(dist.Normal(f + pyro.sample("b", dist.Normal(0.0, 1.0)), 1.0), y)
    )

    def guide(x, y=None):
        w = pyro.sample("w", dist.Normal(pyro.param("m", torch.zeros(())), 1.0))
        pyro.sample("b", dist.Normal(w, 1.0))

    with pytest.raises(GuideError, match="'b' depends on the value of 'w'"):
        MomentPropagationELBO().loss(model, guide, *data)
    with pytest.raises(GuideError, match="'b' depends on the value of 'w'"):
        dvi.predict(model, guide, data, method=dvi.Moments())


def test_a_model_that_asks_for_the_type_of_its_values_is_found_out(data):
    def squeezed(f, x, y):
        f = f.unsqueeze(-1)
        observed(dist.Normal(f.squeeze(-1) if torch.is_tensor(f) else f, 1.0), y)

    model = model_of(squeezed)
    with pytest.raises((ModelError, DataError), match=r"is_tensor|12, 1"):
        MomentPropagationELBO().loss(model, dvi.MeanFieldGuide(model), *data)


class Doubled(torch.autograd.Function):
    """As users write them: it takes moments for something that is no tensor."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def test_a_function_that_drops_gradients_of_moments_is_found_out(data):
    model = model_of(lambda f, x, y: observed(dist.Normal(Doubled.apply(f), 1.0), y))
    with pytest.raises(ModelError, match=r"do not reach latent site 'w'.*autograd.Function"):
        MomentPropagationELBO().loss_and_grads(model, dvi.MeanFieldGuide(model), *data)


@pytest.mark.parametrize("elbo", [MomentPropagationELBO(), dvi.TaylorELBO()], ids=lambda e: type(e).__name__)
def test_values_that_are_broadcast_are_refused_at_every_step(data, elbo):
    x, y = data
    model = model_of(lambda f, x, y: observed(dist.Normal(f, 1.0), y))
    guide = dvi.MeanFieldGuide(model)
    elbo.loss_and_grads(model, guide, x, y)
    with pytest.raises(DataError, match=r"'obs'.*\(12, 1\).*broadcast"):
        elbo.loss_and_grads(model, guide, x, y[:, None])


HEADS = {
    "sum": lambda f, g: (f + g, F.softplus(g)),
    "views": lambda f, g: ((f + g).squeeze(-1), F.softplus(g).squeeze(-1)),
    "log variance": lambda f, g: (f - g, torch.exp(0.5 * g)),
    "product": lambda f, g: (f * g, F.softplus(g)),
    "one output": lambda f, g: (2 * g + 1, F.softplus(g)),
}
SEPARATE = {
    "two outputs": lambda f, g: (f, F.softplus(g)),
    "two outputs, with views": lambda f, g: (f.squeeze(-1), torch.exp(0.5 * g + 1).squeeze(-1)),
    "the very same output": lambda f, g: (g, F.softplus(g)),  # integrated over that
    "a certain scale": lambda f, g: (f + g, 0.1),
}


def heteroscedastic(head):
    net = dvi.to_bayesian_(nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 2)))

    def model(x, y=None):
        loc, scale = head(*net(x[:, None]).chunk(2, -1))
        with pyro.plate_stack("data", loc.shape):
            return pyro.sample("y", dist.Normal(loc, scale), obs=y.reshape(loc.shape))

    return model


@pytest.mark.parametrize("head", HEADS)
def test_parameters_that_share_an_output_are_announced_once(data, head):
    model, elbo = heteroscedastic(HEADS[head]), MomentPropagationELBO()
    guide = dvi.MeanFieldGuide(model)
    with pytest.warns(
        DviWarning, match="observed site 'y': loc and scale depend on the same outputs"
    ) as caught:
        elbo.loss_and_grads(model, guide, *data)
    assert len(caught) == 1
    elbo.loss_and_grads(model, guide, *data)  # a second warning would be an error


@pytest.mark.parametrize("guide", [dvi.MeanFieldGuide, AutoDiagonalNormal])
@pytest.mark.parametrize("head", SEPARATE)
def test_parameters_of_separate_outputs_are_fine(data, head, guide):
    model = heteroscedastic(SEPARATE[head])
    MomentPropagationELBO().loss_and_grads(model, guide(model), *data)


def test_latents_in_one_vector_are_told_apart(data):
    def model(x, y):
        w, b, s = (pyro.sample(name, dist.Normal(x.new_zeros(()), 1.0)) for name in "wbs")
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(w * x + b, F.softplus(s)), obs=y)

    MomentPropagationELBO().loss_and_grads(model, AutoDiagonalNormal(model), *data)


def test_no_observed_site(data):
    model = model_of(lambda f, x, y: None)
    with pytest.raises(ModelError, match="no observed site"):
        MomentPropagationELBO().loss(model, dvi.MeanFieldGuide(model), *data)


def test_forgotten_observation(data):
    model = model_of(lambda f, x, y: pyro.sample("obs", dist.Normal(f, 1.0).to_event(1), obs=y))
    guide = dvi.MeanFieldGuide(model)
    guide(*data)
    with pytest.raises(ModelError, match=r"'obs' is neither observed nor in the guide"):
        MomentPropagationELBO().loss(model, guide, data[0])


def test_values_outside_the_support(data):
    model = model_of(lambda f, x, y: observed(dist.Poisson(f.exp()), y))
    with pytest.raises(DataError, match="'obs'"):
        MomentPropagationELBO().loss(model, dvi.MeanFieldGuide(model), *data)


def test_minibatch_without_scale(data):
    model = model_of(lambda f, x, y: observed(dist.Normal(f, 1.0), y))
    with pytest.raises(DataError, match="12 of 100"):
        MomentPropagationELBO(num_data=100).loss(model, dvi.MeanFieldGuide(model), *data)


def test_a_loss_that_is_not_finite_makes_no_update(data):
    x, y = data
    model = model_of(lambda f, x, y: observed(dist.Normal(f, 1.0), y))
    guide = dvi.MeanFieldGuide(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), loss=MomentPropagationELBO())
    svi.step(x, y)
    before = [p.detach().clone() for p in guide.parameters()]
    with pytest.raises(NonFiniteError, match="log_likelihood"):
        svi.step(x * 1e30, y)
    assert all(torch.equal(a, b) for a, b in zip(before, guide.parameters(), strict=True))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"estimator": "sobol"}, ArgumentError),
        ({"kl_weight": -1.0}, ArgumentError),
        ({"num_particles": 0}, ArgumentError),
    ],
)
def test_options_that_cannot_be_right(options, error):
    with pytest.raises(error):
        MomentPropagationELBO(**options)


@pytest.mark.parametrize("options", [{"link": "probit"}, {"noise": "moments"}])
def test_options_of_the_prediction_rule_that_cannot_be_right(options):
    with pytest.raises(ArgumentError):
        dvi.Moments(**options)


def test_the_context_leaves_pyro_as_it_was(data):
    from pyro.distributions.distribution import COERCIONS

    before = list(COERCIONS)
    model = model_of(lambda f, x, y: observed(dist.Normal(torch.erfinv(f), 1.0), y))
    with pytest.raises(UnsupportedError):
        MomentPropagationELBO().loss(model, dvi.MeanFieldGuide(model), *data)
    assert before == COERCIONS
