"""Extract facts about RoPE and windows from transformers' modeling code, for hf_longctx/metrics/rope.

    python -m scripts.rope_types

Follows names through the syntax trees of the modeling files, from class to class and function to function, without
importing them or building a model.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES


CAUSAL = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)
MAPPINGS = (*CAUSAL, modeling_auto.MODEL_MAPPING_NAMES)


def language_models() -> list[str]:
    """Return the model types that are language models, not composites, and have a model class."""
    shipped = [
        name for name in sorted(CONFIG_MAPPING_NAMES) if CONFIG_MAPPING[name].__module__.startswith("transformers.")
    ]
    return [name for name in shipped if is_language_model(name) and classes(name)]


def is_language_model(model_type: str) -> bool:
    config = CONFIG_MAPPING[model_type]
    settings = getattr(config, "__dataclass_fields__", {}).keys()
    if {"text_config", "decoder"} & getattr(config, "sub_configs", {}).keys():
        return False
    modern = "vocab_size" in settings and {"rope_parameters", "num_key_value_heads"} & settings
    return bool(modern) or any(model_type in mapping for mapping in CAUSAL)


def classes(model_type: str) -> list[tuple[Path, str]]:
    """Return the file and name of each class that is registered for a model type or takes its config."""
    found = [mapping[model_type] for mapping in MAPPINGS if model_type in mapping]
    names = [name for entry in found for name in ([entry] if isinstance(entry, str) else entry)]
    modules = {name: transformers._class_to_module.get(name) for name in names}
    root = Path(transformers.__file__).parent
    built = [(root / f"{module.replace('.', '/')}.py", name) for name, module in modules.items() if module]
    config = CONFIG_MAPPING[model_type]
    file = Path(inspect.getfile(config).replace("configuration_", "modeling_"))
    if built or not file.exists():
        return built
    takes = f"config: {config.__name__}"
    return [(file, name) for name, node in definitions(file).items() if takes in ast.unparse(node)]


@cache
def definitions(path: Path) -> dict[str, ast.AST]:
    """Return a file's top-level classes, functions, constants and imports from other modeling files, by name."""
    found: dict[str, ast.AST] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
        elif isinstance(node, ast.ImportFrom) and node.level and "modeling_" in (node.module or ""):
            found |= {alias.asname or alias.name: node for alias in node.names}
    return found


@cache
def reachable(model_type: str) -> list[ast.AST]:
    """Return the definitions that a model type's classes use, directly or indirectly."""
    pending, seen, found = classes(model_type), set(), []
    while pending:
        path, name = pending.pop()
        node = None if (path, name) in seen else definitions(path).get(name)
        seen.add((path, name))
        if isinstance(node, ast.ImportFrom):
            source = path.parents[node.level - 1] / f"{node.module.replace('.', '/')}.py"
            pending += [(source, name)] * (source.exists() and source.parent.parent.name == "models")
        elif node is not None:
            found.append(node)
            used = {part.id for part in walk(node) if isinstance(part, ast.Name)}
            pending += [(path, name) for name in used if "Vision" not in name]
    return found


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all nodes below it, except decorators, which only name a function that a kernel may replace."""
    yield node
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and field != "decorator_list":
                yield from walk(child)


def is_rotation(node: ast.AST) -> bool:
    """Return whether a node calls a function that rotates queries and keys, such as apply_rotary_pos_emb."""
    name = ast.unparse(node.func).rpartition(".")[2].lstrip("_") if isinstance(node, ast.Call) else ""
    return (
        name.startswith(("apply_", "rotate_"))
        and any(part in name for part in ("rot", "rope"))
        and "vision" not in name
    )


def rotates(model_type: str) -> bool:
    return any(is_rotation(part) for node in reachable(model_type) for part in walk(node))


def rotates_on_sliding_layers_only(model_type: str) -> bool:
    """Return whether every rotation, or every use of its angles, depends on the layer having a window."""
    conditions = [
        ast.unparse(part.test)
        for node in reachable(model_type)
        for part in walk(node)
        if (isinstance(part, ast.If) and any(is_rotation(inner) for line in part.body for inner in walk(line)))
        or (isinstance(part, ast.IfExp) and ast.unparse(part.body) == "position_embeddings")
    ]
    return any(word in condition for condition in conditions for word in ("sliding_", "is_local"))


def reads_alpha(model_type: str) -> bool:
    return any("rope_parameters.get('alpha')" in ast.unparse(node) for node in reachable(model_type))


WINDOW_MASK = re.compile(r"\w*sliding_window\w*mask\w*|create_chunked_causal_mask")
WHOLE_MODEL_WINDOW = "create_causal_mask if self.config.sliding_window is None"


@cache
def decoder_code(model_type: str) -> str:
    """Return the code of the classes whose `config` is the model type's, or that of a composite with this part.

    `reachable` also contains the other parts of a composite, which may have windows of their own.
    """
    config, path = CONFIG_MAPPING[model_type], classes(model_type)[0][0]
    siblings = {
        kind for kind in map(CONFIG_MAPPING.__getitem__, CONFIG_MAPPING_NAMES) if kind.__module__ == config.__module__
    }
    composites = {kind for kind in siblings if config in getattr(kind, "sub_configs", {}).values()}
    takes = re.compile(rf"\bconfig: ({'|'.join(kind.__name__ for kind in (config, *composites))})\b")
    found = {node.name: node for node in reachable(model_type) if isinstance(node, ast.ClassDef)}
    found |= {name: node for name, node in definitions(path).items() if isinstance(node, ast.ClassDef)}
    code = {name: ast.unparse(node) for name, node in found.items()}
    bases = {name: [ast.unparse(base) for base in node.bases] for name, node in found.items()}
    return "\n".join(
        text for name, text in code.items() if any(takes.search(code.get(part, "")) for part in (name, *bases[name]))
    )


def derived() -> dict[str, set[str]]:
    """Return the types that rotate or have windows, and those of some constants, for the installed transformers."""
    models = language_models()
    rotating = [name for name in models if rotates(name)]
    masks = {name: set(WINDOW_MASK.findall(decoder_code(name))) for name in rotating}
    whole = {name for name in rotating if WHOLE_MODEL_WINDOW in decoder_code(name)}
    return {
        "rotate": set(rotating),
        "window": {name for name in rotating if masks[name]},
        "WINDOW_IGNORES_LAYER_TYPES": {name for name in whole if hasattr(CONFIG_MAPPING[name], "layer_types")},
        "INCLUSIVE_WINDOW": {name for name in rotating if "create_bidirectional_sliding_window_mask" in masks[name]},
        "ROPE_ON_SLIDING_LAYERS_ONLY": {name for name in models if rotates_on_sliding_layers_only(name)},
        "NTK_ALPHA": {name for name in models if reads_alpha(name)},
    }


if __name__ == "__main__":
    for title, types in derived().items():
        print(f"{title}: {', '.join(sorted(types))}")
