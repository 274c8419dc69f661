"""The dependencies point one way, and the bundles that travel with weights are closed."""

import ast
import re
import sys
from pathlib import Path

import pytest


PACKAGE = Path(__file__).resolve().parents[1] / "hf_longctx"
# What may import what of ours. scripts and the command line stand above everything.
ALLOWED = {
    "fox": {"fox"},
    "hmt": {"hmt"},
    "metrics": {"metrics"},
    "training": {"training", "fox"},
    "corpus": set(),
    "_registration": set(),
    "cli": {"cli", "corpus", "fox", "metrics", "training"},
    "__main__": {"cli"},
}
# Files that `save_pretrained` copies beside the weights, and all they may import besides each other.
BUNDLES = {
    "fox": [
        *("configuration_fox", "modeling_fox", "attention_fox", "inputs_fox", "state_fox", "paged_fox"),
        *("backend_fox", "triton_fox", "kernels_fox", "bounds_fox", "tiles_fox"),
    ],
    "hmt": ["configuration_hmt", "modeling_hmt", "memory_hmt", "pages_hmt", "backbone_hmt"],
}
BUNDLE_LIBRARIES = {"torch", "transformers", "huggingface_hub", "safetensors", "triton", *sys.stdlib_module_names}
NUMPY_CORES = [
    "curve/adaptive",
    "curve/lengths",
    "curve/result",
    "loss/result",
    "result",
    "rope/bounds",
    "run/journal",
]
NUMPY_CORES += ["retrieval/answers", "retrieval/haystack", "retrieval/lines"]


def imports(path):
    """(level, module, node) of every import statement in a file, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.level, node.module or "", node
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield 0, alias.name, node


def ours(path):
    """Parts of the package (`fox`, `metrics`, ...) that a file imports."""
    inside = path.relative_to(PACKAGE).parts[:-1]
    for level, module, node in imports(path):
        if level == 0 and module.split(".")[0] == "hf_longctx":
            yield [*module.split("."), node.names[0].name][1]
        elif level:
            base = inside[: len(inside) - level + 1]
            parts = [*base, *(module.split(".") if module else [node.names[0].name])]
            yield parts[0]


SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_dependencies_point_one_way(path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    strangers = {name for name in ours(path) if name not in ALLOWED[part] and name != "__version__"}
    assert not strangers, f"{path.name} imports {strangers}; {part} may import {ALLOWED[part] or 'nothing of ours'}"


@pytest.mark.parametrize("bundle", BUNDLES)
def test_bundles_are_closed(bundle):
    for name in BUNDLES[bundle]:
        source = (PACKAGE / bundle / f"{name}.py").read_text()
        # transformers finds relative imports by this pattern, also in docstrings
        siblings = set(re.findall(r"^\s*from\s+\.(\S+)\s+import", source, re.MULTILINE))
        assert siblings <= set(BUNDLES[bundle]), f"{name}.py imports {siblings - set(BUNDLES[bundle])}"
        for level, module, _ in imports(PACKAGE / bundle / f"{name}.py"):
            assert level <= 1, f"{name}.py imports from a parent package"
            assert level or module.split(".")[0] in BUNDLE_LIBRARIES, f"{name}.py imports {module}"


@pytest.mark.parametrize("name", NUMPY_CORES)
def test_metric_cores_know_no_model(name):
    modules = {module.split(".")[0] for level, module, _ in imports(PACKAGE / "metrics" / f"{name}.py") if not level}
    assert not modules & {"torch", "transformers"}
