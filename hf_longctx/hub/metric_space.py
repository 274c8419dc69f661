"""A metric as a Space on the Hub: `evaluate.load("NAMESPACE/NAME")` works without hf_longctx.

evaluate downloads the script of a Space, and the files that the script imports with `from .x import ...`, to a single
folder. The modules that scoring needs are therefore copied next to the script under flat names, such as
`longctx_curve_lengths.py` for `curve/lengths.py`, and the script imports a name from each. Code that runs a model is
imported inside functions, from an installed hf_longctx.
"""

import re
from pathlib import Path

from ..metrics.evaluate_modules import module_path
from .bundle import Bundle, with_contents


REQUIREMENTS = Path(__file__).with_name("space_requirements.txt")
METRICS = Path(module_path("forgetting_curve")).parents[1]
RELATIVE = re.compile(r"^( *)from (\.+)([\w.]*) import ", re.MULTILINE)
OF_PACKAGE = re.compile(r"^from hf_longctx\.metrics import evaluate_modules.*$", re.MULTILINE)
DEFINITION = re.compile(r"^(?:def|class) (\w+)", re.MULTILINE)


def build_space(name: str) -> Bundle:
    """Return the files of a metric: its script, card and app, and the modules that scoring needs.

    Raises:
        ValueError: the metric does not exist.
    """
    folder = Path(module_path(name))
    sources = scoring_modules(["evaluate_modules", *(["rope.bound"] if name == "rope_base_check" else [])])
    files: dict[str, Path | bytes] = {path.name: path for path in folder.iterdir() if path.suffix in (".md", ".py")}
    files["requirements.txt"] = REQUIREMENTS
    files |= {f"{flat(module)}.py": flattened(module, sources).encode() for module in sources}
    imports = [f"from .{flat(module)} import {DEFINITION.findall(source)[0]}" for module, source in sources.items()]
    imports.append(f"from . import {flat('evaluate_modules')} as evaluate_modules")
    script = OF_PACKAGE.sub("\n".join(imports), (folder / f"{name}.py").read_text())
    files[f"{name}.py"] = script.encode()
    return with_contents(Bundle(files))


def absolute(module, dots, name):
    """Resolve the relative import `from DOTSname import ...` in a module, relative to hf_longctx.metrics."""
    return ".".join([*module.split(".")[: -len(dots)], *filter(None, [name])])


def scoring_modules(roots):
    """Return the source of the roots and of their module-level imports, recursively, by module name."""
    sources, stack = {}, list(roots)
    while stack:
        module = stack.pop()
        if module not in sources:
            sources[module] = METRICS.joinpath(*module.split(".")).with_suffix(".py").read_text()
            imports = RELATIVE.findall(sources[module])
            stack += [absolute(module, dots, name) for indent, dots, name in imports if not indent]
    return dict(sorted(sources.items()))


def flat(module):
    """Return the name of a module in the Space. The prefix avoids a clash with evaluate's package evaluate_modules."""
    return f"longctx_{module.replace('.', '_')}"


def flattened(module, sources):
    """Return the source of a module with imports from the flat files, or from hf_longctx for modules not copied."""

    def replace(match):
        target = absolute(module, match[2], match[3])
        place = f".{flat(target)}" if target in sources else f"hf_longctx.metrics{'.' * bool(target)}{target}"
        return f"{match[1]}from {place} import "

    return RELATIVE.sub(replace, sources[module])
