# SPDX-License-Identifier: Apache-2.0
"""The format version of all files and states of the library: checkpoints, states of guides, fitted Gaussians."""

from importlib.metadata import version

from pyro_dvi.errors import CheckpointError

# One number for all formats; it is raised when any of them changes. Later code must still read the files in
# tests/whole_package/saved.
FORMAT_VERSION = 3


def check_format_version(what: str, found: int) -> None:
    """Raise an error for a file or state that a later release has written.

    Args:
        what: the file or state, named in the message.
        found: its format version.

    Raises:
        CheckpointError: if the version is above ``FORMAT_VERSION``.
    """
    if found > FORMAT_VERSION:
        raise CheckpointError(
            f"{what} has format version {found}, but pyro-dvi {version('pyro-dvi')} reads only versions up to "
            f"{FORMAT_VERSION}: update pyro-dvi, or train again"
        )
