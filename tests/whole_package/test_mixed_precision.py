# SPDX-License-Identifier: Apache-2.0
"""Training under ``torch.autocast``: supported in bfloat16, refused by name where half precision would be wrong."""

import contextlib

import pyro
import pytest
import torch

import pyro_dvi as dvi
from pyro_dvi.errors import UnsupportedError
from pyro_dvi.laplace import Dense
from tests.whole_package.methods import METHODS, NUM_DATA, classifier, images, laplace_guide, small_net

NAMES = [
    name for name in METHODS if name != "Taylor, Hessian"
]  # torch has no third derivative of its batch norm


def gradients(name: str, dtype: torch.dtype | None) -> tuple[float, dict[str, torch.Tensor]]:
    pyro.clear_param_store()
    model = classifier("cpu")
    svi = METHODS[name](model)
    svi.guide.initialize(*images("cpu"))
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        loss = svi.loss_and_grads(svi.model, svi.guide, *images("cpu"))
    return loss, {k: p.grad for k, p in svi.guide.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", NAMES)
def test_gradients_in_bfloat16_are_those_of_float32(name):
    """Up to the rounding of bfloat16, 0.4% for each of some operations, of the gradient as a whole."""
    exact, expected = gradients(name, None)
    loss, found = gradients(name, torch.bfloat16)
    assert loss == pytest.approx(exact, rel=1e-3)
    assert {g.dtype for g in found.values()} == {torch.float32}
    difference = torch.cat([(found[k] - g).flatten() for k, g in expected.items()]).norm()
    assert difference < 0.05 * torch.cat([g.flatten() for g in expected.values()]).norm()


@pytest.mark.parametrize("name", ["VOGN", "OGN", "IVON", "mean-field moments"])
def test_steps_in_bfloat16_reduce_the_loss(name):
    svi = METHODS[name](classifier("cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        losses = [svi.step(*images("cpu")) for _ in range(6)]
    assert losses[-1] < losses[0] and all(p.dtype == torch.float32 for p in svi.guide.parameters())


@pytest.mark.every(3)
@pytest.mark.parametrize("name", NAMES)
def test_one_context_for_training_is_one_for_each_step(name):
    """Autocast keeps a copy of the last layer, which is no latent variable, until its context ends."""

    def trained(outer: bool) -> dict[str, torch.Tensor]:
        pyro.clear_param_store()
        torch.manual_seed(0)
        net = dvi.to_bayesian_(small_net(), exclude=["4.*"])
        svi = METHODS[name](dvi.classifier(net, num_data=NUM_DATA))
        with torch.autocast("cpu", torch.bfloat16) if outer else contextlib.nullcontext():
            for _ in range(4):
                with torch.autocast("cpu", torch.bfloat16):
                    svi.step(*images("cpu"))
        return {k: p.detach().clone() for k, p in pyro.get_param_store().items()}

    expected = trained(False)
    assert any("4.weight" in name for name in expected)
    torch.testing.assert_close(trained(True), expected, rtol=0, atol=0)


def test_the_likelihood_is_summed_in_float32():
    """Twelve numbers around one, each with eight bits, have a sum with more."""
    svi = METHODS["mean-field moments"](classifier("cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        svi.step(*images("cpu"))
    elbo = svi.loss_and_grads.__self__
    assert elbo.terms["log_likelihood"].dtype == torch.float32


@pytest.mark.parametrize("name", ["Taylor, empirical Fisher", "multiplicative noise", "VOGN"])
def test_float16_is_refused(name):
    with pytest.raises(UnsupportedError, match="use torch.autocast.*bfloat16"):
        gradients(name, torch.float16)


USES = {
    "fit": lambda guide, batches, model: guide.fit(batches, Dense()),
    "polish": lambda guide, batches, model: guide.polish(batches, progress=False),
    "tune": lambda guide, batches, model: guide.tune(batches, progress=False),
    "log_evidence": lambda guide, batches, model: guide.log_evidence(batches),
    "predict": lambda guide, batches, model: dvi.predict(model, guide, batches[0]),
}


@pytest.mark.parametrize("use", USES.values(), ids=list(USES))
def test_laplace_refuses_half_precision(use):
    guide, batches, model = laplace_guide("cpu")
    guide.fit(batches, Dense())
    use(guide, batches, model)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(UnsupportedError, match="torch.autocast .*only in training"),
    ):
        use(guide, batches, model)
