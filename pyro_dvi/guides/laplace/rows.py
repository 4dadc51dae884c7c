# SPDX-License-Identifier: Apache-2.0
"""Whether the batches of a pass hold every row of the data once."""

from pyro_dvi.errors import DataError
from pyro_dvi.handlers.log_joint import JointRun

__all__ = ["Rows"]


class Rows:
    """Count the rows of plates over a pass."""

    def __init__(self) -> None:
        self.batches = 0
        self._seen: dict[str, int] = {}
        self._full: dict[str, set[int]] = {}
        self._subsampled: set[str] = set()

    def add(self, run: JointRun) -> None:
        self.batches += 1
        for name, (size, full) in run.rows.items():
            self._seen[name] = self._seen.get(name, 0) + size
            self._full.setdefault(name, set()).add(full)
            if size != full:
                self._subsampled.add(name)

    def check(self) -> None:
        """Compare what was seen with the size of each subsampled plate.

        Raises:
            DataError: rows are missing, or there are too many.
        """
        for name in sorted(self._subsampled):
            sizes = self._full[name]
            if sizes != {self._seen[name]}:
                raise DataError(
                    f"the batches hold {self._seen[name]} rows of plate {name!r}, whose size is {max(sizes)}. The "
                    "posterior needs all the data once: a loader with drop_last=False over the whole data set, and a "
                    "plate of its size"
                )
