"""Entry point: quick help, and errors as one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest

import giveway
from giveway.cli.__main__ import COMMANDS
from giveway.cli.__main__ import giveway as group
from tests.cli.conftest import DRY_NOTICE, Cli


def test_help_loads_nothing_that_is_slow() -> None:
    # Goal: an answer in a blink. Time is not tested; what would take it is.
    slow = ("rich", "torch", "numpy", "jinja2", "giveway.build", "giveway.engine", "asyncio")
    code = (
        "import sys; from giveway.cli.__main__ import main; code = main(['--help']);"
        f"loaded = [name for name in {slow} if name in sys.modules]; sys.exit(f'{{loaded}}' if loaded or code else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for name in COMMANDS:
        assert f"\n  {name} " in result.stdout


@pytest.mark.parametrize("module", ["giveway", "giveway.cli"])
def test_it_is_a_module_too(module: str) -> None:
    result = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, f"giveway {giveway.__version__}\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(cli: Cli, name: str) -> None:
    command = group.get_command(None, name)  # type: ignore[arg-type]
    assert command is not None
    assert command.name == name
    below = command.commands if isinstance(command, click.Group) else [None]
    for part in below:
        result = cli(name, *([part] if part else []), "--help")
        assert result.code == 0
        assert "--config" in result.out


def test_a_wrong_command_is_answered_with_the_nearest(cli: Cli) -> None:
    result = cli("genrate", "x")
    assert result.code == 2
    assert result.err == "error: no such command: 'genrate'. Did you mean 'generate'? (see 'giveway --help')\n"


def test_a_usage_error_is_one_line_and_exit_code_2(cli: Cli) -> None:
    result = cli("info", "--block-size", "many")
    assert result.code == 2
    assert result.err.startswith("error: Invalid value for '--block-size': 'many' is not a whole number.")
    assert result.err.count("\n") == 1


def test_an_error_of_ours_is_one_line_and_exit_code_1(cli: Cli) -> None:
    result = cli("generate", "x", "--device", "dry", "--default-priority", 101)
    assert (result.code, result.err) == (1, "error: default_priority is 101; classes are 0 (most urgent) to 100\n")


@pytest.mark.parametrize("arguments", [("--debug", "generate"), ("generate", "--debug")])
def test_debug_shows_the_traceback(cli: Cli, arguments: tuple[str, ...]) -> None:
    result = cli(*arguments, "x", "--device", "dry", "--default-priority", 101)
    assert result.code == 1
    assert "Traceback" in result.err
    assert "ConfigError: default_priority is 101" in result.err


def test_a_notice_is_one_line_on_standard_error(cli: Cli) -> None:
    result = cli("generate", "x", "--device", "dry", "--num-kv-blocks", 8, "-n", 4)
    assert result.code == 0
    lowered = "warning: max_model_len lowered from 8192 to 129 tokens, which is what the KV pool holds\n"
    assert result.err == lowered + DRY_NOTICE


def test_a_reader_that_went_away_is_no_error() -> None:
    command = f"{sys.executable} -m giveway generate x --device dry -n 2000 | head -c 1 > /dev/null"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert result.stderr == DRY_NOTICE


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("arguments", ["info --device dry", "generate hi -n 5 --device dry", "--help", ""])
def test_a_closed_stream_is_like_one_to_nowhere(arguments: str, closed: str) -> None:
    command = f"{sys.executable} -m giveway {arguments} {closed}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert result.returncode == 0
    assert result.stderr in ("", DRY_NOTICE)


def test_a_file_does_not_get_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    # Goal: what is meant for a stream that is closed never lands in a file that was opened afterwards.
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "x", "max_tokens": 2}\n')
    command = f"{sys.executable} -m giveway run {source} -o {out} --device dry <&- >&- 2>&-"
    assert subprocess.run(["bash", "-c", command], check=False).returncode == 0
    assert [json.loads(line)["line"] for line in out.read_text().splitlines()] == [1]


@pytest.mark.parametrize("arguments", [(), ("bench",)])
def test_a_bare_command_prints_its_help_as_it_is(cli: Cli, arguments: tuple[str, ...]) -> None:
    bare = cli(*arguments)
    assert (bare.code, bare.out, bare.err) == (0, cli(*arguments, "--help").out, "")
    assert bare.out.count("\n") > 8


def test_a_mistyped_variable_is_told_with_the_nearest(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_NUM_SEQ", "QQQ", "MAX_LINE_BYTES", "DEBUG", "CONFIG", "JSON_FILE"):
        monkeypatch.setenv(f"GIVEWAY_{name}", "" if name == "CONFIG" else "1")
    monkeypatch.setenv("GIVEWAY_DEBUG", "0")
    result = cli("generate", "x", "-n", 1, "--device", "dry")
    assert result.err == (
        "warning: the environment variable GIVEWAY_MAX_NUM_SEQ is no setting and has no effect. "
        "Did you mean GIVEWAY_MAX_NUM_SEQS?\n"
        "warning: the environment variable GIVEWAY_QQQ is no setting and has no effect.\n" + DRY_NOTICE
    )


def test_no_variable_means_different_things_to_two_commands() -> None:
    # Goal: GIVEWAY_JSON=1 for `info` must not make `demo` write to a file called 1.
    meanings: dict[str, set[str]] = {}

    def collect(command: click.Command) -> None:
        for param in command.params:
            if isinstance(param.envvar, str):
                is_flag = isinstance(param, click.Option) and param.is_flag
                meanings.setdefault(param.envvar, set()).add(f"{param.type.name} {is_flag} {param.multiple}")
        if isinstance(command, click.Group):
            for name in command.list_commands(None):  # type: ignore[arg-type]
                below = command.get_command(None, name)  # type: ignore[arg-type]
                assert below is not None
                collect(below)

    collect(group)
    meanings.pop("GIVEWAY_MODEL")  # an argument of `info`, an option elsewhere: the same
    assert {name: kinds for name, kinds in meanings.items() if len(kinds) > 1} == {}
    assert {"GIVEWAY_JSON", "GIVEWAY_JSON_FILE", "GIVEWAY_CONFIG", "GIVEWAY_DEBUG"} <= set(meanings)
