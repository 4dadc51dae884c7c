# SPDX-License-Identifier: Apache-2.0
"""Run the notebooks that readers download, as Jupyter does; an error or a warning in a cell is a failure."""

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbclient
import nbformat

TUTORIALS = Path(__file__).parent / "tutorials"


def run(path: Path) -> str | None:
    """Run a notebook in an empty folder; return what is wrong with it."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        client = nbclient.NotebookClient(
            notebook, timeout=600, kernel_name="python3", resources=resources
        )
        try:
            client.execute()
        except (
            nbclient.exceptions.CellExecutionError,
            nbclient.exceptions.CellTimeoutError,
        ) as error:
            return str(error)
    # Warnings, and bars that have no widget to be drawn with, are written to stderr.
    written = (
        o
        for cell in notebook.cells
        for o in cell.get("outputs", ())
        if o.get("name") == "stderr"
    )
    return "".join(output["text"] for output in written) or None


def main() -> int:
    """Run all of them, two at a time; return 1 if one fails."""
    paths = sorted(TUTORIALS.glob("*.ipynb"))
    if not paths:
        sys.exit(f"There are no notebooks in {TUTORIALS}: run `make docs` first.")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of each kernel
    failed = 0
    with ThreadPoolExecutor(2) as pool:
        for path, problem in zip(paths, pool.map(run, paths), strict=True):
            print(f"{path.name}: {'ok' if problem is None else problem}", flush=True)
            failed |= problem is not None
    return failed


if __name__ == "__main__":
    sys.exit(main())
