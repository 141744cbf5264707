"""The tokenizer of a Hugging Face directory: tokenizer.json, and what the files beside it say about its ends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from giveway.core.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from giveway.core.ids import TokenId
from giveway.runtime.json_file import MAX_JSON_BYTES, read_json_object_if_present
from giveway.runtime.tokenizer.tokenizer import Tokenizer, building

MAX_TEMPLATE_FILE_BYTES = 1 << 20


def tokenizer_from_directory(directory: Path) -> Tokenizer:
    """Load tokenizer.json, tokenizer_config.json and special_tokens_map.json.

    BOS and EOS are put around a text as tokenizer.json's post-processor says, unless tokenizer_config.json says
    `add_bos_token` or `add_eos_token`, which then decide alone, as in Transformers.
    Raises ModelNotFoundError, ModelFileError or UnsupportedModelError.
    """
    backend = _load_backend(directory)
    settings = read_json_object_if_present(directory / "special_tokens_map.json")
    settings = settings | read_json_object_if_present(directory / "tokenizer_config.json")
    bos = _named_token(backend, settings, "bos_token", directory)
    eos = _named_token(backend, settings, "eos_token", directory)
    prefix, suffix = _ends_of_post_processor(backend, directory)
    if settings.get("add_bos_token") is not None or settings.get("add_eos_token") is not None:
        prefix = [bos] if settings.get("add_bos_token") and bos is not None else []
        suffix = [eos] if settings.get("add_eos_token") and eos is not None else []
    return Tokenizer(
        backend, bos_token_id=bos, eos_token_ids=[eos] if eos is not None else [], prefix=prefix, suffix=suffix
    )


def chat_template_of_directory(directory: Path) -> str | None:
    """Source of the chat template: chat_template.jinja, else tokenizer_config.json's; None if neither has one.

    Of several templates in tokenizer_config.json, the one called "default".
    """
    file = directory / "chat_template.jinja"
    if file.exists():
        if file.stat().st_size > MAX_TEMPLATE_FILE_BYTES:
            raise ModelFileError(f"{file}: {file.stat().st_size} bytes; the limit is {MAX_TEMPLATE_FILE_BYTES}")
        try:
            return file.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise ModelFileError(f"{file}: not UTF-8") from error
    found = read_json_object_if_present(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise ModelFileError(
            f"{directory / 'tokenizer_config.json'}: chat_template is neither a text nor a list of them"
        )
    return found


def _load_backend(directory: Path) -> Backend:
    path = directory / "tokenizer.json"
    if not path.exists():
        if (directory / "tokenizer.model").exists():
            raise UnsupportedModelError(
                f"{directory}: the tokenizer is there as tokenizer.model only; tokenizer.json is needed "
                "(`AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)` of Transformers writes it)"
            )
        raise ModelNotFoundError(f"{path} is missing: without it text cannot become tokens")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ModelFileError(f"{path}: {path.stat().st_size} bytes; the limit is {MAX_JSON_BYTES}")
    with building(str(path)):
        backend = Backend.from_file(str(path))
    backend.no_truncation()
    backend.no_padding()
    return backend


def _named_token(backend: Backend, settings: Mapping[str, Any], name: str, directory: Path) -> TokenId | None:
    """Id of the token that the settings name: as a text, or as an object with a "content"."""
    value = settings.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    if value is None:
        return None
    found: TokenId | None = backend.token_to_id(value) if isinstance(value, str) else None
    if found is None:
        raise ModelFileError(
            f"{directory / 'tokenizer_config.json'}: {name} is {value!r}, which is no token of tokenizer.json"
        )
    return found


def _ends_of_post_processor(backend: Backend, directory: Path) -> tuple[list[TokenId], list[TokenId]]:
    """What the post-processor puts before and behind a text, found by trying it on one."""
    probe = "a"
    inner = list(backend.encode(probe, add_special_tokens=False).ids)
    whole = list(backend.encode(probe, add_special_tokens=True).ids)
    for start in range(len(whole) - len(inner) + 1):
        if whole[start : start + len(inner)] == inner:
            return whole[:start], whole[start + len(inner) :]
    raise UnsupportedModelError(f"{directory / 'tokenizer.json'}: the post-processor changes the tokens of a text")
