"""`giveway chat`."""

from __future__ import annotations

import sys
from typing import Any

import click

from giveway.cli.flags import flag, takes_engine_options, takes_sampling
from giveway.options import EngineOptions

_HELP = "/reset forgets the conversation, /exit or Ctrl-D ends the chat, Ctrl-C stops an answer."


@click.command("chat")
@flag("system", metavar="TEXT", help="System message, at the beginning of the conversation.")
@flag("stats", is_flag=True, help="Print a line of figures to standard error after each answer.")
@takes_sampling(max_tokens=512)
@takes_engine_options()
def command(options: EngineOptions, sampling: dict[str, Any], system: str | None, stats: bool) -> int:
    """Talk with a model; it remembers what was said.

    /reset forgets the conversation, /exit or Ctrl-D ends the chat, Ctrl-C stops an answer. When the conversation no
    longer fits, its oldest messages are left out. Off a terminal every line of standard input is a message, and every
    answer is one line of standard output.
    """
    from giveway.build import build_engine
    from giveway.cli.answering import tell_if_meaningless
    from giveway.cli.conversation import Conversation
    from giveway.cli.standard_input import check_utf8
    from giveway.core.sampling import SamplingParams

    params = SamplingParams(**sampling)
    check_utf8(system or "", "--system")
    built = build_engine(options)
    tell_if_meaningless(options)
    try:
        conversation = Conversation(built, params, system)
        if sys.stdin.isatty():
            return _talk(conversation, built.describe(), stats)
        return _answer_lines(conversation, stats)
    finally:
        built.engine.close()


def _talk(conversation: Any, description: str, stats: bool) -> int:
    from contextlib import suppress

    with suppress(ImportError):  # line editing and history, where the system has them
        import readline  # noqa: F401

    print(f"{description}\n{_HELP}")
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D ends the chat)")
            continue
        except UnicodeDecodeError as error:
            print(f"error: the line is not UTF-8 (byte {error.start})", file=sys.stderr)
            continue
        if line == "/exit":
            return 0
        if line == "/reset":
            conversation.reset()
        elif line.startswith("/"):
            print(_HELP)
        elif line:
            _answer_aloud(conversation, line, stats)


def _answer_aloud(conversation: Any, line: str, stats: bool) -> None:
    from giveway.cli.standard_input import check_utf8
    from giveway.core.errors import InvalidRequestError, RequestFailedError

    try:
        check_utf8(line, "the line")
        conversation.ask(line, lambda text: print(text, end="", flush=True))
    except (InvalidRequestError, RequestFailedError) as error:  # this message's fault; the chat goes on
        print(f"error: {error}", file=sys.stderr)
        return
    print()
    if stats:
        print(conversation.last_figures, file=sys.stderr)


def _answer_lines(conversation: Any, stats: bool) -> int:
    from giveway.cli.standard_input import stdin_lines
    from giveway.core.errors import GiveWayError

    for line in stdin_lines():
        text = line.strip()
        if text == "/exit":
            return 0
        if text == "/reset":
            conversation.reset()
        elif text:
            try:
                answer = conversation.ask(text, lambda _: None)
            except GiveWayError as error:
                raise type(error)(f"message {text[:60]!r}: {error}") from error
            print(" ".join(answer.split()), flush=True)
            if stats:
                print(conversation.last_figures, file=sys.stderr)
            if conversation.was_interrupted:
                return 130
    return 0
