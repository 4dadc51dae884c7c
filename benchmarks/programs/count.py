# SPDX-License-Identifier: Apache-2.0
"""Count the calls and lines of the programs in this folder, and run them.

``python -m benchmarks.programs.count`` prints the table of docs/how_to/one_call.md. With names of programs, it runs
these and prints their test NLL; each library needs an environment that has it.
"""

import ast
import runpy
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
LIBRARIES = ("laplace_torch", "torch_ivon", "tyxe", "torch_uncertainty", "numpyro")
ROWS = {
    "Variational inference (Variational Laplace in pyro-dvi, sampled VI elsewhere)": (
        "variational_laplace",
        "vi",
    ),
    "Variational Laplace, by hand": ("variational_laplace_by_hand", None),
    "Moment propagation": ("moment_propagation", None),
    "VOGN": ("vogn", None),
    "IVON": ("ivon", "ivon"),
    "Laplace, from a trained network": ("laplace", "laplace"),
    "MAP": ("map", "map"),
    "Deep ensemble": ("ensemble", "ensemble"),
}


def count(path: Path) -> tuple[int, int]:
    """Return the number of calls, nested calls included, and of lines of code without imports."""
    tree = ast.parse(path.read_text())
    body = [
        statement
        for statement in tree.body
        if not isinstance(statement, ast.Import | ast.ImportFrom)
        and not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
    ]
    inside = [node for statement in body for node in ast.walk(statement)]
    lines = {line for node in inside if hasattr(node, "lineno") for line in (node.lineno, node.end_lineno)}
    return sum(isinstance(node, ast.Call) for node in inside), len(lines)


def table() -> str:
    """Return calls and lines of every program as a table in Markdown."""
    head = ["", "pyro-dvi", *(name.replace("_", "-") for name in LIBRARIES)]
    rows = [head, ["---"] * len(head)]
    for title, (own, other) in ROWS.items():
        paths = [FOLDER / "ours" / f"{own}.py", *(FOLDER / "peers" / f"{x}_{other}.py" for x in LIBRARIES)]
        rows.append([title, *("{} / {}".format(*count(p)) if p.exists() else "" for p in paths)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def run(path: Path) -> float:
    """Run a program in a fresh task, and return the test NLL that it finds."""
    for name in ("task", "trained"):
        sys.modules.pop(f"benchmarks.programs.{name}", None)
    found: Any = runpy.run_path(str(path))["nll"]
    return float(getattr(found, "value", found))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"{name:30}{run(next(FOLDER.glob(f'*/{name}.py'))):.3f}")
    if not sys.argv[1:]:
        print(table())
