# SPDX-License-Identifier: Apache-2.0
"""As many steps in every process, where some have fewer batches than others."""

from collections.abc import Iterable, Iterator
from typing import Any

from pyro_dvi.core.batches import number_of_batches
from pyro_dvi.distributed.data_parallel import DataParallel
from pyro_dvi.distributed.messages import exchange, exchange_results, several
from pyro_dvi.errors import ArgumentError, DataError

_END = object()


class JointBatches:
    r"""The batches of this process, with its last one repeated until every process has had all of its own.

    A process that repeats has no share in the joint minibatch: its weight is :math:`m_k = 0`, and it makes the same
    update as the others.

    Status: exact; every example counts once in an epoch.

    Args:
        loader: a ``DataLoader`` or another iterable that can be read again and again.
        elbo: the objective, which is told when this process has no share.

    Raises:
        ArgumentError: the objective is no ``DataParallel``.
        DataError: while it is read: a process has no batch at all.
        PyroDviError: while it is read: the loader of another process failed.

    Example:
        >>> from pyro_dvi import TaylorELBO
        >>> elbo = DataParallel(TaylorELBO())
        >>> list(JointBatches(["one", "two"], elbo))  # alone
        ['one', 'two']
    """

    def __init__(self, loader: Iterable[Any], elbo: DataParallel) -> None:
        if not isinstance(elbo, DataParallel):
            raise ArgumentError(
                f"JointBatches takes the loader and the DataParallel objective, got {type(elbo).__name__}"
            )
        self.loader = loader
        self.elbo = elbo
        self._length: int | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "loader" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        """Number of batches of the process that has most; processes meet here at the first call."""
        if self._length is None:
            own = number_of_batches(self.loader)
            all_lengths = exchange(own, self.elbo.group) if several(self.elbo.group) else [own]
            known = [length for length in all_lengths if length is not None]
            if len(known) < len(all_lengths):
                raise TypeError(f"the loader ({type(self.loader).__name__}) does not know its length")
            self._length = max(known)
        return self._length

    def __iter__(self) -> Iterator[Any]:
        """Yield batches; processes meet before each."""
        if not several(self.elbo.group):
            yield from self.loader
            return
        batches: Iterator[Any] | None = None
        batch = last = _END

        def read() -> tuple[bool, bool]:
            """Take the next batch; whether there is one, and whether there has been any."""
            nonlocal batches, batch
            batches = iter(self.loader) if batches is None else batches
            batch = next(batches, _END)
            return batch is not _END, batch is not _END or last is not _END

        while True:
            everyone = exchange_results(read, self.elbo.group, "the loader of ")
            empty = [k for k, (_, has_any) in enumerate(everyone) if not has_any]
            if empty and len(empty) < len(everyone):
                raise DataError(f"process {empty[0]} has no batch at all: give every process at least one")
            if not any(has_batch for has_batch, _ in everyone):
                return
            self.elbo.stands_by = batch is _END
            last = last if batch is _END else batch
            yield last
