"""All recipes of `finetune`, one per file. Importing this package registers them in `RECIPES`.

The recipes of `train` only set defaults. They are the YAML files in the folder `train`.
"""

import importlib
import pkgutil

from .recipe import RECIPES, Recipe, register_recipe


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f".{_module.name}", __name__)

__all__ = ["RECIPES", "Recipe", "register_recipe"]
