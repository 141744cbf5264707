"""`giveway demo`."""

from __future__ import annotations

import json

import click

from giveway.cli.flags import flag, takes_engine_options
from giveway.cli.output_file import open_target, takes_json_file
from giveway.options import EngineOptions


@click.command("demo")
@flag(
    "write_up",
    is_flag=True,
    help="Run the preemption tutorial's demonstration on the tiny model instead; needs PyTorch.",
)
@takes_json_file("the results")
@takes_engine_options(only=("model", "device", "backend", "dtype", "exact", "num_threads", "check_invariants"))
def command(options: EngineOptions, write_up: bool, json_file: str | None) -> int:
    """See background work give way to urgent questions, and lose nothing.

    Eight stories are written in a pool that is too small for them; three urgent questions arrive meanwhile. The same
    work runs without preemption, first come first served, and with priorities, victims being recomputed or swapped.
    Every answer is compared with a run that had room for everybody. Exit code 1: an answer differs, or a run that
    should finish did not.
    """
    from dataclasses import replace

    from giveway.demo import workload
    from giveway.demo.display import make_display
    from giveway.demo.show import run_demo

    target = open_target(json_file)
    if write_up:
        # Blocks of one token, which the native kernels do not take.
        backend = "torch" if options.backend == "auto" else options.backend
        options = replace(options, model=options.model or "tiny", block_size=1, backend=backend)
    make = workload.write_up if write_up else workload.urgent_among_background
    result = run_demo(options, make, make_display())
    if target is not None:
        target.write_text(json.dumps(result.as_json(), indent=2) + "\n")
    return 0 if result.is_as_promised else 1
