"""The protocol and the registry of recipes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..loading import check_length, load_base
from ..trainer import LongContextTrainer


RECIPES: dict[str, "Recipe"] = {}
RecipeClass = TypeVar("RecipeClass", bound="type[Recipe]")


class Recipe:
    """What a recipe changes in a fine-tuning run. This class changes nothing.

    The first line of the docstring is the recipe's description in `--help`.

    Attributes:
        defaults: default settings, as YAML. The command line and `--config` take precedence.
        options: names of the settings that only this recipe reads. Other recipes do not accept them.
        changes_base: whether the base is another model than the checkpoint in `--model`. RUN/model then contains the
            whole model, and an adapter does not name the checkpoint as its base.
        frozen: whether no weight of the checkpoint is trained, even without LoRA. The weights are then in `dtype`.
        trainer: a subclass of `LongContextTrainer`. It may change the loss, the sequences and what is saved.
    """

    defaults = ""
    options: tuple[str, ...] = ()
    changes_base = False
    frozen = False
    trainer = LongContextTrainer

    def config(self, args: Any, base: Any) -> Any:
        """Return the config of the model to train, without loading weights.

        Args:
            args: the settings, a `FinetuneConfig`.
            base: config of the checkpoint in `--model`. It may be changed in place.

        Raises:
            ValueError: the recipe does not support this model.
        """
        for name, value in args.config_fields(type(base)).items():
            setattr(base, name, value)
        return base

    def load(self, args: Any, config: Any) -> Any:
        """Load the checkpoint in `--model` into a model with the config that `config` returned, in `config.dtype`."""
        model = load_base(args, config)
        check_length(model, args.max_length)
        return model

    def modules_to_save(self, model: Any) -> list[str]:
        """Return the names of modules that are trained in full, alongside LoRA. They are the last parts of paths."""
        return []

    def finish(self, args: Any, trainer: Any, tokenizer: Any, folder: Path) -> None:
        """Report on the model that is saved in a folder.

        All processes call this at the end of a run, and if a finished run is repeated.
        """


def register_recipe(name: str) -> Callable[[RecipeClass], RecipeClass]:
    """Register a recipe for `--recipe NAME`. Use it as a class decorator."""

    def decorate(cls: RecipeClass) -> RecipeClass:
        RECIPES[name] = cls()
        return cls

    return decorate


__all__ = ["RECIPES", "Recipe", "register_recipe"]
