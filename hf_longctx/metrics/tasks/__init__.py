"""All metrics that run a model, one per file. Importing this package registers their tasks in `task.Task.tasks`."""

import importlib
import pkgutil


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f".{_module.name}", __name__)
