"""The composition root: from options to an engine. The only place where core, engine and runtime meet."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from giveway.backends import load_backend
from giveway.core.config import (
    LEAST_URGENT_CLASS,
    MOST_URGENT_CLASS,
    CacheConfig,
    PreemptionChoice,
    SchedulerConfig,
    SchedulingPolicy,
    VictimOrder,
)
from giveway.core.cost_profile import SHIPPED, CostProfile
from giveway.core.errors import ConfigError, InvalidRequestError
from giveway.core.ids import TokenId
from giveway.core.planner import plan_step
from giveway.core.scheduler import Scheduler
from giveway.core.tokenizing import Tokenizing
from giveway.engine.clock import Clock, MonotonicClock
from giveway.engine.engine import Engine
from giveway.engine.intake import Defaults, Intake
from giveway.options import GIB, EngineOptions
from giveway.profile_cache import ProfileCache, default_directory, processor_kind, profile_key
from giveway.runtime.backend import Backend
from giveway.runtime.copies import SynchronousCopies
from giveway.runtime.grammar import GrammarCompiler
from giveway.runtime.model_executor import ModelExecutor

if TYPE_CHECKING:
    from giveway.engine.trace import TraceWriter
    from giveway.runtime.disk_tier import DiskTier
    from giveway.runtime.tokenizer.chat_template import ChatTemplate, ChatTokenizing

logger = logging.getLogger("giveway")

DRY_CONTEXT = 8192
ASSUMED_MEMORY = 4 * GIB  # free memory, where the system does not say


class ChatEncoder(Protocol):
    """Messages to token ids."""

    def __call__(self, messages: Sequence[Mapping[str, Any]], **template_arguments: Any) -> list[TokenId]:
        """Return the ids of a conversation, ready for the model's answer. Raises InvalidRequestError."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model ready to run: its backend and its text side."""

    name: str
    backend: Backend
    tokenizer: Tokenizing
    encode_chat: ChatEncoder
    max_positions: int
    eos_token_ids: frozenset[TokenId]
    defaults: Defaults
    chat_template_source: str | None = None  # as the model's files have it; None: it has no chat template

    @property
    def vocab_size(self) -> int:
        """Ids that prompts may hold: whatever the model can generate can be handed in again, also without a text."""
        return max(self.backend.vocab_size, self.tokenizer.vocab_size)


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine with what its users need to know about it."""

    engine: Engine
    model: Model
    scheduler_config: SchedulerConfig
    cache_config: CacheConfig

    def describe(self) -> str:
        """Return one line for people: model, backend and pool."""
        cache = self.cache_config
        block_bytes = cache.block_size * self.model.backend.kv_bytes_per_token
        disk = f", disk {format_bytes(cache.num_disk_blocks * block_bytes)}" if cache.num_disk_blocks else ""
        return (
            f"{self.model.name} on {self.model.backend.description}; KV pool {cache.num_device_slots} tokens in "
            f"{cache.num_device_blocks} blocks ({format_bytes(cache.num_device_blocks * block_bytes)}), host pool "
            f"{format_bytes(cache.num_host_blocks * block_bytes)}{disk}"
        )


def build_engine(options: EngineOptions, clock: Clock | None = None) -> BuiltEngine:
    """Load the model, size the pools, and connect everything.

    Raises ConfigError, ModelError, MissingDependencyError.
    """
    _check(options)
    model = load_model(options)
    if not model.backend.is_exact:
        logger.warning("not exact: an answer may depend on batch mates, chunking and preemption (--exact promises not)")
    return build_on(model, options, clock)


def build_on(model: Model, options: EngineOptions, clock: Clock | None = None) -> BuiltEngine:
    """Build an engine on a model that is already loaded. Its pools are allocated anew: one engine at a time."""
    clock = clock or MonotonicClock()
    cache = size_pools(options, model.backend)
    # The dry run's clock says nothing about real work, and its counts are compared with others.
    refines = options.cost_profile is None and model.backend.device != "dry"
    scheduler_config = _scheduler_config(options, model, cache, refines=refines)
    kept = ProfileCache(default_directory() if refines else None)
    key = _profile_key(model, options)
    costs = kept.load(key) or SHIPPED
    if options.cost_profile is not None:
        costs = read_cost_profile(Path(options.cost_profile))
    model.backend.allocate(
        num_device_blocks=cache.num_device_blocks,
        num_host_blocks=cache.num_host_blocks,
        block_size=cache.block_size,
    )
    intake = Intake(
        model.tokenizer,
        scheduler_config,
        cache,
        eos_token_ids=model.eos_token_ids,
        vocab_size=model.vocab_size,
        defaults=Defaults(model.defaults.temperature, model.defaults.top_p, options.default_priority),
        seed=options.seed,
        compile_constraint=GrammarCompiler(model.tokenizer, model.eos_token_ids),
    )
    disk = _disk_tier(options, cache, model)  # before tables of its blocks are made: it may be larger than any disk
    trace = None if options.trace is None else _open_trace(Path(options.trace), scheduler_config, cache)
    planner = plan_step if trace is None else trace.watch(plan_step)
    scheduler = Scheduler(scheduler_config, cache, costs, planner=planner)
    engine = Engine(
        scheduler,
        ModelExecutor(model.backend, clock.now, SynchronousCopies(model.backend, disk)),
        model.tokenizer,
        intake,
        clock,
        block_bytes=cache.block_size * model.backend.kv_bytes_per_token,
        listeners=() if trace is None else (trace,),
        at_close=lambda: _at_close(kept, key, scheduler, trace),
    )
    return BuiltEngine(engine, model, scheduler_config, cache)


def _open_trace(path: Path, scheduler_config: SchedulerConfig, cache: CacheConfig) -> TraceWriter:
    from giveway.engine.trace import TraceWriter

    return TraceWriter(path, scheduler_config, cache)


def _scheduler_config(options: EngineOptions, model: Model, cache: CacheConfig, *, refines: bool) -> SchedulerConfig:
    target_ms = options.target_step_ms
    return SchedulerConfig(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=_max_model_len(options, model, cache),
        policy=SchedulingPolicy(options.scheduling_policy),
        preemption_mode=PreemptionChoice(options.preemption_mode),
        victim_order=None if options.preemption_victim is None else VictimOrder(options.preemption_victim),
        allow_tails=options.partial_preemption,
        priority_aging_s=options.priority_aging_s,
        target_step_s=None if target_ms is None else target_ms / 1000,
        most_urgent_class=options.most_urgent_priority,
        refine_costs=refines,
        check_invariants=options.check_invariants,
    )


def _disk_tier(options: EngineOptions, cache: CacheConfig, model: Model) -> DiskTier | None:
    """Make the file for --swap-disk. Raises ConfigError when the disk has no room for it."""
    if not cache.num_disk_blocks:
        return None
    from giveway.runtime.disk_tier import DiskTier

    directory = Path(options.swap_dir) if options.swap_dir is not None else Path(tempfile.gettempdir())
    disk = DiskTier(directory, num_blocks=cache.num_disk_blocks, block_bytes=model.backend.block_bytes)
    logger.info("disk tier: %s", disk.description)
    return disk


# Fewer steps than this teach nothing that would be worth keeping.
_STEPS_TO_KEEP = 50


def _at_close(kept: ProfileCache, key: str, scheduler: Scheduler, trace: TraceWriter | None) -> None:
    if trace is not None:
        trace.close()
    if scheduler.state.next_step_id >= _STEPS_TO_KEEP:
        kept.save(key, scheduler.state.costs)


def _profile_key(model: Model, options: EngineOptions) -> str:
    backend = model.backend
    return profile_key(
        model={"name": model.name, "kv_bytes_per_token": backend.kv_bytes_per_token, "vocabulary": backend.vocab_size},
        dtype=options.dtype,
        device=backend.device,
        backend=backend.description,
        num_threads=options.num_threads or 0,
        processor=processor_kind(),
        block_size=options.block_size,
    )


def read_cost_profile(path: Path) -> CostProfile:
    """Read a file for --cost-profile. Raises ConfigError."""
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cost profile {path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"cost profile {path}: not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise ConfigError(f"cost profile {path}: a JSON object is needed, found {type(values).__name__}")
    return CostProfile.from_dict(values)


def _check(options: EngineOptions) -> None:
    for name, choices in (
        ("device", ("auto", "cpu", "cuda", "dry")),
        ("backend", ("auto", "native", "torch")),
        ("scheduling_policy", tuple(policy.value for policy in SchedulingPolicy)),
        ("preemption_mode", tuple(choice.value for choice in PreemptionChoice)),
        ("preemption_victim", (None, *(order.value for order in VictimOrder))),
    ):
        if getattr(options, name) not in choices:
            raise ConfigError(
                f"{name} is {getattr(options, name)!r}; it must be one of {', '.join(filter(None, choices))}"
            )
    if not MOST_URGENT_CLASS <= options.default_priority <= LEAST_URGENT_CLASS:
        raise ConfigError(f"default_priority is {options.default_priority}; classes are 0 (most urgent) to 100")


# Models


def load_model(options: EngineOptions) -> Model:
    """Load what `options.model` names onto `options.device`."""
    if options.device == "dry":
        return _dry_model()
    if options.model == "tiny":
        return _tiny_model(options)
    return _real_model(options)


def _dry_model() -> Model:
    from giveway.runtime.dry.dry_backend import DryBackend
    from giveway.runtime.tokenizer.byte_tokenizer import BYTE_CHAT_TEMPLATE, ByteTokenizer
    from giveway.runtime.tokenizer.chat_template import ChatTemplate

    tokenizer = ByteTokenizer()
    return Model(
        name="dry run",
        backend=DryBackend(vocab_size=256),
        tokenizer=tokenizer,
        encode_chat=_chat_encoder(tokenizer, ChatTemplate(BYTE_CHAT_TEMPLATE), "the dry run"),
        max_positions=DRY_CONTEXT,
        eos_token_ids=frozenset(),
        defaults=Defaults(),
        chat_template_source=BYTE_CHAT_TEMPLATE,
    )


def _tiny_model(options: EngineOptions) -> Model:
    from giveway.runtime.tiny import tiny_checkpoint
    from giveway.runtime.tokenizer.byte_tokenizer import BYTE_CHAT_TEMPLATE, ByteTokenizer
    from giveway.runtime.tokenizer.chat_template import ChatTemplate

    checkpoint, tokenizer = tiny_checkpoint(), ByteTokenizer()
    return Model(
        name="tiny",
        backend=load_backend(options, checkpoint),
        tokenizer=tokenizer,
        encode_chat=_chat_encoder(tokenizer, ChatTemplate(BYTE_CHAT_TEMPLATE), "tiny"),
        max_positions=checkpoint.config.max_positions,
        eos_token_ids=tokenizer.eos_token_ids,
        defaults=Defaults(),
        chat_template_source=BYTE_CHAT_TEMPLATE,
    )


def _real_model(options: EngineOptions) -> Model:
    from giveway.runtime.model_source import open_model

    source = open_model(options.model)
    template = source.compile_chat_template()
    return Model(
        name=source.name,
        backend=load_backend(options, source.checkpoint),
        tokenizer=source.tokenizer,
        encode_chat=_chat_encoder(source.tokenizer, template, source.name),
        max_positions=source.checkpoint.config.max_positions,
        eos_token_ids=source.eos_token_ids,
        defaults=Defaults(
            temperature=1.0 if source.generation.temperature is None else source.generation.temperature,
            top_p=1.0 if source.generation.top_p is None else source.generation.top_p,
        ),
        chat_template_source=None if template is None else template.source,
    )


def _chat_encoder(tokenizer: ChatTokenizing, template: ChatTemplate | None, name: str) -> ChatEncoder:
    from giveway.runtime.tokenizer.chat_template import encode_chat

    def encode(messages: Sequence[Mapping[str, Any]], **template_arguments: Any) -> list[TokenId]:
        if template is None:
            raise InvalidRequestError(f"{name} has no chat template; send a plain prompt instead of messages")
        return encode_chat(tokenizer, template, messages, **template_arguments)

    return encode


# Pools


def size_pools(options: EngineOptions, backend: Backend) -> CacheConfig:
    """Return the sizes of both pools (blocks). Raises ConfigError when not even one block fits."""
    if options.block_size < 1:
        raise ConfigError(f"block_size is {options.block_size}; at least 1 token per block")
    block_bytes = options.block_size * backend.kv_bytes_per_token
    if options.num_kv_blocks is not None:
        num_device_blocks = options.num_kv_blocks
    else:
        pool_bytes = options.kv_cache_memory_bytes
        num_device_blocks = (_default_pool_bytes(backend) if pool_bytes is None else pool_bytes) // block_bytes
    swap_space = options.swap_space
    num_host_blocks = num_device_blocks // 2 if swap_space is None else swap_space // block_bytes
    return CacheConfig(
        num_device_blocks,
        num_host_blocks,
        options.block_size,
        options.enable_prefix_caching,
        num_disk_blocks=options.swap_disk // block_bytes,
        cache_lead_s=options.cache_lead_s,
    )


def _default_pool_bytes(backend: Backend) -> int:
    free = backend.free_memory_bytes or ASSUMED_MEMORY
    return free * 85 // 100 if backend.device == "cuda" else min(2 * GIB, free // 10)


def _max_model_len(options: EngineOptions, model: Model, cache: CacheConfig) -> int:
    """Return the longest prompt + output: what the model was trained for, lowered to what the pool holds."""
    wanted = model.max_positions if options.max_model_len is None else options.max_model_len
    if wanted > model.max_positions:
        raise ConfigError(
            f"max_model_len is {wanted}, but {model.name} was trained for {model.max_positions} tokens. "
            f"Lower --max-model-len to {model.max_positions}."
        )
    holds = cache.num_device_slots + 1  # the last token of a request is never stored
    if holds < wanted:
        logger.warning("max_model_len lowered from %d to %d tokens, which is what the KV pool holds", wanted, holds)
    return min(wanted, holds)


def format_bytes(num_bytes: float) -> str:
    """Return a size for people, in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"
