"""Traces of decisions: `--trace FILE` writes them; `giveway explain`, `giveway trace` and `read_trace` read them."""

from giveway.engine.trace.causes import UnservedReason
from giveway.engine.trace.explain import Alternative, RequestTotals, Unserved
from giveway.engine.trace.trace import Trace, read_trace
from giveway.engine.trace.writer import TraceWriter

__all__ = ["Alternative", "RequestTotals", "Trace", "TraceWriter", "Unserved", "UnservedReason", "read_trace"]
