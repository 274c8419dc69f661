"""The dependencies point one way, and the bundles that travel with weights are closed."""

import ast
import re
import sys
from pathlib import Path

import pytest


PACKAGE = Path(__file__).resolve().parents[1] / "hf_longctx"
# The rooms that each room may import. scripts may import everything.
ALLOWED = {
    "fox": {"fox"},
    "hmt": {"hmt"},
    "vllm": {"vllm", "fox"},
    "windows": {"windows"},
    "metrics": {"metrics", "tokenization"},
    "lm_eval": {"lm_eval", "corpus", "metrics"},
    "training": {"training", "fox", "hmt", "metrics", "corpus", "tokenization", "windows"},
    "hub": {"hub", "fox", "hmt", "metrics"},
    "corpus": {"tokenization"},
    "tokenization": set(),
    "_registration": set(),
    "cli": {"cli", "corpus", "fox", "hmt", "hub", "lm_eval", "metrics", "tokenization", "training"},
    "__main__": {"cli"},
}
BUNDLE_LIBRARIES = {"torch", "transformers", "huggingface_hub", "safetensors", "triton", *sys.stdlib_module_names}


def imports(path, inside_functions=True):
    """(level, module, node) of every import statement in a file, those for annotations included."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if inside_functions else tree.body:
        if isinstance(node, ast.ImportFrom):
            yield node.level, node.module or "", node
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield 0, alias.name, node


def libraries(path):
    return {module.split(".")[0] for level, module, _ in imports(path) if not level}


def targets(path, inside_functions=True):
    """Return the modules of the package that a file imports, as parts of their path: ("metrics", "run", "engine")."""
    inside = path.relative_to(PACKAGE).parts[:-1]
    for level, module, node in imports(path, inside_functions):
        base = module.split(".") if module else []
        if level == 0 and base[0] == "hf_longctx":
            base = base[1:]
        elif level:
            base = [*inside[: len(inside) - level + 1], *base]
        else:
            continue
        for alias in node.names:
            is_module = (
                PACKAGE.joinpath(*base, f"{alias.name}.py").exists() or PACKAGE.joinpath(*base, alias.name).is_dir()
            )
            yield (*base, alias.name) if is_module else tuple(base)


SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def test_dependencies_point_one_way():
    offenders = []
    for path in SOURCES:
        if "modules" in path.parts:  # Spaces of the Hub, which use the package as anybody does
            continue
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        strangers = {target[0] for target in targets(path) if target} - ALLOWED[part]
        if strangers:
            offenders.append(f"{path.relative_to(PACKAGE)} imports {strangers}; {part} may import {ALLOWED[part]}")
    assert not offenders, "\n".join(offenders)


def test_no_module_imports_itself_through_others():
    """Imports inside functions count: two modules that need each other are one idea, or hide a third."""
    modules = {path.relative_to(PACKAGE).with_suffix("").parts: path for path in SOURCES if path.name != "__init__.py"}
    edges = {module: {t for t in targets(path) if t in modules and t != module} for module, path in modules.items()}

    def reachable(start):
        seen, stack = set(), list(edges[start])
        while stack:
            module = stack.pop()
            if module not in seen:
                seen.add(module)
                stack += edges[module]
        return seen

    circles = sorted(".".join(module) for module in edges if module in reachable(module))
    assert not circles, f"on an import circle: {circles}"


@pytest.mark.parametrize("bundle", ["fox", "hmt"])
def test_bundles_are_closed(bundle):
    """The suffix says that a file is copied next to saved weights; see `save_pretrained` of transformers."""
    files = set((PACKAGE / bundle).glob(f"*_{bundle}.py"))
    names = {path.stem for path in files}
    offenders = []
    for path in files:
        # transformers finds relative imports by this pattern, also in docstrings
        strangers = set(re.findall(r"^\s*from\s+\.(\S+)\s+import", path.read_text(), re.MULTILINE)) - names
        strangers |= libraries(path) - BUNDLE_LIBRARIES
        strangers |= {f"a parent package of {module}" for level, module, _ in imports(path) if level > 1}
        if strangers:
            offenders.append(f"{path.name} imports {strangers}")
    assert not offenders, "\n".join(offenders)


@pytest.mark.parametrize(
    "bundle, root", [("fox", "modeling_fox"), ("hmt", "modeling_hmt")], ids=lambda value: value.split("_")[0]
)
def test_the_suffix_means_that_a_file_travels(bundle, root):
    """Files with the suffix are those that the model's file imports, directly or not, and no others."""
    reached, stack = set(), [root]
    while stack:
        name = stack.pop()
        if name not in reached:
            reached.add(name)
            source = (PACKAGE / bundle / f"{name}.py").read_text()
            stack += re.findall(r"^\s*from\s+\.(\S+)\s+import", source, re.MULTILINE)
    assert reached == {path.stem for path in (PACKAGE / bundle).glob(f"*_{bundle}.py")}
