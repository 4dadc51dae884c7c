# SPDX-License-Identifier: Apache-2.0
"""A guide says how it is predicted, whoever wrote it: one of another library, for linear regression."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

import pyro_dvi as dvi
from pyro_dvi.errors import GuideError
from pyro_dvi.runs.outputs import Outputs


class Gaussian(NamedTuple):
    outputs: Outputs
    full_covariance: Tensor


class WiderNoise(Messenger):
    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] == "y":
            msg["fn"] = dist.Normal(msg["fn"].loc, 2 * msg["fn"].scale)


class ForeignGuide:
    """A full Gaussian over the weights, whose scales of the noise are to be doubled."""

    prediction_rule: Any = "Linearised"
    factorised = None

    def __init__(self) -> None:
        root = torch.tensor([[0.3, 0.0], [0.2, 0.1]], dtype=torch.float64)
        self.loc, self.covariance = torch.tensor([1.0, -2.0], dtype=torch.float64), root @ root.T
        self.checked: list[Any] = []

    def __call__(self, *args: Any) -> None:
        pyro.sample("w", dist.MultivariateNormal(self.loc, self.covariance))

    def check_model(self, model: Any) -> None:
        self.checked.append(model)

    def example_latents(self) -> dict[str, Tensor]:
        return {"w": self.loc}

    def predicted_model(self, model: Callable[..., Any]) -> Callable[..., Any]:
        return WiderNoise()(model)

    @torch.enable_grad()
    def linearised(self, inputs: tuple[Any, ...], read: Callable[..., Outputs], link: Any) -> Gaussian:
        loc = self.loc.clone().requires_grad_()
        outputs = read({"w": loc}, len(inputs[0]))
        rows = [torch.autograd.grad(f, loc, retain_graph=True)[0] for f in outputs.values.flatten()]
        jacobian = torch.stack(rows).reshape(*outputs.values.shape, -1)
        return Gaussian(outputs, jacobian @ self.covariance @ jacobian.mT)


def model(x: Tensor, y: Tensor | None = None) -> Any:
    w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=torch.float64), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)


X = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(4, 2)
Y = torch.ones(4, dtype=torch.float64)


def test_a_foreign_guide_is_asked_for_all_that_a_prediction_needs():
    guide = ForeignGuide()
    found = dvi.predict(model, guide, (X, Y))
    assert found.method == dvi.Linearised() and guide.checked == [model]
    torch.testing.assert_close(found.mean, X @ guide.loc)
    torch.testing.assert_close(found.variance, (X @ guide.covariance * X).sum(-1) + 1.0)
    expected = dist.Normal(found.mean, found.variance.sqrt()).log_prob(Y)
    torch.testing.assert_close(found.log_likelihood(), expected)


@pytest.mark.parametrize("name", ["AtMean", "Samples", dvi.Samples(3)], ids=str)
def test_other_rules_take_its_model(name):
    guide = ForeignGuide()
    guide.prediction_rule = name
    found = dvi.predict(model, guide, X)
    torch.testing.assert_close(found.aleatoric, torch.full((4,), 1.0, dtype=torch.float64))
    assert (found.epistemic > 0).all() == (name != "AtMean")


def test_a_guide_that_is_no_product_is_not_predicted_as_one():
    with pytest.raises(GuideError, match=r"this ForeignGuide is not a factorised Gaussian.*Linearised\(\)"):
        dvi.predict(model, ForeignGuide(), X, dvi.Moments())
