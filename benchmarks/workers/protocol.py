"""What the comparison and a worker say to each other: one JSON object a line, on the worker's stdin and stdout.

    {"command": "load", "model": {...}, "limits": {...}, "options": {...}}  ->  {"version": ..., "settings": {...}}
    {"command": "run", "requests": [{"prompt": [...], "max_tokens": 8}]}    ->  {"seconds": ..., "first_token_s": ...,
                                                                                 "cpu_s": ..., "token_ids": [[...]]}
    {"command": "quit"}                                                     ->  the process ends

A command that the engine cannot carry out is answered by {"unable": reason}; the process goes on. Standard library
only: this module is imported in the environment of every engine.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn, Protocol, TextIO


@dataclass(frozen=True, slots=True)
class Request:
    """One request: greedy, and exactly `max_tokens` long whatever the model says."""

    prompt: list[int]  # token ids
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Model:
    """The same weights in two forms; an engine takes the one that it can read."""

    gguf: str  # path of the file
    directory: str  # safetensors with the file's weights, unpacked to float32


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine must have room for: everything at once, so that no engine has to preempt."""

    threads: int
    num_seqs: int  # requests at a time
    kv_tokens: int  # of all requests together, each rounded up to whole pages of 256
    kv_bytes: int  # of these tokens in float32, the widest that an engine keeps them in
    max_model_len: int  # prompt and output tokens of the longest request


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was loaded, for the report."""

    version: str
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Finished:
    """One run: all requests handed in at second 0."""

    seconds: float  # until the last token of the last request
    first_token_s: float  # until the first token of whichever request had one first
    cpu_s: float  # processor time of all threads of the process in these seconds
    token_ids: list[list[int]]  # output of each request, in the order of the requests


class Unable(Exception):
    """The engine cannot do this; the text says why."""


class Worker(Protocol):
    """One engine. `load` is called once, before `run`."""

    def load(self, model: Model, limits: Limits, options: dict[str, Any]) -> Loaded:
        """Load the model. options: the engine's own, from the command line. Raises Unable."""

    def run(self, requests: Sequence[Request]) -> Finished:
        """Answer all requests, timed from the first to the last. Raises Unable."""


@dataclass(slots=True)
class Stopwatch:
    """Times one run; started when made."""

    started_s: float = field(default_factory=time.perf_counter)
    started_cpu_s: float = field(default_factory=time.process_time)
    first_s: float | None = None

    def saw_token(self) -> None:
        """Note that a token is there; only the first one counts."""
        if self.first_s is None:
            self.first_s = time.perf_counter() - self.started_s

    def finish(self, token_ids: Iterable[Iterable[int]]) -> Finished:
        """End the run. token_ids: of each request; made into lists after the clock is read."""
        seconds, cpu_s = time.perf_counter() - self.started_s, time.process_time() - self.started_cpu_s
        outputs = [[int(token) for token in output] for output in token_ids]
        return Finished(seconds, seconds if self.first_s is None else self.first_s, cpu_s, outputs)


def serve(make_worker: Callable[[], Worker]) -> NoReturn:
    """Answer commands until `quit` or the end of stdin, then end the process.

    make_worker: called at the first command. What the engine prints goes to stderr: stdout belongs to the protocol.
    Any other exception than Unable ends the process at once, with code 1 and its traceback on stderr.
    """
    code = 0
    try:
        _answer_all(make_worker, _take_stdout())
    except BaseException:  # noqa: BLE001  # the one place that every fault of an engine comes to
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # threads that an engine has left behind would hold up a normal exit for ever


def _answer_all(make_worker: Callable[[], Worker], answers: TextIO) -> None:
    worker: Worker | None = None
    for line in sys.stdin:
        message = json.loads(line)
        if message["command"] == "quit":
            return
        try:
            if worker is None:
                worker = make_worker()
            answer = _answer(worker, message)
        except Unable as reason:
            answer = {"unable": str(reason)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _take_stdout() -> TextIO:
    """Keep stdout for the answers and let everything else that is printed there, from C too, go to stderr."""
    kept = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return kept


def _answer(worker: Worker, message: dict[str, Any]) -> dict[str, Any]:
    if message["command"] == "load":
        loaded = worker.load(Model(**message["model"]), Limits(**message["limits"]), message["options"])
        return asdict(loaded)
    finished = worker.run([Request(**request) for request in message["requests"]])
    return asdict(finished)
