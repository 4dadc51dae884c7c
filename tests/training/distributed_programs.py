# SPDX-License-Identifier: Apache-2.0
"""What the processes of the tests run: they import it by name, so it stands in a module of its own."""

from datetime import timedelta
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
import torch.distributed as td
from pyro.infer import SVI
from pyro.infer.autoguide import AutoNormal
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import pyro_dvi as dvi
from pyro_dvi.curvature import GGNDiagonal
from pyro_dvi.errors import DataError, NonFiniteError, PyroDviError, UnsupportedError
from pyro_dvi.guides import MeanFieldGuide
from pyro_dvi.moment_propagation.multiplicative_noise import MultiplicativeNoiseGuide
from pyro_dvi.natural_gradients.kronecker_guide import LayerFisher
from pyro_dvi.natural_gradients.precision_guide import NaturalGradientGuide
from pyro_dvi.natural_gradients.updates import IVON, OGN, VOGN, VOGNOptimizer
from pyro_dvi.training.data_parallel import DataParallel

N, BATCH, STEPS = 40, 12, 4


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
    return x, x.sum(1).sin()


def share(t: int, rank: int, world: int) -> Tensor:
    """Rows of a process in step t."""
    rows = (torch.arange(BATCH) + BATCH * t) % N
    return rows.chunk(world)[rank]


class Net(pyro.nn.PyroModule):
    """A small network with a learned noise scale."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        layers = [
            nn.Linear(3, 4),
            nn.BatchNorm1d(4) if norm else nn.Identity(),
            nn.Softplus(),
            nn.Linear(4, 1),
        ]
        self.net = dvi.to_bayesian_(nn.Sequential(*layers))
        self.noise = pyro.nn.PyroParam(torch.tensor(0.5), dist.constraints.positive)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        f = self.net(x)[:, 0]
        with pyro.plate("data", N, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(f, self.noise), obs=y)


CASES = {
    "VOGN": (
        NaturalGradientGuide,
        lambda: dvi.NaturalGradientELBO(kl_weight=0.5),
        lambda: VOGN({"lr": 0.05}),
    ),
    "VOGN, 3 draws": (
        NaturalGradientGuide,
        lambda: dvi.NaturalGradientELBO(num_particles=3),
        lambda: VOGN({"lr": 0.05}),
    ),
    "OGN": (NaturalGradientGuide, dvi.NaturalGradientELBO, lambda: OGN({"lr": 0.05})),
    "IVON": (NaturalGradientGuide, dvi.NaturalGradientELBO, lambda: IVON({"lr": 0.05})),
    "NoisyKFAC": (
        dvi.KroneckerGuide,
        lambda: dvi.NaturalGradientELBO(num_particles=2),
        lambda: dvi.NoisyKFAC(
            {
                "lr": 0.05,
                "estimate": LayerFisher(observed=True),
                "factor_interval": 2,
                "inverse_interval": 3,
            }
        ),
    ),
    "Taylor": (
        MeanFieldGuide,
        lambda: dvi.TaylorELBO(curvature=GGNDiagonal(), kl_weight=dvi.schedules.LinearWarmup(5)),
        lambda: pyro.optim.Adam(dvi.optim.learning_rates(0.01)),
    ),
    "moments": (
        MultiplicativeNoiseGuide,
        dvi.MomentPropagationELBO,
        lambda: pyro.optim.ClippedAdam(dvi.optim.learning_rates(0.01)),
    ),
    "AutoNormal": (
        partial(AutoNormal, init_loc_fn=dvi.bayesian.init_to_module),
        dvi.MomentPropagationELBO,
        lambda: pyro.optim.Adam({"lr": 0.01}),
    ),
}


def parameters(guide: Any) -> dict[str, Tensor]:
    named = [*guide.named_parameters(), *pyro.get_param_store().named_parameters()]
    return {name: value.detach().clone() for name, value in named}


def train(case: str, rank: int, world: int, own_draws: bool = False) -> dict[str, Any]:
    """A few steps from a start that only process 0 knows."""
    pyro.clear_param_store()
    torch.manual_seed(7 * rank)
    make_guide, make_elbo, make_optimizer = CASES[case]
    model = Net()
    guide = make_guide(model)
    elbo = DataParallel(make_elbo(), own_draws=own_draws)
    svi = SVI(model, guide, make_optimizer(), loss=elbo)
    x, y = data()
    losses = [svi.step(x[rows], y[rows]) for rows in (share(t, rank, world) for t in range(STEPS))]
    terms = {name: float(value) for name, value in elbo.terms.items()}
    return {"losses": losses, "parameters": parameters(guide), "terms": terms, "step": elbo.step}


def train_module(rank: int, world: int) -> dict[str, Any]:
    """An ELBOModule with a torch optimizer, under parameters of its own."""
    with pyro.settings.context(module_local_params=True):
        torch.manual_seed(7 * rank)
        model = Net()
        guide = NaturalGradientGuide(model)
        x, y = data()
        guide.initialize(x, y)
        module = DataParallel(dvi.NaturalGradientELBO())(model, guide)
        optimizer = VOGNOptimizer(module.parameters(), lr=0.05)
        losses = []
        for t in range(STEPS):
            rows = share(t, rank, world)
            optimizer.zero_grad()
            loss = module(x[rows], y[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return {"losses": losses, "parameters": {k: v.detach().clone() for k, v in module.named_parameters()}}


def loops_of_different_lengths(rank: int) -> dict[str, str]:
    """``fit`` where process 0 has more batches than process 1, and a loop that is longer in one."""
    found = {}
    x, y = data()

    def svi_of(elbo: Any) -> SVI:
        pyro.clear_param_store()
        model = Net()
        return SVI(model, NaturalGradientGuide(model), VOGN({}), loss=elbo)

    rows = (torch.arange(24), torch.arange(24, N))[rank]
    loader = DataLoader(TensorDataset(x[rows], y[rows]), batch_size=6)
    try:
        dvi.fit(svi_of(DataParallel(dvi.NaturalGradientELBO())), list(loader), 2, progress=False)
    except DataError as error:
        found["numbers of batches"] = str(error)
    group = td.new_group(timeout=timedelta(seconds=1))
    svi = svi_of(DataParallel(dvi.NaturalGradientELBO(), group=group))
    try:
        for _ in range(1 if rank else 2):
            svi.step(x[:8], y[:8])
    except RuntimeError as error:
        found["longer loop"] = f"{type(error).__name__}: {error}"
    td.barrier()
    return found


class Unreadable:
    """A loader whose third batch cannot be read in process 1."""

    def __init__(self, rank: int) -> None:
        self.rank, self.read = rank, 0

    def __iter__(self) -> Any:
        for rows in (slice(0, 8), slice(8, 16)):
            self.read += 1
            if self.rank == 1 and self.read == 3:
                raise KeyError("image 17")
            yield tuple(value[rows] for value in data())

    def __len__(self) -> int:
        return 2


def unreadable_data(rank: int) -> dict[str, str]:
    """``fit`` where the loader of process 1 fails."""
    pyro.clear_param_store()
    model, group = Net(), td.new_group(timeout=timedelta(seconds=1))
    elbo = DataParallel(dvi.NaturalGradientELBO(), group=group)
    svi = SVI(model, NaturalGradientGuide(model), VOGN({}), loss=elbo)
    try:
        dvi.fit(svi, Unreadable(rank), 3, progress=False)
    except (RuntimeError, KeyError) as error:
        td.barrier()
        return {"unreadable": f"{type(error).__name__}: {error}"}
    return {}


def hand_written(rank: int, world: int) -> dict[str, Any]:
    """A model and a guide that are functions, with draws of a latent that sets the prior of another."""
    pyro.clear_param_store()
    torch.manual_seed(rank)

    def model(x: Tensor, y: Tensor) -> None:
        s = pyro.sample("s", dist.LogNormal(torch.tensor(0.0), 0.3))
        w = pyro.sample("w", dist.Normal(torch.zeros(3), s).to_event(1))
        with pyro.plate("data", N, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)

    def guide(x: Tensor, y: Tensor) -> None:
        start = torch.tensor(0.1 * (1 + rank))
        pyro.sample("s", dist.LogNormal(pyro.param("s_loc", start), torch.tensor(0.1)))
        loc = pyro.param("w_loc", lambda: start.expand(3).clone())
        scale = pyro.param("w_scale", torch.full((3,), 0.1), constraint=dist.constraints.positive)
        pyro.sample("w", dist.Normal(loc, scale).to_event(1))

    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), loss=DataParallel(dvi.MomentPropagationELBO()))
    x, y = data()
    losses = [svi.step(x[rows], y[rows]) for rows in (share(t, rank, world) for t in range(STEPS))]
    return {"losses": losses, "parameters": parameters(nn.Module())}


def fit_and_save(rank: int, world: int, path: str) -> dict[str, Any]:
    """``fit`` with torch's sampler and batch normalisation; process 0 writes the checkpoint."""
    pyro.clear_param_store()
    torch.manual_seed(rank)
    model = Net(norm=True)
    guide = NaturalGradientGuide(model)
    elbo = DataParallel(dvi.NaturalGradientELBO())
    svi = SVI(model, guide, VOGN({"lr": 0.05}), loss=elbo)
    dataset = TensorDataset(*data())
    sampler: DistributedSampler = DistributedSampler(dataset, num_replicas=world, rank=rank, seed=3)
    loader = DataLoader(dataset, batch_size=10, sampler=sampler)
    checkpoint = f"{path}/checkpoint.pt" if rank == 0 else None
    callbacks = [lambda state: sampler.set_epoch(state.epoch)]
    history = dvi.fit(svi, loader, 3, checkpoint=checkpoint, callbacks=callbacks, progress=False)
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    return {"losses": history.steps["loss"], "parameters": parameters(guide), "buffers": buffers}


def stop_early(rank: int) -> dict[str, Any]:
    """``fit`` where each process has metrics of its own, by which process 1 would go on."""
    pyro.clear_param_store()
    torch.manual_seed(0)
    model = Net()
    guide = NaturalGradientGuide(model)
    svi = SVI(model, guide, VOGN({"lr": 0.05}), loss=DataParallel(dvi.NaturalGradientELBO()))
    x, y = data()
    rows = torch.arange(N).chunk(2)[rank]
    metrics = iter(([3.0, 1.0, 2.0, 2.0, 2.0], [5.0, 4.0, 3.0, 2.0, 1.0])[rank])
    history = dvi.fit(
        svi,
        [(x[rows], y[rows])],
        5,
        validate=lambda: next(metrics),
        early_stopping=dvi.training.EarlyStopping(patience=2),
        progress=False,
    )
    outcome = (history.stopped, history.epoch, history.best_epoch)
    return {"losses": [], "parameters": parameters(guide), "outcome": outcome}


def failures(rank: int) -> dict[str, str]:
    """Errors that every process has to see, so that none waits for the others for ever."""
    found = {}
    x, y = data()

    def net() -> Net:
        torch.manual_seed(0)
        return Net()

    def attempt(name: str, model: Any, elbo: Any, x: Tensor, y: Tensor, error: type) -> None:
        pyro.clear_param_store()
        guide = MeanFieldGuide(model)
        torch.manual_seed(0)
        if name not in ("setup", "synchronised"):
            guide.initialize(*data())
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), loss=DataParallel(elbo))
        before = parameters(guide)
        try:
            svi.step(x, y)
        except error as caught:
            found[name] = f"{type(caught).__name__}: {caught}"
        after = parameters(guide)
        assert all(torch.equal(before[key], after[key]) for key in before), "no process makes an update"

    def unsized(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)

    bad = y.clone()
    bad[0] = float("nan")
    attempt("bad data", net(), dvi.MomentPropagationELBO(), x[:8], (y, bad)[rank][:8], PyroDviError)
    attempt("setup", net(), dvi.MomentPropagationELBO(), x[:8] if rank else x[:8, :2], y[:8], Exception)
    attempt("parts", net(), dvi.MomentPropagationELBO(), x[: (8, 4)[rank]], y[: (8, 4)[rank]], DataError)
    attempt("no plate", unsized, dvi.MomentPropagationELBO(), x[:8], y[:8], DataError)
    huge = 1e200 * y
    attempt("infinite", net(), dvi.MomentPropagationELBO(), x[:8], (y, huge)[rank][:8], NonFiniteError)
    synchronised = net()
    synchronised.net[2] = nn.SyncBatchNorm(4)
    attempt("synchronised", synchronised, dvi.MomentPropagationELBO(), x[:8], y[:8], UnsupportedError)
    model = unsized if rank else net()
    attempt("models", model, dvi.MomentPropagationELBO(), x[:8], y[:8], PyroDviError)
    return found


def everything(rank: int, world: int, path: str) -> dict[str, Any]:
    results: dict[str, Any] = {case: train(case, rank, world) for case in CASES}
    results["module"] = train_module(rank, world)
    results["functions"] = hand_written(rank, world)
    results["own draws"] = train("VOGN", rank, world, own_draws=True)
    if world > 1:
        results["fit"] = fit_and_save(rank, world, path)
        results["early stopping"] = stop_early(rank)
        results["failures"] = {**failures(rank), **loops_of_different_lengths(rank), **unreadable_data(rank)}
    return results


def start(rank: int, world: int, path: str) -> None:
    """Run everything as one of several processes, and leave the results in files."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    td.init_process_group(
        "gloo",
        init_method=f"file://{path}/meeting_{world}",
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=3),  # if the other process has died
    )
    try:
        torch.save(everything(rank, world, path), f"{path}/results_{world}_{rank}.pt")
    finally:
        td.destroy_process_group()
