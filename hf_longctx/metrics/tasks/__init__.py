"""Every metric that runs a model, one file each. Importing this module registers all of them in `task.Task.tasks`."""

import importlib
import pkgutil


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f".{_module.name}", __name__)
