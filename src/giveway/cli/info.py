"""`giveway info`."""

from __future__ import annotations

import json

import click

from giveway.cli.flags import flag, takes_engine_options
from giveway.options import EngineOptions

_SIZING = (
    "device", "backend", "dtype", "max_model_len", "block_size", "kv_cache_memory_bytes", "num_kv_blocks", "swap_space",
)  # fmt: skip


@click.command("info")
@click.argument("model", required=False, envvar="GIVEWAY_MODEL")
@flag("json", into="as_json", is_flag=True, help="Print JSON instead of a table.")
@takes_engine_options(only=_SIZING)
def command(options: EngineOptions, model: str | None, as_json: bool) -> int:
    """Show the geometry of MODEL, what its weights and KV take, and how many blocks fit. Loads no weights.

    MODEL: a .gguf file, a safetensors directory, a hub name, or 'tiny'. Default: the embedded SmolLM2-135M-Instruct.
    """
    from dataclasses import replace

    from giveway.cli.model_facts import facts_for_people, model_facts

    facts = model_facts(replace(options, model=model))
    if as_json:
        print(json.dumps(facts, indent=2))
        return 0
    rows = facts_for_people(facts)
    width = max(len(title) for title, _ in rows)
    for title, text in rows:
        print(f"{title:{width}}  {text}")
    return 0
