# SPDX-License-Identifier: Apache-2.0
"""Covariances between activations, held against dense algebra and draws of the weights, and refused where they end."""

import pytest
import torch
import torch.nn.functional as F

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.full_covariance import full_covariances
from pyro_dvi.moments.shared_noise import (
    JointMoments,
    SharedNoise,
    covariance_between,
    covariance_of,
    joint_noise_followed,
)

pytestmark = pytest.mark.usefixtures("double")

X = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def layers(*sizes, seed=1, dtype=torch.float64):
    """Means and variances of weights and biases."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            GaussianMoments(
                torch.randn(n, m, generator=generator, dtype=dtype) / m**0.5,
                0.3 * torch.rand(n, m, generator=generator, dtype=dtype) / m,
            ),
            GaussianMoments(
                0.5 * torch.randn(n, generator=generator, dtype=dtype),
                0.1 * torch.rand(n, generator=generator, dtype=dtype),
            ),
        )
        for m, n in zip(sizes, sizes[1:], strict=False)
    ]


def network(x, weights):
    """Linear layers with ReLU between them."""
    for k, (w, b) in enumerate(weights):
        x = F.linear(x.relu() if k else x, w, b)
    return x


def propagated(x, weights, function=network):
    with full_covariances():
        return function(x, weights)


def draws(x, weights, count, seed=0):
    """Outputs ``[count, B, n]`` of a network with other weights in each draw."""
    torch.manual_seed(seed)
    h = x.expand(count, *x.shape)
    for k, parts in enumerate(weights):
        w, b = (g.loc + g.variance.sqrt() * torch.randn(count, *g.shape, dtype=g.dtype) for g in parts)
        h = torch.baddbmm(b.unsqueeze(1), h.relu() if k else h, w.mT)
    return h


def z_scores(outputs, loc, covariance):
    """How many standard errors means and covariances are away from those of draws."""
    mean, root = outputs.mean(0), len(outputs) ** 0.5
    apart = outputs - mean
    products = apart.unsqueeze(-1) * apart.unsqueeze(-2)
    of_mean = (mean - loc) / (outputs.std(0) / root)
    of_covariance = (products.mean(0) - covariance) / (products.std(0) / root)
    return of_mean.abs().max(), of_covariance.abs().max()


@pytest.mark.slow
def test_one_hidden_layer_against_two_million_draws():
    weights, x = layers(3, 4, 2), X[:2]
    result = propagated(x, weights)
    outputs = torch.cat([draws(x, weights, 200_000, seed) for seed in range(10)])
    assert max(z_scores(outputs, result.loc, covariance_of(result))) < 5


@pytest.mark.slow
def test_rectified_dependent_gaussians_against_two_million_draws():
    """A certain second layer leaves its outputs Gaussian and makes them dependent, so that all moments are exact."""
    weights, x = layers(3, 4, 5, 2), X[:2]
    mixing = 1.5 * weights[1][0].loc
    result = propagated(x, weights, lambda x, w: F.linear(F.linear(F.linear(x, *w[0]), mixing).relu(), *w[2]))
    found = []
    for seed in range(10):
        torch.manual_seed(seed)
        (w, b), _, (v, c) = [
            [g.loc + g.variance.sqrt() * torch.randn(200_000, *g.shape) for g in parts] for parts in weights
        ]
        h = ((x @ w.mT + b.unsqueeze(1)) @ mixing.T).relu()
        found.append(h @ v.mT + c.unsqueeze(1))
    assert max(z_scores(torch.cat(found), result.loc, covariance_of(result))) < 5
    diagonal = F.linear(F.linear(F.linear(x, *weights[0]), mixing).relu(), *weights[2])
    assert (diagonal.variance / result.variance - 1).abs().max() > 0.1


@pytest.mark.slow
def test_a_deep_network_whose_variances_the_default_gets_wrong():
    """Units that share uncertain inputs with weights of one sign rise and fall together."""
    weights = [(GaussianMoments(w.loc.abs(), w.variance), b) for w, b in layers(3, 12, 12, 12, 1, seed=3)]
    x = X
    sampled = draws(x, weights, 100_000).std(0)
    full = propagated(x, weights).variance.sqrt() / sampled
    diagonal = network(x, weights).variance.sqrt() / sampled
    assert (full - 1).abs().max() < 0.1
    assert diagonal.max() < 0.85


def test_a_linear_layer_has_the_covariance_of_dense_algebra():
    (w, b), (v, c) = layers(3, 4, 2)
    with full_covariances():
        h = F.linear(X, w, b)
        result = F.linear(h, v, c)
    variance = X.square() @ w.variance.T + b.variance
    mean = X @ w.loc.T + b.loc
    expected = v.loc @ torch.diag_embed(variance) @ v.loc.T
    own = (variance + mean.square()) @ v.variance.T + c.variance
    torch.testing.assert_close(covariance_of(result), expected + torch.diag_embed(own))
    torch.testing.assert_close(result.variance, covariance_of(result).diagonal(dim1=-2, dim2=-1))
    torch.testing.assert_close(covariance_of(h), torch.diag_embed(variance))


@pytest.mark.parametrize("sizes", [(3, 2), (3, 6, 1), (3, 6, 2)])
def test_equal_to_the_default_where_covariances_vanish(sizes):
    """The units of a first hidden layer are independent, and so variances of outputs are those of the default."""
    weights = layers(*sizes)
    full, diagonal = propagated(X, weights), network(X, weights)
    torch.testing.assert_close(full.loc, diagonal.loc, rtol=1e-12, atol=0)
    torch.testing.assert_close(full.variance, diagonal.variance, rtol=1e-12, atol=0)


def moved(function):
    """The network with a function between its second and its third layer."""
    return lambda x, w: F.linear(function(F.linear(F.linear(x, *w[0]).relu(), *w[1])).relu(), *w[2])


@pytest.mark.parametrize("function", [
    lambda h: h.unsqueeze(0).squeeze(0),
    lambda h: h.reshape(2, 2, 5).flatten(0, 1),
    lambda h: 2 * (0.5 * h + 1) - 2,
    lambda h: F.dropout(h, 0.5, training=False),
    lambda h: torch.flatten(h, 1),
    lambda h: h.float().double(),
    lambda h: h.expand(4, 5),
    lambda h: torch.flip(h.flip(-1), [1]),
    lambda h: h.split([5, 0], -1)[0][..., :5],
])  # fmt: skip
def test_functions_that_keep_rows_keep_their_covariances(function):
    weights = layers(3, 6, 5, 2)
    expected = propagated(X, weights)
    result = propagated(X, weights, moved(function))
    torch.testing.assert_close(result.variance, expected.variance, rtol=1e-6, atol=0)
    torch.testing.assert_close(covariance_of(result), covariance_of(expected), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("part", [slice(2), slice(1, 4)])
def test_some_units_of_a_layer_are_a_smaller_layer(part):
    (w, b), (u, a), (v, c) = layers(3, 6, 5, 2)
    fewer = [GaussianMoments(x.loc[part], x.variance[part]) for x in (u, a)]
    last = GaussianMoments(v.loc[:, part], v.variance[:, part]), c
    expected = propagated(X, [(w, b), tuple(fewer), last])
    found = propagated(X, [(w, b), (u, a), last], moved(lambda h: h[:, part]))
    torch.testing.assert_close(found.loc, expected.loc)
    torch.testing.assert_close(covariance_of(found), covariance_of(expected))


def test_a_batch_of_networks_and_products_of_matrices():
    nets = [layers(3, 6, 5, 2, seed=seed) for seed in (1, 2)]

    def stacked(k, part):
        return GaussianMoments(
            *(torch.stack([getattr(net[k][part], name) for net in nets]) for name in ("loc", "variance"))
        )

    with full_covariances():
        h = X.expand(2, 4, 3)
        for k in range(3):
            h = h.relu() if k else h
            h = h @ stacked(k, 0).mT + stacked(k, 1).unsqueeze(1)
    expected = [propagated(X, net) for net in nets]
    torch.testing.assert_close(covariance_of(h), torch.stack([covariance_of(e) for e in expected]))


def test_heads_on_the_same_units_have_a_covariance():
    trunk, (w, b) = layers(3, 6, 5), layers(5, 2, seed=4)[0]
    with full_covariances():
        h = network(X, trunk).relu()
        together = F.linear(h, w, b)
        first, second = (F.linear(h, w[k : k + 1], b[k : k + 1]) for k in range(2))
    torch.testing.assert_close(covariance_between(first, second)[:, 0], covariance_of(together)[:, 0, 1])
    torch.testing.assert_close(covariance_of(first, second), covariance_of(together))
    other = propagated(X, layers(3, 6, 5, 1, seed=7))
    with pytest.raises(UnsupportedError, match="come from different layers"):
        covariance_of(first, other)


def test_gradients_are_those_of_finite_differences():
    weights = layers(3, 3, 3, 2)
    leaves = [t.clone().requires_grad_() for parts in weights for g in parts for t in (g.loc, g.variance)]

    def moments(x, *tensors):
        given = [GaussianMoments(*tensors[k : k + 2]) for k in range(0, len(tensors), 2)]
        result = propagated(x, list(zip(given[::2], given[1::2], strict=True)))
        return result.loc, covariance_of(result)

    assert torch.autograd.gradcheck(moments, [X[:1].clone().requires_grad_(), *leaves])


@pytest.mark.parametrize("noisy_biases", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dead_and_certain_units_have_finite_gradients(dtype, noisy_biases):
    """An input of zero leaves only the biases, and one unit is far below its kink."""
    weights = layers(3, 5, 5, 2, dtype=dtype)
    weights = [(w, b if noisy_biases else b.loc) for w, b in weights]
    (weights[0][1].loc if noisy_biases else weights[0][1])[0] = -50.0
    leaves = [w.loc.requires_grad_() for w, _ in weights] + [w.variance.requires_grad_() for w, _ in weights]
    result = propagated(torch.zeros(2, 3, dtype=dtype), weights)
    covariance_of(result).sum().backward()
    assert all(torch.isfinite(leaf.grad).all() for leaf in leaves)
    assert (torch.linalg.eigvalsh(covariance_of(result)) > -1e-6).all()


def test_float32_agrees_with_float64():
    exact = covariance_of(propagated(X, layers(3, 16, 16, 16, 3)))
    weights = [
        tuple(GaussianMoments(g.loc.float(), g.variance.float()) for g in parts)
        for parts in layers(3, 16, 16, 16, 3)
    ]
    single = covariance_of(propagated(X.float(), weights))
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), exact, rtol=1e-4, atol=1e-5)


def test_an_uncertain_input():
    (w, b) = layers(3, 2)[0]
    x = GaussianMoments(X, torch.rand(4, 3))
    covariance = covariance_of(propagated(x, [(w, b)]))
    expected = w.loc @ torch.diag_embed(x.variance) @ w.loc.T
    own = (x.variance + X.square()) @ w.variance.T + b.variance
    torch.testing.assert_close(covariance, expected + torch.diag_embed(own))


def test_the_same_on_a_device(device):
    weights = layers(3, 6, 5, 2)
    there = [tuple(GaussianMoments(g.loc.to(device), g.variance.to(device)) for g in w) for w in weights]
    leaves = [w.loc.requires_grad_() for w, _ in weights], [w.loc.requires_grad_() for w, _ in there]
    expected = covariance_of(propagated(X, weights))
    found = covariance_of(propagated(X.to(device), there))
    assert found.device.type == device.type
    torch.testing.assert_close(found.cpu(), expected)
    gradients = [torch.autograd.grad(c.sum(), own) for c, own in zip((expected, found), leaves, strict=True)]
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(other.cpu(), own)


# What is refused ------------------------------------------------------------------------------------------------

IMAGES = torch.ones(2, 1, 4, 4, dtype=torch.float64)
KERNEL = GaussianMoments(
    torch.ones(1, 1, 2, 2, dtype=torch.float64), torch.ones(1, 1, 2, 2, dtype=torch.float64)
)
ONE = GaussianMoments(torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64))
REFUSED = {
    "a convolution": (lambda w: F.conv2d(IMAGES, KERNEL), r"torch\.conv2d with arguments"),
    "an einsum": (lambda w: torch.einsum("ni,oi->no", X, w[0][0]), "einsum with arguments"),
    "an activation": (moved(torch.tanh), "dependent activations"),
    "its name": (lambda w: F.linear(torch.tanh(network(X, w[:2])), *w[2]), "tanh of dependent activations"),
    "a sum": (lambda w: network(X, w).sum(-1), r"activations enter torch\.Tensor\.sum|torch\.sum"),
    "a norm": (lambda w: F.layer_norm(network(X, w[:2]), (5,)), r"layer_norm"),
    "a skip": (lambda w: network(X, w[:2]) + F.linear(X, *layers(3, 5)[0]), r"torch\.add"),
    "examples subtracted": (lambda w: (lambda f: f[:2] - f[2:])(network(X, w)), r"torch\.sub"),
    "other rows": (
        lambda w: F.linear(network(X, w[:2]).reshape(5, 4), layers(4, 2)[0][0]),
        "moved to other rows",
    ),
    "columns": (lambda w: F.linear(network(X, w[:2]).t(), layers(4, 2)[0][0]), "moved to other rows"),
    "positions": (lambda w: F.linear(X.expand(2, 4, 3), *w[0]), r"same weights at each of \(4,\) positions"),
    "on the right": (lambda w: torch.ones(4, 4) @ network(X, w[:2]), "as the second factor"),
    "a softmax": (lambda w: F.linear(F.linear(X, *w[0]).softmax(-1), w[1][0]), "softmax of dependent"),
    "a larger one": (lambda w: (lambda h: torch.maximum(h, h.flip(-1)))(F.linear(X, *w[0])), "maximum"),
    "one bias": (lambda w: F.linear(X, *w[0]) + ONE, "value that several units share"),
    "one bias later": (lambda w: network(X, w) - ONE, "value that several units share"),
    "one scale": (lambda w: F.linear(X * ONE, *w[0]), "value that several units share"),
    "a unit twice": (lambda w: F.linear(network(X, w[:1]).relu()[:, [0, 0, 1, 2, 3, 4]], w[1][0]), "or copied"),
    "copies of it": (lambda w: F.linear(network(X, w[:1])[:, :1].relu().expand(-1, 6), w[1][0]), "or copied"),
    "repeated": (lambda w: F.linear(network(X, w[:1]).relu().repeat(1, 2)[:, :6], w[1][0]), "or copied"),
    "a turned matrix": (lambda w: covariance_of((w[0][0] @ X.T).T), "density of activations"),
    "a change in place": (lambda w: torch.tanh_(network(X, w)), "are changed in place"),
    "dropout": (lambda w: F.dropout(network(X, w)), "dropout"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_loses_covariances_is_refused_by_name(case):
    function, message = REFUSED[case]
    weights = layers(3, 6, 5, 2)
    with full_covariances(), pytest.raises(UnsupportedError, match=message) as error:
        function(X, weights) if case == "an activation" else function(weights)
    assert "propagate only variances (the default)" in str(error.value)


def test_weights_with_covariances_are_refused():
    joint = JointMoments(torch.zeros(2, 6), None, SharedNoise(torch.ones(2, 2, 6), "'w'"), of_weights=True)
    with (
        full_covariances(),
        joint_noise_followed(),
        pytest.raises(UnsupportedError, match="that have covariances"),
    ):
        F.linear(network(X, layers(3, 6)).relu(), joint)


def test_nothing_is_followed_outside_of_the_context():
    with full_covariances(False):
        result = network(X, layers(3, 6, 5, 2))
    assert type(result) is GaussianMoments
    with pytest.raises(ZeroDivisionError), full_covariances():
        raise ZeroDivisionError
    assert type(network(X, layers(3, 6, 5, 2))) is GaussianMoments
