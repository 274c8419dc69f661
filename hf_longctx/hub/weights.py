"""Check weights before a push. transformers accepts NaN, and initializes missing weights randomly."""

from pathlib import Path

import transformers
from transformers.utils import is_accelerate_available

from ..fox.checkpoint_files import Checkpoint, open_safetensors


def check_weights(folder: Path, checkpoint: Checkpoint, config: dict, auto_class: str) -> None:
    """Check for NaN. If transformers has the model's class, load the model and check that no tensor is missing.

    If accelerate is installed, the model is created on the meta device. Its weights then need no memory.

    Args:
        config: content of config.json.
        auto_class: name of the Auto class of transformers that loads the model.

    Raises:
        ValueError: a tensor is missing, has a wrong shape, or contains NaN; or transformers cannot load the model.
    """
    for file in sorted(set(checkpoint.files.values())):
        check_safetensors(file)
    loader = getattr(transformers, auto_class, None)
    is_known = loader is not None and config.get("model_type") in transformers.CONFIG_MAPPING
    needs_more = "quantization_config" in config or not config.get("backbone_in_checkpoint", True)
    if not is_known or needs_more:
        return
    try:
        _, info = loader.from_pretrained(
            str(folder),
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            device_map="meta" if is_accelerate_available() else None,
        )
    except Exception as error:  # an invalid value in config.json can raise any exception
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"transformers cannot load the model in {folder} ({reason}).") from error
    if info["missing_keys"]:
        name = min(info["missing_keys"])
        raise ValueError(f"{folder} does not contain the tensor {name} of the model. Save the model again.")
    for name, found, expected in sorted(info["mismatched_keys"]):
        raise ValueError(
            f"{name} must have shape {tuple(expected)} according to config.json, got {tuple(found)} in {folder}. Save "
            "the model again."
        )


def check_safetensors(path: Path) -> dict[str, int]:
    """Return the number of elements of each tensor in a safetensors file.

    Raises:
        ValueError: the file does not exist, is damaged, or contains NaN.
    """
    if not path.is_file():
        raise ValueError(
            f"{path.parent} does not contain {path.name}. Save the model or adapter with save_pretrained."
        )
    sizes = {}
    with open_safetensors(path) as tensors:
        for name in tensors.keys():  # noqa: SIM118 (a file, not a dictionary)
            tensor = tensors.get_tensor(name)
            if tensor.is_floating_point() and tensor.float().isnan().any():
                raise ValueError(
                    f"{path} contains NaN in {name}: training diverged, or the file is damaged. Push other weights."
                )
            sizes[name] = tensor.numel()
    return sizes
