# SPDX-License-Identifier: Apache-2.0
"""The report says which scales have converged."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoLowRankMultivariateNormal
from torch import nn

from pyro_dvi import MeanFieldGuide, fit, to_bayesian_
from pyro_dvi.analysis.diagnostics.posterior_scales import scale_report, scale_snapshot


def model():
    pyro.sample("a", dist.Normal(torch.zeros(4), 2.0).to_event(1))
    pyro.sample("b", dist.Normal(torch.zeros(2, 3), 0.5).to_event(2))


def guide_at(**factors):
    """Return a guide whose scales are these multiples of their start, and the scales at the start."""
    guide = MeanFieldGuide(model)
    guide.initialize()
    start = scale_snapshot(guide)
    with torch.no_grad():
        for name, factor in factors.items():
            getattr(guide.scales, f"{name}_unconstrained").add_(torch.as_tensor(factor).log())
    return guide, start


def test_scales_at_their_start():
    guide, start = guide_at()
    assert scale_report(guide)["to_start"] == pytest.approx([1.0, 1.0])
    assert scale_report(guide, earlier=start)["change"] == pytest.approx([0.0, 0.0])


def test_nothing_is_said_of_a_start_or_a_snapshot_that_is_not_known():
    guide = AutoLowRankMultivariateNormal(model)
    guide()
    report = scale_report(guide)
    assert all(math.isnan(value) for value in report["to_start"] + report["change"])


def test_changes_since_a_snapshot():
    guide, _ = guide_at(a=3.0, b=0.5)
    earlier = scale_snapshot(guide)
    earlier["b"] = earlier["b"] * torch.tensor([[1.1, 1 / 1.1, 1.1], [1 / 1.1, 1.1, 1 / 1.1]])
    report = scale_report(guide, earlier=earlier)
    assert report["change"] == pytest.approx([0.0, 0.1], rel=1e-5, abs=1e-12)  # up and down do not cancel


def test_the_numbers_of_a_row():
    factors = torch.tensor([1.0, 2.0, 4.0, 30.0])
    row = scale_report(guide_at(a=factors)[0]).rows[0]
    scales = 2.0 * math.exp(-3) * factors.double().numpy()
    for name, level in (("5%", 0.05), ("50%", 0.5), ("95%", 0.95)):
        assert row[f"scale_{name}"] == pytest.approx(np.quantile(scales, level), rel=1e-6)
    assert row["to_prior"] == pytest.approx(2 * math.exp(-3), rel=1e-6)
    assert row["to_start"] == pytest.approx(240**0.25, rel=1e-6)  # geometric mean
    assert row["elements"] == 4 and math.isnan(row["change"])


def test_text_and_frame_hold_the_same_rows():
    guide, start = guide_at(a=3.0)
    report = scale_report(guide, earlier=start)
    frame = report.to_dataframe()
    assert list(frame.index) == ["a", "b"]
    assert frame.loc["a", "to_start"] == pytest.approx(3.0, rel=1e-5)
    assert frame.loc["a", "scale_50%"] == pytest.approx(report["scale_50%"][0])
    text = str(report)
    assert "200.0%" in text
    assert "MeanFieldGuide" in text


@pytest.mark.slow
def test_training_of_a_conjugate_model_is_recognised_as_unfinished_and_as_finished():
    """The posterior standard deviation of a mean of Normals has a closed form."""
    x = 0.3 * torch.randn(40, dtype=torch.float64)

    def conjugate(x):
        m = pyro.sample("m", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(m.mean(-1), 0.1), obs=x)

    guide = MeanFieldGuide(conjugate)
    elbo = TraceMeanField_ELBO(num_particles=16, vectorize_particles=True, max_plate_nesting=1)
    svi = SVI(conjugate, guide, pyro.optim.Adam({"lr": 0.03}), elbo)
    guide.initialize(x)
    start = scale_snapshot(guide)
    history = fit(svi, [x], epochs=30, progress=False)
    assert scale_report(guide, earlier=start)["change"][0] > 0.01
    history = fit(svi, [x], epochs=200, progress=False, history=history)
    then = scale_snapshot(guide)
    for group in svi.optim.optim_objs.values():
        group.param_groups[0]["lr"] = 1e-3
    history = fit(svi, [x], epochs=40, progress=False, history=history)
    late = scale_report(guide, earlier=then)
    assert late["change"][0] < 0.01
    factorised = (1 + len(x) * 0.25 / 0.1**2) ** -0.5  # the precision given the other coordinate
    np.testing.assert_allclose(late["scale_50%"][0], factorised, rtol=0.1)


def test_a_network_of_modules():
    net = to_bayesian_(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)))
    guide = MeanFieldGuide(net)
    guide.initialize(torch.ones(1, 1, 4, 4))
    report = scale_report(guide)
    assert report["site"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert all(row["to_prior"] == pytest.approx(math.exp(-3), rel=1e-5) for row in report.rows)


def test_a_guide_that_moved_to_another_device(device):
    from pyro_dvi.analysis.diagnostics import signal_to_noise

    net = to_bayesian_(nn.Linear(3, 2))
    guide = MeanFieldGuide(net)
    guide.initialize(torch.ones(1, 3))
    earlier = scale_snapshot(guide)
    net.to(device), guide.to(device)
    report = scale_report(guide, earlier=earlier)
    assert all(row["change"] == pytest.approx(0, abs=1e-6) for row in report.rows)
    assert sum(map(len, signal_to_noise(guide).values())) == 4
