"""`giveway`: entry point, the list of commands, and how errors reach the user."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

import click

from giveway import __version__
from giveway.cli.environment import warn_about_unknown_variables
from giveway.cli.lazy_group import LazyGroup
from giveway.cli.session import Session
from giveway.core.errors import GiveWayError

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE

COMMANDS = {
    "demo": ("giveway.cli.demo", "See background work give way and lose nothing."),
    "generate": ("giveway.cli.generate", "Stream the answer to one prompt."),
    "chat": ("giveway.cli.chat", "Talk with a model."),
    "serve": ("giveway.cli.serve", "Serve a model over HTTP, as OpenAI's API."),
    "run": ("giveway.cli.run", "Answer a file of requests; can be stopped and resumed."),
    "explain": ("giveway.cli.explain", "Say why a request waited, from a file that --trace wrote."),
    "trace": ("giveway.cli.trace", "Draw such a file for ui.perfetto.dev."),
    "info": ("giveway.cli.info", "Show a model's geometry, and what fits into memory."),
    "verify": ("giveway.cli.verify", "Check that whoever gives way gets the undisturbed answer, to the bit."),
    "bench": ("giveway.cli.bench", "Measure what this engine costs and gives."),
}


@click.group(
    cls=LazyGroup,
    commands_by_name=COMMANDS,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, "--version", message="giveway %(version)s")
@click.option("--debug", is_flag=True, envvar="GIVEWAY_DEBUG", help="Show the traceback of an error.")
@click.pass_context
def giveway(ctx: click.Context, debug: bool) -> None:
    """An LLM inference engine in which low-priority work gives way and loses nothing.

    Every option of a command can also be given as an environment variable (--max-num-seqs: GIVEWAY_MAX_NUM_SEQS) or
    in a TOML file named with --config. A flag wins over the environment, the environment over the file.
    """
    ctx.ensure_object(Session).debug |= debug
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
        return
    warn_about_unknown_variables(os.environ, ctx)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code. A standard stream that is closed becomes one to nowhere."""
    _open_closed_streams()
    session, notices = Session(), _Notices(logging.WARNING)
    logger = logging.getLogger("giveway")
    logger.addHandler(notices)
    try:
        code = _run(arguments, session)
        sys.stdout.flush()
    except BrokenPipeError:
        _silence_stdout()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        return _report(error, session)
    finally:
        logger.removeHandler(notices)
    return code


def _run(arguments: Sequence[str] | None, session: Session) -> int:
    try:
        code = giveway.main(
            None if arguments is None else list(arguments), prog_name="giveway", standalone_mode=False, obj=session
        )
        return code if isinstance(code, int) else 0
    except (click.Abort, KeyboardInterrupt):
        print(file=sys.stderr)
        return EXIT_INTERRUPTED
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "giveway"
        _say_error(f"{error.format_message()} (see '{path} --help')")
        return EXIT_USAGE
    except click.ClickException as error:
        _say_error(error.format_message())
        return error.exit_code
    except GiveWayError as error:
        return _report(error, session)
    except SystemExit as stop:  # click's own answer to a broken pipe
        return stop.code if isinstance(stop.code, int) else EXIT_ERROR


def _report(error: Exception, session: Session) -> int:
    if session.debug:
        import traceback

        traceback.print_exception(error)
    else:
        _say_error(str(error))
    return EXIT_ERROR


def _say_error(message: str) -> None:
    print("error: " + " ".join(message.split()), file=sys.stderr)


def _open_closed_streams() -> None:
    """Replace absent streams (`>&-`): without one, what is printed to it goes astray, and a file may get its number.

    In this order each new stream gets the lowest free descriptor, which is the one that was closed.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # as long-lived as the process


def _silence_stdout() -> None:
    """Point standard output to nowhere, so that the interpreter's own last flush does not complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


class _Notices(logging.Handler):
    """One line a notice on standard error, whatever that is at the moment (a live display replaces it)."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"{record.levelname.lower()}: {' '.join(record.getMessage().split())}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
