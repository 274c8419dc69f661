"""Registers our models with transformers' Auto classes when these are imported, not when `hf_longctx` is.

Registering a model needs its class, and the class needs most of transformers: `import torch, transformers` takes 2.4 s
of CPU time, with the Auto classes 2.7 s, and with our models 5.6 s (medians of 3, transformers 5.23). `import
hf_longctx` therefore only puts a finder on `sys.meta_path`: as soon as any code imports the Auto classes, the finder
imports our models, which register themselves. The mappings of the Auto classes have lazy entries for models inside of
transformers only.
"""

import importlib
import sys
import threading
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import PathFinder


AUTO_CLASSES = "transformers.models.auto.configuration_auto"
MODELS = ("hf_longctx.fox", "hf_longctx.hmt")  # each registers its models when it is imported


def register_with_auto_classes() -> None:
    """Register now if the Auto classes are imported already, else as soon as they are."""
    if AUTO_CLASSES in sys.modules:
        _import_models()
    else:
        sys.meta_path.insert(0, _AfterAutoClasses())


def _import_models() -> None:
    for name in MODELS:
        importlib.import_module(name)


class _AfterAutoClasses(MetaPathFinder):
    """Imports our models after the outermost import of a transformers module, once the Auto classes are imported.

    Before that, modules of transformers that our models need may be half imported.
    """

    def __init__(self):
        self.thread = threading.local()  # `depth`: unfinished imports of transformers modules in this thread
        self.registering = False

    def find_spec(self, name, path=None, target=None):
        if not name.startswith("transformers."):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Watched(spec.loader, self)
        return spec

    def begin(self):
        self.thread.depth = getattr(self.thread, "depth", 0) + 1

    def end(self):
        self.thread.depth -= 1
        if self.thread.depth or self.registering or AUTO_CLASSES not in sys.modules:
            return
        self.registering = True
        try:
            _import_models()
        except ImportError as error:  # transformers must stay usable
            warnings.warn(f"hf_longctx could not register its models with the Auto classes: {error}", stacklevel=2)
        finally:
            self.registering = False
        sys.meta_path.remove(self)  # after an interruption the finder stays, and the next import tries again


class _Watched(Loader):
    """The loader of a module that tells `watcher` when the execution of the module begins and ends."""

    def __init__(self, loader, watcher):
        self.loader, self.watcher = loader, watcher

    def __getattr__(self, name):  # get_code, get_source, ...
        return getattr(self.loader, name)

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.watcher.begin()
        try:
            self.loader.exec_module(module)
        finally:
            self.watcher.end()
