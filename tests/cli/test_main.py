"""Entry point: quick help, and errors as one line."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

import giveway
from giveway.cli.__main__ import COMMANDS
from giveway.cli.__main__ import giveway as group
from tests.cli.conftest import Cli


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
    assert result.err == "warning: max_model_len lowered from 8192 to 129 tokens, which is what the KV pool holds\n"


def test_a_reader_that_went_away_is_no_error() -> None:
    command = f"{sys.executable} -m giveway generate x --device dry -n 2000 | head -c 1 > /dev/null"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert result.stderr == ""
