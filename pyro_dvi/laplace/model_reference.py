# SPDX-License-Identifier: Apache-2.0
"""A model that belongs to a guide, but neither to its parameters nor to its files."""

from collections.abc import Callable
from typing import Any

from pyro_dvi.errors import GuideError

__all__ = ["ModelReference"]


class ModelReference:
    """Hold a model: copies share it, pickles leave it out, as Pyro's guides do.

    Args:
        model: a Pyro model; None in what was loaded.
    """

    def __init__(self, model: Callable | None = None) -> None:
        self._model = model

    def get(self) -> Callable:
        """Return the model.

        Raises:
            GuideError: it was left out of the file that the guide comes from.
        """
        if self._model is None:
            raise GuideError(
                "this LaplaceGuide comes from a file, which has no model: use predict(model, guide, x), or build "
                "LaplaceGuide(model), call its initialize(*args) and load_state_dict(loaded.state_dict())"
            )
        return self._model

    def __deepcopy__(self, memo: Any) -> "ModelReference":
        return self

    def __reduce__(self) -> Any:
        return ModelReference, ()
