# SPDX-License-Identifier: Apache-2.0
"""The format version of everything that the library writes: checkpoints, states of guides, fitted Gaussians."""

from importlib.metadata import version

from pyro_dvi.errors import CheckpointError

# One number for all. A change of any format raises it; the code then still reads what tests/whole_package/saved holds.
FORMAT_VERSION = 1


def check_format_version(what: str, found: int) -> None:
    """Raise an error for something that a later release has written.

    Args:
        what: the file or state, for the message.
        found: its format version.

    Raises:
        CheckpointError: the version is above ``FORMAT_VERSION``.
    """
    if found > FORMAT_VERSION:
        raise CheckpointError(
            f"{what} has format version {found}, and pyro-dvi {version('pyro-dvi')} reads versions up to "
            f"{FORMAT_VERSION}: update pyro-dvi, at least to the release that wrote it, or train again"
        )
