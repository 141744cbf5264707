"""`giveway generate` and `giveway chat`, without a model file."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from giveway.cli import chat
from giveway.cli.answering import _Turns
from giveway.core.sampling import MAX_STOP_STRINGS
from tests.cli.conftest import DRY_NOTICE, Cli


def test_the_answer_is_that_of_the_library(cli: Cli) -> None:
    from giveway.core.sampling import SamplingParams
    from giveway.llm import LLM

    with LLM(device="dry") as llm:
        wanted = llm.generate("hello", SamplingParams(max_tokens=12, temperature=0))[0].text
    result = cli("generate", "hello", "--raw", "--device", "dry", "-n", 12, "--temperature", 0)
    assert (result.code, result.out, result.err) == (0, wanted + "\n", DRY_NOTICE)


def test_the_prompt_goes_through_the_chat_template_unless_raw(cli: Cli) -> None:
    # "hi" are two tokens for the tokenizer of bytes; the template adds its own.
    raw = cli("generate", "hi", "--raw", "--stats", "--device", "dry", "-n", 1)
    templated = cli("generate", "hi", "--stats", "--device", "dry", "-n", 1)
    system = cli("generate", "hi", "--system", "be brief", "--stats", "--device", "dry", "-n", 1)
    assert raw.err.startswith(DRY_NOTICE + "2 prompt tokens, 1 output tokens (length); first token after ")
    lengths = [int(result.err.removeprefix(DRY_NOTICE).split()[0]) for result in (raw, templated, system)]
    assert lengths == sorted(set(lengths))


def test_a_dash_reads_standard_input(cli: Cli) -> None:
    result = cli("generate", "-", "--raw", "--stats", "--device", "dry", "-n", 1, stdin="four")
    assert result.err.startswith(DRY_NOTICE + "4 prompt tokens")


def test_a_temperature_of_zero_is_a_wish(cli: Cli) -> None:
    # 0 equals False in Python: it must not be taken for "not given", which would sample with a seed of chance.
    answers = {cli("generate", "x", "--device", "dry", "-n", 16, "--temperature", 0).out for _ in range(3)}
    assert len(answers) == 1


def test_a_seed_makes_a_sampled_answer_repeatable(cli: Cli) -> None:
    first, again, other = (cli("generate", "x", "--device", "dry", "-n", 16, "--seed", seed).out for seed in (1, 1, 2))
    assert first == again != other


def test_a_stop_text_ends_the_answer(cli: Cli) -> None:
    whole = cli("generate", "x", "--device", "dry", "-n", 40, "--temperature", 0).out
    stop = next(character for character in whole[1:] if character.isascii() and character.isprintable())
    cut = cli("generate", "x", "--device", "dry", "-n", 40, "--temperature", 0, "--stop", stop)
    assert cut.out == whole[: whole.index(stop)] + "\n"


def test_a_wrong_sampling_value_is_named(cli: Cli) -> None:
    result = cli("generate", "x", "--device", "dry", "--temperature", 500)
    assert (result.code, result.err) == (1, "error: temperature is 500.0; it must be between 0 and 100\n")


def test_a_system_message_needs_the_template(cli: Cli) -> None:
    assert cli("generate", "x", "--raw", "--system", "y").code == 2


def test_ctrl_c_ends_generate_with_130_and_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "giveway", "generate", "x", "--device", "dry", "-n", "8000"]
    out, err = tmp_path / "out", tmp_path / "err"
    with out.open("wb") as out_file, err.open("wb") as err_file:
        process = subprocess.Popen(command, stdout=out_file, stderr=err_file)
        while out.stat().st_size == 0 and process.poll() is None:
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait() == 130
    assert "Traceback" not in err.read_text()


# Several answers


def test_several_answers_are_printed_one_after_another_below_headings(cli: Cli) -> None:
    from giveway.core.sampling import SamplingParams
    from giveway.llm import LLM

    with LLM(device="dry") as llm:
        (wanted,) = llm.generate("hello", SamplingParams(max_tokens=12, temperature=1, seed=4, n=3))
    texts = [choice.text for choice in wanted.choices]
    arguments = ("hello", "--raw", "--device", "dry", "-n", 12, "--temperature", 1, "--seed", 4)
    result = cli("generate", *arguments, "--n", 3, "--stats")
    headings = [f"--- answer {number} of 3 ---\n" for number in (1, 2, 3)]
    assert result.out == "".join(heading + text + "\n" for heading, text in zip(headings, texts, strict=True))
    figures = result.err.removeprefix(DRY_NOTICE).splitlines()
    assert [line.split(":")[0] for line in figures] == ["answer 1", "answer 2", "answer 3"]
    assert cli("generate", *arguments).out == texts[0] + "\n"


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ([(0, "a", 0), (1, "x", 0), (0, "b", 1), (1, "y", 1)], ["<1>", "a", "b", "\n", "<2>", "x", "y"]),
        ([(1, "x", 1), (0, "a", 0), (0, "", 1)], ["<1>", "a", "\n", "<2>", "x"]),
        ([(0, "", 1), (1, "x", 0), (1, "y", 1)], ["<1>", "\n", "<2>", "x", "y"]),
    ],
)
def test_the_answer_whose_turn_it_is_is_said_as_it_comes(told: list[tuple[int, str, int]], wanted: list[str]) -> None:
    pieces: list[str] = []
    turns = _Turns(2, lambda text: pieces.append(re.sub(r"--- answer (\d) of 2 ---\n", r"<\1>", text)))
    for index, text, is_last in told:
        turns.add(index, text, is_last=bool(is_last))
    assert pieces == wanted


def test_a_wrong_number_of_answers_is_named_and_a_chat_has_one_answer(cli: Cli) -> None:
    for wrong in (0, 129):
        result = cli("generate", "x", "--device", "dry", "--n", wrong)
        assert (result.code, result.err) == (1, f"error: n is {wrong}; it must be between 1 and 128\n")
    chat = cli("chat", "--device", "dry", "--n", 2, stdin="x\n")
    assert chat.code == 2
    assert "--n" in chat.err


# Chat


def test_off_a_terminal_every_line_is_a_message_and_every_answer_a_line(cli: Cli) -> None:
    result = cli("chat", "--device", "dry", "-n", 8, "--temperature", 0, stdin="hello\n\nhow are you?\n/exit\nno\n")
    assert result.code == 0
    assert result.out.count("\n") == 2


def test_the_conversation_is_remembered_until_reset(cli: Cli) -> None:
    lines = "hello\nhello\n/reset\nhello\n"
    result = cli("chat", "--device", "dry", "-n", 8, "--temperature", 0, "--stats", stdin=lines)
    lengths = [int(line.split()[0]) for line in result.err.removeprefix(DRY_NOTICE).splitlines()]
    assert lengths[1] > lengths[0]
    assert lengths[2] == lengths[0]
    answers = result.out.splitlines()
    assert answers[2] == answers[0] != answers[1]


def test_what_no_longer_fits_is_left_out_with_a_notice(cli: Cli) -> None:
    arguments = ("--device", "dry", "-n", 8, "--temperature", 0, "--max-model-len", 100)
    result = cli("chat", *arguments, stdin="".join(f"message {number}\n" for number in range(6)))
    assert result.code == 0
    assert result.out.count("\n") == 6
    assert "warning: the 2 oldest messages no longer fit and are left out" in result.err


def test_a_message_that_can_never_fit_is_an_error_that_names_it(cli: Cli) -> None:
    result = cli("chat", "--device", "dry", "-n", 8, "--max-model-len", 64, stdin="x" * 200 + "\n")
    assert result.code == 1
    assert result.err.startswith(DRY_NOTICE + "error: message 'xxxxx")


# Text that means nothing, and bytes that are no text


@pytest.mark.parametrize("command", [("generate", "x"), ("chat",)])
def test_the_noise_of_the_tiny_model_is_not_taken_for_a_fault(cli: Cli, command: tuple[str, ...]) -> None:
    result = cli(*command, "-m", "tiny", "--device", "cpu", "-n", 2, "--num-kv-blocks", 8, stdin="x\n")
    assert result.code == 0
    assert "tiny: a model with random weights, the text means nothing\n" in result.err


def test_standard_input_that_is_not_utf8_is_named_with_the_place(cli: Cli) -> None:
    result = cli("generate", "-", "--device", "dry", stdin=b"ab\xffcd")
    assert (result.code, result.err) == (1, "error: standard input is not UTF-8 (byte 2)\n")
    result = cli("chat", "--device", "dry", "-n", 2, stdin=b"hello\nab\xff\n")
    assert (result.code, result.err) == (1, DRY_NOTICE + "error: standard input is not UTF-8 (byte 8)\n")


def test_a_locale_without_utf8_does_not_smuggle_bytes_in_as_surrogates() -> None:
    command = [sys.executable, "-m", "giveway", "generate", "-", "--device", "dry", "-n", "2"]
    environment = {**os.environ, "LC_ALL": "C"}
    result = subprocess.run(command, input=b"\xc3\xa9\xff", env=environment, capture_output=True, check=False)
    assert (result.returncode, result.stderr) == (1, b"error: standard input is not UTF-8 (byte 2)\n")


def test_an_argument_that_is_not_utf8_is_named_with_the_place(cli: Cli) -> None:
    # Python keeps the byte 0xff of an argument as the surrogate U+DCFF.
    assert cli("generate", "é\udcff", "--device", "dry").err == "error: PROMPT is not UTF-8 (byte 2)\n"
    system = cli("chat", "--system", "\udcff", "--device", "dry")
    assert (system.code, system.err) == (1, "error: --system is not UTF-8 (byte 0)\n")


def test_a_message_typed_in_another_encoding_does_not_end_the_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Unused:
        def ask(self, *_: object) -> str:
            raise AssertionError("what is no text must not reach the model")

    answers = iter(["", "\udcff", "/exit"])

    def typed(_: str) -> str:
        answer = next(answers)
        if not answer:
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
        return answer

    monkeypatch.setattr("builtins.input", typed)
    assert chat._talk(Unused(), "a model", stats=False) == 0
    assert capsys.readouterr().err == "error: the line is not UTF-8 (byte 0)\n" * 2


def test_help_says_how_many_stop_texts_there_may_be(cli: Cli) -> None:
    text = " ".join(cli("generate", "--help").out.split())
    assert f"may be given several times, at most {MAX_STOP_STRINGS}." in text
    assert cli("generate", "x", "--device", "dry", *["--stop=x"] * (MAX_STOP_STRINGS + 1)).code == 1
