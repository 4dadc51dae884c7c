# SPDX-License-Identifier: Apache-2.0
r"""Posteriors trained separately, each with its own parameter store, and ensembles of these as one model and guide.

The index of the member is an additional latent variable, the site ``member``. The guide draws a member m, and then the
weights from the posterior of member m; the model runs the network of member m:

.. math:: q(m, \theta) = \tfrac1K\, q_m(\theta).
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, TypeGuard

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoGuide
from pyro.params.param_store import StateDict
from torch import Tensor, nn

from pyro_dvi.core.arguments import check_count
from pyro_dvi.core.in_turn import in_turn
from pyro_dvi.core.progress import progress_bar
from pyro_dvi.errors import ArgumentError, GuideError, warn
from pyro_dvi.runs.trained_for import trained_for
from pyro_dvi.training.own_store import OwnNetworks, Scope, bind
from pyro_dvi.training.parameter_checks import supplanted
from pyro_dvi.training.random_state import preserve_random_state


@dataclass(frozen=True, eq=False)
class TrainedPosterior:
    """A model and its trained guide, with their parameters in Pyro's store.

    Attributes:
        model: the Pyro model.
        guide: the posterior of the model's latents.
        store: state of the parameter store; empty if the parameters belong to the modules.
        networks: tensors of the networks that a model calls that is a function; None if it shares them with others.
    """

    model: Any
    guide: Any
    store: StateDict = field(repr=False)
    networks: OwnNetworks | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("model", "guide"):
            object.__setattr__(self, name, bind(getattr(self, name), self.store, self.networks))

    def in_store(self) -> AbstractContextManager[None]:
        """Make Pyro's store contain only the parameters of this posterior within the context."""
        return in_turn.own(Scope(self.store), self.networks or nullcontext())

    def put_back(self) -> None:
        """Copy the parameters into Pyro's store, where they replace other parameters of the same names."""
        pyro.get_param_store().set_state(self.store)

    def trainable(self) -> dict[int, tuple[str, Tensor]]:
        """Return names and tensors of all trainable parameters, by identity."""
        parts = [part for part in (self.model, self.guide) if isinstance(part, nn.Module)]
        named = [*self.store["params"].items(), *(pair for part in parts for pair in part.named_parameters())]
        return {id(tensor): (name, tensor) for name, tensor in named if tensor.requires_grad}


def train_apart(
    train: Callable[[], Any], seed: int, others: Iterable[TrainedPosterior] = ()
) -> TrainedPosterior:
    """Run a training function with a seed and an empty parameter store, and return its result with this store.

    The global random state and Pyro's store are restored afterwards.

    Args:
        train: function that builds and trains a model and its guide, and returns both, or a posterior.
        seed: seed of the generators of torch, NumPy and Python.
        others: posteriors trained earlier, whose parameters ``train`` must not change.

    Raises:
        ArgumentError: if ``train`` does not return a pair ``(model, guide)``, or trains parameters of another
            posterior.

    Example:
        >>> import pyro.distributions as dist
        >>> from pyro.infer.autoguide import AutoNormal
        >>> def train():
        ...     model = lambda: pyro.sample("w", dist.Normal(0.0, 1.0))
        ...     guide = AutoNormal(model)
        ...     guide()  # here it would be trained
        ...     return model, guide
        >>> pyro.clear_param_store()
        >>> posterior = train_apart(train, seed=0)
        >>> list(posterior.store["params"]), list(pyro.get_param_store())
        (['AutoNormal.locs.w', 'AutoNormal.scales.w'], [])
    """
    store: StateDict = {"params": {}, "constraints": {}}
    with in_turn.own(preserve_random_state(), Scope(store)):
        pyro.set_rng_seed(seed)
        result: Any = train()
        networks = None
        if isinstance(result, TrainedPosterior):
            result.put_back()
            result, networks = (result.model, result.guide), result.networks
    if not _is_pair(result):
        raise ArgumentError(
            f"train must return a tuple (model, guide), in this order, not {type(result).__name__}"
        )
    posterior = TrainedPosterior(*result, store, networks)
    own = posterior.trainable()
    for other in others:
        for key, (name, _) in other.trainable().items():
            if key in own:
                raise ArgumentError(
                    f"two training runs have changed the same parameter, {name!r}: build network, model and guide "
                    "inside train, and freeze shared parameters with requires_grad_(False)"
                )
    return posterior


MEMBER = "member"  # the site whose value is the index of the member


def train_ensemble(
    train: Callable[[], Any], num_members: int = 5, *, seed: int = 0, progress: bool = True
) -> tuple["EnsembleModel", "EnsembleGuide"]:
    r"""Train a deep ensemble: repeat a training run several times, each from its own random start.

    .. math:: p(y \mid x) \approx \frac1K \sum_{k=1}^K p_k(y \mid x)

    where :math:`p_k` is the predictive distribution of member k with its own prediction rule. With MAP training of an
    ``AutoDelta``, the result is the deep ensemble of the literature. Ensembles of variational posteriors, of VOGN
    posteriors or of Laplace approximations are trained in the same way. Each training run has an empty parameter store
    and its own seed. The global random state and Pyro's store are restored afterwards.

    Args:
        train: function that builds network, model and guide, trains them, and returns ``(model, guide)``. It must not
            set a seed.
        num_members: number of members, K.
        seed: determines the seeds of all members.
        progress: show a progress bar over members in a terminal or notebook.

    Returns:
        Model and guide of the ensemble, for :func:`~pyro_dvi.predict`, :func:`~pyro_dvi.to_arviz` and Pyro's
        ``Predictive``; ``guide.members`` contains the members.

    Raises:
        ArgumentError: if ``num_members`` is less than one, or if ``train`` does not return a pair ``(model, guide)`` or
            trains the same network repeatedly.
        DviWarning: if two members have the same parameters.

    Source: Lakshminarayanan, Pritzel & Blundell (2017), Algorithm 1, without adversarial examples.

    Example:
        >>> import pyro_dvi as dvi
        >>> from pyro.infer import SVI, Trace_ELBO
        >>> from pyro.infer.autoguide import AutoDelta
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> def train():
        ...     net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        ...     model = dvi.regressor(dvi.to_bayesian_(net), num_data=20, noise_scale=0.1)
        ...     guide = AutoDelta(model, init_loc_fn=dvi.bayesian.init_to_module)
        ...     svi = SVI(model, guide, dvi.optim.Adam({"lr": 0.02}), loss=Trace_ELBO())
        ...     dvi.fit(svi, [(x, x[:, 0].sin())], epochs=100, progress=False)
        ...     return model, guide
        >>> model, guide = dvi.train_ensemble(train, num_members=3)
        >>> prediction = dvi.predict(model, guide, torch.tensor([[0.0], [5.0]]))
        >>> prediction
        Prediction(Normal site 'obs', 2 examples, method=3 x AtMean())
        >>> near, far = prediction.epistemic
        >>> bool(near < far)
        True
    """
    check_count("num_members", num_members)
    members: list[TrainedPosterior] = []
    seeds = torch.randint(2**31 - 1, (num_members,), generator=torch.Generator().manual_seed(seed)).tolist()
    with progress_bar(progress, num_members, unit="member") as bar:
        for own in seeds:
            members.append(train_apart(train, own, members))
            bar.update()
    guide = EnsembleGuide(members)
    return guide.model, guide


class EnsembleModel(nn.Module):
    """The model of an ensemble: it draws the site ``member`` and runs the model of the drawn member.

    Args:
        members: model, guide and parameters of each member.
    """

    def __init__(self, members: Iterable[TrainedPosterior]) -> None:
        super().__init__()
        self.members = tuple(members)
        self.models = nn.ModuleList(m.model for m in self.members if isinstance(m.model, nn.Module))

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The first member's model, whose signature all members share."""
        return self.members[0].model  # type: ignore[no-any-return]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model of one member."""
        member = self.members[_drawn_member(len(self.members))]
        with member.in_store():
            return member.model(*args, **kwargs)


class EnsembleGuide(nn.Module):
    r"""Guide of several trained posteriors with equal weights; it draws a member, and then this member's latents.

    .. math:: q(m, \theta) = \tfrac1K\, q_m(\theta)

    Members may be of any kind and have different networks, but :func:`~pyro_dvi.to_arviz` needs the same latent sites
    in all members. :func:`train_ensemble` trains members and returns their ensemble.

    Args:
        members: pairs ``(model, guide)`` of trained posteriors. If parameters of a pair are in Pyro's parameter store
            and not in the modules of the pair, they are copied from the store.

    Attributes:
        model: the model of the ensemble.
        members: model, guide and parameters of each member.

    Raises:
        ArgumentError: if there are no members, or if a member is not such a pair.
        DviWarning: if two members have the same parameters.

    Example:
        >>> import pyro_dvi as dvi
        >>> from pyro.infer.autoguide import AutoDelta
        >>> def model(x, y=None):
        ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         return pyro.sample("obs", dist.Normal(slope * x, 0.5), obs=y)
        >>> x, members = torch.ones(1), []
        >>> for slope in (1.0, 3.0):
        ...     with pyro.get_param_store().scope():
        ...         guide = AutoDelta(model, init_loc_fn=lambda site: torch.tensor(slope))
        ...         _ = guide(x, x)  # in place of a training
        ...     members.append((model, guide))
        >>> ensemble = EnsembleGuide(members)
        >>> prediction = dvi.predict(ensemble.model, ensemble, x)
        >>> prediction.mean, prediction.variance  # within the members .25, between them 1
        (tensor([2.]), tensor([1.2500]))
    """

    factorised = None  # a mixture is not a product of Gaussians

    def __init__(self, members: Iterable[TrainedPosterior | tuple[Any, Any]]) -> None:
        super().__init__()
        self.members = tuple(map(_as_member, members))
        if not self.members:
            raise ArgumentError("an ensemble needs at least one member: pass pairs (model, guide)")
        self.guides = nn.ModuleList(m.guide for m in self.members if isinstance(m.guide, nn.Module))
        self._model = [EnsembleModel(self.members)]  # in a list, so that it is not a submodule
        pairs = combinations(enumerate(self.members), 2)
        same = [f"{i} and {k}" for (i, first), (k, second) in pairs if _are_same(first, second)]
        if same:
            warn(f"members {', '.join(same)} have the same parameters: train must not set a seed")

    @property
    def model(self) -> EnsembleModel:
        """The model of the ensemble."""
        return self._model[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Draw a member, run its guide, and return the result."""
        member = self.members[_drawn_member(len(self.members))]
        with member.in_store():
            return member.guide(*args, **kwargs)

    def check_model(self, model: Callable[..., Any]) -> None:
        """Raise an error for a model other than the ensemble's, because predictions run the models of the members.

        Raises:
            GuideError: if ``model`` is not :attr:`model`.
        """
        if model is not self.model:
            raise GuideError(
                f"an ensemble predicts with its own models, not {type(model).__name__}: predict(guide.model, guide, x)"
            )

    def predicted_model(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """Return the ensemble of the models that the members use for predictions."""
        return EnsembleModel(
            replace(m, model=getattr(m.guide, "predicted_model", lambda own: own)(m.model))
            for m in self.members
        )


def _drawn_member(count: int) -> int:
    """Draw the index of a member on the CPU, so that reading the index does not wait for an accelerator."""
    return int(pyro.sample(MEMBER, dist.Categorical(torch.full((count,), 1 / count, device="cpu"))))


def _is_pair(value: Any) -> TypeGuard[tuple[Any, Any]]:
    """Return whether a value is a pair of a model and its guide, and not a guide and its model."""
    if not (isinstance(value, tuple) and len(value) == 2 and all(map(callable, value))):
        return False
    model, guide = value
    # Both may be methods of one object.
    is_swapped = isinstance(model, AutoGuide) or (trained_for(model) and not trained_for(guide))
    return not is_swapped


def _as_member(given: Any) -> TrainedPosterior:
    """Return a member as a trained posterior with its parameters."""
    if isinstance(given, TrainedPosterior):
        return given
    if not _is_pair(given):
        raise ArgumentError(
            f"a member of an ensemble is a pair (model, guide) of callables, in this order, not {given!r}"
        )
    modules = [part for part in given if isinstance(part, nn.Module)]
    # Names under which the store now contains parameters of another posterior.
    others = {name for part in modules for name, *_ in supplanted(part)}
    state: Any = pyro.get_param_store().get_state()
    kept: Any = {
        what: {name: value for name, value in values.items() if name.replace("$$$", ".") not in others}
        for what, values in state.items()
    }
    return TrainedPosterior(*given, kept)


def _are_same(one: TrainedPosterior, other: TrainedPosterior) -> bool:
    """Return True if two guides have parameters, and their parameters are the same."""
    modules = isinstance(one.guide, nn.Module) and isinstance(other.guide, nn.Module)
    first, second = (dict(m.guide.named_parameters()) if modules else m.store["params"] for m in (one, other))
    return first.keys() == second.keys() != set() and all(map(torch.equal, first.values(), second.values()))
