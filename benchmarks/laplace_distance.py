# SPDX-License-Identifier: Apache-2.0
"""How far the Gaussians of cheap methods are from that of the whole Gauss-Newton matrix, at one mode and one prior.

``distance`` is for other benchmarks. Run as a script it prints a table for the digits networks of laplace_quality.py:

    python benchmarks/laplace_distance.py --network cnn --seed 0
"""

import argparse
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

import pyro_dvi
from benchmarks.laplace_quality import BATCH_SIZE, LAST_LAYER, NUM_TRAIN, build, digits, train
from pyro_dvi.bayesian import classifier, to_bayesian_
from pyro_dvi.laplace import Accept, Dense, Diagonal, KroneckerFactored, TopEigen
from pyro_dvi.laplace.methods.posterior import LaplacePosterior, Method

METHODS: dict[str, Method] = {
    "KroneckerFactored": KroneckerFactored(),
    "Diagonal": Diagonal(),
    "TopEigen(300)": TopEigen(300),
    "last layer, Dense": Dense(),
}


def distance(
    guide: pyro_dvi.LaplaceGuide, batches: Iterable[Any], x: Tensor, method: Method, subset: str | None = None
) -> dict[str, float]:
    r"""Fit a method and the whole matrix at the guide's mode; return how they differ.

    Args:
        guide: with a mode; its scale factors are used as they are.
        batches: all data.
        x: inputs at which predictions are compared.
        method: the approximation.
        subset: sites that it leaves uncertain, as a last layer; the others have no variance then. None: all.

    Returns:
        ``covariance``: relative Frobenius distance of the covariance matrices of all latents; ``variance_ratio``: the
        median over outputs of the variance of the method by the exact one; ``log_determinant``: log det P of the
        method less the exact one, in nats (with a subset: of the exact matrix of those sites).
    """
    guide.fit(batches, Dense(), unconverged=Accept())
    exact, variance = covariance(guide.fitted.posterior), guide.predictive(x).variance
    places = torch.arange(len(exact))
    if subset is not None:
        chosen = guide.energy(batches, subset=subset).layout
        whole = guide.fitted.layout
        named = whole.named(places)
        places = torch.cat([named[name].flatten() for name in chosen.names])
    determinant = float(torch.linalg.inv(exact)[places][:, places].logdet())
    guide.fit(batches, method, subset=subset, unconverged=Accept())
    found = torch.zeros_like(exact)
    found[places.unsqueeze(1), places] = covariance(guide.fitted.posterior)
    return {
        "covariance": float((found - exact).norm() / exact.norm()),
        "variance_ratio": float((guide.predictive(x).variance / variance).median()),
        "log_determinant": float(guide.fitted.posterior.log_determinant()) - determinant,
    }


def covariance(posterior: LaplacePosterior) -> Tensor:
    """Return the matrix ``[D, D]`` in double precision."""
    identity = torch.eye(len(posterior.mode), dtype=posterior.mode.dtype)
    return torch.cat([posterior.solve(rows) for rows in identity.split(256)]).double()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", choices=("mlp", "cnn"), default="cnn")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    data, net = digits(options.network, options.seed), build(options.network)
    net.load_state_dict({k: torch.tensor(v) for k, v in train(options.network, options.seed).items()})
    model = classifier(to_bayesian_(net, prior_scale=1.0), num_data=NUM_TRAIN)
    guide = pyro_dvi.LaplaceGuide(model)
    batches = list(zip(data["train"].split(BATCH_SIZE), data["labels"][0].split(BATCH_SIZE), strict=True))
    guide.initialize(*batches[0])
    print("| method | covariance | variance ratio | log determinant |\n|---|---|---|---|")
    for name, method in METHODS.items():
        subset = LAST_LAYER[options.network] if name.startswith("last") else None
        found = distance(guide, batches, data["test"], method, subset)
        cells = f"{found['covariance']:.3f} | {found['variance_ratio']:.3f} | {found['log_determinant']:+.0f}"
        print(f"| {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
