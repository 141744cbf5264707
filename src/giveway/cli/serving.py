"""Running the server in this process: socket first, then the model, then requests until a signal."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from importlib import import_module

from giveway.build import BuiltEngine, build_engine
from giveway.build_server import ServerOptions, build_server, make_keyring, welcome
from giveway.core.errors import ConfigError
from giveway.options import EngineOptions
from giveway.server.access import Keyring
from giveway.server.lifecycle import address_of, bind, raise_file_limit
from giveway.server.logs import configure_logging


def begin_logging(log_format: str, log_level: str) -> None:
    """Log as a server does: with times, every line in one form, and warnings of the command line among them."""
    configure_logging(log_format, log_level)
    logging.getLogger("giveway").handlers.clear()  # else they would be told twice
    for name in ("uvicorn", "uvicorn.error"):  # it tells of its start and its end, which the server does itself
        logging.getLogger(name).setLevel(logging.ERROR)


def serve(options: EngineOptions, server_options: ServerOptions) -> int:
    """Serve until a signal; return the exit code. Raises ConfigError and what loading a model raises."""
    keyring = make_keyring(server_options)  # whatever is wrong is said before a model is loaded
    try:
        sock = bind(server_options.host, server_options.port)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {server_options.host}, port {server_options.port}: {error.strerror}. "
            "Another --port may be free; 0 takes any."
        ) from error
    with sock:
        raise_file_limit()
        # FastAPI takes half a second to import; the model is loaded meanwhile, which mostly is not Python's work.
        importing = threading.Thread(target=import_module, args=("giveway.server.everything",))
        importing.start()
        try:
            built = build_engine(options)
        finally:
            importing.join()  # an interpreter that ends must not find it at work
        try:
            with asyncio.Runner(loop_factory=_new_event_loop()) as runner:
                return runner.run(_serve_on(sock, built, options, server_options, keyring))
        finally:
            built.engine.close()


async def _serve_on(
    sock: socket.socket,
    built: BuiltEngine,
    options: EngineOptions,
    server_options: ServerOptions,
    keyring: Keyring,
) -> int:
    server = build_server(built, server_options, keyring, default_priority=options.default_priority)
    text = welcome(built, server, server_options, address_of(sock), keyring)
    return await server.lifecycle.run(sock, lambda: print(text, flush=True))


def _new_event_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the faster event loop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
