"""Build the API reference of all public names with Sphinx; scripts/docs runs it in its environment.

    python scripts/docs.py [FOLDER]

The HTML is written to FOLDER (default: build/docs). Sphinx warnings are errors, and so are docstring entries that name
several arguments.
"""

import importlib
import inspect
import sys
import tempfile
from pathlib import Path

from sphinx.cmd.build import main as build


ROOT = Path(__file__).resolve().parents[1]
MODULES = [f"hf_longctx.{name}" for name in ("fox", "hmt", "windows", "metrics", "training", "hub", "corpus")]
CONFIG = r"""
import re
from sphinx.util import logging

project, html_theme, default_role = "hf-longctx", "alabaster", "code"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_inherit_docstrings, autodoc_preserve_defaults, napoleon_use_ivar = False, True, True

def check_entries(app, what, name, value, options, lines):
    for line in lines:
        if re.match(r" +[a-z]\w*(, [a-z]\w*)+: ", line):
            logging.getLogger("docs").warning("%s: an entry must name one argument, got: %s", name, line)

def setup(app):
    app.connect("autodoc-process-docstring", check_entries, priority=1)  # before napoleon changes the lines
"""


def heading(text: str) -> str:
    return f"{text}\n{'=' * len(text)}\n\n"


def page(name: str) -> str:
    """Return the reStructuredText page of a module and its public names."""
    module = importlib.import_module(name)
    own = (key for key, value in vars(module).items() if key[0] != "_" and getattr(value, "__module__", "") == name)
    text = f"{heading(name)}{inspect.getdoc(module)}\n\n"
    for public in getattr(module, "__all__", own):
        is_class = inspect.isclass(getattr(module, public))
        text += f".. auto{'class' if is_class else 'function'}:: {name}.{public}\n"
        # a model's `generate` inherits transformers' docstring
        text += "   :members:\n   :exclude-members: generate\n\n" if is_class else "\n"
    return text


def main(folder: str = str(ROOT / "build" / "docs")) -> int:
    """Build the reference and return Sphinx's exit status."""
    with tempfile.TemporaryDirectory() as source:
        Path(source, "conf.py").write_text(CONFIG)
        contents = "\n".join(f"   {name}" for name in MODULES)
        Path(source, "index.rst").write_text(f"{heading('hf-longctx')}.. toctree::\n\n{contents}\n")
        for name in MODULES:
            Path(source, f"{name}.rst").write_text(page(name))
        return build(["-q", "-W", "--keep-going", "-b", "html", source, folder])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
