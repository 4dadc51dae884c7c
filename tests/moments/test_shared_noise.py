# SPDX-License-Identifier: Apache-2.0
"""Moments that share noise, held against dense covariances by Jacobians."""

import pytest
import torch
import torch.nn.functional as F

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.shared_noise import JointMoments, SharedNoise, covariance_of, joint_noise_followed

pytestmark = pytest.mark.usefixtures("double")

X = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

# A function of weight and bias that is linear in both, and their shapes.
USES = {
    "linear": (lambda w, b: F.linear(X, w, b), (2, 3), (2,)),
    "matmul, then plus": (lambda w, b: X @ w.t() + b, (2, 3), (2,)),
    "the weight on the left": (lambda w, b: (w @ X.T).mT - b, (2, 3), (2,)),
    "einsum": (lambda w, b: torch.einsum("ni,oi->no", X, w) + b, (2, 3), (2,)),
    "convolution": (lambda w, b: F.conv2d(IMAGES, w, b, padding=1), (2, 3, 3, 3), (2,)),
    "views and scales": (lambda w, b: (2 * F.linear(X, w, b) / 4).unsqueeze(0)[0, :, :1], (2, 3), (2,)),
    "shifts that are certain": (lambda w, b: 3 + F.linear(X, w, b) - X[:, :2], (2, 3), (2,)),
    "parts": (lambda w, b: F.linear(X, w, b).chunk(2, -1)[1].squeeze(-1), (2, 3), (2,)),
    "differences of a layer": (lambda w, b: F.linear(X, w, b) - F.linear(2 * X, w, b), (2, 3), (2,)),
    "in place": (lambda w, b: F.linear(X, w, b).add_(b), (2, 3), (2,)),
    "double precision": (lambda w, b: F.linear(X, w, b).double(), (2, 3), (2,)),
}


def weights(*shapes, rest, between=True, num_lanes=6):
    torch.manual_seed(3)
    return [
        JointMoments(
            torch.randn(shape),
            torch.rand(shape) if rest else None,
            SharedNoise(torch.randn(num_lanes, *shape), "'w' and 'b'", between),
            of_weights=True,
        )
        for shape in shapes
    ]


@pytest.mark.parametrize("rest", [False, True])
@pytest.mark.parametrize("case", USES)
def test_covariances_of_outputs_against_jacobians(case, rest):
    if rest and case in ("differences of a layer", "in place"):
        pytest.skip("a weight is used twice, where what it does not share counts as independent")
    function, *shapes = USES[case]
    given = weights(*shapes, rest=rest)
    with joint_noise_followed():
        result = function(*given)
    locs = tuple(g.loc for g in given)
    jacobians = torch.autograd.functional.jacobian(function, locs)
    flat = torch.cat([j.reshape(result.loc.numel(), -1) for j in jacobians], 1)
    factor = torch.cat([g.noise.factor.flatten(1) for g in given], 1)
    covariance = factor.T @ factor
    own = torch.zeros(flat.shape[1]) if not rest else torch.cat([g.rest.flatten() for g in given])
    torch.testing.assert_close(result.loc, function(*locs))
    expected = flat @ (covariance + torch.diag(own)) @ flat.T
    torch.testing.assert_close(result.variance.flatten(), expected.diagonal())
    if not rest:  # with it, outputs of different rows share more than the lanes
        lanes = result.noise.factor.flatten(1)
        torch.testing.assert_close(lanes.T @ lanes, expected)


def test_covariance_of_outputs_with_rests():
    """Outputs have weights of their own, so that rests add to the diagonal of each row."""
    (w,) = weights((2, 3), rest=True)
    result = F.linear(X, w)
    lanes = torch.einsum("ni,roi->rno", X, w.noise.factor)
    expected = torch.einsum("rno,rnp->nop", lanes, lanes) + torch.diag_embed(F.linear(X.square(), w.rest))
    torch.testing.assert_close(covariance_of(result), expected)


def test_rows_with_noise_of_their_own_have_independent_outputs():
    (w,) = weights((2, 3), rest=False, between=False)
    covariance = covariance_of(F.linear(X, w))
    variance = torch.einsum("ni,roi->rno", X, w.noise.factor).square().sum(0)
    torch.testing.assert_close(covariance, torch.diag_embed(variance))


def test_an_uncertain_input_adds_its_own_noise():
    """Variances by brute force over pairs of weights and of inputs."""
    (w, b) = weights((2, 3), (2,), rest=True)
    x = GaussianMoments(X, torch.rand(5, 3))
    result = F.linear(x, w, b)
    factors = torch.cat([w.noise.factor, b.noise.factor[..., None]], -1)
    rests, locs = torch.cat([w.rest, b.rest[:, None]], -1), torch.cat([w.loc, b.loc[:, None]], -1)
    mean = torch.cat([x.loc, torch.ones(5, 1)], 1)
    second = mean[:, :, None] * mean[:, None] + torch.diag_embed(F.pad(x.variance, (0, 1)))
    for o in range(2):
        covariance = factors[:, o].T @ factors[:, o] + torch.diag(rests[o])
        products = covariance + locs[o][:, None] * locs[o]
        expected = (products * second).sum((1, 2)) - (mean @ locs[o]).square()
        torch.testing.assert_close(result.variance[:, o], expected)


def test_gradients_reach_means_factors_and_rests():
    w, b = weights((2, 3), (2,), rest=True)
    leaves = [t.requires_grad_() for g in (w, b) for t in (g.loc, g.noise.factor, g.rest)]

    def loss(*tensors):
        noises = [SharedNoise(f, "'w' and 'b'") for f in (tensors[1], tensors[4])]
        w = JointMoments(tensors[0], tensors[2], noises[0], of_weights=True)
        b = JointMoments(tensors[3], tensors[5], noises[1], of_weights=True)
        with joint_noise_followed():
            result = X @ w.T + b
        return covariance_of(result).square().sum() + result.loc.square().sum()

    torch.autograd.gradcheck(loss, leaves)


@pytest.mark.parametrize("function", [
    lambda w, b: F.linear(X, w, b).sum(-1),
    lambda w, b: F.linear(F.linear(X, w, b), b.unsqueeze(0)),
    lambda w, b: torch.relu(F.linear(X, w, b)) @ torch.ones(2),
    lambda w, b: F.linear(X, torch.exp(w), b),
    lambda w, b: F.linear(X, w, b) * b,
    lambda w, b: torch.cat([F.linear(X, w), F.linear(X, w)]),
])  # fmt: skip
def test_what_loses_covariances_is_refused(function):
    with joint_noise_followed(), pytest.raises(UnsupportedError, match="'w' and 'b' has covariances"):
        function(*weights((2, 3), (2,), rest=False))


def test_independent_outputs_are_not_subtracted():
    """One whose rows share no noise has a difference of another variance than that of its lanes."""
    w, b = weights((2, 3), (2,), rest=False, between=False)
    with joint_noise_followed():
        outputs = X @ w.T + b  # a bias is of the same rows
        with pytest.raises(UnsupportedError, match="have covariances|has covariances"):
            outputs[:, 0] - outputs[:, 1]


def test_a_function_of_outputs_keeps_the_gaussian_behind_it():
    with joint_noise_followed():
        outputs = F.linear(X, *weights((2, 3), (2,), rest=False))
        scale = torch.exp(0.5 * outputs[:, 1:]).squeeze(-1)
        probabilities = torch.softmax(outputs, -1)
    assert isinstance(scale.link.inner, JointMoments)
    torch.testing.assert_close(scale.link.inner.noise.factor, 0.5 * outputs.noise.factor[:, :, 1])
    torch.testing.assert_close(covariance_of(probabilities.link.inner), covariance_of(outputs))


def test_a_bias_with_the_noise_of_another_layer_is_refused():
    w, b = weights((2, 3), (2,), rest=False)
    b.noise = SharedNoise(b.noise.factor, "'other.bias'")
    with pytest.raises(UnsupportedError, match="'other.bias' has covariances.* with weights of another site"):
        F.linear(X, w, b)
