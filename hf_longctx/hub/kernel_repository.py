"""The Triton kernels as a repository of kernels, which transformers and the library `kernels` load by its name.

The branch main holds the source in the form of Hugging Face's kernel-builder, and the card. The branch of the version
holds what is loaded: a build per backend, of Python files, which Triton compiles where they run. All of it is made of
the package's own files.
"""

import base64
import hashlib
import json
from pathlib import Path

from transformers.dynamic_module_utils import get_relative_import_files

from ..fox import kernel as entry
from ..fox.tiles_fox import OLDEST_GPU
from ..fox.triton_fox import FOX_INTERFACE
from .bundle import Bundle, with_contents


KERNEL = "forgetting-attention"  # its name, whatever the repository's
MODULE = KERNEL.replace("-", "_")
VERSION_BRANCH = f"v{FOX_INTERFACE}"
OLDEST = f"{OLDEST_GPU // 10}.{OLDEST_GPU % 10}+PTX"  # and all later: Triton compiles for the GPU at hand
CARD = Path(__file__).with_name("kernel_card.md")
BUILD_TOML = f"""\
[general]
name = "{KERNEL}"
version = {FOX_INTERFACE}
edition = 5
license = "Apache-2.0"
backends = ["cuda"]

[general.hub]
repo-id = "REPO"

[torch-noarch]
cuda_capabilities = ["{OLDEST}"]
"""
FLAKE = """\
{
  description = "Forgetting attention in Triton";
  inputs.kernel-builder.url = "github:huggingface/kernels";
  outputs = { self, kernel-builder, ... }:
    kernel-builder.lib.genKernelFlakeOutputs { inherit self; path = ./.; };
}
"""
# Older versions of `kernels` import a package of the name in a build; its contents must be the same.
OLDER_LOADERS = f"""\
import importlib.util
import sys
from pathlib import Path

_init = Path(__file__).parents[1] / "__init__.py"
_spec = importlib.util.spec_from_file_location(f"_{MODULE}_{{abs(hash(_init)):x}}", _init)
sys.modules[_spec.name] = _module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
globals().update(vars(_module))
"""


def kernel_files() -> dict[str, Path]:
    """Return the kernel's Python files, by name: fox/kernel.py as `__init__.py`, and what it imports."""
    return {"__init__.py": Path(entry.__file__)} | {
        Path(file).name: Path(file) for file in get_relative_import_files(entry.__file__)
    }


def build_kernel(repo: str, backend: str = "cuda") -> dict[str, Bundle]:
    """Return the files by branch: the source on main, and the build on `VERSION_BRANCH`.

    Args:
        repo: NAMESPACE/NAME, for the card and the source.
        backend: "cuda"; or "cpu", for tests in Triton's interpreter.
    """
    files, folder = kernel_files(), f"build/torch-{backend}"
    card = CARD.read_text().replace("REPO", repo).replace("VERSION", str(FOX_INTERFACE)).encode()
    source: dict[str, Path | bytes] = {"README.md": card, "CARD.md": card, "flake.nix": FLAKE.encode()}
    source["build.toml"] = BUILD_TOML.replace("REPO", repo).encode()
    source |= {f"torch-ext/{MODULE}/{name}": path for name, path in files.items()}
    build = files | {f"{MODULE}/__init__.py": OLDER_LOADERS.encode()}
    build["metadata.json"] = metadata(build, backend)
    build = {f"{folder}/{name}": content for name, content in build.items()}
    branches = {"main": source, VERSION_BRANCH: {"README.md": card} | build}
    return {branch: with_contents(Bundle(contents, (), {})) for branch, contents in branches.items()}


def metadata(files, backend) -> bytes:
    """Return metadata.json of a build: its name in Python and in torch.ops, `id`, differs between any two contents."""
    digests = {
        name: hashlib.sha256(content if isinstance(content, bytes) else content.read_bytes()).digest()
        for name, content in sorted(files.items())
    }
    unique = hashlib.sha256(b"".join(digests.values())).hexdigest()[:7]
    values = {
        "name": KERNEL,
        "id": f"_{MODULE}_{backend}_{unique}",
        "version": FOX_INTERFACE,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend} | ({"archs": [OLDEST]} if backend == "cuda" else {}),
        "digest": {
            "algorithm": "sha256",
            "files": {name: base64.b64encode(digest).decode() for name, digest in digests.items()},
        },
    }
    return (json.dumps(values, indent=2) + "\n").encode()
