"""The composition root of the server: an engine, its HTTP side, and the work that it keeps over restarts."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from giveway import __version__
from giveway.build import BuiltEngine, format_bytes
from giveway.core.errors import ConfigError
from giveway.engine.tool_calls import special_marker_of, tool_format_of
from giveway.server.access import Caller, Keyring, plain_caller, read_key_file
from giveway.server.classes import PriorityClasses
from giveway.server.served_model import ServedModel
from giveway.server.settings import ServerLimits

if TYPE_CHECKING:
    from giveway.server.api import Api
    from giveway.server.batch_jobs.jobs import BatchJobs
    from giveway.server.lifecycle import Lifecycle

logger = logging.getLogger("giveway.server")

NEEDED_CLASSES = ("priority", "default", "flex", "batch")  # tiers, and the Batch API
LINES_A_SEAT = 2  # lines of batches in the engine at a time, for each of its seats


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Everything that `giveway serve` can be told about the server; the engine has options of its own."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_names: tuple[str, ...] = ()  # none: the model's own
    keys: tuple[str, ...] = ()
    key_file: Path | None = None
    allow_anybody: bool = False  # no keys, yet on an address that others can reach
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    classes: PriorityClasses = field(default_factory=PriorityClasses)
    limits: ServerLimits = field(default_factory=ServerLimits)
    data_dir: Path | None = None  # None: the user's own place
    has_batch_api: bool = True
    max_upload_bytes: int = 200 << 20
    batch_keep_days: int | None = None  # None: finished batches and files stay
    drain_timeout_s: float = 30.0
    logs_prompts: bool = False

    def __post_init__(self) -> None:
        """Check what one part alone cannot see."""
        missing = [name for name in NEEDED_CLASSES if name not in self.classes.names]
        if missing:
            raise ConfigError(f"class {missing[0]!r} is missing; the names {', '.join(NEEDED_CLASSES)} are needed")
        for name in self.limits.max_queued_of:
            if name not in self.classes.names:
                raise ConfigError(f"max_queued names the class {name!r}; there are {', '.join(self.classes.names)}")
        if not self.drain_timeout_s >= 0:
            raise ConfigError(f"drain_timeout_s is {self.drain_timeout_s}; 0 or more")

    @property
    def data_directory(self) -> Path:
        """Where files and batches are kept."""
        return default_data_directory() if self.data_dir is None else self.data_dir


def make_keyring(options: ServerOptions) -> Keyring:
    """Return the keys, and refuse to serve the world without any. Raises ConfigError."""
    keys: list[tuple[str, Caller]] = [(secret, plain_caller(n)) for n, secret in enumerate(options.keys, 1)]
    if options.key_file is not None:
        keys += read_key_file(options.key_file)
    keyring = Keyring(keys)
    if keyring.is_open and not is_loopback(options.host) and not options.allow_anybody:
        raise ConfigError(
            f"--host {options.host} can be reached by others, and there are no API keys. Name some with --api-key-file "
            "or GIVEWAY_API_KEY, or say --allow-anybody."
        )
    return keyring


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def default_data_directory() -> Path:
    """Return where files and batches are kept unless something else is said."""
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "giveway"


@dataclass(frozen=True, slots=True)
class BuiltServer:
    """A server, ready to run."""

    lifecycle: Lifecycle
    model: ServedModel
    jobs: BatchJobs | None
    directory: Path  # of the jobs' files


def build_server(built: BuiltEngine, options: ServerOptions, keyring: Keyring, *, default_priority: int) -> BuiltServer:
    """Put the server together around an engine. Must be called in the event loop that will run it.

    Raises ConfigError, also when another server uses the data directory.
    """
    from giveway.engine.async_engine import AsyncEngine
    from giveway.engine.intake import Submission
    from giveway.server.admission import WaitingCounts
    from giveway.server.api import Api
    from giveway.server.app import ROUTES, Parts, create_app
    from giveway.server.finished import FinishedRequest
    from giveway.server.generation import GenerationDesk
    from giveway.server.http_errors import CLIENT_CLOSED
    from giveway.server.lifecycle import Lifecycle
    from giveway.server.logs import log_finished, log_prompt
    from giveway.server.metrics import ServerMetrics
    from giveway.server.request_book import RequestBook
    from giveway.server.wishes import tier_served

    model = _served_model(built, options.served_names)
    metrics = ServerMetrics(built.engine, options.classes, model_name=model.name, routes=ROUTES)
    book, waiting = RequestBook(built.engine, options.classes), WaitingCounts()
    for listener in (metrics, book, waiting):
        built.engine.add_listener(listener)
    engine = AsyncEngine(built.engine)

    def finished(end: FinishedRequest) -> None:
        class_name = options.classes.name_of(end.priority)
        if end.status == CLIENT_CLOSED:
            metrics.count_disconnect(class_name)
        log_finished(end, model=model.name, class_name=class_name, tier=tier_served(end.priority, options.classes))

    def taken_in(api_id: str, submission: Submission) -> None:
        ids = submission.branches[0].prompt_token_ids
        log_prompt(api_id, submission.prompt or model.tokenizer.decode(ids, skip_special_tokens=False))

    desk = GenerationDesk(
        engine,
        limits=options.limits,
        classes=options.classes,
        waiting=waiting,
        book=book,
        finished=finished,
        taken_in=taken_in if options.logs_prompts else None,
    )
    api = Api(desk, model, options.classes, options.limits, default_priority=default_priority)
    jobs = _batch_jobs(api, keyring, options) if options.has_batch_api else None
    routers, upload_paths = [], list[str]()
    if jobs is not None:
        from giveway.server.batch_jobs.router import batch_router

        routers.append(batch_router(jobs, lambda request: keyring.identify(request.headers.get("authorization")).owner))
        upload_paths.append("/v1/files")
    app = create_app(
        Parts(
            api=api,
            desk=desk,
            engine=engine,
            keyring=keyring,
            book=book,
            metrics=metrics,
            limits=options.limits,
            routers=routers,
            upload_paths=upload_paths,
            allowed_hosts=options.allowed_hosts if keyring.is_open and is_loopback(options.host) else None,
            allowed_origins=options.allowed_origins,
        )
    )
    lifecycle = Lifecycle(
        app,
        engine,
        desk,
        jobs,
        None if jobs is None else jobs.store,
        drain_timeout_s=options.drain_timeout_s,
    )
    return BuiltServer(lifecycle, model, jobs, options.data_directory)


def _batch_jobs(api: Api, keyring: Keyring, options: ServerOptions) -> BatchJobs | None:
    """Open the data directory. The user's own place may be another server's, which is no reason not to serve."""
    from giveway.server.batch_jobs.jobs import BatchJobs
    from giveway.server.batch_jobs.limits import BatchLimits
    from giveway.server.batch_jobs.store import BatchStore
    from giveway.server.batch_lines import BatchLines

    directory = options.data_directory
    try:
        if options.data_dir is None:
            directory.parent.mkdir(parents=True, exist_ok=True)
        store = BatchStore(
            directory, BatchLimits(max_file_bytes=options.max_upload_bytes, keep_days=options.batch_keep_days)
        )
    except (ConfigError, OSError) as error:
        if options.data_dir is not None:
            raise
        logger.warning("the Batch API is off: %s", error)
        return None
    priority = options.classes.start_of("batch")
    assert priority is not None  # the options were checked
    lines = BatchLines(api, keyring, priority=priority)
    return BatchJobs(store, lines.run, max_outstanding=LINES_A_SEAT * api.model.num_seats)


def _served_model(built: BuiltEngine, names: Sequence[str]) -> ServedModel:
    model = built.model
    tool_format = tool_format_of(model.chat_template_source)
    return ServedModel(
        names=tuple(names) or (model.name,),
        root=model.name,
        tokenizer=model.tokenizer,
        vocab_size=model.vocab_size,
        encode_chat=model.encode_chat,
        tool_format=tool_format,
        tool_marker_id=None if tool_format is None else special_marker_of(tool_format, model.tokenizer),
        max_model_len=built.scheduler_config.max_model_len,
        num_seats=built.scheduler_config.max_num_seqs,
        created=int(time.time()),
        version=__version__,
    )


def welcome(built: BuiltEngine, server: BuiltServer, options: ServerOptions, address: str, keyring: Keyring) -> str:
    """Return what a person wants to know when the server is up."""
    cache, name = built.cache_config, server.model.name
    block_bytes = cache.block_size * built.model.backend.kv_bytes_per_token
    classes = ", ".join(f"{each} from {start}" for each, start in options.classes.entries)
    batch = "off" if server.jobs is None else f"files in {server.directory}"
    key = "" if keyring.is_open else ' -H "Authorization: Bearer $KEY"'
    return (
        f"{address} serves {', '.join(server.model.names)} ({built.model.backend.description})\n"
        f"KV pool: {cache.num_device_slots} tokens, {cache.num_device_blocks} blocks, "
        f"{format_bytes(cache.num_device_blocks * block_bytes)}; host pool "
        f"{format_bytes(cache.num_host_blocks * block_bytes)}; {built.scheduler_config.max_num_seqs} seats\n"
        f"classes, the most urgent first: {classes}; Batch API: {batch}\n"
        f"try: curl {address}/v1/chat/completions{key} -H 'Content-Type: application/json' "
        f'-d \'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}], "priority": 0}}\''
    )
