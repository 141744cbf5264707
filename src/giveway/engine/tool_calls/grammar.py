"""The grammar that makes a model call a tool, in the way in which it writes calls."""

from __future__ import annotations

import json

from giveway.core.errors import InvalidRequestError
from giveway.core.ids import TokenId
from giveway.core.sampling import StructuredOutput
from giveway.core.tokenizing import Tokenizing
from giveway.engine.tool_calls.formats import ToolFormat
from giveway.engine.tool_calls.wishes import check_tools

MAX_FORCED_CALLS = 16  # in one answer that must call: a model that never ends its list is ended


def special_marker_of(tool_format: ToolFormat, tokenizer: Tokenizing) -> TokenId | None:
    """Return the control token that the marker of a call is in a vocabulary; None: it is ordinary text there."""
    ids = tokenizer.encode(tool_format.marker, add_special_tokens=False, parse_special=True)
    return ids[0] if len(ids) == 1 and ids[0] in tokenizer.special_ids else None


def constraint_for_tools(
    tool_format: ToolFormat,
    tools: object,
    choice: str,
    *,
    is_named: bool = False,
    is_parallel: bool = True,
    marker_token_id: TokenId | None = None,
) -> StructuredOutput | None:
    """Return the form of an answer that must call; None: the choice leaves the model free.

    tools: the field of the request. choice: none, auto or required; with `is_named` the function that is called, once.
    is_parallel: whether there may be several calls. marker_token_id: what special_marker_of says; None: a model that
    announces calls by a control token is made to write its name, letter by letter.
    Raises InvalidRequestError, naming the field, for tools or a choice that is wrong, and for schemas that are too long
    together.
    """
    wanted = check_tools(tools)
    if is_named:
        wanted = tuple(tool for tool in wanted if tool.name == choice)
        if not wanted:
            raise InvalidRequestError(f"tool_choice.function.name is {choice[:64]!r}, which is none of the tools")
    elif choice in ("none", "auto"):
        return None
    elif choice != "required":
        raise InvalidRequestError(f"tool_choice is {choice[:60]!r}; it must be none, auto, required or a function")
    elif not wanted:
        raise InvalidRequestError("tool_choice is 'required', but the request has no tools")
    most = MAX_FORCED_CALLS if is_parallel and not is_named else 1
    rules = [f"start: {_start(tool_format, marker_token_id, most)}"]
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(wanted))))
    key = "parameters" if tool_format is ToolFormat.LLAMA else "arguments"
    for index, tool in enumerate(wanted):
        # The parameters are a schema of their own, so that a $ref in them finds what it means.
        head = _literal(f'{{"name": {json.dumps(tool.name)}, "{key}": ')
        rules.append(f'call_{index}: {head} %json {json.dumps(tool.parameters, ensure_ascii=False)} "}}"')
    try:
        return StructuredOutput(grammar="\n".join(rules) + "\n")
    except InvalidRequestError as error:
        raise InvalidRequestError(f"tools: their schemas are too long to make the model call one ({error})") from error


def _start(tool_format: ToolFormat, marker_token_id: TokenId | None, most: int) -> str:
    """Write the right side of the first rule: calls with what stands around them."""
    marker = _literal(tool_format.marker) if marker_token_id is None else f"<[{marker_token_id}]>"
    listed = f'"[" {_repeated("call", ", ", most)} "]"'
    match tool_format:
        case ToolFormat.HERMES:
            return _repeated(f'{marker} "\\n" call "\\n" {_literal(tool_format.end_marker)}', "\n", most)
        case ToolFormat.SMOLLM:
            return f"{marker} {listed} {_literal(tool_format.end_marker)}"
        case ToolFormat.MISTRAL:
            return f"{marker} {listed}"
        case ToolFormat.LLAMA:
            return _repeated("call", "; ", most)


def _repeated(item: str, separator: str, most: int) -> str:
    """Write an item, and perhaps more of it."""
    return item if most == 1 else f"{item} ({_literal(separator)} {item}){{0,{most - 1}}}"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
