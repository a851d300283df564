"""Sphinx builds the documentation: ``sphinx-build -W --keep-going docs site/docs``."""

import sys
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import docstrings  # noqa: E402 - beside this file
import pages  # noqa: E402 - beside this file

project, author, copyright = "keyedopt", "The keyedopt developers", "The keyedopt developers"
release = version = version_of("keyedopt")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
default_role = "code"
highlight_language = "text"  # of blocks without a language, which are outputs
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"keyedopt {release}"
html_static_path = ["_static"]
html_favicon = "_static/keyedopt.svg"
html_css_files = ["keyedopt.css"]
html_js_files = [("accessible.js", {"defer": "defer"})]
html_show_sourcelink = False
html_show_sphinx = False
html_math_renderer = "mathml"

autodoc_typehints, autodoc_typehints_format = "signature", "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
toc_object_entries = False  # each class has a heading
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = True
napoleon_google_docstring, napoleon_numpy_docstring = True, False

pages.write(HERE)


def setup(app: Any) -> None:
    """Complete docstrings; show formulas as MathML, which browsers draw without a request to elsewhere."""

    def inline(translator: Any, node: Any) -> None:
        translator.body.append(convert(node.astext()))
        raise nodes.SkipNode

    def block(translator: Any, node: Any) -> None:
        source = f"\\begin{{align}}{node.astext()}\\end{{align}}"
        translator.body.append(f'<div class="formula" tabindex="0">{convert(source, display="block")}</div>')
        raise nodes.SkipNode

    app.connect("autodoc-process-docstring", docstrings.complete, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", docstrings.constructor)
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
