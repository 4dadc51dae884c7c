# SPDX-License-Identifier: Apache-2.0
"""Options that are objects: a class, a string or an empty list in their place says what to pass."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_dvi.errors import ArgumentError, UnsupportedError
from pyro_dvi.laplace import (
    ByEvidence,
    Dense,
    Hessian,
    LaplaceGuide,
    PosteriorSamples,
    TopEigen,
)
from pyro_dvi.predictive import predict
from tests.laplace.problems import guide_at

X = torch.tensor([-1.0, 0.5, 2.0])
BATCHES = [(X, X)]


def model(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(w * x, 0.3), obs=y)


class Unasked(ByEvidence):
    """Mistakes are found before the search."""

    def score(self, candidates):
        raise AssertionError


@pytest.fixture
def guide():
    guide = guide_at(model, (X, X), {"w": torch.tensor(0.9)})
    guide.fit(BATCHES, Dense(), unconverged="accept")
    return guide


@pytest.mark.parametrize(
    ("use", "advice"),
    [
        (lambda guide: guide.fit(BATCHES, Dense), r"the class Dense itself: write Dense\(...\)"),
        (lambda guide: guide.fit(BATCHES, "dense"), r"method must be .* Dense\(\)"),
        (lambda guide: guide.fit(BATCHES, unconverged="ggn"), r"unconverged must .*\"accept\""),
        (lambda guide: guide.fit(BATCHES, Dense(Hessian)), r"precision must .*Hessian\(...\)"),
        (lambda guide: guide.fit(BATCHES, subset=[]), "subset is empty"),
        (lambda guide: guide.fit(BATCHES, subset=3), r"subset names 3, .* not a site .*\['w'\]"),
        (lambda guide: guide.energy(BATCHES, subset=["w", 3]), "subset names 3"),
        (lambda guide: guide.diagnose(BATCHES, subset={3: True}), "subset names 3"),
        (
            lambda guide: guide.tune(BATCHES, values=1.0, progress=False),
            "values must be a list of .* got 1.0",
        ),
        (
            lambda guide: guide.tune(BATCHES, values="a", progress=False),
            "values must be a list of .* got 'a'",
        ),
        (lambda guide: guide.as_prior(exclude=3), "exclude names 3"),
        (lambda guide: guide.tune(BATCHES, criterion=ByEvidence, progress=False), "criterion must"),
        (
            lambda guide: guide.tune(BATCHES, criterion=Unasked(), unconverged="ggn"),
            r"unconverged must .*\"accept\"",
        ),
        (lambda guide: guide.tune(BATCHES, criterion=Unasked(), refinements="3"), "refinements must"),
        (lambda guide: guide.tune(BATCHES, "w", progress=False), r"scale must .*PriorPrecision\("),
        (lambda guide: guide.tune(BATCHES, method=Dense, progress=False), r"Dense\(...\)"),
        (lambda guide: guide.log_evidence(BATCHES, determinant="exact"), "determinant must .*ByLanczos"),
        (
            lambda guide: guide.tune(BATCHES, criterion=ByEvidence("exact"), progress=False),
            r"determinant must",
        ),
        (lambda guide: PosteriorSamples(1.5), "num_samples must be a positive whole number"),
        (lambda guide: TopEigen("3"), "k must be a positive whole number"),
        (
            lambda guide: LaplaceGuide(model, kl_weight=lambda step: 1.0),
            "kl_weight must be a positive number",
        ),
    ],
)
def test_mistakes_say_what_to_pass(guide, use, advice):
    before = guide.posterior
    with pytest.raises(ArgumentError, match=advice):
        use(guide)
    assert guide.posterior is before and guide.scale_factors == {}


def test_inference_mode_is_refused(guide):
    for use in (
        lambda: guide.predictive(X),
        lambda: predict(model, guide, X),
        lambda: guide.fit(BATCHES),
        lambda: guide.log_evidence(BATCHES),
    ):
        with torch.inference_mode(), pytest.raises(UnsupportedError, match=r"torch.no_grad\(\)"):
            use()
    with torch.no_grad():
        assert guide.predictive(X).variance.shape == (3,)
