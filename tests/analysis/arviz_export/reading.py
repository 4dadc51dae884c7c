# SPDX-License-Identifier: Apache-2.0
"""Read an export alike with ArviZ 0.x and 1.x, and write it to a file and back."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces version 1
    import arviz as az

__all__ = ["ARVIZ_1", "az", "groups", "reopened", "values"]

ARVIZ_1 = int(az.__version__.split(".")[0]) >= 1


def groups(posterior):
    return {name.strip("/") for name in (posterior.groups if ARVIZ_1 else posterior.groups())} - {""}


def values(posterior, group, name):
    return posterior[group][name].values


def reopened(posterior, tmp_path):
    path = tmp_path / "posterior.nc"
    posterior.to_netcdf(path)
    return az.from_netcdf(path)
