# SPDX-License-Identifier: Apache-2.0
"""Entries of the API pages under their public names, and links to them from code in text.

``.. entries::`` takes public names, one a line and without ``pyro_dvi.``, and makes a table and an entry of each.
"""

import inspect
import re
import sys
import zlib
from dataclasses import fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from textwrap import indent
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.addnodes import desc_signature, pending_xref
from sphinx.application import Sphinx
from sphinx.domains.python import PythonDomain
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.docutils import SphinxDirective

import pyro_dvi

HERE = Path(__file__).parent
PAGES = HERE / "reference" / "api"
# Code of these names in a text is as often a torch class, a method or an argument.
NOT_LINKED = {
    "Adam",
    "SGD",
    "Function",
    "Kind",
    "Link",
    "Table",
    "Predicted",
    "Method",
}


def public_object(name: str) -> Any:
    """Return what ``pyro_dvi.NAME`` is."""
    return attrgetter(name)(pyro_dvi)


def entries_of(page: Path) -> list[str]:
    """Return the names that a page lists in its ``entries``."""
    listed = page.read_text().partition(".. entries::")[2]
    return [
        line.strip()
        for line in listed.splitlines()
        if line.startswith("   ") and line.strip()
    ]


PUBLIC = {
    name: public_object(name)
    for page in sorted(PAGES.glob("*.rst"))
    for name in entries_of(page)
}
# Where an object is defined, and its public name:
# "pyro_dvi.variational_laplace.taylor.TaylorELBO" is "pyro_dvi.TaylorELBO".
DEFINED = {
    f"{value.__module__}.{value.__qualname__}": f"pyro_dvi.{name}"
    for name, value in PUBLIC.items()
    if inspect.isclass(value) or inspect.isfunction(value)
}
# A name by its last part; where two end alike, the shorter is meant, and rather not the plot.
LAST = {
    name.rpartition(".")[2]: f"pyro_dvi.{name}"
    for name in sorted(
        PUBLIC, key=lambda name: (name.count("."), name.startswith("plots")), reverse=True
    )
}


def documentation(name: str) -> str:
    """Return an object's docstring; that of a value stands below its assignment."""
    value, last = PUBLIC[name], name.rpartition(".")[2]
    if inspect.isclass(value) or inspect.isfunction(value):
        return inspect.getdoc(value) or ""
    for module in [name for name in sys.modules if name.startswith("pyro_dvi.")]:
        if getattr(sys.modules[module], last, None) is value:
            found = ModuleAnalyzer.for_module(module).find_attr_docs().get(("", last))
            if found:
                return "\n".join(found)
    raise ValueError(f"{name} has no docstring")


def directive_of(name: str) -> str:
    """Return the directive of one entry."""
    value = PUBLIC[name]
    if inspect.isfunction(value):
        return f".. autofunction:: pyro_dvi.{name}\n"
    if not inspect.isclass(value):
        chapter, _, last = f"pyro_dvi.{name}".rpartition(".")
        return f".. py:data:: {last}\n   :module: {chapter}\n\n{indent(documentation(name), '   ')}\n"
    kind = "exception" if issubclass(value, BaseException) else "class"
    ours = [base for base in value.__mro__[1:] if base.__module__.startswith("pyro_dvi")]
    private = [base for base in ours if base not in PUBLIC.values()]
    others = [base.__name__ for base in value.__mro__[1:] if base not in private]
    inherited = f"   :inherited-members: {', '.join(others)}\n" if private else ""
    given = fields(value) if is_dataclass(value) else ()
    called = ", ".join(field.name for field in given if callable(field.default))
    excluded = f"   :exclude-members: {called}\n" if called else ""  # no methods
    return f".. auto{kind}:: pyro_dvi.{name}\n   :members:\n{inherited}{excluded}"


def with_readable_defaults(
    app: Sphinx,
    what: str,
    name: str,
    value: Any,
    options: Any,
    signature: str,
    returned: str,
) -> Any:
    """Write ``Probit()`` for the factory of a data class, and ``VOGN`` for a class or function."""
    if not signature:
        return None
    for field in fields(value) if is_dataclass(value) else ():
        if inspect.isclass(field.default_factory):
            default = f"{field.name}={field.default_factory.__name__}()"
            signature = signature.replace(f"{field.name}=<factory>", default)
    names = r"<(?:class|function) '?(?:\w+\.)*(\w+)'?(?: at \w+)?>"
    return re.sub(names, r"\1", signature), returned


class Entries(SphinxDirective):
    """A table of names, then their entries."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        names = [line.strip() for line in self.content if line.strip()]
        first = {
            name: " ".join(documentation(name).split("\n\n")[0].split()) for name in names
        }
        rows = "".join(
            f"   * - :py:obj:`~pyro_dvi.{name}`\n     - {first[name]}\n" for name in names
        )
        table = f".. list-table::\n   :widths: 30 70\n\n{rows}"
        text = "\n".join(
            [table, ".. currentmodule:: pyro_dvi\n", *map(directive_of, names)]
        )
        parent = nodes.container()
        self.state.nested_parse(
            StringList(text.splitlines(), self.get_source_info()[0]), 0, parent
        )
        return parent.children


class LinkedCode(SphinxTransform):
    """Code in a text that is a public name, or one of torch's or Pyro's, becomes a link."""

    default_priority = 400

    def apply(self, **kwargs: Any) -> None:
        for literal in list(self.document.findall(nodes.literal)):
            text = literal.astext()
            name = text.removeprefix("dvi.").removeprefix("pyro_dvi.").partition("(")[0]
            plain = (
                text.startswith(("dvi.", "pyro_dvi."))
                or name in PUBLIC
                and "_" in name.strip("_")
            )
            target = f"pyro_dvi.{name}" if name in PUBLIC and plain else None
            if name in LAST and name[0].isupper() and name not in NOT_LINKED:
                target = LAST[name]
            target = target or (text if text in FOREIGN else None)
            inside = isinstance(
                literal.parent, nodes.reference | pending_xref | nodes.title
            )
            if target is None or inside:
                continue
            link = pending_xref(
                "",
                refdomain="py",
                reftype="obj",
                reftarget=target,
                refdoc=self.env.docname,
                refexplicit=True,
            )
            literal.replace_self(link)
            link += literal


class ShorterAnchors(SphinxPostTransform):
    """Anchors that lack chapters, ``pyro_dvi.Sum``: pages of source code link back to some of these."""

    default_priority = 800

    def run(self, **kwargs: Any) -> None:
        signatures = list(self.document.findall(desc_signature))
        taken = {name for signature in signatures for name in signature["ids"]}
        for signature in signatures:
            chapters = (signature.get("module") or "").split(".")
            for length in range(1, len(chapters)):
                name = ".".join([*chapters[:length], signature["fullname"]])
                if name not in taken:
                    signature["ids"].append(name)
                    taken.add(name)


def by_public_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> Any:
    """Resolve the name of where an object is defined, or its last part."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    owner, _, member = target.rpartition(".")
    if owner.startswith("pyro_dvi.") and member in LAST and owner not in DEFINED:
        target = member  # "pyro_dvi.training.fit"
    if target in DEFINED or target in LAST:
        public = DEFINED.get(target) or LAST[target]
    elif owner in DEFINED or owner in LAST:
        public = f"{DEFINED.get(owner) or LAST[owner]}.{member}"
    else:
        return None
    domain = env.get_domain("py")
    assert isinstance(domain, PythonDomain)
    return domain.resolve_xref(
        env, node["refdoc"], app.builder, "obj", public, node, content
    )


def inventories() -> dict[str, tuple[str, str]]:
    """Write ``inventories.txt`` as files that intersphinx reads, so that links need no network to be made."""
    folder = HERE / "_build" / "inventories"
    folder.mkdir(parents=True, exist_ok=True)
    mapping = {}
    for block in (HERE / "inventories.txt").read_text().split("\n\n")[1:]:
        (project, url), *rows = [line.split() for line in block.splitlines()]
        lines = [
            f"{name} py:{kind} 1 {address} -"
            for kind, address, *names in rows
            for name in names
        ]
        head = (
            f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n# zlib\n"
        )
        path = folder / f"{project}.inv"
        path.write_bytes(head.encode() + zlib.compress("\n".join(lines).encode()))
        FOREIGN.update(name for _, _, *names in rows for name in names)
        mapping[project] = (url, str(path))
    return mapping


FOREIGN: set[str] = set()


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the parts."""
    app.add_directive("entries", Entries)
    app.add_transform(LinkedCode)
    app.add_post_transform(ShorterAnchors)
    app.connect("autodoc-process-signature", with_readable_defaults)
    app.connect("missing-reference", by_public_name, priority=900)  # after intersphinx
    return {"parallel_read_safe": True, "parallel_write_safe": True}
