"""Options of commands: those of the engine are made from `EngineOptions`, and every option has three more sources.

Flag, then environment (GIVEWAY_<NAME>), then the file named with --config, then the default.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import Field, fields
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import click

from giveway.cli.config_file import read_config_file
from giveway.cli.session import Session
from giveway.core.errors import ConfigError
from giveway.core.sampling import MAX_STOP_STRINGS
from giveway.options import EngineOptions, parse_size

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

logger = logging.getLogger("giveway")

ENGINE_NAMES = tuple(field.name for field in fields(EngineOptions))


class WholeNumber(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """An integer. A fraction or a truth value from a file is refused, not rounded."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number, or fail with a usage error."""
        number = None
        with suppress(ValueError):
            number = int(value) if isinstance(value, int | str) and not isinstance(value, bool) else None
        if number is None:
            self.fail(f"{value!r} is not a whole number.", param, ctx)
        return number


class Number(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """A number that may have a fraction."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number, or fail with a usage error."""
        number = None
        with suppress(ValueError):
            number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else None
        if number is None:
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


class Size(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """A number of bytes such as 512MiB."""

    name = "size"

    def __init__(self, bare_unit: int = 1) -> None:
        self._bare_unit = bare_unit

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return bytes, or fail with a usage error."""
        try:
            return parse_size(value, bare_unit=self._bare_unit)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


def flag(
    name: str,
    *more: str,
    help: str,  # noqa: A002  # the name that click gives it
    into: str | None = None,
    variable: str | None = None,
    **settings: Any,
) -> Callable[[Decorated], Decorated]:
    """Declare an option called `name`, a Python name; its flag has dashes, its variable GIVEWAY_ in front.

    more: further spellings. into: parameter that receives it, if not `name`. variable: what comes after GIVEWAY_, if
    not `name`: two commands must not read different things from one variable. The rest goes to click.option.
    """
    dashed = name.replace("_", "-")
    declaration = f"--{dashed}/--no-{dashed}" if settings.pop("is_switch", False) else f"--{dashed}"
    show_default = settings.get("default") not in (None, False, ()) and "Default:" not in help
    return click.option(
        declaration,
        *more,
        into or name,
        envvar=f"GIVEWAY_{(variable or name).upper()}",
        help=help,
        show_default=show_default,
        **settings,
    )


def _engine_flag(field: Field[Any], hint: Any) -> Callable[[Decorated], Decorated]:
    kinds = [kind for kind in (get_args(hint) or (hint,)) if kind is not type(None)]
    settings: dict[str, Any] = {"default": field.default}
    more = ("-m",) if field.name == "model" else ()
    if field.metadata.get("kind") == "size":
        settings["type"] = Size(field.metadata.get("bare_unit", 1))
    elif "choices" in field.metadata:
        settings["type"] = click.Choice(field.metadata["choices"])
    elif kinds == [bool]:
        settings["is_switch"] = True
    elif kinds == [int]:
        settings["type"] = WholeNumber()
    elif kinds == [float]:
        settings["type"] = Number()
    else:
        settings["type"] = str
    return flag(field.name, *more, help=field.metadata["help"], **settings)


def takes_engine_options(
    *, only: Collection[str] = ENGINE_NAMES, without: Collection[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the engine's options (a part of them), --config and --debug; it receives `options`."""
    hints = get_type_hints(EngineOptions)
    chosen = [field for field in fields(EngineOptions) if field.name in only and field.name not in without]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def with_options(**values: Any) -> Any:
            given = {field.name: values.pop(field.name) for field in chosen}
            _tell_what_is_ignored(given)
            return function(options=EngineOptions(**given), **values)

        decorated: Callable[..., Any] = _config_flag(_debug_flag(with_options))
        for field in reversed(chosen):
            decorated = _engine_flag(field, hints[field.name])(decorated)
        return decorated

    return decorate


def _tell_what_is_ignored(given: Mapping[str, Any]) -> None:
    if given.get("num_kv_blocks") is not None and given.get("kv_cache_memory_bytes") is not None:
        logger.warning("--kv-cache-memory-bytes is ignored, because --num-kv-blocks sets the size of the KV pool")


def _read_config(ctx: click.Context, param: click.Parameter, value: Path | None) -> None:
    del param
    if value is None:
        return
    group = ctx.find_root().command
    commands = group.list_commands(ctx) if isinstance(group, click.Group) else [ctx.info_name or ""]
    is_at_top = ctx.parent is None or ctx.parent.parent is None  # `bench serve` is not the command of table [serve]
    own = {option.name for option in ctx.command.params if isinstance(option, click.Option) and option.name}
    settings = read_config_file(
        value,
        command=(ctx.info_name or "") if is_at_top else "",
        engine_names=ENGINE_NAMES,
        command_names=own - set(ENGINE_NAMES) - {"config", "debug", "help"},
        commands=commands,
    )
    for option in ctx.command.params:
        if option.name in settings and option.multiple and isinstance(settings[option.name], str):
            settings[option.name] = [settings[option.name]]  # one text, as on the command line
    ctx.default_map = settings


def _config_flag(function: Decorated) -> Decorated:
    return click.option(
        "--config",
        type=click.Path(dir_okay=False, path_type=Path),
        envvar="GIVEWAY_CONFIG",
        is_eager=True,  # its values are defaults of the other options
        expose_value=False,
        callback=_read_config,
        help="TOML file with settings: those of the engine at the top, a command's own in a table of its name.",
    )(function)


def _set_debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    del param
    ctx.ensure_object(Session).debug |= value


def _debug_flag(function: Decorated) -> Decorated:
    return click.option(
        "--debug",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_set_debug,
        help="Show the traceback of an error.",
    )(function)


# Sampling

_SAMPLING: dict[str, tuple[WholeNumber | Number, str]] = {
    "temperature": (Number(), "0: always the most likely token. Default: what the model's makers say, else 1."),
    "top_p": (Number(), "Choose among the most likely tokens that together have this probability. Default: likewise."),
    "top_k": (WholeNumber(), "Choose among so many of the most likely tokens; 0: among all."),
    "min_p": (Number(), "Leave out tokens below this fraction of the most likely one's probability."),
    "repetition_penalty": (Number(), "Above 1: tokens of prompt and output become less likely."),
    "presence_penalty": (Number(), "Above 0: tokens of the output become less likely."),
    "frequency_penalty": (Number(), "Above 0: tokens of the output become less likely each time."),
}


def takes_sampling(*, max_tokens: int | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command sampling options; it receives `sampling`, the fields that were named (for SamplingParams)."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def with_sampling(**values: Any) -> Any:
            names = ("max_tokens", "stop", "ignore_eos", *_SAMPLING)
            given = {name: values.pop(name) for name in names}
            # By identity: 0 equals False, and a temperature of 0 is a wish.
            sampling = {name: value for name, value in given.items() if value is not None and value is not False}
            return function(sampling=sampling, **values)

        decorated: Callable[..., Any] = with_sampling
        decorated = flag("ignore_eos", help="Go on after the model's end of text.", is_flag=True)(decorated)
        text = f"End before this text; may be given several times, at most {MAX_STOP_STRINGS}."
        decorated = flag("stop", help=text, multiple=True)(decorated)
        for name, (kind, meaning) in reversed(_SAMPLING.items()):
            decorated = flag(name, help=meaning, type=kind)(decorated)
        text = "Output tokens at most." + ("" if max_tokens is not None else " Default: what fits.")
        return flag("max_tokens", "-n", help=text, type=WholeNumber(), default=max_tokens)(decorated)

    return decorate
