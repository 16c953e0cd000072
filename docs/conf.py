"""How the site is built: `make docs`.

The source directory is the whole repository, of which only the pages below are taken: so a link from one Markdown file
to another is the same on a forge and on the site, also to and from proto/ and clients/.
"""

import logging
import re
import sys
from inspect import Signature
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "clients" / "python")]

from kvxfer import __version__  # noqa: E402
from scripts.reference import cli, grpc_api, settings  # noqa: E402

project = "kvxfer"
copyright = "kvxfer contributors"  # noqa: A001
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "proto/kvxfer/**", "clients/**", "deploy/**"]
exclude_patterns = ["**/__pycache__", ".*", "build", "dist", "tests", "kvxfer"]
source_suffix = {".md": "markdown"}

# As forges make them.
myst_heading_anchors = 4

# Snippets of code may be cut short.
suppress_warnings = ["misc.highlighting_failure"]
# A folder of pages may be empty.  This warning has a subtype, but no type to suppress it by.
logging.getLogger("sphinx.sphinx.directives.other").addFilter(lambda r: getattr(r, "subtype", "") != "empty_glob")

# Engines are documented whether they are there or not.
autodoc_mock_imports = ["torch", "transformers"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"kvxfer {__version__}"
html_copy_source = False
html_show_sphinx = False

#: What stands for a generated part in a page.
_MARK = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.MULTILINE)


def _generate(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put the generated parts of the reference into its pages."""
    if _MARK.search(source[0]) is None:
        return
    parts = {name: text for module in (cli, grpc_api, settings) for name, text in module.pages().items()}
    source[0] = _MARK.sub(lambda mark: parts[mark[1]], source[0])


def _returned(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, signature: str, returned: str
) -> tuple[str, str] | None:
    """What a client's method returns, which its own signature tells and the function that it wraps does not."""
    told = getattr(thing, "__dict__", {}).get("__signature__")
    return (signature, told.return_annotation) if isinstance(told, Signature) else None


def _enter(app: Sphinx, failure: Exception | None) -> None:
    """The site's root leads to its first page."""
    if failure is None and app.builder.format == "html":
        page = '<!doctype html><meta charset="utf-8"><title>kvxfer</title>'
        page += f'<meta http-equiv="refresh" content="0; url={root_doc}.html"><a href="{root_doc}.html">kvxfer</a>\n'
        (Path(app.outdir) / "index.html").write_text(page, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _generate)
    app.connect("autodoc-process-signature", _returned)
    app.connect("build-finished", _enter)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
