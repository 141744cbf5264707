"""An engine for tests that speaks the workers' protocol and computes nothing: it takes the seconds it is told to."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.workers.protocol import Finished, Limits, Loaded, Model, Request, Unable, serve


class FakeWorker:
    """Options: `seconds` of each run in turn; `crash_at`, `hang_at` or `short_at` a run, counted from 1; `unable`."""

    def load(self, model: Model, limits: Limits, options: dict[str, Any]) -> Loaded:
        """Load nothing."""
        print("this goes to the log, not among the answers")
        if "cannot_load" in options:
            raise Unable(options["cannot_load"])
        self.options, self.num_runs = options, 0
        return Loaded("1.0", {"threads": limits.threads})

    def run(self, requests: Sequence[Request]) -> Finished:
        """Answer each request with zeros."""
        self.num_runs += 1
        if "unable" in self.options:
            raise Unable(self.options["unable"])
        if self.num_runs == self.options.get("hang_at"):
            time.sleep(600)
        if self.num_runs == self.options.get("crash_at"):
            threading.Thread(target=time.sleep, args=(600,)).start()  # must not keep the process alive
            print("out of luck", file=sys.stderr)
            raise RuntimeError("crashed as told")
        seconds = self.options.get("seconds", [1.0])
        token = self.options.get("token", 0)
        outputs = [[token] * request.max_tokens for request in requests]
        if self.num_runs == self.options.get("short_at"):
            outputs[0].pop()
        return Finished(seconds[(self.num_runs - 1) % len(seconds)], 0.25, 0.5, outputs)


if __name__ == "__main__":
    serve(FakeWorker)
