"""GiveWay: an LLM inference engine in which low-priority work gives way and loses nothing."""

__version__ = "0.1.0"
