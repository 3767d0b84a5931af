"""Settings of the documentation site: `make docs` writes it to build/site."""

from pygments.lexers.data import YamlLexer
from sphinx.highlighting import lexers

import mesa_tune

project = "mesa-tune"
release = mesa_tune.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "mesa-tune"

myst_heading_anchors = 3
default_role = "code"  # docstrings are written in Markdown
autodoc_member_order = "bysource"
autodoc_default_options = {"exclude-members": "__new__, __init__"}
lexers["policy"] = YamlLexer()
