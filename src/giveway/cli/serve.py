"""`giveway serve`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from giveway.cli.flags import Number, Size, WholeNumber, flag, takes_engine_options
from giveway.core.errors import ConfigError
from giveway.options import EngineOptions

if TYPE_CHECKING:
    from giveway.build_server import ServerOptions


class Numbers(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """Names with whole numbers, `name=1,other=2`, or a table of a configuration file."""

    name = "name=number,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, int]:
        """Return the numbers by name, in order, or fail with a usage error."""
        if isinstance(value, dict):
            pairs = [(str(name), number) for name, number in value.items()]
        else:
            pairs = [
                (name.strip(), number.strip()) for name, _, number in (p.partition("=") for p in str(value).split(","))
            ]
        return {name: WholeNumber().convert(number, param, ctx) for name, number in pairs}


@click.command("serve")
@click.argument("model_argument", metavar="[MODEL]", required=False)
@flag("host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 for all, which needs API keys.")
@flag("port", default=8000, type=WholeNumber(), help="Port to listen on; 0 for any that is free.")
@flag(
    "api_key",
    multiple=True,
    variable="API_KEY",
    metavar="KEY",
    help="Key that clients must send. It shows in the list of processes: better in GIVEWAY_API_KEY or a file.",
)
@flag(
    "api_key_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File of keys: one a line; or, in TOML, [[key]] tables with key, name, priority, ceiling, max_concurrent.",
)
@flag("allow_anybody", is_flag=True, help="Serve without keys although others can reach --host.")
@flag("allowed_host", multiple=True, help="Further name that clients may call this machine; for servers without keys.")
@flag("allowed_origin", multiple=True, help="Origin of web pages that may ask (CORS); none by default.")
@flag("served_model_name", multiple=True, help="Name of the model for clients; the first is the one in answers.")
@flag(
    "classes",
    type=Numbers(),
    default="priority=0,default=10,flex=20,batch=30",
    help="Names of classes with the first integer of each: what service_tier stands for, and labels of metrics.",
)
@flag("max_queued", type=WholeNumber(), default=10_000, help="Requests of one class that may wait for a first seat.")
@flag("max_queued_by_class", type=Numbers(), help="The same for single classes, such as flex=500,batch=2000.")
@flag("max_body_size", type=Size(), default="4MiB", help="Size of a request's body; uploads have a limit of their own.")
@flag("body_timeout_s", type=Number(), default=60.0, help="Seconds that a body may take to arrive.")
@flag("request_timeout_s", type=Number(), help="Seconds from a request's arrival to its end. Default: no limit.")
@flag("keep_alive_s", type=Number(), default=5.0, help="A stream that has nothing to say sends a comment so often.")
@flag("stall_timeout_s", type=Number(), default=60.0, help="A step that takes longer makes /health say 503.")
@flag(
    "max_unread",
    type=WholeNumber(),
    default=512,
    help="Updates that wait for a slow reader before its request gives way.",
)
@flag("max_http_requests", type=WholeNumber(), help="More HTTP requests at a time get a 503. Default: no limit.")
@flag("drain_timeout_s", type=Number(), default=30.0, help="Seconds for requests in progress after SIGTERM.")
@flag(
    "data_dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Files and batches of the Batch API. Default: giveway in $XDG_DATA_HOME or ~/.local/share.",
)
@flag("batch_api", is_switch=True, default=True, help="Offer /v1/files and /v1/batches.")
@flag("max_upload_size", type=Size(), default="200MiB", help="Size of a file for the Batch API.")
@flag(
    "batch_keep_days", type=WholeNumber(), help="Delete finished batches and old files after so many. Default: never."
)
@flag("log_format", type=click.Choice(("text", "json")), default="text", help="Form of the log, on standard error.")
@flag("log_prompts", is_flag=True, help="Log prompts too; they are nobody's business by default.")
@flag(
    "log_level",
    type=click.Choice(("debug", "info", "warning", "error")),
    default="info",
    help="What is logged; info has a line for every finished request, without its prompt.",
)
@takes_engine_options()
def command(options: EngineOptions, model_argument: str | None, **values: Any) -> int:
    """Serve MODEL over HTTP, as OpenAI's API; interactive and batch requests on one engine.

    `priority` in a request (0 is the most urgent, as in vLLM) or OpenAI's `service_tier` says who gives way. SIGTERM
    takes no new requests and lets those in progress end; lines of batches go on after the next start.
    """
    from dataclasses import replace

    from giveway.cli.serving import begin_logging, serve

    if model_argument is not None:
        if options.model not in (None, model_argument):
            raise click.UsageError(f"MODEL is {model_argument}, and --model is {options.model}: say one of them.")
        options = replace(options, model=model_argument)
    if options.most_urgent_priority is None:  # background work must not hold up the first ordinary request after hours
        options = replace(options, most_urgent_priority=options.default_priority)
    begin_logging(values.pop("log_format"), values.pop("log_level"))
    return serve(options, _server_options(values))


def _server_options(values: dict[str, Any]) -> ServerOptions:
    from giveway.build_server import ServerOptions
    from giveway.server.classes import PriorityClasses
    from giveway.server.settings import ServerLimits

    source = click.get_current_context().get_parameter_source("api_key")
    if values["api_key"] and source is click.core.ParameterSource.COMMANDLINE:
        import logging

        logging.getLogger("giveway").warning(
            "--api-key shows in the list of processes; GIVEWAY_API_KEY or --api-key-file keeps it to you"
        )
    if not 0 <= values["port"] <= 65535:
        raise ConfigError(f"port is {values['port']}; it must be from 0 to 65535")
    return ServerOptions(
        host=values["host"],
        port=values["port"],
        served_names=tuple(values["served_model_name"]),
        keys=tuple(values["api_key"]),
        key_file=values["api_key_file"],
        allow_anybody=values["allow_anybody"],
        allowed_hosts=tuple(values["allowed_host"]),
        allowed_origins=tuple(values["allowed_origin"]),
        classes=PriorityClasses.of(values["classes"]),
        limits=ServerLimits(
            max_body_bytes=values["max_body_size"],
            max_queued=values["max_queued"],
            max_queued_of=values["max_queued_by_class"] or {},
            max_unread=values["max_unread"],
            max_http_requests=values["max_http_requests"],
            body_timeout_s=values["body_timeout_s"],
            request_timeout_s=values["request_timeout_s"],
            keep_alive_s=values["keep_alive_s"],
            stall_timeout_s=values["stall_timeout_s"],
        ),
        data_dir=values["data_dir"],
        has_batch_api=values["batch_api"],
        max_upload_bytes=values["max_upload_size"],
        batch_keep_days=values["batch_keep_days"],
        logs_prompts=values["log_prompts"],
        drain_timeout_s=values["drain_timeout_s"],
    )
