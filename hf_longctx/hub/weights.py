"""Check weights before a push.

transformers accepts NaN, ignores unknown tensors, and initializes missing ones randomly.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import is_accelerate_available, is_peft_available

from ..fox.checkpoint_files import Checkpoint, open_safetensors, read_json


def check_weights(folder: Path, checkpoint: Checkpoint, config: dict, auto_class: str) -> int | None:
    """Check all tensors. If transformers has the model's class, load the model and compare its tensors with the files.

    If accelerate is installed, the model is created on the meta device. Its weights then need no memory.

    Args:
        folder: folder with the files that a push uploads.
        config: content of config.json.
        auto_class: name of the Auto class of transformers that loads the model.

    Returns:
        The number of input embeddings. None: the model was not loaded, or has none.

    Raises:
        ValueError: the model type is unknown; a value is not finite; a tensor is missing, has a wrong shape, is
            unknown to the model or has an integer dtype; the index of the files is wrong; or transformers cannot load
            the model.
    """
    dtype = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(set(checkpoint.files.values())):
        tensors |= check_safetensors(file, torch.float16 if dtype == "float16" else None)
    index = folder / transformers.utils.SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        for name, file in read_json(index)["weight_map"].items():
            if name not in tensors or checkpoint.files[name].name != file:
                raise ValueError(f"{index} places {name} in {file}, but it is not there. Save the model again.")
    architecture = next(iter(config.get("architectures") or ()), "")
    named: Any = getattr(transformers, architecture, None)
    loader: Any = getattr(transformers, auto_class, named)
    if config.get("model_type") not in transformers.CONFIG_MAPPING and not config.get("auto_map"):
        raise ValueError(
            f"model_type in {folder}/config.json must be a model type of transformers {transformers.__version__}, got "
            f"{config.get('model_type')!r}. Correct it, or add the model's code and an auto_map."
        )
    needs_more = "quantization_config" in config or not config.get("backbone_in_checkpoint", True)
    if config.get("model_type") not in transformers.CONFIG_MAPPING or needs_more:
        return None
    kind = getattr(getattr(named, "config_class", None), "model_type", config["model_type"])
    if loader is None or kind != config["model_type"]:
        raise ValueError(
            f"architectures in {folder}/config.json must name a class of the model type {config['model_type']!r}, got "
            f"{architecture!r}. Save the model again."
        )
    try:
        model, info = loader.from_pretrained(
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
    if info["unexpected_keys"]:
        raise ValueError(
            f"config.json describes a {type(model).__name__} that does not use {len(info['unexpected_keys'])} of the "
            f"tensors in {folder}, such as {min(info['unexpected_keys'])}. Save the model and its config again."
        )
    parameters = [f".{name}" for name, _ in model.named_parameters()]
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() and any(x.endswith(f".{name}") for x in parameters):
            raise ValueError(
                f"{name} in {folder} must have a floating-point dtype, got {tensor.dtype}. If the model is quantized, "
                "config.json must contain its quantization_config."
            )
    for name, source in getattr(model, "all_tied_weights_keys", {}).items():
        if {name, source} <= tensors.keys() and not torch.equal(checkpoint.read(name), checkpoint.read(source)):
            raise ValueError(
                f"config.json ties {name} to {source}, but these tensors differ in {folder}. Set tie_word_embeddings to "
                "false, or save the model again."
            )
    try:
        return model.get_input_embeddings().weight.shape[0]
    except (NotImplementedError, AttributeError):  # a model of other inputs than token ids
        return None


def check_safetensors(path: Path, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file on the meta device.

    Args:
        dtype: dtype to which transformers converts the tensors. None: it cannot overflow.

    Raises:
        ValueError: the file does not exist, is damaged, or contains NaN or infinity.
    """
    if not path.is_file():
        raise ValueError(
            f"{path.parent} does not contain {path.name}. Save the model or adapter with save_pretrained."
        )
    tensors = {}
    with open_safetensors(path) as file:
        for name in file.keys():  # noqa: SIM118 (a file, not a dictionary)
            tensor = file.get_tensor(name)
            tensors[name] = tensor.to("meta")
            if not tensor.is_floating_point() or "float4" in str(tensor.dtype):  # four bits do not represent NaN
                continue
            if tensor.dtype.itemsize == 1:
                tensor = tensor.float()
            if not tensor.isfinite().all():
                value = "NaN" if tensor.isnan().any() else "infinity"
                raise ValueError(
                    f"{path} contains {value} in {name}: training diverged, or the file is damaged. Push other weights."
                )
            if dtype is not None and not tensor.to(dtype).isfinite().all():
                raise ValueError(
                    f"{path} contains {tensor.abs().max():g} in {name}, which is infinite in {dtype}, the dtype in "
                    "config.json. Set dtype to bfloat16 or float32."
                )
    return tensors


def check_adapter(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> None:
    """Raise ValueError if PEFT would load an adapter without effect, or could not load it.

    Args:
        config: content of adapter_config.json.
        tensors: tensors of the adapter, on any device.
    """
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{name} in {folder} must have a floating-point dtype, got {tensor.dtype}.")
    is_lora = config.get("peft_type") == "LORA"
    matrices = {name: x for name, x in tensors.items() if ".lora_" in name} if is_lora else tensors
    if not matrices:
        raise ValueError(
            f"{folder} does not contain weights of its adapter ({config.get('peft_type')}), so the base model would stay "
            "unchanged. Save the adapter again with save_pretrained."
        )
    if not is_lora or not is_peft_available():
        return
    from peft import LoraConfig  # takes a second
    from peft.tuners.tuners_utils import check_target_module_exists

    try:
        lora: Any = LoraConfig.from_pretrained(str(folder))
    except Exception as error:  # an invalid value can raise any exception
        raise ValueError(f"PEFT cannot load adapter_config.json in {folder} ({error}).") from error
    ranks = {lora.r, *lora.rank_pattern.values()}
    for name, tensor in matrices.items():
        path, _, matrix = name.partition(".lora_")
        module = path.removeprefix("base_model.model.")
        is_target = not lora.target_modules or check_target_module_exists(lora, module)
        if not is_target and not lora.target_parameters:
            raise ValueError(
                f"target_modules in {folder}/adapter_config.json must match the modules of the weights, got "
                f"{lora.target_modules} for {module}. PEFT would ignore these weights. Save the adapter again."
            )
        other = f"{path}.lora_{matrix.translate(str.maketrans('AB', 'BA'))}"
        if tensor.ndim > 1 and (other not in tensors or ("A" in matrix and tensor.shape[0] not in ranks)):
            raise ValueError(
                f"{folder} must contain pairs of LoRA matrices with a rank in {sorted(ranks)}, got {name} "
                f"{tuple(tensor.shape)}{'' if other in tensors else ' alone'}. Save the adapter again."
            )
