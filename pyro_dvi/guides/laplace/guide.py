# SPDX-License-Identifier: Apache-2.0
"""The posterior as a Gaussian around its mode."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_dvi.bayesian import init_to_module
from pyro_dvi.errors import ArgumentError, DviWarning, GuideError
from pyro_dvi.guides.base import FactorisedGuide
from pyro_dvi.guides.factors import Deterministic, Factor
from pyro_dvi.guides.laplace.dense import Dense
from pyro_dvi.guides.laplace.draws import Draws
from pyro_dvi.guides.laplace.energy import Energy
from pyro_dvi.guides.laplace.fitted import Fitted
from pyro_dvi.guides.laplace.gaussian_outputs import GaussianOutputs
from pyro_dvi.guides.laplace.model_reference import ModelReference
from pyro_dvi.guides.laplace.posterior import LaplacePosterior, Method
from pyro_dvi.guides.laplace.query import Query
from pyro_dvi.handlers.latents import unconstraining_transform

__all__ = ["DRAWN_WEIGHTS", "LaplaceGuide"]

DRAWN_WEIGHTS = (
    "weights are drawn from a Laplace posterior: a network run at them leaves the neighbourhood in which the Gaussian "
    "was fitted, and predicts too widely. predict(model, guide, x, method=Linearised()) stays at the mode."
)


class LaplaceGuide(FactorisedGuide):
    r"""Train a mode, then put a Gaussian around it.

    .. math:: q(u) = \mathcal N(\hat u, P^{-1}), \qquad \hat u = \arg\min_u U(u), \qquad
        U(u) = -\tfrac1\kappa\log p(D \mid u) - \log p(u)

    In training it is a point mass in unconstrained space, for ``SVI`` with any ELBO: its loss is
    :math:`\kappa U` up to a constant. Then :meth:`polish` finds the minimum itself, :meth:`fit` the Gaussian, and
    :meth:`predictive`, ``predict`` and :meth:`log_evidence` use it. Predictions linearise the model around the mode.

    Status: the Gaussian is exact for linear models with Gaussian noise; elsewhere a local approximation.

    Args:
        model: a Pyro model whose latents are continuous.
        kl_weight: :math:`\kappa`, as the objective had it in training; the posterior is that of the tempered
            likelihood :math:`p(D \mid u)^{1/\kappa}`.
        init_loc_fn: Pyro initialisation strategy of the mode; by default the weights that a network had before
            :func:`~pyro_dvi.to_bayesian_`: a trained network is a mode already.
        create_plates: as in Pyro's guides.

    Attributes:
        locs: module of modes, ``guide.locs.<site>``.
        posterior: what the last :meth:`fit` made; None before.

    Raises:
        ModelError: a latent is discrete, or there is none.
        ArgumentError: a KL weight that is not positive.

    Source: MacKay (1992); Immer, Korzepa & Bauer (2021) for the linearised predictive.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> def model(x, y=None):
        ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         return pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)
        >>> x = torch.ones(3)
        >>> guide = LaplaceGuide(model)
        >>> guide.initialize(x, x)
        >>> _ = guide.fit([(x, x)], Dense())
        >>> guide.predictive(x).variance
        tensor([0.2500, 0.2500, 0.2500])
    """

    def __init__(
        self,
        model: Callable,
        *,
        kl_weight: float = 1.0,
        init_loc_fn: Callable = init_to_module,
        create_plates: Callable | None = None,
    ) -> None:
        if not kl_weight > 0:
            raise ArgumentError(f"kl_weight must be positive, got {kl_weight!r}")
        super().__init__(model, init_loc_fn=init_loc_fn, create_plates=create_plates)
        self.kl_weight = float(kl_weight)
        self._plain_model = ModelReference(model)  # without the initialisation of means, and no submodule
        self._fitted: Fitted | None = None

    def _factor_of(self, name: str, site: Any, loc: Tensor) -> Factor:
        return Deterministic()

    @property
    def posterior(self) -> LaplacePosterior | None:
        """The Gaussian of the last :meth:`fit`; None before.

        Raises:
            GuideError: the mode has moved since.
        """
        return None if self._fitted is None else self.fitted.posterior

    def fit(
        self,
        batches: Iterable[Any],
        method: Method | None = None,
        *,
        subset: str | Iterable[str] | None = None,
        seed: int = 0,
        progress: bool = False,
    ) -> LaplacePosterior:
        """Put the Gaussian around the mode.

        Args:
            batches: all the data: a loader or a list of batches, as for :func:`~pyro_dvi.fit`.
            method: how the Gaussian is represented.
            subset: sites that are uncertain, by name or pattern (``"net.4.*"`` for a last layer); the others stay at
                their mode. None: all.
            seed: of random numbers.
            progress: show a progress bar.

        Returns:
            the Gaussian; also ``guide.posterior``.

        Raises:
            GuideError: the guide has not seen its model yet.
            DataError: batches that do not hold all data, or change.
        """
        method = Dense() if method is None else method
        if not isinstance(method, Method):
            raise ArgumentError(
                f"method must be an object such as Dense() or PosteriorSamples(64), not {method!r}"
            )
        energy = self.energy(batches, subset=subset)
        posterior = method.fit(energy.at(energy.start), seed=seed, progress=progress)
        self._fitted = Fitted(posterior, energy.layout, self.unconstrained_mode())
        return posterior

    def energy(self, batches: Iterable[Any], *, subset: str | Iterable[str] | None = None) -> Energy:
        """Return U on these batches, with its gradient and products; arguments as :meth:`fit`."""
        locs = self.unconstrained_mode()
        names = None if subset is None else _selected(list(locs), subset)
        return Energy(self._plain_model.get(), batches, locs, subset=names, kl_weight=self.kl_weight)

    def unconstrained_mode(self) -> dict[str, Tensor]:
        """Return a copy of the mode of every site in unconstrained space."""
        return {name: attrgetter(name)(self.locs).detach().clone() for name, _ in self._sites()}

    def predictive(self, *inputs: Any, site: str | None = None, joint: bool = False) -> GaussianOutputs:
        """Return the Gaussian over the outputs for some inputs.

        Args:
            inputs: positional arguments of the model; observations may be left out.
            site: an observed site, or one of ``pyro.deterministic``; None for the one observed site.
            joint: also the covariance between examples, ``joint_covariance`` of shape ``[B k, B k]``.

        Returns:
            ``mean`` and ``variance`` of the prediction ``[B, ...]``, ``covariance`` ``[B, k, k]``.

        Raises:
            GuideError: not fitted yet, or the mode has moved since.
            DataError: no rows, NaN, or inputs that the model cannot take.
            ModelError: no such site, or several to choose from.
            UnsupportedError: a distribution that cannot be linearised, or a method without what is asked for.
        """
        fitted = self.fitted
        query = Query(self._plain_model.get(), inputs, fitted.mode, fitted.layout, site=site)
        return fitted.gaussian_outputs(query, joint=joint)

    @property
    def fitted(self) -> Fitted:
        """The Gaussian with its mode and the sites that it is over.

        Raises:
            GuideError: not fitted yet, or the mode has moved since.
        """
        if self._fitted is None:
            raise GuideError(
                "this LaplaceGuide is a point mass so far: call guide.fit(batches, method) after training. "
                "predict(..., method=AtMean()) predicts at the mode"
            )
        moved = self._fitted.first_moved(self.unconstrained_mode())
        if moved is not None:
            raise GuideError(
                f"site {moved!r} has moved since guide.fit, so that its Gaussian belongs to another mode: fit again"
            )
        return self._fitted

    # As a Pyro guide: a point mass in training, the Gaussian of the last fit when draws are asked for ---------------

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Give every latent site a value; Pyro calls it with the arguments of the model.

        With gradients enabled, as in training, this is the mode. Without (``Predictive``, ``Samples``) and after
        :meth:`fit` it is a draw from the Gaussian, with a warning: a network run at such weights is no linearised
        prediction.
        """
        self.initialize(*args, **kwargs)
        if self._fitted is None or torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        moved = self._fitted.first_moved(self.unconstrained_mode())
        if moved is not None:
            warnings.warn(
                f"site {moved!r} has moved since guide.fit: this LaplaceGuide is a point mass until it is fitted again",
                DviWarning,
                stacklevel=2,
            )
            return super().forward(*args, **kwargs)
        warnings.warn(DRAWN_WEIGHTS, DviWarning, stacklevel=2)
        vectors = pyro.sample(
            f"_{self._pyro_name}_latent", Draws(self._fitted.posterior), infer={"is_auxiliary": True}
        )
        plates = self._create_plates(*args, **kwargs)
        result = {}
        for name, site in self._sites():
            u = self._fitted.value_of(name, vectors, self._event_dims[name])
            transform = unconstraining_transform(site["fn"].support)
            value = u if transform is None else transform(u)
            with ExitStack() as stack:
                for frame in site["cond_indep_stack"]:
                    stack.enter_context(plates[frame.name])
                result[name] = pyro.sample(name, dist.Delta(value, event_dim=site["fn"].event_dim))
        return result

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] | int = ()) -> dict[str, Tensor]:
        """Draw all sites at once: from the Gaussian after :meth:`fit`, the mode before.

        Args:
            sample_shape: leading dimensions of the draws; a number of draws, or a shape.

        Returns:
            draws of shape ``[*sample_shape, *site]`` by site name, in their own (constrained) space.

        Raises:
            GuideError: the mode has moved since the fit.
            UnsupportedError: the method of the fit has no draws.
        """
        if self._fitted is None:
            return super().sample(sample_shape)
        shape = torch.Size([sample_shape] if isinstance(sample_shape, int) else sample_shape)
        drawn = self.fitted.draw(shape.numel())
        return self._constrained({name: u.reshape(*shape, *u.shape[1:]) for name, u in drawn.items()})

    @torch.no_grad()
    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return the mode of every site; in unconstrained space that is the median."""
        return self._constrained(self.unconstrained_mode())

    def _marginals(self) -> dict[str, Any]:
        marginals = super()._marginals()
        if self._fitted is not None:
            for name, variance in self.fitted.marginal_variances().items():
                normal = dist.Normal(marginals[name].mean.detach(), variance.sqrt(), validate_args=False)
                marginals[name] = normal.to_event(self._event_dims[name])
        return marginals

    def _constrained(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        transforms = {name: unconstraining_transform(site["fn"].support) for name, site in self._sites()}
        return {name: u if (t := transforms[name]) is None else t(u) for name, u in values.items()}

    # Moving and saving ---------------------------------------------------------------------------------------------

    def get_extra_state(self) -> dict[str, Any] | None:
        """Return the Gaussian of the last fit for ``state_dict``, in tensors and plain values.

        A method that needs the model and the data to predict (conjugate gradients, say) is left out, with a warning.
        """
        return None if self._fitted is None else self._fitted.state()

    def set_extra_state(self, state: Any) -> None:
        """Take over what :meth:`get_extra_state` returned."""
        self._fitted = Fitted.from_state(state)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        if self._fitted is not None:
            self._fitted = self._fitted.moved(fn)
        return self


def _selected(names: list[str], subset: str | Iterable[str]) -> list[str]:
    patterns = [subset] if isinstance(subset, str) else list(subset)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ArgumentError(f"subset names {pattern!r}, which is no site of the guide; there are {names}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
