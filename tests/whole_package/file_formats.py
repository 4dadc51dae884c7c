# SPDX-License-Identifier: Apache-2.0
"""What the library can save, with what must be found after loading.

``python -m tests.whole_package.file_formats`` writes the files of the present format version. Run it once, after the
version was raised: files that are there already are those of a release, and stay as they are.
"""

import gzip
import tempfile
from pathlib import Path

import pyro
import torch
from pyro.infer import SVI
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.core.file_format import FORMAT_VERSION
from pyro_dvi.laplace import Dense, Diagonal, KroneckerFactored, PosteriorSamples, TopEigen

SAVED = Path(__file__).parent / "saved"
X = torch.linspace(-1, 1, 12, dtype=torch.float64)[:, None]
Y = X[:, 0].sin()
LOADER = [(X[:6], Y[:6]), (X[6:], Y[6:])]
GUIDES = {
    "MeanFieldGuide": dvi.MeanFieldGuide,
    "MultiplicativeNoiseGuide": dvi.MultiplicativeNoiseGuide,
    "NaturalGradientGuide": dvi.NaturalGradientGuide,
    "KroneckerGuide": dvi.KroneckerGuide,
    "LastLayerGuide": lambda model: dvi.LastLayerGuide(model, "net.2"),
}
FITS = {
    type(m).__name__: m for m in (Dense(), Diagonal(), KroneckerFactored(), TopEigen(3), PosteriorSamples(2))
}
METHODS = {
    "VariationalLaplace": dvi.VariationalLaplace(noise_scale=0.3, prior_scale=1.0),
    "Laplace": dvi.Laplace(noise_scale=0.3, prior_scale=1.0),
}


def network():
    """The same weights on every machine."""
    net = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.linspace(-0.8, 0.5, parameter.numel()).reshape(parameter.shape))
    return net


def fresh_model():
    pyro.clear_param_store()
    return dvi.regressor(dvi.to_bayesian_(network()), num_data=12, noise_scale=0.3)


def fresh_guide(name):
    guide = dvi.LaplaceGuide(fresh_model()) if name in FITS else GUIDES[name](fresh_model())
    if name == "LastLayerGuide":  # the others learn from the state which parameters they have
        guide.initialize(X, Y)
    return guide


def fresh_svi():
    model, elbo = fresh_model(), dvi.TaylorELBO(temperature=0.5)
    return SVI(model, dvi.MeanFieldGuide(model), dvi.optim.Adam({"lr": 0.01}), loss=elbo)


def marginals(guide):
    """Quantiles of every site."""
    guide.initialize(X, Y)
    return guide.quantiles([0.2, 0.5])


def write(folder):
    """Write all files, and what must be found in them."""
    expected = {}
    states = {}
    for name in (*GUIDES, *FITS):
        guide = fresh_guide(name)
        guide.initialize(X, Y)
        if name in FITS:
            guide.fit([(X, Y)], FITS[name], unconverged="accept")
        else:
            with torch.no_grad():
                for parameter in guide.parameters():
                    parameter.mul_(1.1)
        states[name], expected[name] = guide.state_dict(), marginals(guide)
    torch.save(states, folder / "guides.pt")
    svi = fresh_svi()
    history = dvi.fit(svi, LOADER, 2, progress=False)
    dvi.save(folder / "checkpoint.pt", svi, history=history)
    expected["checkpoint"] = marginals(svi.guide)
    expected["resumed"] = dvi.fit(svi, LOADER, 3, history=history, progress=False)["loss"]
    for name, method in METHODS.items():
        posterior = method.fit(network(), LOADER, 2, progress=False)
        posterior.save(folder / f"{name}.pt")
        prediction = posterior.predict(X)
        expected[f"{name}.pt"] = {"mean": prediction.mean, "variance": prediction.variance}
    torch.save(expected, folder / "expected.pt")


def unpack(version, folder):
    """Write the files of a format version, which are kept compressed, into a folder."""
    for path in (SAVED / str(version)).iterdir():
        (folder / path.stem).write_bytes(gzip.decompress(path.read_bytes()))


if __name__ == "__main__":
    kept = SAVED / str(FORMAT_VERSION)
    kept.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        for path in Path(folder).iterdir():
            (kept / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
