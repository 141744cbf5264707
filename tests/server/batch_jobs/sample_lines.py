"""Lines of input and their answers, for tests; light to import."""

from __future__ import annotations

import json
from typing import Any, Literal

from giveway.server.batch_jobs.records import BatchLine, LineAnswer

CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"


def request_line(custom_id: str, content: str = "hello", **changes: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body, **changes}


def jsonl(*values: Any) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def lines_of(content: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in content.splitlines()]


def answer_of(line: BatchLine) -> LineAnswer:
    """Echo, in OpenAI's shape."""
    body = {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": line.body["messages"][0]["content"]}}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}},
    }
    return LineAnswer(200, body, f"req-{line.custom_id}")
