# SPDX-License-Identifier: Apache-2.0
"""Configuration of the documentation; `make docs` builds it with warnings as errors."""

import sys
from importlib.metadata import version as _version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # gallery, api_pages, layout

from api_pages import inventories  # noqa: E402

project = "pyro-dvi"
author = "The pyro-dvi developers"
copyright = author
version = release = _version("pyro-dvi")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx-mathjax-offline",  # MathJax is part of the build: pages can be read without a network
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "api_pages",
    "compatibility",
    "layout",
]
exclude_patterns = ["_build", "generated"]
intersphinx_mapping = inventories()  # from inventories.txt: a build needs no network

myst_enable_extensions = ["dollarmath", "amsmath", "deflist", "colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
autodoc_preserve_defaults = True
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

# Tutorials run at each build, if they have changed; an error in one is an error of the build.
sphinx_gallery_conf = {
    "examples_dirs": "../examples/tutorials",
    "gallery_dirs": "tutorials",
    "filename_pattern": r"\.py",
    "within_subsection_order": "gallery.reading_order",
    "capture_repr": (),
    "reset_modules": ("matplotlib", "gallery.short_warnings"),
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_signature": False,
    "write_computation_times": False,
    "remove_config_comments": True,
    # Pyro's import asks for ipywidgets in a notebook; nothing here needs them.
    "first_notebook_cell": (
        'import warnings\n\nwarnings.filterwarnings("ignore", "IProgress not found")'
    ),
}

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = f"pyro-dvi {release}"
html_static_path = ["layout.css"]
html_css_files = ["layout.css"]
pygments_dark_style = (
    "github-dark"  # the default underlines modules as if they were links
)
