# SPDX-License-Identifier: Apache-2.0
"""Models and data that a method takes, and mistakes with them."""

import inspect
from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Sampler, Subset, TensorDataset

import pyro_dvi as dvi
from pyro_dvi import AtMean
from pyro_dvi.bayesian import Heteroscedastic, LearnedScale
from pyro_dvi.errors import ArgumentError, DataError, DviWarning, ModelError
from tests.methods.cases import EPOCHS, METHODS, Slope, fitted, loader, network, rows, slope, with_lr

# Models ---------------------------------------------------------------------------------------------------------------


@pytest.mark.every(4)
@pytest.mark.parametrize("model", [Slope(), slope, nn.Linear(3, 1), dvi.to_bayesian_(nn.Linear(3, 1), 2.0)])
def test_any_model_with_numbers(model):
    posterior = dvi.VariationalLaplace(lr=0.1).fit(model, loader(labels=False), 60, progress=False)
    assert posterior.predict(rows(20, 1, labels=False)).metrics()["rmse"] < 0.1
    assert (inspect.unwrap(posterior.model) is model) == (model is slope)


def test_the_prior_the_noise_and_the_number_of_data():
    def prior_and_plate(posterior, batch):
        trace = pyro.poutine.trace(posterior.model).get_trace(*batch)
        return trace.nodes["net.weight"]["fn"].base_dist.scale.max(), trace.nodes["obs"]["scale"]

    batches = list(loader(labels=False))  # of 25, 25 and 10 rows
    method = dvi.VariationalLaplace(prior_scale=0.3, noise_scale=2.0)
    posterior = method.fit(nn.Linear(3, 1), batches, 1, progress=False)
    scale, plate = prior_and_plate(posterior, batches[0])
    assert float(scale) == pytest.approx(0.3) and plate == 60 / 25
    assert posterior.predict(rows(4, 1)[0]).aleatoric.tolist() == pytest.approx([4.0] * 4)
    learned = dvi.VariationalLaplace(noise_scale=LearnedScale(0.5)).fit(
        nn.Linear(3, 1), batches, 1, progress=False
    )
    assert float(learned.model.noise_scale.detach()) == pytest.approx(0.5, rel=0.1)
    by_input = dvi.VariationalLaplace(noise_scale=Heteroscedastic()).fit(
        nn.Linear(3, 2), batches, 1, progress=False
    )
    assert len(set(by_input.predict(rows(4, 1)[0]).aleatoric.tolist())) == 4


PART = list(range(0, 60, 3))


class Own(Sampler):
    def __iter__(self):
        return iter(PART)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 8, "sampler": PART},
        {"batch_size": 8, "sampler": Own()},
        {"batch_sampler": BatchSampler(PART, 8, False)},
        {"batch_sampler": [PART[:8], PART[8:16], PART[16:]]},
        {"batch_size": None, "sampler": BatchSampler(Own(), 8, False)},
    ],
)
def test_rows_that_a_sampler_never_draws_do_not_count(options):
    data = TensorDataset(*rows(60, 0, labels=False))
    method = dvi.VariationalLaplace(lr=0.1, temperature=0.1)  # the default needs the number of steps
    network = nn.Linear(3, 1)
    rest = method.fit(network, DataLoader(Subset(data, PART), batch_size=8), 2, progress=False)
    found = method.fit(network, DataLoader(data, **options), 2, progress=False)
    assert found.model.num_data == 20
    torch.testing.assert_close(found.guide.state_dict(), rest.guide.state_dict())
    own = dvi.regressor(dvi.to_bayesian_(network), num_data=20)
    assert method.fit(own, DataLoader(data, **options), 1, progress=False).model.num_data == 20


@pytest.mark.parametrize(
    "batches",
    [
        [torch.ones(4, 3)],
        [{"x": torch.ones(4, 3)}],
        [(torch.ones(4, 3), 1, 2)],
        [(torch.ones(4, 3), 1)],
        iter([]),
        [(torch.ones(3), torch.tensor(1))],
    ],
)
def test_batches_of_a_network_are_inputs_and_targets(batches):
    with pytest.raises(DataError, match="batches for a network must be .* pass a Pyro model|is an iterator"):
        dvi.MAP().fit(network(), batches, 1, progress=False)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(2, 3)

    def forward(self, first, second):
        return self.first(first) + self.second(second)


@pytest.mark.every(5)
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("name", ["vl", "moments", "vogn", "laplace"])
def test_a_network_with_several_inputs(name, named):
    """In a tuple beside the labels, or by name, as data sets of Hugging Face give them."""
    (first, labels), second = rows(60, 0), torch.randn(60, 2, generator=torch.Generator().manual_seed(1))
    data: Any
    if named:
        data = {"first": first, "second": second, "labels": labels}
        examples = [dict(zip(data, row, strict=True)) for row in zip(*data.values(), strict=True)]
    else:
        data = (first, second), labels
        examples = list(zip(zip(first, second, strict=True), labels, strict=True))
    method = with_lr(METHODS[name])
    posterior = method.fit(TwoInputs(), DataLoader(examples, 20, shuffle=True), 20, progress=False)
    assert posterior.model.num_data == 60
    assert posterior.predict(data, seed=0).metrics()["accuracy"] > 0.6
    if name != "laplace":
        inputs: Any = {"first": first, "second": second} if named else (data[0],)
        module = posterior.export(inputs, seed=0)
        torch.testing.assert_close(
            module(first, second).mean, posterior.predict(inputs, seed=0).probabilities
        )
        assert torch.export.export(module, (first, second))


def grouped(x, group, count=None):
    """A hierarchy with a learned scale of its groups, and counts."""
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    with pyro.plate("groups", 3):
        level = pyro.sample("level", dist.Normal(0.0, spread))
    with pyro.plate("data", 60, subsample_size=len(x)):
        return pyro.sample("count", dist.Poisson((level[group] + x[:, 0]).exp()), obs=count)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["vl", "moments"])
def test_a_pyro_model_is_not_tempered_unless_asked(name):
    x, group = rows(60, 0)
    data = x, group, torch.poisson(x[:, 0].exp(), generator=torch.Generator().manual_seed(1))
    posterior = METHODS[name].fit(grouped, DataLoader(TensorDataset(*data), 20), 10, progress=False)
    assert posterior.elbo.temperature == posterior.method.temperature == 1.0
    assert posterior.predict(data).mean.shape == (60,)
    assert fitted(name).method.temperature == 0.02 == fitted(name).elbo.temperature
    cold = replace(METHODS[name], temperature=0.5)
    assert cold.fit(slope, loader(labels=False), 1, progress=False).elbo.temperature == 0.5


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(loader())


@pytest.mark.parametrize(
    "method", [dvi.VariationalLaplace(), dvi.MomentPropagation(), dvi.NaturalGradients()]
)
def test_long_trainings_are_warmer_and_noise_spares_batch_norm(method):
    """1,000 epochs of three batches are 3,000 steps."""

    def temperature(net, batches, epochs):
        return method.svi(net, batches, epochs).loss.__self__.temperature

    assert [temperature(network(), loader(), n) for n in (1, 500, 1000, 5000)] == [0.02, 0.05, 0.1, 0.1]
    stream = DataLoader(Stream(), batch_size=None)  # without a length
    assert temperature(network(), stream, 1) == 0.1
    normalised = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    expected = 0.1 if isinstance(method, dvi.VariationalLaplace) else 0.005
    assert temperature(normalised, loader(), 1000) == expected


def coefficients(x, count=None):
    intercept = pyro.sample("intercept", dist.Normal(0.0, 1.0))
    slopes = pyro.sample("slopes", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", 60, subsample_size=len(x)):
        return pyro.sample("count", dist.Poisson((intercept + x @ slopes).exp()), obs=count)


def test_coefficients_of_a_pyro_model_have_a_spread_under_moments():
    """About the standard deviations of the best factorised Gaussian, from the curvature at the mean."""
    x, _ = rows(60, 0)
    counts = torch.poisson(x[:, 0].exp(), generator=torch.Generator().manual_seed(1))
    guide = dvi.MomentPropagation(lr=0.05).fit(coefficients, [(x, counts)], 150, seed=0, progress=False).guide
    design = torch.cat([torch.ones(60, 1), x], 1)
    mean = torch.cat([guide.locs.intercept.view(1), guide.locs.slopes]).detach()
    curvature = ((design @ mean).exp()[:, None] * design.square()).sum(0) + 1
    scales = torch.cat([guide.scales.intercept.view(1), guide.scales.slopes]).detach()
    torch.testing.assert_close(scales, curvature.rsqrt(), rtol=0.1, atol=0)


@pytest.mark.every(5)
@pytest.mark.parametrize("name", METHODS)
def test_one_logit_is_enough_for_two_classes(name):
    """It is the logit of class 1, as of a network with the outputs zero and logit."""

    class Both(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x):
            return torch.cat([torch.zeros(len(x), 1), self.net(x)], 1)

    x, y = rows(60, 0)
    data, method = [(x, (y > 0).long())], with_lr(METHODS[name])
    one = method.fit(network(1), data, 30, progress=False).predict(data[0], seed=0)
    assert one.metrics()["accuracy"] > 0.7
    if name not in ("moments", "mean-field moments"):  # in which torch.zeros has no moments
        both = method.fit(Both(network(1)), data, 30, progress=False).predict(x, seed=0)
        torch.testing.assert_close(one.probabilities, both.probabilities)


class Rate(PyroModule):
    def __init__(self):
        super().__init__()
        self.net = dvi.to_bayesian_(nn.Linear(3, 1))

    def forward(self, x, y=None):
        rate = self.net(x).squeeze(-1).exp()
        with pyro.plate("data", 60, subsample_size=len(x)):
            return pyro.sample("obs", dist.Poisson(rate), obs=y)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", METHODS)
def test_counts_are_read_again(name, tmp_path):
    """A file holds no data, and the ones that are made up in their place are no counts."""
    x = rows(60, 0)[0]
    data = [(x, torch.poisson(x[:, 0].exp(), generator=torch.Generator().manual_seed(1)))]
    posterior = METHODS[name].fit(Rate(), data, EPOCHS, progress=False)
    posterior.save(tmp_path / "counts.pt")
    read = METHODS[name].load(tmp_path / "counts.pt", Rate(), data)
    torch.testing.assert_close(read.predict(x, seed=0).mean, posterior.predict(x, seed=0).mean)


# Mistakes -------------------------------------------------------------------------------------------------------------

X, Y = rows(60, 0, labels=False)


@pytest.mark.parametrize(
    ("targets", "net", "hint"),
    [
        ((Y > 0).float(), network(1), r"targets are 0.0 or 1.0.* y\.long\(\)"),
        ((Y[:, None] > 0).float(), network(1), r"targets are 0.0 or 1.0.* y\.long\(\)"),
        (nn.functional.one_hot(X.argmax(1)).float(), network(), r"0.0 or 1.0.* pass y\.argmax\(1\)"),
        ((X > 0).float(), network(), r"0.0 or 1.0.* Pyro model with dist\.Bernoulli"),
        (150 + 70 * Y, network(1), "root mean square of the targets is .* Standardise"),
        (0.01 * Y, network(1), "root mean square of the targets is .* Standardise"),
        (8 + 0.05 * Y, network(1), "and their mean 8.* Standardise"),
    ],
)
def test_targets_that_the_defaults_do_not_suit(targets, net, hint):
    with pytest.warns(DviWarning, match=hint):
        dvi.MAP().fit(net, [(X, targets)], 1, progress=False)


UNSCALED = X * torch.tensor([1.0, 5e4, 1.0])


@pytest.mark.every(4)
@pytest.mark.parametrize("name", METHODS)
def test_inputs_that_are_not_scaled(name):
    with pytest.warns(DviWarning, match=r"column 1 of the inputs .*e\+04.* Standardise each column"):
        METHODS[name].fit(network(1), [(UNSCALED, Y)], 1, progress=False)


def test_inputs_that_the_network_scales_or_has_been_trained_on_are_not_warned_of():
    dvi.MAP().fit(nn.Sequential(nn.BatchNorm1d(3), network(1)), [(UNSCALED, Y)], 1, progress=False)
    dvi.Laplace().fit(network(1), [(UNSCALED, Y)], progress=False)
    dvi.MAP().fit(network(1), [(X, 8 + Y)], 1, progress=False)


def test_a_compiled_network_is_trained_as_the_network_itself():
    compiled = torch.compile(network(), backend="eager")
    for method in (dvi.MAP(), dvi.Laplace(), dvi.Ensemble(dvi.MAP(), 2)):
        one, plain = (method.fit(net, loader(), 1, progress=False) for net in (compiled, network()))
        assert torch.equal(one.predict(X).probabilities, plain.predict(X).probabilities)


@pytest.mark.filterwarnings("ignore:training steps are not captured")
@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_a_layer_whose_weight_is_computed_is_excluded_as_the_error_says(norm):
    net = nn.Sequential(norm(nn.Linear(3, 6)), nn.Tanh(), nn.Linear(6, 3))
    with pytest.raises(ModelError, match=r"pass dvi\.to_bayesian_\(net, exclude='0\.\*'\)"):
        dvi.MAP().fit(net, loader(), 1, progress=False)
    posterior = dvi.MAP().fit(dvi.to_bayesian_(net, exclude="0.*"), loader(), 40, progress=False)
    assert posterior.predict(rows(60, 0)).metrics()["accuracy"] > 0.7


@pytest.mark.parametrize("name", ["map", "vl", "moments", "vogn"])
def test_a_batch_of_one_row_with_batch_norm(name):
    net = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))
    with pytest.raises(DataError, match="batch norm cannot normalise a batch of one row.*drop_last=True"):
        METHODS[name].fit(net, [(X[:20], Y[:20]), (X[20:21], Y[20:21])], 1, progress=False)


def test_a_prior_in_the_units_of_the_targets_is_not_warned_of():
    dvi.MAP(prior_scale=70.0).fit(network(1), [(X, 150 + 70 * Y)], 1, progress=False)


def on_numbers(method, **options):
    return method.fit(network(1), [(X, Y)], 1, progress=False, **options)


@pytest.mark.parametrize(
    ("call", "error", "hint"),
    [
        (lambda: dvi.MAP().fit(X, Y, 1), ArgumentError, "the model is a Tensor: pass a network"),
        (
            lambda: on_numbers(dvi.NaturalGradients(by="vogn")),
            ArgumentError,
            "by must be .* not 'vogn'",
        ),
        (
            lambda: on_numbers(dvi.NaturalGradients(by=dvi.IVON({}))),
            ArgumentError,
            "by must be the function VOGN",
        ),
        (lambda: on_numbers(dvi.NaturalGradients(by=dvi.OGN)), ArgumentError, "by cannot be OGN.*Pass VOGN"),
        (lambda: dvi.NaturalGradients(lr=0.1), ArgumentError, "no lr: pass max_step"),
        (lambda: dvi.MAP().predict(X), AttributeError, "fit returns the posterior.*then posterior.predict"),
        (lambda: dvi.Ensemble().history, AttributeError, "fit returns the posterior.*posterior.history"),
        (lambda: dvi.MAP().rate, AttributeError, "MAP has no attribute 'rate'$"),
        (lambda: on_numbers(dvi.Ensemble(dvi.MAP)), ArgumentError, r"member .* write MAP\("),
        (
            lambda: on_numbers(dvi.MAP(), validation=(X, Y)),
            TypeError,
            "'validation'",
        ),
        (lambda: dvi.MAP().fit(network(), [(X, X.argmax(1).float())], 1), DataError, r"y\.long\(\)"),
        (lambda: dvi.MAP().fit(network(1), [(X.numpy(), Y.numpy())], 1), DataError, r"torch\.as_tensor\(y\)"),
        (lambda: dvi.MAP().fit(network(1), [(X.numpy(), Y)], 1), DataError, r"torch\.as_tensor"),
        (lambda: dvi.MAP().fit(network(1), [(X[0], Y[0])], 1), DataError, r"of a single example, y\[None\]"),
        (lambda: dvi.MAP().fit(network(1), [(X[0], Y[:1])], 1), DataError, r"as x\[None\], y\[None\]"),
        (
            lambda: dvi.MAP().fit(TwoInputs(), [(X, Y > 0)], 1),
            TypeError,
            "missing .*'second'",
        ),
    ],
)
def test_mistakes_are_named(call, error, hint):
    with pytest.raises(error, match=hint):
        call()


SIGNS = (Y > 0).long()
OUT_OF_RANGE = [
    (
        SIGNS + 1,
        2,
        r"labels from 1 to 2, but outputs for 2 classes, from 0 to 1.*unique\(return_inverse=True\)",
    ),
    (
        2 * SIGNS - 1,
        1,
        r"labels from -1 to 1, but .* 2 classes, from 0 to 1 \(one output means two\)",
    ),
    (torch.arange(60) % 9, 3, r"labels from 0 to 8, but outputs for 3 classes, from 0 to 2\. .*more outputs"),
    ((10 * Y).long(), 1, r"labels from -\d+ to \d+, .*regression, pass y\.float\(\)"),
    ((10 * Y[:, None]).long(), 1, r"pass y\.float\(\)"),
]


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("name", ["map", "moments"])
@pytest.mark.parametrize(("labels", "outputs", "hint"), OUT_OF_RANGE)
def test_labels_out_of_range(name, labels, outputs, hint, validate):
    with pyro.validation_enabled(validate), pytest.raises(DataError, match=hint) as caught:
        METHODS[name].fit(network(outputs), [(X, labels)], 1, progress=False)
    assert "tensor(" not in str(caught.value)


@pytest.mark.parametrize("labels", [nn.functional.one_hot(X.argmax(1)), X > 0, (9 * X).long()])
def test_integer_targets_of_several_columns(labels):
    with pytest.raises(DataError, match=r"one-hot rows, pass y.argmax\(1\).*y.float\(\).*dist.Bernoulli"):
        dvi.MAP().fit(network(), [(X, labels)], 1, progress=False)


@pytest.mark.parametrize("targets", [Y, Y[:, None], X[:, :2]])
def test_networks_of_means_and_log_variances_are_told_of_their_noise(targets):
    net, data = network(2 * targets[0].numel()), [(X, targets)]
    with pytest.raises(DataError, match=r"pass noise_scale=dvi\.bayesian\.Heteroscedastic\(\)"):
        dvi.MAP().fit(net, data, 1, progress=False)
    dvi.MAP(noise_scale=dvi.bayesian.Heteroscedastic()).fit(net, data, 1, progress=False)


@pytest.mark.every(4)
@pytest.mark.parametrize("name", METHODS)
def test_labels_in_a_column_of_their_own(name):
    labels = X.argmax(1)
    one, flat = (METHODS[name].fit(network(), [(X, y)], 2, progress=False) for y in (labels[:, None], labels))
    assert one.predict((X, labels[:, None]), seed=0).metrics() == flat.predict((X, labels), seed=0).metrics()


def test_positions_whose_labels_have_a_channel():
    logits, labels = torch.randn(4, 3, 2, 2), torch.randint(3, (4, 1, 2, 2))
    one, flat = (
        pyro.poutine.trace(dvi.classifier(nn.Identity(), 4)).get_trace(logits, y).log_prob_sum()
        for y in (labels, labels[:, 0])
    )
    assert torch.equal(one, flat)


def test_a_model_with_an_open_file_is_refused_with_the_reason(tmp_path):
    net = network(1)
    with (
        open(tmp_path / "log", "w") as net.log,
        pytest.raises(ModelError, match="cannot be copied.*open files"),
    ):
        dvi.VariationalLaplace().fit(net, loader(labels=False), 1, progress=False)


def test_a_list_from_a_loader_is_predicted_like_a_tuple():
    batch = next(iter(loader()))
    posterior = dvi.MAP().fit(network(), loader(), 1, progress=False)
    assert isinstance(batch, list)
    assert posterior.predict(batch).metrics() == posterior.predict(tuple(batch)).metrics()
    assert torch.equal(posterior.predict(batch[:1]).probabilities, posterior.predict(batch[0]).probabilities)
    with pytest.raises(DataError, match=r"tuple\(batch\)"):
        posterior.predict([X, X])


def test_lists_of_tokens_beside_offsets_need_no_common_length():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag = nn.EmbeddingBag(5, 2)

        def forward(self, tokens, offsets):
            return self.bag(tokens, offsets)

    data = [((torch.arange(5), torch.tensor([0, 3])), torch.tensor([0, 1]))]
    dvi.MAP().fit(Bag(), data, 1, progress=False)


def line(columns):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, columns)).double()
    x = torch.randn(40, 3, dtype=torch.float64)
    y = 50 + torch.tensor([0.02, 300.0]).double()[:columns] * (
        x[:, :columns] + 0.1 * torch.randn(40, columns)
    )
    return net, x, y


@pytest.mark.every(4)
@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize(
    "method",
    [dvi.MAP(), dvi.VariationalLaplace(), dvi.MomentPropagation(), dvi.NaturalGradients(), dvi.Laplace()],
    ids=lambda method: type(method).__name__,
)
def test_standardize_is_the_same_as_standardised_targets(method, columns, tmp_path):
    """Means, variances, intervals and scores in the units of the targets, also after loading and in the export."""
    net, x, y = line(columns)
    mean, scale = y.mean(0), y.std(0, correction=0)
    batches, unit = [list(zip(x.split(20), each.split(20), strict=True)) for each in (y, (y - mean) / scale)]
    own = replace(method, standardize=True)
    posterior = own.fit(net, batches, 6, progress=False)
    found = posterior.predict((x, y), seed=0)
    expected = method.fit(net, unit, 6, progress=False).predict((x, (y - mean) / scale), seed=0)
    shape = found.mean.shape
    close = {"rtol": 1e-5, "atol": 1e-8}
    torch.testing.assert_close(
        found.mean, (mean + scale * expected.mean.reshape(y.shape)).reshape(shape), **close
    )
    variance = (scale.square() * expected.variance.reshape(y.shape)).reshape(shape)
    torch.testing.assert_close(found.variance, variance, **close)
    for limit, other in zip(found.interval(), expected.interval(), strict=True):
        torch.testing.assert_close(limit, (mean + scale * other.reshape(y.shape)).reshape(shape), **close)
    torch.testing.assert_close(found.log_likelihood(), expected.log_likelihood() - scale.log().sum(), **close)
    posterior.save(tmp_path / "posterior.pt")
    read = own.load(tmp_path / "posterior.pt", net, batches[:1])  # whose targets have other moments
    torch.testing.assert_close(read.predict(x, seed=0).mean, found.mean)
    exported = posterior.export(x[:4], AtMean())
    torch.testing.assert_close(exported(x).mean, posterior.predict(x, AtMean()).mean)


def test_what_cannot_be_standardised_is_refused():
    net, x, y = line(1)
    with pytest.raises(ArgumentError, match="the targets are labels"):
        dvi.MAP(standardize=True).fit(net, [(x, torch.zeros(40).long())], 1, progress=False)
    with pytest.raises(ArgumentError, match="standardises its observations itself"):
        dvi.MAP(standardize=True).fit(dvi.regressor(net, 40), [(x, y)], 1, progress=False)
    with pytest.raises(ArgumentError, match="needs epochs"):
        dvi.Laplace(standardize=True).fit(net, [(x, y)], progress=False)
