"""transformers' own test mixins, which its source distribution carries and its wheel does not.

They are taken once from the package index, with pip and its settings, into a cache folder. The distribution has only
the files at the top of `tests/`. A clone of transformers at the installed version has them all:

    TRANSFORMERS_CLONE=/path/to/transformers python -m pytest tests/fox/test_transformers_common.py
"""

import importlib
import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
import transformers
from filelock import FileLock


PACKAGE = "transformers_tests"
# Names that the mixins import but the source distribution does not contain, and their replacements.
ABSENT = {
    "distributed_testing_utils": {
        "run_distributed": None,  # users of the mixins provide the processes
        "_start_rank_processes": None,
        "_get_distributed_backend": lambda: "gloo",
        "_get_distributed_device_type": lambda: "cpu",
        "_get_rank_device": lambda rank: torch.device("cpu"),
        "_set_rank_device": lambda rank: None,
    },
    "exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
    "generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
    "utils.test_configuration_utils": {
        "config_common_kwargs": {"dtype": "float16", "output_hidden_states": True, "id2label": {0: "one"}}
    },
}


def unpacked() -> Path:
    """Folder `tests` of the source distribution, fetched unless it is in the cache. pip checks the archive's hash."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_longctx"
    folder = cache / f"transformers-{transformers.__version__}"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "lock"), tempfile.TemporaryDirectory(dir=cache) as scratch:
        if not folder.is_dir():
            fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "transformers"]
            fetch += ["--retries", "1", "--dest", scratch, f"transformers=={transformers.__version__}"]
            done = subprocess.run(fetch, capture_output=True, text=True)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
                pytest.skip(f"transformers' tests could not be fetched: {reason}", allow_module_level=True)
            tests = Path(scratch, "tests")
            tests.mkdir()
            (tests / "__init__.py").touch()  # the distribution leaves it out
            [archive] = Path(scratch).glob("transformers-*.tar.gz")
            with tarfile.open(archive) as tar:
                for member in tar.getmembers():
                    name = Path(member.name)
                    if member.isfile() and name.parts[1:-1] == ("tests",):
                        (tests / name.name).write_bytes(tar.extractfile(member).read())
            tests.rename(folder)
    return folder


def install():
    """Make the mixins importable as `transformers_tests`. If they are not available, skip the calling module."""
    pytest.importorskip("parameterized", reason="transformers' tests need it: pip install parameterized")
    if PACKAGE in sys.modules:
        return
    clone = os.environ.get("TRANSFORMERS_CLONE")
    folder = Path(clone, "tests") if clone else unpacked()
    spec = ModuleSpec(PACKAGE, None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    if clone:
        sys.modules["tests"] = sys.modules[PACKAGE]  # some of its files import each other by this name
    for name, contents in ABSENT.items():
        if not (folder / name.replace(".", "/")).with_suffix(".py").is_file():
            parent = f"{PACKAGE}.{name.split('.')[0]}"
            sys.modules[parent] = types.ModuleType(parent)
            module = sys.modules[f"{PACKAGE}.{name}"] = types.ModuleType(f"{PACKAGE}.{name}")
            vars(module).update(contents)


def load(name):
    """Return a module of transformers' tests, such as `test_modeling_common`."""
    install()
    return importlib.import_module(f"{PACKAGE}.{name}")
