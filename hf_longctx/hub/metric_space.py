"""A metric as a Space of the Hub: `evaluate.load("NAMESPACE/NAME")` scores where hf_longctx is not installed.

evaluate fetches the script of a Space, and the files that the script itself imports with `from .x import ...`, all
from one folder. So the modules that scoring needs are copied beside the script under flat names, `curve/result.py` as
`longctx_curve_result.py`, and the script imports a name from each. What runs a model is imported inside functions,
from hf_longctx, where that is installed.
"""

import ast
import re
from pathlib import Path

from ..metrics.evaluate_modules import module_path
from .bundle import Bundle, with_contents


REQUIREMENTS = Path(__file__).with_name("space_requirements.txt")
METRICS = Path(module_path("forgetting_curve")).parents[1]
# Modules that scoring needs, beside those that they import when they are imported themselves.
ROOTS = {
    "forgetting_curve": ["evaluate_modules"],
    "rope_base_check": ["evaluate_modules", "rope.base"],
}
RELATIVE = re.compile(r"^( *)from (\.+)([\w.]*) import ", re.MULTILINE)
OF_PACKAGE = re.compile(r"^from hf_longctx\.metrics import evaluate_modules.*$", re.MULTILINE)


def build_space(name: str) -> Bundle:
    """Return the files of a metric: its script, card and app, and the modules that scoring needs.

    Raises:
        ValueError: a metric of that name does not exist.
    """
    folder = Path(module_path(name))
    modules = closure(ROOTS[name])
    files: dict[str, Path | bytes] = {path.name: path for path in folder.iterdir() if path.suffix in (".md", ".py")}
    files["requirements.txt"] = REQUIREMENTS.read_bytes()
    files |= {f"{flat(module)}.py": flattened(module, modules).encode() for module in modules}
    lines = [f"from .{flat(module)} import {public_name(module)}" for module in modules]
    lines.append(f"from . import {flat('evaluate_modules')} as evaluate_modules")
    script = OF_PACKAGE.sub("\n".join(lines), (folder / f"{name}.py").read_text())
    files[f"{name}.py"] = script.encode()
    return with_contents(Bundle(files, (), {}))


def source(module):
    return METRICS.joinpath(*module.split(".")).with_suffix(".py").read_text()


def absolute(module, dots, name):
    """Return the module that `from DOTSname import ...` means in `module`, both below hf_longctx.metrics."""
    parents = module.split(".")[: -len(dots)]
    return ".".join([*parents, *filter(None, [name])])


def closure(roots):
    """Return the roots and all that they import when they are imported, by name."""
    modules, stack = set(), list(roots)
    while stack:
        module = stack.pop()
        if module not in modules:
            modules.add(module)
            imports = RELATIVE.findall(source(module))
            stack += [absolute(module, dots, name) for indent, dots, name in imports if not indent]
    return sorted(modules)


def flat(module):
    """Return its name as a file of the Space; evaluate has a package called evaluate_modules."""
    return f"longctx_{module.replace('.', '_')}"


def flattened(module, modules):
    """Return its source, which imports flat files, and from hf_longctx the modules that are not copied."""

    def replace(match):
        target = absolute(module, match[2], match[3])
        place = f".{flat(target)}" if target in modules else f"hf_longctx.metrics{'.' * bool(target)}{target}"
        return f"{match[1]}from {place} import "

    return RELATIVE.sub(replace, source(module))


def public_name(module):
    """Return the first function or class that it defines."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return next(node.name for node in ast.parse(source(module)).body if isinstance(node, kinds))
