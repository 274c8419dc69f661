"""Check a model's tokenizer, chat templates and generation config before a push: they load, and their ids exist."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import UndefinedError
from transformers import AutoTokenizer, GenerationConfig
from transformers.utils.chat_template_utils import render_jinja_template


GENERATION_CONFIG = "generation_config.json"
TOKENIZER = ("tokeniz", "vocab", "merges", "special_tokens", "added_tokens")  # prefixes of the names of its files
# Fields of a config that contain token ids, as numbers or nested lists
IDS = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "force_words_ids", "forced_decoder_ids")
ROLES = ("bos", "eos", "pad", "sep", "cls", "mask", "decoder_start", "forced_bos", "forced_eos")
IDS += tuple(f"{role}_token_id" for role in ROLES)
# Placeholders of a tokenizer that a text model shares with a model of images or sound. Text does not contain them.
PLACEHOLDERS = ("image_token", "audio_token", "video_token")


def check_text_files(folder: Path, values: dict[str, dict], embeddings: int | None) -> None:
    """Load what `from_pretrained` and `generate` read next to the weights.

    Args:
        folder: folder with the files that a push uploads.
        values: content of its JSON files, by name.
        embeddings: number of token ids of the model. None: unknown.

    Raises:
        ValueError: the tokenizer, a chat template or the generation config does not load; or a
            token id is not an id of the model.
    """
    names = {path.name for path in folder.iterdir()}
    if GENERATION_CONFIG in values:
        try:
            GenerationConfig.from_pretrained(str(folder)).validate()
        except Exception as error:  # an invalid value can raise any exception
            raise ValueError(f"transformers cannot load {folder / GENERATION_CONFIG} ({error}).") from error
    for name in ("config.json", GENERATION_CONFIG):
        for field in IDS:
            for token in flatten(values.get(name, {}).get(field)):
                check_id(f"{field} in {folder / name}", token, embeddings)
    biases = values.get(GENERATION_CONFIG, {}).get("sequence_bias") or []  # pairs of a sequence of ids and its bias
    for token in flatten([sequence for sequence, _ in biases]):
        check_id(f"sequence_bias in {folder / GENERATION_CONFIG}", token, embeddings)
    settings = values.get("tokenizer_config.json", {})
    needs_code = bool(settings.get("auto_map"))
    templates: list[Any] = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("chat_template*.jinja"))]
    templates += [values.get("chat_template.json", {}).get("chat_template")]
    if any(name.startswith(TOKENIZER) or name.endswith(".model") for name in names) and not needs_code:
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        except Exception as error:  # a damaged file can raise any exception
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(
                f"transformers cannot load the tokenizer in {folder} ({reason}). Save it again with save_pretrained, or "
                "remove its files."
            ) from error
        template = tokenizer.chat_template
        named = template if isinstance(template, dict) else {"default": template}
        templates += named.values()
        if isinstance(named.get("default"), str):
            check_rendering(folder, tokenizer)
        placeholders = {str(tokenizer.special_tokens_map.get(name)) for name in PLACEHOLDERS}
        for token, number in tokenizer.get_vocab().items():
            if token not in placeholders:
                check_id(f"the token {token!r} of the tokenizer in {folder}", number, embeddings)
    for template in templates:
        try:
            if template is not None:
                render_jinja_template([], chat_template=template)
        except Exception as error:  # TemplateSyntaxError, or the template is not a string
            raise ValueError(
                f"a chat template in {folder} is not a valid jinja template ({error}). Correct it."
            ) from error


def check_rendering(folder: Path, tokenizer: Any) -> None:
    """Raise ValueError if a chat template omits a user's turn or cannot render it, as text or as a list of parts.

    Other errors are allowed: a template may require other turns.
    """
    reason: Any = "its text is missing"
    for content in ("Hi", [{"type": "text", "text": "Hi"}]):
        try:
            if "Hi" in tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False):
                return
        except (UndefinedError, TypeError) as error:
            reason = error
        except Exception:  # also from raise_exception() of a template, and from a template that does not parse
            return
    raise ValueError(f"the chat template in {folder} cannot render a user's turn ({reason}). Correct it.")


def flatten(ids: Any) -> Iterator[Any]:
    """Yield the ids in nested lists, without None."""
    if isinstance(ids, list):
        for value in ids:
            yield from flatten(value)
    elif ids is not None:
        yield ids


def check_id(what: str, token: Any, embeddings: int | None) -> None:
    """Raise ValueError if `token` is not an id of a model with `embeddings` ids."""
    if type(token) is not int or token < 0 or (embeddings is not None and token >= embeddings):
        ids = "an integer of at least 0" if embeddings is None else f"an id from 0 to {embeddings - 1}"
        raise ValueError(
            f"{what} must be {ids}, got {token!r}. Correct the id, or resize the model's embeddings "
            "(model.resize_token_embeddings)."
        )
