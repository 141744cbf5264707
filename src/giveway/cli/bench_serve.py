"""`giveway bench serve`: its flags, named as in `vllm bench serve` where that has one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

from giveway.cli.bench_serve_options import read_options, result_file
from giveway.cli.flags import Number, WholeNumber, flag, takes_engine_options
from giveway.cli.output_file import open_target, takes_json_file
from giveway.core.errors import MissingDependencyError, OutputFileError
from giveway.options import EngineOptions

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

EXIT_NOTHING_COMPLETED = 1
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it

_SPACED = ("--goodput", "--header", "--metadata")


class SpacedValues(click.Command):
    """A command some of whose options take several values behind one flag: --goodput ttft:200 tpot:60.

    It has no arguments, so whatever does not begin with a dash belongs to the flag before it.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeat the flag for each further value, which is how click wants it."""
        spread: list[str] = []
        current, has_value = "", False
        for arg in args:
            if arg.startswith("-"):
                current, has_value = arg.partition("=")[0], "=" in arg
            elif current in _SPACED:
                spread += [current] if has_value else []
                has_value = True
            spread.append(arg)
        return super().parse_args(ctx, spread)


def _flag(name: str, *more: str, **settings: Any) -> Callable[[Decorated], Decorated]:
    """Declare a flag. One that an engine has too needs `into`: what a file sets for the engine is not meant for it."""
    return flag(name, *more, variable=f"bench_serve_{name}", **settings)


def _flags(*declared: Callable[[Any], Any]) -> Callable[[Decorated], Decorated]:
    def decorate(function: Decorated) -> Decorated:
        for each in reversed(declared):
            function = each(function)
        return function

    return decorate


_TAKES_TARGET = _flags(
    _flag("base_url", metavar="URL", help="The server. Default: http:// with --host and --port."),
    _flag("host", default="127.0.0.1", help="The server's host, without --base-url."),
    _flag("port", default=8000, type=WholeNumber(), help="The server's port, without --base-url."),
    _flag("endpoint", default="/v1/completions", help="Where requests go; /v1/chat/completions sends messages."),
    _flag(
        "model",
        into="model_name",
        metavar="NAME",
        help="Name of the model in requests. Default: the first that the server lists.",
    ),
    _flag("header", metavar="NAME=VALUE", multiple=True, help="A header of every request. Several are allowed."),
    _flag("extra_body", metavar="JSON", help="Fields of every body; null leaves one out that would be there."),
    _flag("insecure", is_flag=True, help="Take any TLS certificate."),
    _flag("ready_check_timeout_sec", default=60.0, type=Number(), help="Wait so long for the server; 0: do not ask."),
    _flag("timeout_sec", default=3600.0, type=Number(), help="A request has failed after so long without a byte."),
)

_TAKES_LOAD = _flags(
    _flag(
        "class",
        into="classes",
        metavar="NAME:KEY=VALUE,...",
        multiple=True,
        help="A class of load, with rate=, burst= or concurrency=; also prompt=, output=, priority=, service_tier=, "
        "num=, burstiness=, start=, stream=0. Several are allowed.",
    ),
    _flag(
        "num_prompts", type=WholeNumber(), help="Requests of an open loop without num=. Default: 1000 without classes."
    ),
    _flag(
        "request_rate", default=math.inf, type=Number(), help="Requests a second, without classes; inf: all at once."
    ),
    _flag("burstiness", default=1.0, type=Number(), help="1: Poisson arrivals; less: in bursts; more: evenly."),
    _flag(
        "max_concurrency",
        type=WholeNumber(),
        help="Requests of open loops under way at most. With an infinite rate: a closed loop of so many.",
    ),
    _flag("duration", into="duration_s", type=Number(), help="Seconds after which nothing new arrives."),
    _flag("random_input_len", "--input-len", default=1024, type=WholeNumber(), help="Prompt tokens, where unsaid."),
    _flag("random_output_len", "--output-len", default=128, type=WholeNumber(), help="Output tokens, where unsaid."),
    _flag("random_range_ratio", default=0.0, type=Number(), help="Both vary by this share to either side."),
    _flag("random_prefix_len", default=0, type=WholeNumber(), help="Tokens more that all prompts begin with."),
    _flag("random_vocab", default="1000-20000", metavar="FIRST-LAST", help="Token ids that prompts are made of."),
    _flag(
        "prompt_format",
        type=click.Choice(["ids", "text"]),
        help="Token ids, of exact length, or words. Default: ids; text for chat.",
    ),
    _flag("ignore_eos", is_switch=True, default=True, help="Answers of exactly the wished length."),
    _flag("temperature", type=Number(), help="0: always the most likely token. Default: the server's."),
    _flag("num_warmups", default=0, type=WholeNumber(), help="Requests before the run, one after another."),
    _flag(
        "seed",
        into="load_seed",
        default=0,
        type=WholeNumber(),
        help="Of prompts, lengths and arrivals. Another one: other prompts.",
    ),
    _flag("request_id_prefix", metavar="TEXT", help="Of X-Request-Id. Default: bench- and random letters."),
)

_TAKES_TRACE = _flags(
    _flag("trace", "--dataset-path", into="trace_file", metavar="FILE", help="Replay arrivals and lengths of a trace."),
    _flag(
        "trace_format",
        "--dataset-name",
        type=click.Choice(["auto", "mooncake", "burstgpt", "azure", "random"]),
        default="auto",
        help="What the trace is; random: there is none.",
    ),
    _flag("time_scale", default=1.0, type=Number(), help="2: the trace takes twice as long."),
    _flag("trace_limit", type=WholeNumber(), help="Replay so many requests of the trace at most."),
)

_TAKES_REPORT = _flags(
    _flag(
        "goodput",
        metavar="NAME:MS",
        multiple=True,
        help="Count requests within limits of ttft, tpot and e2el in milliseconds: --goodput ttft:200 tpot:60.",
    ),
    _flag("percentile_metrics", default="ttft,tpot,itl,e2el", help="Times in the table."),
    _flag("metric_percentiles", default="50,90,99", help="Percentiles; these three are always there."),
    _flag("save_result", is_flag=True, help="Write the file of --json, under a name of its own."),
    _flag("save_detailed", is_flag=True, help="Write every single request into the file too."),
    _flag("result_dir", metavar="DIR", help="Directory for --save-result.", type=click.Path(file_okay=False)),
    _flag("result_filename", metavar="NAME", help="File name for --save-result. Default: from model and date."),
    _flag("metadata", metavar="KEY=VALUE", multiple=True, help="Kept in the file. Several are allowed."),
    _flag("disable_tqdm", is_flag=True, help="No progress bar."),
)


@click.command("serve", cls=SpacedValues)
@_TAKES_TARGET
@_TAKES_LOAD
@_TAKES_TRACE
@_TAKES_REPORT
@takes_json_file("settings and figures, in seconds,")
@takes_engine_options(only=())
def command(options: EngineOptions, json_file: str | None, **given: Any) -> int:  # noqa: ARG001
    """Load a running OpenAI-compatible server with classes of requests; report times, throughput and errors.

    \b
    giveway bench serve --base-url http://127.0.0.1:8000 --goodput ttft:200 tpot:60 \\
      --class interactive:rate=0.5,num=100,prompt=64,output=32,priority=0 \\
      --class batch:concurrency=48,prompt=256,output=256,priority=20

    A closed loop (concurrency=) without num= runs until the others have ended. TTFT counts from the moment at which a
    request was due. Exit code 1: no request was completed. docs/bench/serve.md describes everything.
    """
    _need_aiohttp()
    asked = read_options(given, json_file)
    targets = [each for each in (open_target(json_file), open_target(result_file(given))) if each is not None]
    from giveway.bench.serve.report import as_json, show
    from giveway.bench.serve.run import bench_serve

    report = bench_serve(asked)
    show(report)
    for target in targets:
        content = as_json(report, has_requests=given["save_detailed"])
        try:
            target.write_text(json.dumps(content, indent=2) + "\n")
        except OSError as error:
            raise OutputFileError(f"{target}: cannot be written: {error.strerror}") from error
    if report.run.is_interrupted:
        return EXIT_INTERRUPTED
    return 0 if report.total.num_completed else EXIT_NOTHING_COMPLETED


def _need_aiohttp() -> None:
    try:
        import aiohttp  # noqa: F401
    except ImportError:
        raise MissingDependencyError(
            "the package 'aiohttp' is not installed, with which requests are sent. Install it with `pip install "
            "'giveway[bench]'`"
        ) from None
