"""GiveWay: an LLM inference engine in which low-priority work gives way and loses nothing.

Importing this package loads nothing but the standard library; a name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from giveway.build import build_engine
    from giveway.core.config import PreemptionChoice
    from giveway.core.errors import GiveWayError, InvalidRequestError, KVCacheFullError
    from giveway.core.request import FinishReason
    from giveway.core.sampling import SamplingParams, StructuredOutput
    from giveway.engine.async_engine import AsyncEngine
    from giveway.engine.engine import Engine
    from giveway.engine.outputs import RequestOutput, RequestUpdate
    from giveway.llm import LLM
    from giveway.options import EngineOptions

__version__ = "0.1.0"

_HOMES = {
    "LLM": "giveway.llm",
    "SamplingParams": "giveway.core.sampling",
    "StructuredOutput": "giveway.core.sampling",
    "Engine": "giveway.engine.engine",
    "AsyncEngine": "giveway.engine.async_engine",
    "EngineOptions": "giveway.options",
    "build_engine": "giveway.build",
    "RequestOutput": "giveway.engine.outputs",
    "RequestUpdate": "giveway.engine.outputs",
    "FinishReason": "giveway.core.request",
    "GiveWayError": "giveway.core.errors",
    "InvalidRequestError": "giveway.core.errors",
    "KVCacheFullError": "giveway.core.errors",
    "PreemptionChoice": "giveway.core.config",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "Engine",
    "EngineOptions",
    "FinishReason",
    "GiveWayError",
    "InvalidRequestError",
    "KVCacheFullError",
    "PreemptionChoice",
    "RequestOutput",
    "RequestUpdate",
    "SamplingParams",
    "StructuredOutput",
    "__version__",
    "build_engine",
]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'giveway' has no attribute {name!r}")
    return getattr(import_module(home), name)
