# SPDX-License-Identifier: Apache-2.0
"""Two processes with the halves of each minibatch against one with the joint minibatch."""

import os
import re

import pyro
import pytest
import torch
import torch.multiprocessing as mp
from pyro.infer import SVI, Trace_ELBO

import pyro_dvi as dvi
from pyro_dvi.errors import ArgumentError, UnsupportedError
from pyro_dvi.natural_gradients.precision_guide import NaturalGradientGuide
from pyro_dvi.natural_gradients.updates import VOGN
from pyro_dvi.training.data_parallel import DataParallel
from tests.training import distributed_programs as programs

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module", params=[pytest.param("gloo", marks=pytest.mark.slow)])
def results(tmp_path_factory):
    """Results by number of processes and rank."""
    path = str(tmp_path_factory.mktemp("distributed"))
    other = mp.get_context("spawn").Process(target=programs.start, args=(1, 2, path), daemon=True)
    other.start()
    threads = torch.get_num_threads()
    programs.start(0, 1, path)  # meanwhile, in this process
    programs.start(0, 2, path)  # which is also the first of the two
    torch.set_num_threads(threads)
    other.join()
    assert other.exitcode == 0
    runs = [(1, 0), (2, 0), (2, 1)]
    found = {run: torch.load(f"{path}/results_{run[0]}_{run[1]}.pt", weights_only=False) for run in runs}
    return {**found, "path": path}


@pytest.mark.parametrize("case", [*programs.CASES, "module", "functions"])
def test_two_processes_equal_one_with_the_joint_minibatch(results, case):
    reference = results[1, 0][case]
    assert len(set(reference["losses"])) == programs.STEPS
    for rank in (0, 1):
        ours = results[2, rank][case]
        torch.testing.assert_close(ours["losses"], reference["losses"], rtol=1e-10, atol=0)
        torch.testing.assert_close(ours["parameters"], reference["parameters"], rtol=1e-10, atol=1e-12)
        if "terms" in reference:
            torch.testing.assert_close(ours["terms"], reference["terms"], rtol=1e-10, atol=1e-12)
            assert ours["step"] == programs.STEPS


@pytest.mark.parametrize("case", ["VOGN", "own draws", "fit", "early stopping"])
def test_processes_agree_to_the_last_bit(results, case):
    first, second = results[2, 0][case], results[2, 1][case]
    assert first["losses"] == second["losses"]
    for part in {"parameters", "buffers"} & set(first):
        torch.testing.assert_close(first[part], second[part], rtol=0, atol=0)


def test_own_draws_differ_from_shared_ones(results):
    own, shared = results[2, 0]["own draws"], results[2, 0]["VOGN"]
    assert own["losses"][0] != shared["losses"][0]
    assert own["losses"][0] == pytest.approx(shared["losses"][0], rel=0.3)


def test_a_checkpoint_of_several_processes_loads_in_one(results):
    model = programs.Net(norm=True).double()
    guide = NaturalGradientGuide(model)
    svi = SVI(model, guide, VOGN({"lr": 0.05}), loss=dvi.NaturalGradientELBO())
    history = dvi.load(f"{results['path']}/checkpoint.pt", svi)
    x, y = (value.double() for value in programs.data())
    saved = results[2, 1]["fit"]
    assert history.steps["loss"] == saved["losses"]
    for name, value in guide.named_parameters():
        torch.testing.assert_close(value.detach(), saved["parameters"][name], rtol=0, atol=0)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, saved["buffers"][name], rtol=0, atol=0)
    svi.step(x, y)
    again = SVI(model, guide, VOGN({"lr": 0.05}), loss=DataParallel(dvi.NaturalGradientELBO()))
    dvi.load(f"{results['path']}/checkpoint.pt", again)
    assert again.step(x, y) > 0


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("bad data", (r"process 1 failed: DataError: .*NaN", r"DataError: observed site 'y'.*NaN")),
        ("setup", (r".*", r"PyroDviError: process 0 failed")),
        ("no plate", (r"DataError: .*pyro\.plate\('data', size=N.*own_draws",) * 2),
        (
            "parts",
            (r"DataError: the processes have parts of different sizes.*0.2.*0.1.*DistributedSampler",) * 2,
        ),
        ("infinite", (r"NonFiniteError: the loss of process 1 is not finite.*1 of 2 processes",) * 2),
        ("synchronised", (r"UnsupportedError: layer 'net\.2' is torch.nn.SyncBatchNorm.*nn.GroupNorm",) * 2),
        ("models", (r"processes 0 and 1 have different parameters",) * 2),
    ],
)
def test_every_process_hears_of_an_error(results, name, messages):
    for rank in (0, 1):
        assert re.search(messages[rank], results[2, rank]["failures"][name]), results[2, rank]["failures"][
            name
        ]


def test_a_process_that_waits_in_vain_says_why(results):
    assert "longer loop" not in results[2, 1]["failures"]
    assert re.search(
        r"process 0 waited for the others, but process 1 .*no batch left.*DistributedSampler",
        results[2, 0]["failures"]["longer loop"],
    )


def test_a_process_that_waits_names_the_process_that_failed_and_its_error(results):
    assert results[2, 1]["failures"]["unreadable"] == "KeyError: 'image 17'"
    assert re.search(
        r"process 0 waited for the others, but process 1 failed with KeyError: 'image 17'",
        results[2, 0]["failures"]["unreadable"],
    )


def test_all_processes_stop_by_the_validation_of_the_first(results):
    for rank in (0, 1):
        assert results[2, rank]["early stopping"]["outcome"] == ("early stopping", 4, 2)


def test_fit_compares_the_numbers_of_batches(results):
    for rank in (0, 1):
        message = results[2, rank]["failures"]["numbers of batches"]
        assert re.search(r"different numbers of batches, \[4, 3\].*DistributedSampler", message)


# In one process ------------------------------------------------------------------------------------------------


def test_without_a_process_group_it_is_the_objective_itself(monkeypatch):
    x, y = programs.data()

    def losses(wrap):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        model = programs.Net()
        svi = SVI(model, NaturalGradientGuide(model), VOGN({}), loss=wrap(dvi.NaturalGradientELBO()))
        return [svi.step(x, y) for _ in range(3)] + [torch.rand(()).item()]

    assert losses(DataParallel) == losses(lambda elbo: elbo)
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    with pytest.raises(UnsupportedError, match=r"one of 2 processes.*init_process_group"):
        losses(DataParallel)


def test_the_wrapper_shows_the_objective():
    elbo = DataParallel(dvi.NaturalGradientELBO(kl_weight=0.3), own_draws=True)
    assert (elbo.kl_weight, elbo.step, elbo.num_data) == (0.3, 0, None)
    elbo.num_data = 7
    assert elbo.elbo.num_data == 7
    state = elbo.state_dict()
    plain = dvi.NaturalGradientELBO()
    plain.load_state_dict(state)
    DataParallel(plain).load_state_dict(plain.state_dict())


def test_options_of_the_wrong_type():
    with pytest.raises(ArgumentError, match="Trace_ELBO"):
        DataParallel(Trace_ELBO())
    with pytest.raises(ArgumentError, match="DataParallel"):
        DataParallel(DataParallel(dvi.TaylorELBO()))
