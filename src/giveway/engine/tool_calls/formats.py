"""In which way a model writes calls of tools."""

from __future__ import annotations

import re
from enum import Enum


class ToolFormat(Enum):
    """How a model writes its calls. A call is a JSON object with a name and arguments."""

    HERMES = "hermes"  # <tool_call>{...}</tool_call>, as often as there are calls: Hermes, Qwen
    SMOLLM = "smollm"  # <tool_call>[{...}, {...}]</tool_call>: SmolLM2
    MISTRAL = "mistral"  # [TOOL_CALLS][{...}, {...}]
    LLAMA = "llama"  # {...} as the whole answer, "parameters" for arguments, or behind <|python_tag|>: Llama 3.x

    @property
    def marker(self) -> str:
        """What announces a call. Of LLAMA, what may."""
        return {"mistral": "[TOOL_CALLS]", "llama": "<|python_tag|>"}.get(self.value, "<tool_call>")

    @property
    def is_control(self) -> bool:
        """Whether the marker is a control token, which a text shows only with `skip_special_tokens=False`."""
        return self in (ToolFormat.MISTRAL, ToolFormat.LLAMA)

    @property
    def end_marker(self) -> str:
        """What follows a call; empty: nothing."""
        return "</tool_call>" if self in (ToolFormat.HERMES, ToolFormat.SMOLLM) else ""


def tool_format_of(template_source: str | None) -> ToolFormat | None:
    """Return how the model of a chat template writes calls; None: it takes no tools, or writes calls in another way.

    template_source: Jinja; None: the model has no template.
    """
    if template_source is None or not re.search(r"\btools\b", template_source):
        return None
    if "[TOOL_CALLS]" in template_source:
        return None if "[ARGS]" in template_source else ToolFormat.MISTRAL
    if "<tool_call>" in template_source:
        if "<function=" in template_source:  # calls as XML
            return None
        return ToolFormat.SMOLLM if re.search(r"<tool_call>\s*\[", template_source) else ToolFormat.HERMES
    if re.search(r'\\?"parameters\\?": ', template_source) and re.search(r'\\?"name\\?": ', template_source):
        return ToolFormat.LLAMA
    return None
