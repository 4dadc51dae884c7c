# SPDX-License-Identifier: Apache-2.0
"""What is known of each example as a table, and as labelled arrays."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    import pandas
    import xarray


def dataframe(columns: Mapping[str, Tensor], num_rows: int) -> "pandas.DataFrame":
    """Return a ``pandas.DataFrame``; see :meth:`Prediction.to_dataframe`."""
    import pandas

    found: dict[str, np.ndarray] = {}
    for name, value in columns.items():
        array = array_of(value)
        if array.ndim == 1:
            found[name] = array
            continue
        for place in np.ndindex(array.shape[1:]):
            found[f"{name}[{', '.join(map(str, place))}]"] = array[(slice(None), *place)]
    return pandas.DataFrame(found, index=pandas.RangeIndex(num_rows, name="example"))


def dataset(
    columns: Mapping[str, Tensor], draws: Mapping[str, Tensor], cell_dims: int, attributes: Mapping[str, str]
) -> "xarray.Dataset":
    """Return an ``xarray.Dataset``; see :meth:`Prediction.to_xarray`.

    Args:
        columns: by name, examples first.
        draws: by name, draws first and then examples.
        cell_dims: dimensions of one example's values, without that of classes.
        attributes: of the whole.
    """
    import xarray

    dims = ["example", *(f"dim_{i}" for i in range(cell_dims)), "class"]
    variables = {name: (dims[: value.dim()], array_of(value)) for name, value in columns.items()}
    for name, value in draws.items():
        variables[f"draws_{name}"] = (["draw", *dims[: value.dim() - 1]], array_of(value))
    return xarray.Dataset(variables, attrs=dict(attributes))


def array_of(value: Tensor) -> np.ndarray:
    """Return the values on the CPU, half precision as single."""
    value = value.detach().cpu()
    if value.dtype in (torch.bfloat16, torch.float16):  # NumPy has no bfloat16, netCDF no half precision
        value = value.float()
    return value.numpy()
