# SPDX-License-Identifier: Apache-2.0
"""The code that README, quickstart and tutorials show, as files for type checkers."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

# A block that is not meant to run (another library's code, a fragment) says so on the line before its fence.
NOT_RUN = "<!-- not run"
# One that trains for long says there what the test writes in place of its number: "<!-- tested with epochs=2 -->".
TESTED_WITH = re.compile(r"<!-- tested with (\w+)=(\d+) -->")


def python_blocks(page: Path) -> str:
    """The page's Python blocks as one program, each at its own line number so that tracebacks point home."""
    text = page.read_text()
    program: list[str] = []
    for block in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        line_before = text[: block.start()].rstrip("\n").rpartition("\n")[2]
        if line_before.startswith(NOT_RUN):
            continue
        first_line = text[: block.start(1)].count("\n")
        program += [""] * (first_line - len(program))
        code = block[1]
        if shorter := TESTED_WITH.fullmatch(line_before):
            code = re.sub(rf"\b{shorter[1]}=\d+", f"{shorter[1]}={shorter[2]}", code)
        program += code.splitlines()
    return "\n".join(program)


def write(folder: Path) -> list[Path]:
    """Write README's blocks as a program, and the list of all files to check."""
    folder.mkdir(exist_ok=True)
    readme = folder / "README.py"
    readme.write_text(python_blocks(ROOT / "README.md") + "\n")
    files = [
        readme,
        ROOT / "tests" / "docs" / "first_use.py",
        ROOT / "examples" / "quickstart.py",
        *sorted((ROOT / "examples" / "tutorials").glob("*.py")),
    ]
    (folder / "files").write_text("\n".join(map(str, files)) + "\n")
    return files


if __name__ == "__main__":
    write(ROOT / ".shown_code")
