# SPDX-License-Identifier: Apache-2.0
"""Read one value of every latent from a guide."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from pyro_dvi.errors import GuideError

__all__ = ["posterior_means"]


def posterior_means(guide: Any) -> dict[str, Tensor]:
    """Return the medians of the latents, which are the means where the posterior is Normal.

    Args:
        guide: a guide with a ``median()`` method, as all automatic guides have, or a mapping from site names
            to values: one posterior draw, say.

    Raises:
        GuideError: if the guide has no median, or has not been run yet.
    """
    if isinstance(guide, Mapping):
        return dict(guide)
    median: Callable[[], Mapping[str, Tensor]] | None = getattr(guide, "median", None)
    if not callable(median):
        raise GuideError(
            f"{type(guide).__name__} has no median() method, as Pyro's automatic guides have. Pass a mapping "
            "from site names to values instead."
        )
    if getattr(guide, "prototype_trace", True) is None:
        raise GuideError(
            f"The {type(guide).__name__} has not seen the model yet and has no parameters: train it, or call "
            "it once with the arguments of the model."
        )
    return {name: value.detach() for name, value in median().items()}
