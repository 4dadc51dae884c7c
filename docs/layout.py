# SPDX-License-Identifier: Apache-2.0
"""What stays on one line and what may break, in the pages; ``layout.css`` has the rest of their layout."""

import re
from pathlib import Path
from typing import Any

import imagesize
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx_gallery.directives import imgsgnode

TOGETHER = re.compile(r"(?<=\d) (?=%)| (?=± )|(?<=±) ")  # "95 %" and "0.75 ± 0.04"
# Code in a cell may break behind these, and before the words of a CamelCase name.
BREAKS = re.compile(r"(?<=[/_.:=(,])(?=\w{3})|(?<=[a-z])(?=[A-Z][a-z])")
SHORT, LONG, LONGER = 20, 25, 70  # characters of cells; short ones with numbers do not break
WIDE = 900  # pixels of a figure whose text cannot be read when it is as narrow as a phone


class Lines(SphinxPostTransform):
    """Keep numbers together with their errors, let code in tables break, and let wide figures scroll."""

    default_priority = 700
    formats = ("html",)

    def run(self, **kwargs: Any) -> None:
        for text in list(self.document.findall(nodes.Text)):
            if not isinstance(text.parent, nodes.literal | nodes.literal_block | nodes.math | nodes.raw):
                kept = TOGETHER.sub("\u00a0", text)
                if kept != text:
                    text.parent.replace(text, nodes.Text(kept))
        for cell in self.document.findall(nodes.entry):
            self.lay_out(cell)
        for image in [*self.document.findall(nodes.image), *self.document.findall(imgsgnode)]:
            width, _ = imagesize.get(Path(self.app.srcdir, image["uri"].lstrip("/")))
            if width >= WIDE:
                alone = isinstance(image.parent, nodes.paragraph) and len(image.parent) == 1
                shown = image.parent if alone else image
                shown.replace_self(nodes.container("", image.deepcopy(), classes=["wide-figure"]))

    def lay_out(self, cell: nodes.entry) -> None:
        """Set the class of a cell by its length, and where its code may break."""
        said = cell.astext()
        if len(said) > LONG:
            cell["classes"].append("longer" if len(said) > LONGER else "long")
        elif len(said) <= SHORT and re.search(r"\d", said):
            cell["classes"].append("short")
        for literal in list(cell.findall(nodes.literal)):
            pieces = BREAKS.split(literal.astext())
            literal.clear()
            for piece in pieces:
                if len(literal):
                    literal += nodes.raw("", "<wbr>", format="html")
                literal += nodes.Text(piece)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the transform."""
    app.add_post_transform(Lines)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
