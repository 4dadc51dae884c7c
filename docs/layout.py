# SPDX-License-Identifier: Apache-2.0
"""What stays on one line, what may break, and captions; ``layout.css`` has the rest of the pages' layout."""

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
# Lengths of cells: a number up to the first does not break, texts beyond the others have a least width.
SHORT, LONG, LONGER = 22, 25, 70
WIDE = 9  # inches of a figure whose text cannot be read when it is as narrow as a phone
AS_THEY_ARE = nodes.literal | nodes.literal_block | nodes.math | nodes.raw


class Layout(SphinxPostTransform):
    """Keep numbers beside their errors, let code in tables break, and give figures captions and boxes to scroll."""

    default_priority = 700
    formats = ("html",)

    def run(self, **kwargs: Any) -> None:
        for text in list(self.document.findall(nodes.Text)):
            kept = TOGETHER.sub("\u00a0", text)
            if kept != text and not isinstance(text.parent, AS_THEY_ARE):
                text.parent.replace(text, nodes.Text(kept))
        for cell in self.document.findall(nodes.entry):
            self.lay_out(cell)
        for kind in (nodes.image, imgsgnode):
            for image in list(self.document.findall(kind)):
                self.frame(image)

    def lay_out(self, cell: nodes.entry) -> None:
        """Set the class of a cell by its length, and where its code may break."""
        length = len(cell.astext())
        if length > LONG:
            cell["classes"].append("longer" if length > LONGER else "long")
        elif length <= SHORT and re.search(r"\d", cell.astext()):
            cell["classes"].append("short")
        for literal in list(cell.findall(nodes.literal)):
            first, *further = BREAKS.split(literal.astext())
            literal.children = []
            literal += nodes.Text(first)
            for piece in further:
                literal += nodes.raw("", "<wbr>", format="html")
                literal += nodes.Text(piece)

    def frame(self, image: nodes.Element) -> None:
        """Put a wide image into a box, and make the text of one that is a paragraph its caption."""
        file = Path(self.app.srcdir, image["uri"].lstrip("/"))
        is_wide = imagesize.get(file)[0] >= WIDE * imagesize.getDPI(file)[0]
        framed = image.deepcopy()
        if is_wide:
            framed = nodes.container("", framed, classes=["wide-figure"])
        paragraph = image.parent
        if isinstance(paragraph, nodes.paragraph) and len(paragraph) == 1:
            caption = nodes.caption("", TOGETHER.sub("\u00a0", image.get("alt", "")))
            name = nodes.make_id(f"figure-{Path(image['uri']).stem}")
            paragraph.replace_self(nodes.figure("", framed, caption, ids=[name]))
        elif is_wide:
            image.replace_self(framed)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the transform."""
    app.add_post_transform(Layout)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
