# SPDX-License-Identifier: Apache-2.0
"""From about the mode to the mode itself."""

from collections.abc import Callable

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_count, check_positive
from pyro_dvi.core.progress import progress_bar
from pyro_dvi.errors import UnconvergedError, warn
from pyro_dvi.laplace.energy.energy import Energy
from pyro_dvi.laplace.mode.diagnosis import look_at_kinks
from pyro_dvi.laplace.mode.kinks import without_kinks
from pyro_dvi.laplace.mode.search import Polished, Search

__all__ = ["Polished", "polish"]


def polish(
    energy: Energy,
    keep: Callable[[Tensor], None],
    *,
    tolerance: float = 1e-10,
    max_gradients: int = 3000,
    progress: bool = True,
    callback: Callable[[int, float, float, float], None] | None = None,
) -> Polished:
    r"""Go down to a minimum of U, and prove it by the true Hessian, known by its products.

    .. math:: u \leftarrow u - P^{-1} g \quad\text{at last, until}\quad g^\top P^{-1} g \le \epsilon

    Valleys are followed by a quasi-Newton method in the metric of the Gauss-Newton matrix; saddle points are left along
    their negative curvature. See :func:`~pyro_dvi.linalg.descend` and :func:`~pyro_dvi.linalg.minimise_newton`.

    Status: a local minimum with a positive definite Hessian, as far as 200 Lanczos steps show. Where U has kinks, a
    point at rest in the norm of the Gauss-Newton matrix.

    Args:
        energy: U on fixed batches.
        keep: takes the best point so far, however the search ends; also after Ctrl-C or an error.
        tolerance: on the Newton decrement, in squared posterior standard deviations. Where rounding hides further
            progress, or the gradients are spent, a decrement below 0.01 will do.
        max_gradients: of all data, that the search may take; a proof of some hundred may follow.
        progress: show a progress bar where there is a terminal or notebook.
        callback: called after each step with its number, U, the norm of its gradient, and the decrement before or an
            estimate of it.

    Raises:
        UnconvergedError: the search ended elsewhere; ``report`` holds what it did. The best point is kept.
        NonFiniteError: U is NaN or infinite where the search starts.
        ArgumentError: a tolerance or a count is not positive.
    """
    check_positive("tolerance", tolerance)
    check_count("max_gradients", max_gradients)
    spent = energy.work.done
    with progress_bar(progress, max_gradients, unit="gradient") as bar:

        def report(iteration: int, value: float, norm: float, decrement: float) -> None:
            bar.update(energy.work.done - spent - bar.n)
            bar.set_postfix_str(f"U {value:.6g}, gradient {norm:.2g}, decrement {decrement:.2g}")
            if callback is not None:
                callback(iteration, value, norm, decrement)

        search = Search(energy, max_gradients, report)
        kinked = look_at_kinks(energy).kinks
        try:
            found = search.rest(kinked) if kinked else search.minimum(tolerance)
        except KeyboardInterrupt:
            warn(f"polish was interrupted after {search.steps} steps; the guide keeps the best point so far")
            curvature = "GGN" if kinked else "Hessian"
            return search.ended(newton_decrement=search.decrement, curvature=curvature, reason="interrupted")
        finally:
            keep(search.best[0])
    if kinked and not found.converged:
        warn(
            f"polish: {found.reason}; the guide keeps the best point. U has kinks ({', '.join(kinked)}), where no "
            "gradient vanishes and the Hessian means nothing. fit with GGN(), which does without a minimum; what "
            f"avoids kinks is {without_kinks(kinked)}."
        )
    elif not found.converged:
        raise _unconverged(found, energy.start.dtype)
    return found


def _unconverged(found: Polished, dtype: torch.dtype) -> UnconvergedError:
    way = "call guide.polish again, which goes on from here, with a larger max_gradients"
    if "gradients" not in found.reason:
        way = "give a prior that holds every direction"
        if dtype != torch.float64:
            way = "use float64 (model.double(), guide.double() and the data), or " + way
    error = UnconvergedError(
        f"polish ended without a minimum; the guide keeps the best point.\n{found}\nTo go on, {way}."
    )
    error.report = found
    return error
