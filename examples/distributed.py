# SPDX-License-Identifier: Apache-2.0
"""Train a Bayesian classifier with VOGN in several processes, as if one process trained on the joint minibatch.

Start it with torchrun, with one process per GPU or per core::

    torchrun --nproc-per-node 2 examples/distributed.py

Without torchrun, the script trains the same model in one process, with minibatches of the same total size.
"""

import argparse
import os

import pyro
import torch
import torch.distributed as td
from pyro.infer import SVI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import pyro_dvi as dvi
from pyro_dvi.training import DataParallel


def spirals(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return points on three spiral arms, and the arm as the label."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 3
    radius = torch.rand(count, generator=generator)
    angle = 4 * radius + 2.094 * y + 0.15 * torch.randn(count, generator=generator)
    return torch.stack([radius * angle.sin(), radius * angle.cos()], 1), y


def main() -> None:
    """Train, and print test scores in the first process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument(
        "--batch-size", type=int, default=100, help="examples in the joint minibatch of all processes"
    )
    parser.add_argument("--num-data", type=int, default=3000)
    parser.add_argument("--kl-weight", type=float, default=0.3, help="KL weight (default: 0.3)")
    parser.add_argument("--lr", type=float, default=0.01)
    args = parser.parse_args()

    world = int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:  # set by torchrun
        td.init_process_group("nccl" if cuda else "gloo")
    rank = int(os.environ.get("RANK", "0"))

    pyro.set_rng_seed(rank)
    network = nn.Sequential(nn.Linear(2, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 3))
    network = dvi.to_bayesian_(network, prior_scale=dvi.bayesian.fan_in).to(device)
    model = dvi.classifier(network, num_data=args.num_data)  # size of the whole data set, for the plate
    guide = dvi.NaturalGradientGuide(model)
    elbo = DataParallel(dvi.NaturalGradientELBO(kl_weight=args.kl_weight))
    svi = SVI(model, guide, dvi.VOGN({"lr": args.lr}), loss=elbo)

    dataset = TensorDataset(*spirals(args.num_data, seed=0))
    sampler: DistributedSampler = DistributedSampler(dataset, num_replicas=world, rank=rank)
    loader = DataLoader(dataset, batch_size=args.batch_size // world, sampler=sampler)
    reshuffle = [lambda state: sampler.set_epoch(state.epoch)]
    history = dvi.fit(svi, loader, args.epochs, device=device, callbacks=reshuffle, progress=rank == 0)

    if rank == 0:  # all processes hold the same posterior
        x, y = spirals(1000, seed=1)
        scores = dvi.predict(model, guide, (x.to(device), y.to(device)), seed=0).metrics()
        shown = ", ".join(f"{name} {scores[name]:.3f}" for name in ("accuracy", "nll", "ece"))
        print(f"{world} process(es): loss {history['loss'][-1]:.1f}; test {shown}")
    if td.is_initialized():
        td.destroy_process_group()


if __name__ == "__main__":
    main()
