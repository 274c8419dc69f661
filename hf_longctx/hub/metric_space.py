"""Package a metric as a Hub Space, so that `evaluate.load("NAMESPACE/NAME")` works without hf_longctx.

evaluate downloads a Space's script to a single folder, with the files that the script imports by `from .x import ...`.
We therefore put copies of the modules for scoring next to the script. Their names are flat, such as
`longctx_curve_lengths.py` for `curve/lengths.py`. The script imports a function or class from each copy, so that
evaluate downloads all copies. Code that runs a model is not copied. The functions that need such code
import it from an installed hf_longctx when they are called.
"""

import re
from pathlib import Path

from ..metrics.evaluate_modules import module_path
from .bundle import Bundle, with_contents


REQUIREMENTS = Path(__file__).with_name("space_requirements.txt")
PACKAGE = Path(module_path("forgetting_curve")).parents[2]
RELATIVE = re.compile(r"^( *)from (\.+)([\w.]*) import ", re.MULTILINE)
OF_PACKAGE = re.compile(r"^from hf_longctx\.metrics import evaluate_modules.*$", re.MULTILINE)
DEFINITION = re.compile(r"^(?:def|class) (\w+)", re.MULTILINE)
# The page of a Space: evaluate's form for predictions and references.
APP = """from pathlib import Path

import evaluate
from evaluate.utils import launch_gradio_widget


launch_gradio_widget(evaluate.load(str(Path(__file__).with_name("{name}.py"))))
"""


def build_space(name: str) -> Bundle:
    """Return the files of a metric's Space: script, card, app, and the modules that scoring needs.

    Raises:
        ValueError: the metric does not exist.
    """
    folder = Path(module_path(name))
    sources = scoring_modules(
        ["metrics.evaluate_modules", *(["metrics.rope.bound"] if name == "rope_base_check" else [])]
    )
    files: dict[str, Path | bytes] = {path.name: path for path in folder.iterdir() if path.suffix in (".md", ".py")}
    files |= {"requirements.txt": REQUIREMENTS, "app.py": APP.format(name=name).encode()}
    files |= {f"{flat(module)}.py": flattened(module, sources).encode() for module in sources}
    imports = [f"from .{flat(module)} import {DEFINITION.findall(source)[0]}" for module, source in sources.items()]
    imports.append(f"from . import {flat('metrics.evaluate_modules')} as evaluate_modules")
    script = OF_PACKAGE.sub("\n".join(imports), (folder / f"{name}.py").read_text())
    files[f"{name}.py"] = script.encode()
    return with_contents(Bundle(files))


def absolute(module, dots, name):
    """Resolve a relative import, such as `from ..name import x`, to a module name relative to hf_longctx."""
    return ".".join([*module.split(".")[: -len(dots)], *filter(None, [name])])


def scoring_modules(roots):
    """Return the source code of the `roots` and of all modules that they import at module level, keyed by name."""
    sources = {}
    stack = list(roots)
    while stack:
        module = stack.pop()
        if module not in sources:
            sources[module] = PACKAGE.joinpath(*module.split(".")).with_suffix(".py").read_text()
            imports = RELATIVE.findall(sources[module])
            stack += [absolute(module, dots, name) for indent, dots, name in imports if not indent]
    return dict(sorted(sources.items()))


def flat(module):
    """Return a module's name in the Space. Its prefix avoids a conflict with evaluate's package `evaluate_modules`."""
    return f"longctx_{module.removeprefix('metrics.').replace('.', '_')}"


def flattened(module, sources):
    """Return a module's source code. Its imports are redirected to the flat copies or to an installed hf_longctx."""

    def replace(match):
        target = absolute(module, match[2], match[3])
        place = f".{flat(target)}" if target in sources else f"hf_longctx{'.' * bool(target)}{target}"
        return f"{match[1]}from {place} import "

    return RELATIVE.sub(replace, sources[module])
