# SPDX-License-Identifier: Apache-2.0
"""classifier and regressor: the log joint they state, every shape they accept, and that they train."""

import copy
import io
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import Tensor, nn

import pyro_dvi as dvi
from pyro_dvi.bayesian import (
    Heteroscedastic,
    LearnedScale,
    classifier,
    init_to_module,
    regressor,
    to_bayesian_,
)
from pyro_dvi.errors import DataError, DviWarning
from pyro_dvi.laplace import ByValidation


def observed(model: Any, *args: Any) -> Any:
    return pyro.poutine.trace(model).get_trace(*args).nodes["obs"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("positions", [(), (5,), (3, 2)])
def test_classifier_is_the_cross_entropy_of_the_whole_data_set(positions, dtype):
    logits = torch.randn(4, 3, *positions, dtype=dtype)
    y = torch.randint(3, (4, *positions))
    site = observed(classifier(nn.Identity(), 20), logits, y)
    assert site["scale"] == 5.0
    assert site["fn"].batch_shape == (4,)
    expected = (
        -nn.functional.cross_entropy(logits, y, reduction="none").flatten(1).sum(1) if positions else None
    )
    expected = expected if expected is not None else -nn.functional.cross_entropy(logits, y, reduction="none")
    assert torch.allclose(site["fn"].log_prob(y), expected)


# outputs, targets, noise, mean and scale of the observation
REGRESSIONS = [
    (torch.ones(4), torch.zeros(4), 2.0, torch.ones(4), 2.0),
    (torch.ones(4, 1), torch.zeros(4), 2.0, torch.ones(4), 2.0),
    (torch.ones(4), torch.zeros(4, 1), 2.0, torch.ones(4), 2.0),
    (torch.ones(4, 1), torch.zeros(4, 1), 2, torch.ones(4), 2.0),
    (torch.ones(4, 3), torch.zeros(4, 3), torch.tensor(0.5), torch.ones(4, 3), 0.5),
    (torch.ones(4, 3), torch.zeros(4, 3), LearnedScale(0.3), torch.ones(4, 3), 0.3),
    (torch.tensor([[1.0, 2.0]] * 4), torch.zeros(4), Heteroscedastic(), torch.ones(4), torch.e),
    (torch.tensor([[1.0, 1.0, 0.0, 0.0]] * 4), torch.zeros(4, 2), Heteroscedastic(), torch.ones(4, 2), 1.0),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("outputs", "y", "noise", "mean", "scale"), REGRESSIONS)
def test_regressor(outputs, y, noise, mean, scale, dtype):
    model = regressor(nn.Identity(), 12, noise).to(dtype)
    site = observed(model, outputs.to(dtype), y.to(dtype))
    assert site["scale"] == 3.0 and site["fn"].batch_shape == (4,)
    expected = dist.Normal(mean.double(), scale).log_prob(torch.zeros(mean.shape, dtype=torch.float64))
    assert torch.allclose(site["fn"].log_prob(site["value"]).double().sum(), expected.sum(), rtol=1e-6)


def test_noise_with_a_prior_is_a_latent():
    model = regressor(nn.Linear(2, 1), 12, dist.HalfNormal(1.0)).double()
    trace = pyro.poutine.trace(model).get_trace(torch.zeros(4, 2).double(), torch.zeros(4).double())
    noise = trace.nodes["noise_scale"]["value"]
    assert noise.dtype is torch.float64
    assert torch.equal(trace.nodes["obs"]["fn"].scale, noise.expand(4))


@pytest.mark.every(4)
@pytest.mark.parametrize("noise", [0.3, dist.HalfNormal(1.0), LearnedScale(0.5), Heteroscedastic()])
def test_regression_trains_predicts_and_is_saved(noise):
    x = torch.linspace(-1, 1, 40)[:, None]
    y = 2 * x[:, 0] + 0.1 * torch.randn(40)
    net = to_bayesian_(nn.Linear(1, 2 if isinstance(noise, Heteroscedastic) else 1))
    model = regressor(net, 40, copy.deepcopy(noise))
    guide = AutoNormal(model, init_loc_fn=init_to_module, init_scale=0.01)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), Trace_ELBO())  # type: ignore[attr-defined]
    for _ in range(200):
        svi.step(x, y)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (model, copy.deepcopy(model), torch.load(file, weights_only=False)):
        draws = Predictive(twin.eval(), guide=guide, num_samples=20)(x)["obs"]
        assert draws.shape == (20, 40)
        assert (draws.mean(0) - 2 * x[:, 0]).abs().mean() < 0.4


def test_a_network_that_was_tried_out_before_can_be_wrapped():
    net = to_bayesian_(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    net(torch.randn(4, 2))
    trace = pyro.poutine.trace(classifier(net, 4)).get_trace(torch.randn(4, 2))
    assert "net.0.weight" in trace.nodes


def test_inputs_may_be_tuples_or_mappings():
    class Sum(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a + b

    a, b = torch.randn(4, 3), torch.randn(4, 3)
    for x in ((a, b), [a, b], {"b": b, "a": a}, UserDict(b=b, a=a)):
        assert torch.allclose(observed(classifier(Sum(), 4), x)["fn"].logits, (a + b).log_softmax(-1))


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


@pytest.mark.every(3)
@pytest.mark.parametrize("wrap", [Output, lambda logits: UserDict(loss=None, logits=logits)])
@pytest.mark.parametrize("outputs", [1, 3])
def test_batches_and_outputs_as_of_transformers(wrap, outputs):
    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 2), nn.Linear(2, outputs)

        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
            assert labels is None
            return wrap(self.head((self.embed(input_ids) * attention_mask.unsqueeze(-1)).sum(1)))

    net = to_bayesian_(Text())
    model = regressor(net, 20) if outputs == 1 else classifier(net, 20)
    ids = torch.randint(7, (20, 5))
    x = {"input_ids": ids, "attention_mask": (ids > 1).float()}
    y = ids[:, 0] % 3 if outputs == 3 else ids[:, 0].float()
    whole, found = {**x, "labels": y}, []
    guide = dvi.LaplaceGuide(model)
    dvi.fit(SVI(model, guide, dvi.optim.Adam({}), Trace_ELBO()), [whole], epochs=2, progress=False)
    for batches in ([(x, y)], [{"x": x, "y": y}], [UserDict(whole)], [{**x, "y": y}]):
        guide.scale_factors = {}
        guide.fit(batches, unconverged="accept")
        with pytest.warns(DviWarning, match="tried"):
            held_out = ByValidation(batches)
            curve = guide.tune(batches, criterion=held_out, values=[2], unconverged="accept", progress=False)
        predicted = dvi.predict(model, guide, batches)
        found.append([curve.scores, predicted.log_likelihood(y), predicted.mean])
    for others in found[1:]:
        for other, first in zip(others, found[0], strict=True):
            assert torch.equal(other, first)
    assert dvi.predict(model, guide, whole).metrics()["nll"] > 0
    assert len(dvi.predict(model, guide, x, batch_size=7).mean) == 20


def test_more_inputs_than_data_may_be_predicted_and_evaluated():
    model = classifier(nn.Identity(), 3)
    assert observed(model, torch.randn(5, 2))["value"].shape == (5,)
    assert observed(model.eval(), torch.randn(5, 2), torch.zeros(5).long())["scale"] == 1.0


def test_a_step_draws_no_permutation_of_the_data_set():
    model = regressor(nn.Identity(), 10**9)
    state = torch.get_rng_state()
    observed(model, torch.zeros(4), torch.zeros(4))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_network_that_ends_in_a_softmax_is_named_once():
    x, y = torch.randn(4, 2), torch.tensor([0, 1, 1, 0])
    model = classifier(nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1)), 4)
    with pytest.warns(DviWarning, match="ends in softmax"):
        model(x, y)
    model(x, y)
    classifier(nn.Sequential(nn.Linear(2, 2), nn.LogSoftmax(-1)), 4)(x, y)  # changes nothing


class Tokens(nn.Module):
    """Logits of each token, with classes last as in a transformer, or classes first."""

    def __init__(self, classes: int, first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.first = nn.Linear(3, classes), first

    def forward(self, x: Tensor) -> Tensor:
        logits = self.layer(x)
        return logits.movedim(-1, 1) if self.first else logits


@pytest.mark.parametrize("method", [dvi.MAP(lr=0.1), dvi.MomentPropagation(lr=0.1)])
@pytest.mark.parametrize("positions", [(4,), (4, 4)])
def test_as_many_positions_as_classes(method, positions):
    """The axes are as in F.cross_entropy; where both orders fit the labels, a warning names the order."""
    x, y = torch.randn(40, *positions, 3), torch.arange(4).expand(40, *positions)
    with pytest.warns(DviWarning, match=r"read as \[batch, classes, .*return logits.movedim\(-1, 1\)"):
        method.fit(Tokens(4, False), [(x, y)], 1, progress=False)
    y = (x.pow(2).sum(-1) > 2).long() + 2 * (x[..., 0] > 0)
    x = nn.functional.one_hot(y, 4).float()[..., 1:]
    posterior = method.fit(Tokens(4, True), [(x, y)], 60, progress=False)
    assert posterior.predict((x, y), seed=0).metrics()["accuracy"] == 1.0


@pytest.mark.parametrize("method", [dvi.MAP(), dvi.MomentPropagation(), dvi.Laplace()])
def test_other_numbers_of_positions_with_classes_last_are_refused_with_the_remedy(method):
    x, y = torch.randn(40, 5, 3), torch.zeros(40, 5).long()
    with pytest.raises(DataError, match=r"\(40, 5, 4\).* return logits.movedim\(-1, 1\)"):
        method.fit(Tokens(4, False), [(x, y)], 1, progress=False)


def test_ignored_labels_count_nowhere() -> None:
    """Label -100, as in F.cross_entropy: as if the data were the other tokens, each an example of its own."""
    x, y = torch.randn(6, 5, 3), torch.randint(4, (6, 5))
    kept = torch.rand(6, 5) > 0.4
    kept[0] = False
    padded = y.masked_fill(~kept, -100)
    found: list[Any] = []
    site = observed(classifier(Tokens(4, True), 6), x, padded)
    expected = nn.functional.cross_entropy(Tokens(4, True)(x), padded, reduction="none").sum(1)
    torch.testing.assert_close(site["fn"].log_prob(site["value"]), -expected)
    for data, first in [((x, padded), True), ((x[kept], y[kept]), False)]:
        model = classifier(to_bayesian_(Tokens(4, first)), len(data[0]))
        pyro.clear_param_store()
        moments = SVI(
            model, dvi.MultiplicativeNoiseGuide(model), dvi.optim.Adam({}), dvi.MomentPropagationELBO()
        )
        loss = moments.evaluate_loss(*data)
        model = classifier(to_bayesian_(Tokens(4, first)), len(data[0]))
        guide = dvi.LaplaceGuide(model)
        guide.fit([data], unconverged="accept")
        scores = dvi.predict(model, guide, data).metrics()
        found.append(
            (
                loss,
                guide.posterior.marginal_variance(),
                scores["accuracy"],
                scores["brier"],
                scores["entropy"],
            )
        )
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize(
    "method", [dvi.MAP(), dvi.VariationalLaplace(), dvi.MomentPropagation(), dvi.Laplace()]
)
def test_one_ignored_label_for_an_example_counts_nowhere(method: Any) -> None:
    """As if the data set were the other examples; some batches have no ignored labels."""
    x, y = torch.randn(60, 3), torch.randint(3, (60,))
    kept = (torch.arange(60) % 4 != 0) | (torch.arange(60) < 20)
    labels = y.masked_fill(~kept, -100)
    site = observed(classifier(nn.Identity(), 60), x, labels)
    expected = nn.functional.cross_entropy(x, labels, reduction="none")
    torch.testing.assert_close(site["fn"].log_prob(site["value"]), -expected)
    found = []
    for inputs in (x, torch.where(kept[:, None], x, x + 9)):
        batches = list(zip(inputs.split(20), labels.split(20), strict=True))
        torch.manual_seed(0)
        posterior = method.fit(nn.Linear(3, 3), batches, 4, progress=False)
        scores = posterior.predict(batches, seed=0).metrics()
        alone = posterior.predict((x[kept], y[kept]), seed=0).metrics()
        assert scores == pytest.approx(alone, rel=1e-5)
        found.append({name: v.detach() for name, v in posterior.guide.named_parameters()} | scores)
    torch.testing.assert_close(*found)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "method", [dvi.VariationalLaplace(), dvi.NaturalGradients(), dvi.NaturalGradients(by=dvi.IVON)]
)
def test_inputs_of_ignored_labels_change_no_posterior(method):
    x, y = torch.randn(6, 5, 3), torch.randint(4, (6, 5))
    ignored = torch.rand(6, 5) > 0.6
    ends = []
    for other in (x, torch.where(ignored[..., None], 10 + x, x)):
        data = other, y.masked_fill(ignored, -100)
        posterior = method.fit(Tokens(4, True), [data], 3, progress=False)
        ends.append((dict(posterior.guide.named_parameters()), posterior.predict(data, seed=0).metrics()))
    torch.testing.assert_close(*ends)
