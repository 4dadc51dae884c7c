# SPDX-License-Identifier: Apache-2.0
"""Export to ArviZ: ``InferenceData`` with ArviZ 0.x, ``xarray.DataTree`` with ArviZ 1.x.

The only module that knows ArviZ; ``import pyro_dvi`` does not load it.
"""

import difflib
import re
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import pyro
import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyro_dvi.errors import ArgumentError, DviWarning
from pyro_dvi.guides.laplace.guide import DRAWN_WEIGHTS
from pyro_dvi.predictive import PredictionRule, Samples
from pyro_dvi.predictive.batches import Batch, batches
from pyro_dvi.predictive.mixture import checked_log_prob
from pyro_dvi.predictive.predict import at_tuned_scales, device_of, rule_of
from pyro_dvi.predictive.rules import check_is_set_up, example_latents
from pyro_dvi.predictive.run import (
    Response,
    check_observation,
    evaluation_mode,
    refuse_mask,
    respond,
    seeded,
)
from pyro_dvi.signatures import parameter_names

__all__ = ["to_arviz"]

Arrays = dict[str, np.ndarray]

MAX_INPUT_VALUES = 1_000_000  # inputs with more values are not copied into constant_data


def to_arviz(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    data: Any,
    num_samples: int | None = None,
    *,
    sites: str | Sequence[str] | None = None,
    max_site_size: int = 1000,
    method: PredictionRule | None = None,
    site: str | None = None,
    observed: str | None = None,
    elbo: Any = None,
    batch_size: int = 1000,
    seed: int | None = None,
    coords: Mapping[Hashable, Any] | None = None,
    dims: Mapping[Hashable, Sequence[Hashable]] | None = None,
    progress: bool = False,
) -> Any:
    r"""Posterior draws, predictions and data as one ArviZ object.

    Groups, with dimensions ``chain`` (of length 1) and ``draw`` first where there are draws:

    ``posterior``
        draws of the latent sites from the guide, in their own (constrained) space.
    ``posterior_predictive``
        draws of the observation from the predictive distribution of ``method``.
    ``log_likelihood``
        log density of each observation, :math:`\log p(y_i \mid x_i, \theta_k)`; if the data hold observations.
    ``observed_data``, ``constant_data``
        the observations, and the inputs by the names that the model gives them.

    With ``AtMean()``, the default, every draw of ``posterior_predictive`` comes from
    :math:`p(y \mid x, \mathrm{E}_q\theta)`: draws of the weights of a Variational Laplace posterior are no good
    predictor. ``log_likelihood`` is then the same for every draw. Its sum over *held-out* data is their
    log score. It is no input for leave-one-out cross-validation by importance sampling, which reweights draws that
    differ: ``az.loo`` reports infinite Pareto k (ArviZ 0.x) or refuses (1.x). For that, export with
    ``method=Samples(500)``, where the draws are those of ``posterior``, and judge the posterior that it then scores.

    Args:
        model: the Pyro model.
        guide: its trained guide, of this library, of Pyro, or a function.
        data: as in :func:`~pyro_dvi.predict`: ``(x, y)``, inputs alone, or a loader of either.
        num_samples: draws; by default 500, or as many as ``method`` has.
        sites: latent sites to export. By default all with at most ``max_site_size`` values; a warning names the rest.
            An empty list exports predictions alone: for methods of a LaplaceGuide that have no draws.
        max_site_size: values of one site above which it is left out by default.
        method: rule of prediction, by default the guide's own or ``AtMean()``.
        site: observed site, where the model has several.
        observed: the model's argument that holds the observation; by default the one whose default is None.
        elbo: the objective that trained the guide, to record its name and KL weight.
        batch_size: examples at a time; a loader has its own.
        seed: of all draws. The global random state is left as it was.
        coords: coordinate values by dimension, as in ArviZ.
        dims: names of the dimensions by variable, as in ArviZ.
        progress: show a progress bar over batches.

    Returns:
        ``arviz.InferenceData`` or ``xarray.DataTree``; ``.to_netcdf(path)`` writes either. Its attributes hold the
        versions of the libraries, guide, method, objective, KL weight, seed, and the names of what was left out.

    Raises:
        ArgumentError: an unknown site (similar names are suggested), no draws, two numbers of draws, or several
            arguments that may be the observation.
        DataError: data that cannot be right, as in :func:`~pyro_dvi.predict`.
        GuideError: the guide was never run, or has no mean.
        ModelError: no observed site, or several and no ``site``.
        UnsupportedError: the model masks some of the observed values.

    Example:
        >>> import pyro.distributions as dist
        >>> from pyro.infer.autoguide import AutoNormal
        >>> def model(x, y=None):
        ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         return pyro.sample("obs", dist.Normal(slope * x, 0.5), obs=y)
        >>> guide = AutoNormal(model)
        >>> x = torch.linspace(-1, 1, 5)
        >>> _ = guide(x, x)
        >>> posterior = to_arviz(model, guide, data=(x, x), num_samples=100, seed=0)
        >>> dict(posterior["posterior_predictive"]["obs"].sizes)
        {'chain': 1, 'draw': 100, 'obs_dim_0': 5}
    """
    rule = rule_of(method, guide)
    count = _number_of_draws(num_samples, rule)
    check_is_set_up(guide)
    device = device_of(model, guide)
    split = batches(model, data, observed=observed, batch_size=batch_size, device=device)
    posterior: Arrays = {}
    left_out: list[str] = []
    predictive: list[np.ndarray] = []
    log_likelihood: list[np.ndarray] = []
    observations: list[np.ndarray] = []
    inputs: list[tuple[Any, ...]] = []
    site_name = "obs"
    with evaluation_mode(model, guide), seeded(seed, device) as used_seed:
        # Noise of the observations has its own seeds: batches share the draws of the weights, not the noise.
        noise_seeds = torch.Generator().manual_seed(used_seed)
        for batch in tqdm(split, desc="export", unit="batch", disable=not progress):
            if batch.start == 0:
                torch.manual_seed(used_seed)
                posterior, left_out = _posterior(guide, batch, count, sites, max_site_size)
            if batch.observed is not None:
                batch = check_observation(model, batch, example_latents(guide, batch.inputs), site)
            torch.manual_seed(used_seed)
            run = at_tuned_scales(guide, partial(respond, model, batch, site=site))
            exported = _Exported(count, rule.num_components, batch.observed, noise_seeds)
            for response in rule.components(guide, batch.inputs, run):
                exported.add(response)
                site_name = response.site
            predictive.append(exported.predictive)
            if exported.observed is not None:
                log_likelihood.append(exported.log_likelihood)
                observations.append(exported.observed)
            inputs.append(batch.inputs)

    groups: dict[str, Arrays] = {"posterior": posterior}
    groups["posterior_predictive"] = {site_name: np.concatenate(predictive, axis=1)[None]}
    if len(observations) == len(inputs):
        groups["log_likelihood"] = {site_name: np.concatenate(log_likelihood, axis=1)[None]}
        groups["observed_data"] = {site_name: np.concatenate(observations)}
    groups["constant_data"], big_inputs = _constant_data(model, inputs)
    attributes = _attributes(guide, rule, elbo, seed)
    attributes["sites_left_out"] = ", ".join(left_out)
    attributes["inputs_left_out"] = ", ".join(big_inputs)
    return _assemble({k: v for k, v in groups.items() if v}, attributes, coords, dims)


class _Exported:
    """Draws of one batch, filled component by component; examples after the dimension of draws."""

    def __init__(
        self, count: int, num_components: int, observed: Tensor | None, seeds: torch.Generator
    ) -> None:
        self.share = count // num_components  # draws from each component
        self.seeds = seeds
        self._observed = observed
        self._draws: list[np.ndarray] = []
        self._log_probs: list[np.ndarray] = []
        self.observed: np.ndarray | None = None

    def add(self, response: Response) -> None:
        fn, axis = response.distribution, response.axis
        value_axis = axis - len(fn.event_shape)
        torch.manual_seed(int(torch.randint(2**31 - 1, (), generator=self.seeds)))
        self._draws.append(_array(fn.sample((self.share,)).movedim(value_axis, 1)))
        values = response.value if self._observed is None and response.is_observed else self._observed
        if values is not None:
            if response.is_masked:
                raise refuse_mask(response.site)
            self.observed = _array(values.movedim(value_axis, 0))
            log_prob = _array(checked_log_prob(fn, values, response.site).movedim(axis, 0))
            self._log_probs.append(np.broadcast_to(log_prob, (self.share, *log_prob.shape)))

    @property
    def predictive(self) -> np.ndarray:
        return np.concatenate(self._draws)

    @property
    def log_likelihood(self) -> np.ndarray:
        return np.concatenate(self._log_probs)


def _number_of_draws(num_samples: int | None, rule: PredictionRule) -> int:
    if num_samples is None:
        return 500 if rule.num_components == 1 else rule.num_components
    if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1:
        raise ArgumentError(f"num_samples must be a positive whole number, not {num_samples!r}")
    if isinstance(rule, Samples) and rule.num_samples != num_samples:
        raise ArgumentError(
            f"num_samples={num_samples} and method={rule} disagree: the draws of the posterior are those of the "
            "predictions. Leave out num_samples."
        )
    return num_samples


def _posterior(
    guide: Callable[..., Any], batch: Batch, count: int, sites: str | Sequence[str] | None, max_size: int
) -> tuple[Arrays, list[str]]:
    """Draw the chosen sites; return them, and the names of those left out for their size."""
    arrays: Arrays = {}
    left_out: list[str] = []
    if sites is not None and not list(sites):
        return {}, list(example_latents(guide, batch.inputs))
    with warnings.catch_warnings():
        # Nothing is predicted with these draws, of which a LaplaceGuide warns.
        warnings.filterwarnings("ignore", message=re.escape(DRAWN_WEIGHTS), category=DviWarning)
        for k, latents in enumerate(Samples(count).draws(guide, batch.inputs)):
            if k == 0:
                chosen, left_out = _choose_sites(latents, sites, max_size)
                for name in chosen:
                    value = latents[name]
                    arrays[name] = np.empty((1, count, *value.shape), dtype=_array(value).dtype)
            for name, array in arrays.items():
                array[0, k] = _array(latents[name])
    # A slash would become a group of the file.
    return {name.replace("/", "."): array for name, array in arrays.items()}, left_out


def _choose_sites(
    latents: Mapping[str, Tensor], sites: str | Sequence[str] | None, max_size: int
) -> tuple[list[str], list[str]]:
    if sites is None:
        left_out = [name for name, value in latents.items() if value.numel() > max_size]
        if left_out:
            sizes = ", ".join(f"{name!r} ({latents[name].numel():,})" for name in left_out)
            warnings.warn(
                f"the exported posterior leaves out sites of more than {max_size:,} values: {sizes}. Name those to "
                "keep, as in sites=['...'], or raise max_site_size.",
                DviWarning,
                stacklevel=4,
            )
        return [name for name in latents if name not in left_out], left_out
    chosen = [sites] if isinstance(sites, str) else list(sites)
    for name in chosen:
        if name not in latents:
            close = difflib.get_close_matches(str(name), latents, n=3, cutoff=0.4) or list(latents)[:10]
            raise ArgumentError(f"the guide has no site {name!r}; close names: {close}")
    return chosen, [name for name in latents if name not in chosen]


def _constant_data(model: Callable[..., Any], inputs: Sequence[tuple[Any, ...]]) -> tuple[Arrays, list[str]]:
    """Join the inputs of all batches, by the names that the model gives them."""
    arrays: Arrays = {}
    left_out = []
    for position, name in enumerate(parameter_names(model, len(inputs[0]))):
        pieces = [arguments[position] for arguments in inputs]
        if not all(torch.is_tensor(p) and p.dim() > 0 for p in pieces):
            continue
        if sum(p.numel() for p in pieces) > MAX_INPUT_VALUES:
            left_out.append(name)
        else:
            arrays[name] = np.concatenate([_array(p) for p in pieces])
    return arrays, left_out


def _attributes(guide: Any, rule: PredictionRule, elbo: Any, seed: int | None) -> dict[str, Any]:
    """Where the draws come from, in values that a netCDF file can hold."""
    attributes: dict[str, Any] = {
        "inference_library": "pyro_dvi",
        "inference_library_version": version("pyro-dvi"),
        "pyro_version": pyro.__version__,
        "torch_version": str(torch.__version__),
        "guide": getattr(guide, "__name__", type(guide).__name__),
        "method": repr(rule),
    }
    if seed is not None:
        attributes["seed"] = seed
    if elbo is not None:
        attributes["elbo"] = type(elbo).__name__
        weight = getattr(elbo, "kl_weight", None)
        if callable(weight):  # a schedule: what it last gave
            weight = (getattr(elbo, "terms", None) or {}).get("kl_weight", repr(weight))
        if weight is not None:
            attributes["kl_weight"] = weight if isinstance(weight, str) else float(weight)
    return attributes


def _assemble(groups: dict[str, Arrays], attributes: dict[str, Any], coords: Any, dims: Any) -> Any:
    with warnings.catch_warnings():
        # ArviZ 0.23 announces version 1 whenever it is imported; both versions are supported here.
        warnings.filterwarnings(
            "ignore", message=r"\s*ArviZ is undergoing a major refactor", category=FutureWarning
        )
        import arviz

    if int(arviz.__version__.split(".")[0]) >= 1:
        return arviz.from_dict(groups, attrs={"/": attributes}, coords=coords, dims=dims)
    return arviz.from_dict(**groups, attrs=attributes, coords=coords, dims=dims)


def _array(value: Tensor) -> np.ndarray:
    value = value.detach().cpu()
    if value.dtype in (torch.bfloat16, torch.float16):  # NumPy has no bfloat16, netCDF no half precision
        value = value.float()
    if value.dtype == torch.bool:
        value = value.to(torch.int8)
    return value.numpy()
