"""Calls of tools: how a model writes them, taking them out of its text, and making it write one."""

from __future__ import annotations

from giveway.engine.tool_calls.formats import ToolFormat, tool_format_of
from giveway.engine.tool_calls.grammar import constraint_for_tools, special_marker_of
from giveway.engine.tool_calls.parser import Parsed, ToolCall, ToolCallParser
from giveway.engine.tool_calls.wishes import Tool, check_tools

__all__ = [
    "Parsed",
    "Tool",
    "ToolCall",
    "ToolCallParser",
    "ToolFormat",
    "check_tools",
    "constraint_for_tools",
    "special_marker_of",
    "tool_format_of",
]
