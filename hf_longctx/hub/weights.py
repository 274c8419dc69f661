"""Checks of weights: transformers loads what is incomplete or NaN all the same, and draws at random what is absent."""

import re
from pathlib import Path

import torch
import transformers

from ..fox.checkpoint_files import Checkpoint, open_safetensors, read_json


LAYERS = re.compile(r"n(um)?_(\w+_)?layers?")  # fields of configurations; each layer takes a module to compare


def check_weights(folder: Path, checkpoint: Checkpoint, config: dict, auto_class: str) -> None:
    """Compare names and shapes of tensors with the index, and with the class, if transformers or this package has it.

    Args:
        config: what config.json holds.
        auto_class: the name of the class of transformers that loads the model.

    Raises:
        ValueError: a tensor is absent, has another shape, or holds NaN; transformers cannot read the configuration.
    """
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for name, number in part.items():
            if LAYERS.fullmatch(name) and isinstance(number, int) and number > max(1024, len(checkpoint.shapes)):
                raise ValueError(f"{folder / 'config.json'} has {name} {number}, and the files hold no such model.")
    shapes, tied = shapes_of_class(folder, config, auto_class)
    absent = shapes.keys() - checkpoint.shapes.keys()
    absent -= {name for pair in tied.items() if not absent.issuperset(pair) for name in pair}
    # other names beside absent ones may be those of a layout that transformers converts
    if config.get("model_type") != "fox" and not checkpoint.shapes.keys() <= shapes.keys():
        absent = set()
    index = folder / transformers.utils.SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        absent |= read_json(index)["weight_map"].keys() - checkpoint.shapes.keys()
    if absent:
        raise ValueError(f"no file of {folder} has {min(absent)}, which the model needs; save the model again.")
    for name, shape in checkpoint.shapes.items():
        if shapes.get(name, shape) != shape:
            raise ValueError(
                f"{checkpoint.files[name]} has {name} of shape {shape}, and config.json asks for {shapes[name]}; save the "
                "model again."
            )
    for file in sorted(set(checkpoint.files.values())):
        check_safetensors(file)


def shapes_of_class(folder, config, auto_class):
    """Return {name: shape} of the tensors of a model, and the names of those that are tied; empty if not known."""
    if config.get("model_type") not in transformers.CONFIG_MAPPING or "quantization_config" in config:
        return {}, {}
    auto = getattr(transformers, auto_class, None)
    try:
        known = transformers.CONFIG_MAPPING[config["model_type"]].from_dict({**config, "auto_map": {}})
        if auto is None or type(known) not in auto._model_mapping:
            return {}, {}
        with torch.device("meta"):
            model = auto.from_config(known)
    except Exception as error:  # whatever a value of the configuration breaks
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"transformers cannot build the model of {folder / 'config.json'} ({reason}).") from error
    pointer = not config.get("backbone_in_checkpoint", True)
    tensors = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tensors = {name: shape for name, shape in tensors.items() if name not in (model._keys_to_ignore_on_save or ())}
    return {k: v for k, v in tensors.items() if not pointer or k.startswith("memory.")}, model.all_tied_weights_keys


def check_safetensors(path: Path) -> dict[str, int]:
    """Return the numbers in each tensor of a file.

    Raises:
        ValueError: there is no such file, it is damaged, or it holds NaN.
    """
    if not path.is_file():
        raise ValueError(f"{path.parent} lacks {path.name}; save the model or adapter with save_pretrained.")
    sizes = {}
    with open_safetensors(path) as tensors:
        for name in tensors.keys():  # noqa: SIM118 (a file, not a dictionary)
            tensor = tensors.get_tensor(name)
            if tensor.is_floating_point() and tensor.float().isnan().any():
                raise ValueError(
                    f"{path} has NaN in {name}: a training that diverged, or a damaged file. Push sound weights."
                )
            sizes[name] = tensor.numel()
    return sizes
