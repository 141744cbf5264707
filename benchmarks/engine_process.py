"""One engine in a process of its own: started, spoken to, stopped between its turns, and its end explained."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Self

from benchmarks.workers.protocol import Finished, Limits, Loaded, Model, Request

REPOSITORY = Path(__file__).resolve().parents[1]
_QUIT_S = 10.0  # a worker that has not ended by then is killed
_REASON_LINES, _REASON_CHARACTERS = 3, 400


@dataclass(frozen=True, slots=True)
class Engine:
    """One contestant."""

    name: str  # as reported; the same engine may take part twice, with different options
    module: str  # of its worker, seen from the repository
    python: str  # of its environment
    options: dict[str, Any] = field(default_factory=dict)
    is_peer: bool = True  # not GiveWay


class EngineFailure(Exception):
    """The engine cannot go on with this scenario; the text says why."""


class EngineProcess:
    """A running worker. Its process group stands still but while a command is being carried out.

    So an engine whose threads wait by spinning, or that has work in the background, takes nothing from the one whose
    turn it is. The group is of this session: if this process is killed, the system lets stopped groups end.
    """

    def __init__(self, engine: Engine, log: Path, *, threads: int, timeout_s: float) -> None:
        """Start the worker. log: file for whatever it prints. timeout_s: for the answer to one command."""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",  # what is compared lies on the disk
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._log, self._timeout_s, self._options = log, timeout_s, engine.options
        self._started_s = time.perf_counter()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [engine.python, "-m", engine.module],
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                process_group=0,
            )

    @property
    def age_s(self) -> float:
        """Seconds since its start."""
        return time.perf_counter() - self._started_s

    def load(self, model: Model, limits: Limits) -> Loaded:
        """Load the model. Raises EngineFailure."""
        options = self._options
        return Loaded(
            **self._ask({"command": "load", "model": asdict(model), "limits": asdict(limits), "options": options})
        )

    def run(self, requests: Sequence[Request]) -> Finished:
        """Have all requests answered. Raises EngineFailure, also for outputs of a wrong length."""
        answer = self._ask({"command": "run", "requests": [asdict(request) for request in requests]})
        finished = Finished(**answer)
        _check_lengths(requests, finished)
        return finished

    def close(self) -> None:
        """End the process."""
        with suppress(OSError):
            self._signal(signal.SIGCONT)
            self._input.write(b'{"command": "quit"}\n')
            self._input.close()
        try:
            self._process.wait(_QUIT_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._output.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _input(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def _output(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            self._signal(signal.SIGKILL)

        timer = threading.Timer(self._timeout_s, give_up)
        timer.start()
        try:
            self._signal(signal.SIGCONT)
            self._input.write(json.dumps(message).encode() + b"\n")
            self._input.flush()
            line = self._output.readline()
        except OSError:  # it ended before it read the message
            line = b""
        finally:
            timer.cancel()
        if not line:
            code = self._process.wait()
            how = f"no answer in {self._timeout_s:g} s" if is_late.is_set() else f"the process ended with code {code}"
            raise EngineFailure(f"{how}; last output: {_last_lines(self._log)}")
        self._signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        if "unable" in answer:
            raise EngineFailure(answer["unable"])
        return answer

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _check_lengths(requests: Sequence[Request], finished: Finished) -> None:
    found = [len(output) for output in finished.token_ids]
    wanted = [request.max_tokens for request in requests]
    wrong = [pair for pair in zip(found, wanted, strict=True) if pair[0] != pair[1]]
    if wrong:
        raise EngineFailure(
            f"{len(wrong)} of {len(wanted)} outputs have a wrong length, the first {wrong[0][0]} tokens instead of "
            f"{wrong[0][1]}"
        )


def _last_lines(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-_REASON_LINES:])[-_REASON_CHARACTERS:] or "none"
