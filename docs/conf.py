"""The documentation site: pages in Markdown, the reference from docstrings. `make docs` builds it into site/.

Nothing is fetched at the build, and the pages fetch nothing: they can be read from a folder, search included.
"""

import re
from pathlib import Path

from sphinx.util import inspect

import gradlane
from gradlane import __version__

project = "gradlane"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_static"]

# Links such as page.md#a-heading work as they do where the repository is browsed.
myst_heading_anchors = 3

# The reference is the same whether they are installed or not.
autodoc_mock_imports = ["accelerate", "lightning", "ray", "transformers"]
autodoc_default_options = {"members": True}
autodoc_inherit_docstrings = False  # Strategy alone describes what all strategies do
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"gradlane {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False


def readable(app, what, name, obj, options, signature, returns):
    """A default that a factory makes is shown as `...`; what dataclasses write there cannot be parsed.

    Types are shown without quotes. A class whose base is not installed has the signature of its `__init__`.
    """
    if what == "class" and "__init__" in vars(obj) and signature == "(*args: Any, **kwargs: Any)":
        own = inspect.signature(obj.__init__, bound_method=True)
        signature = inspect.stringify_signature(own, show_return_annotation=False)
        signature = signature.replace("collections.abc.", "").replace("datetime.", "")
    if signature:
        signature = re.sub(r": '([^']*)'", r": \1", signature.replace("<factory>", "..."))
    return (signature, returns)


PACKAGES = {"api/strategies": "strategies", "api/codecs": "codecs", "api/rules": "aggregate"}


def add_unlisted(app, page, source):
    """A public class that no page of the reference lists is added at the end of its package's page."""
    if page not in PACKAGES:
        return
    listed = "".join(path.read_text(encoding="utf-8") for path in Path(app.srcdir, "api").glob("*.rst"))
    for name in sorted(set(gradlane.__all__) - set(re.findall(r":: (\w+)", listed))):
        part = getattr(gradlane, name)
        if isinstance(part, type) and part.__module__.startswith(f"gradlane.{PACKAGES[page]}."):
            source[0] += f"\n.. autoclass:: {name}\n"


def setup(app):
    app.connect("autodoc-process-signature", readable)
    app.connect("source-read", add_unlisted)
