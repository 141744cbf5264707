"""The Jinja environment in which chat templates run. They come with model files, so they are strangers' programs.

Jinja's own sandbox keeps a template away from Python's internals. This one also keeps it from taking the machine: every
loop turn, call and operator draws on the meter of the running render, which ends it at a limit of turns or of time.
What could take very long or very much memory in one single operation is bounded before it starts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_TURNS = 1_000_000  # loop turns, calls and operators of one render
MAX_TEXT_CHARACTERS = 16 << 20  # of any string that a template makes, and of its output
MAX_RANGE = 100_000
MAX_INTEGER_BITS = 256
_MAX_INDENT = 1_000
_TURNS_BETWEEN_CLOCK_LOOKS = 512

# What published templates use; the others make long texts from short arguments, or random ones.
_FILTERS = frozenset(
    {"abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float",
    "forceescape", "groupby", "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max",
    "min", "reject", "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "sort",
    "string", "sum", "title", "tojson", "trim", "truncate", "unique", "upper", "wordcount"}
)  # fmt: skip
# Methods of a string that make a long one from two short arguments, or that are programs of their own.
_REFUSED_METHODS = frozenset({"center", "expandtabs", "format", "format_map", "ljust", "rjust", "translate", "zfill"})


class Meter:
    """What one render may still use."""

    def __init__(self, *, limit_s: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._limit_s = limit_s
        self._end_s = clock() + limit_s
        self._turns = 0

    def turn(self) -> None:
        """Count one step of the template. Raises SecurityError at a limit."""
        self._turns += 1
        if self._turns > MAX_TURNS:
            raise SecurityError(f"took more than {MAX_TURNS} steps")
        if self._turns % _TURNS_BETWEEN_CLOCK_LOOKS == 0:
            self.look_at_clock()

    def look_at_clock(self) -> None:
        """Raise SecurityError if the time is up."""
        if self._clock() > self._end_s:
            raise SecurityError(f"ran longer than {self._limit_s:g} s")


# The environment is shared by concurrent renders, each in its own thread or task, so a render's meter lives here.
current_meter: ContextVar[Meter] = ContextVar("current_meter")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """An immutable sandbox with meters, and with the functions and filters that published templates use."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        """now: local time, for templates that write the date."""
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # the optimizer would compute constant expressions outside any meter
            extensions=[loopcontrols, _GenerationTag],
            finalize=_check_size,
        )
        self.filters = {name: filter_ for name, filter_ in self.filters.items() if name in _FILTERS}
        self.filters |= {"tojson": _to_json, "replace": _replace, "join": _join, "indent": _indent, "string": _to_text}
        self.filters |= {_METERED: _metered, _CONCAT: _concat, _CHECKED: _checked}
        self.globals = {
            "range": _bounded_range,
            "namespace": _TemplateNamespace,
            "dict": _make_dict,
            "raise_exception": _raise_exception,
            "strftime_now": lambda pattern: now().strftime(_check_date_pattern(pattern)),
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse, and put meters into the tree."""
        tree: nodes.Template = _MeterInserter().visit(super()._parse(source, name, filename))
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may look at this attribute."""
        if isinstance(obj, str) and attr in _REFUSED_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """Offer no sandboxed `str.format` either: a width in it takes as much memory as it says."""

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call something from a template: count it, and look at what could blow up before and after."""
        current_meter.get().turn()
        _check_call(obj, args)
        if isinstance(obj, jinja2.runtime.LoopContext):  # `loop(items)` of a recursive loop
            args = (_metered(args[0]), *args[1:]) if args else args
        return _checked(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right` if the result is sure to be small."""
        current_meter.get().turn()
        _check_operands(operator, left, right)
        return _checked(super().call_binop(context, operator, left, right))


_METERED, _CONCAT, _CHECKED = "giveway metered", "giveway concat", "giveway checked"  # no template can spell these


class _MeterInserter(NodeTransformer):
    """Sends loops, `~` and `{% set %}` blocks through filters that count; nothing else can repeat or double."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - Jinja's naming
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _METERED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.filter = _filtered(node.filter, _CHECKED)
        return node


def _filtered(node: nodes.Node | None, name: str) -> nodes.Filter:
    return nodes.Filter(cast("nodes.Expr | None", node), name, [], [], None, None, lineno=node.lineno if node else 1)


class _GenerationTag(Extension):
    """`{% generation %}`: marks what an assistant wrote, for training; here only its content counts."""

    tags = {"generation"}  # noqa: RUF012 - the attribute that Jinja defines

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateNamespace(Namespace):
    """Jinja's namespace without names that could reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may pass `self=`
        self, *positional = args
        values = dict(*positional, **kwargs)
        for name in values:
            _refuse_underscore(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"sets the attribute {name!r} of a namespace")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it: not escaped for HTML, as Jinja's own filter would do."""
    if isinstance(indent, int) and indent > 16:
        raise SecurityError(f"indents JSON by {indent}")
    _check_size(value)
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return str(_checked(text))


def _replace(value: object, old: str, new: str, count: int = -1) -> str:
    text, old, new = str(value), str(old), str(new)
    _check_replacement(text, old, new)
    return text.replace(old, new, count)


def _join(values: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
    """Join the texts of values, or of one member of each, with d between."""
    parts: list[str] = []
    total = 0
    for value in _metered(values):
        member = value if attribute is None else value.get(attribute, "") if isinstance(value, Mapping) else ""
        parts.append(_to_text(member))
        total += len(parts[-1]) + len(str(d))
        _check_length(total)
    return str(d).join(parts)


def _concat(values: list[Any]) -> str:
    return _join(values)


def _to_text(value: Any) -> str:
    return value if isinstance(value, str) else str(_check_size(value))


def _check_date_pattern(pattern: str) -> str:
    if len(pattern) > 200 or re.search(r"%[^A-Za-z%]*[0-9]", pattern):
        raise SecurityError("formats a date with a width, or with more than 200 characters")
    return pattern


def _indent(value: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    filler = width if isinstance(width, str) else " " * min(width, _MAX_INDENT)
    _check_length(len(value) + (value.count("\n") + 1) * len(filler))
    return jinja2.filters.do_indent(value, filler, first, blank)


def _bounded_range(*bounds: int) -> range:
    numbers = range(*bounds)
    if len(numbers) > MAX_RANGE:
        raise SecurityError(f"makes a range of {len(numbers)} numbers; the limit is {MAX_RANGE}")
    return numbers


def _metered(values: Iterable[Any]) -> Iterator[Any]:
    meter = current_meter.get()
    for value in values:
        meter.turn()
        yield value


def _check_operands(operator: str, left: Any, right: Any) -> None:
    if operator == "**" and not (_is_small(left) and _is_small(right)):
        raise SecurityError("raises a number to a power that is too large")
    if operator == "*":
        for repeated, count in ((left, right), (right, left)):
            if isinstance(repeated, str | list | tuple) and isinstance(count, int):
                _check_length(len(repeated) * max(count, 0))
    if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        _check_length(len(left) + len(right))
    if operator == "%" and isinstance(left, str) and any(character.isdigit() or character == "*" for character in left):
        raise SecurityError("formats with a width")  # "%999999999d" would take that much memory


def _is_small(value: Any) -> bool:
    return not isinstance(value, int) or value.bit_length() <= 6


def _check_call(obj: Any, args: tuple[Any, ...]) -> None:
    owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
    if not isinstance(owner, str):
        return
    if name == "replace" and len(args) >= 2 and all(isinstance(value, str) for value in args[:2]):
        _check_replacement(owner, args[0], args[1])
    elif name == "join" and args and isinstance(args[0], list | tuple):
        _check_length(sum(len(str(part)) + len(owner) for part in args[0]))


def _check_replacement(text: str, old: str, new: str) -> None:
    _check_length(len(text) + text.count(old) * len(new))


def _check_length(length: int) -> None:
    if length > MAX_TEXT_CHARACTERS:
        raise SecurityError(f"makes a text or list of {length} items; the limit is {MAX_TEXT_CHARACTERS}")


def _checked(value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        _check_length(len(value))
    elif isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        raise SecurityError(f"makes a number of more than {MAX_INTEGER_BITS} bits")
    return value


def _check_size(value: Any) -> Any:
    """Return the value if it can be written out in a bounded number of steps: nested lists may share members."""
    if not isinstance(value, list | tuple | dict):
        return value
    meter, waiting = current_meter.get(), [value]
    while waiting:
        inside = waiting.pop()
        members = [*inside.keys(), *inside.values()] if isinstance(inside, dict) else inside
        for member in members:
            meter.turn()
            if isinstance(member, list | tuple | dict):
                waiting.append(member)
    return value
