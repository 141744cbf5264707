"""Settings of the engine as flags, in the environment and in a file."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest

from giveway.cli.__main__ import main
from giveway.cli.flags import flag, takes_engine_options
from giveway.cli.session import Session
from giveway.options import GIB, EngineOptions
from tests.cli.conftest import Cli


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> Any:
    """Options that a command receives, for given arguments: `giveway generate`, without the work."""
    seen: list[tuple[EngineOptions, dict[str, Any]]] = []

    @click.command("generate")
    @flag("max_tokens", "-n", help="For the test.", type=int)
    @flag("stop", help="For the test.", multiple=True)
    @takes_engine_options()
    def command(options: EngineOptions, **rest: Any) -> int:
        seen.append((options, rest))
        return 0

    monkeypatch.setattr("giveway.cli.generate.command", command)

    def run(*arguments: object) -> tuple[EngineOptions, dict[str, Any]]:
        assert main(["generate", *map(str, arguments)]) == 0
        return seen.pop()

    return run


def test_without_flags_everything_has_its_default(resolve: Any) -> None:
    assert resolve()[0] == EngineOptions()


def test_every_field_has_a_flag_with_its_help(cli: Cli) -> None:
    text = " ".join(cli("generate", "--help").out.split())
    for field in fields(EngineOptions):
        assert f"--{field.name.replace('_', '-')}" in text
        assert field.metadata["help"].split(".")[0][:40] in text or "-" in field.metadata["help"][:60]
    assert "Seats: requests resident at the same time. [default: 64]" in text


def test_sizes_have_units_and_a_bare_number_has_the_unit_of_its_field(resolve: Any) -> None:
    options, _ = resolve("--kv-cache-memory-bytes", "512MiB", "--swap-space", 2)
    assert (options.kv_cache_memory_bytes, options.swap_space) == (512 << 20, 2 * GIB)


def test_of_two_sizes_of_the_pool_the_one_that_is_ignored_is_told(cli: Cli) -> None:
    result = cli("info", "--device", "dry", "--num-kv-blocks", 8, "--kv-cache-memory-bytes", "1GiB")
    assert result.code == 0
    assert result.err == (
        "warning: --kv-cache-memory-bytes is ignored, because --num-kv-blocks sets the size of the KV pool\n"
    )
    assert "blocks that fit  8 (128 tokens)" in result.out
    assert cli("info", "--device", "dry", "--num-kv-blocks", 8).err == ""


def test_switches_can_be_turned_both_ways(resolve: Any) -> None:
    assert resolve("--exact")[0].exact is True
    assert resolve("--no-exact")[0].exact is False
    assert resolve("--enable-prefix-caching")[0].enable_prefix_caching is True


def test_a_flag_wins_over_the_environment_that_over_the_file_that_over_the_default(
    resolve: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "giveway.toml"
    file.write_text('max_num_seqs = 1\nblock-size = 1\nseed = 1\nswap_space = "1MiB"\n[generate]\nmax_tokens = 9\n')
    monkeypatch.setenv("GIVEWAY_MAX_NUM_SEQS", "2")
    monkeypatch.setenv("GIVEWAY_BLOCK_SIZE", "2")
    options, rest = resolve("--config", file, "--max-num-seqs", 3)
    assert (options.max_num_seqs, options.block_size, options.seed) == (3, 2, 1)
    assert options.swap_space == 1 << 20
    assert options.max_num_batched_tokens == EngineOptions().max_num_batched_tokens
    assert rest["max_tokens"] == 9


def test_the_file_may_be_named_in_the_environment(
    resolve: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "giveway.toml"
    file.write_text('exact = true\n[generate]\nstop = ["a", "b"]\nblock_size = 4\n[run]\nwhatever = 1\n')
    monkeypatch.setenv("GIVEWAY_CONFIG", str(file))
    options, rest = resolve()
    assert (options.exact, options.block_size, rest["stop"]) == (True, 4, ("a", "b"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max_num_seq = 1", "unknown setting max_num_seq. Did you mean max_num_seqs?"),
        ("[generate]\nmax_tokns = 1", "unknown setting [generate] max_tokns. Did you mean max_tokens?"),
        ("[genrate]\n", "table [genrate] is not a command. Did you mean generate?"),
        ("max_tokens = 1", "max_tokens is not an engine setting; put it below [generate]"),
        ("max_num_seqs = ", "not valid TOML"),
        ("seed = 1 # \udcff", "not UTF-8 (byte 11)"),
    ],
)
def test_a_mistake_in_the_file_is_named(cli: Cli, tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "giveway.toml"
    file.write_bytes(content.encode(errors="surrogateescape"))
    result = cli("generate", "x", "--config", file)
    assert result.code == 1
    assert result.err.startswith(f"error: {file}: ")
    assert message in result.err


@pytest.mark.parametrize("value", ["true", "1.5", '"many"'])
def test_a_value_of_the_wrong_type_in_the_file_is_refused_not_rounded(cli: Cli, tmp_path: Path, value: str) -> None:
    file = tmp_path / "giveway.toml"
    file.write_text(f"max_num_seqs = {value}\n")
    result = cli("generate", "x", "--config", file)
    assert result.code == 2
    assert "is not a whole number" in result.err


def test_an_absent_file_is_named(cli: Cli, tmp_path: Path) -> None:
    result = cli("generate", "x", "--config", tmp_path / "no.toml")
    assert (result.code, result.err) == (1, f"error: {tmp_path}/no.toml: cannot be read: No such file or directory\n")


def test_one_text_in_the_file_is_enough_for_an_option_that_takes_several(resolve: Any, tmp_path: Path) -> None:
    file = tmp_path / "giveway.toml"
    file.write_text('[generate]\nstop = "end"\n')
    assert resolve("--config", file)[1]["stop"] == ("end",)


def test_the_table_of_a_command_is_not_read_by_a_command_of_that_name_further_down(tmp_path: Path) -> None:
    # Goal: [serve] belongs to `giveway serve`; `giveway bench serve` has other flags and must not stumble over it.
    seen: list[dict[str, Any]] = []

    def make_serve(name: str) -> click.Command:
        @click.command("serve")
        @flag(name, help="For the test.")
        @takes_engine_options(only=("seed",))
        def serve(options: EngineOptions, **rest: Any) -> None:
            seen.append({"seed": options.seed, **rest})

        return serve

    bench = click.Group("bench", commands=[make_serve("rate")])
    group = click.Group("giveway", commands=[make_serve("listen"), bench])
    config = tmp_path / "settings.toml"
    config.write_text('seed = 7\n[serve]\nlisten = "here"\n')
    for arguments in (["serve"], ["bench", "serve"]):
        group.main([*arguments, "--config", str(config)], standalone_mode=False, obj=Session())
    assert seen == [{"seed": 7, "listen": "here"}, {"seed": 7, "rate": None}]
