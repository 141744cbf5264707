"""Memory for pools: zeros from the start, in huge pages where the system gives them, touched in the background."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

_HUGE_PAGE_BYTES = 2 << 20  # where huge pages have another size, this is an alignment like any other
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the Python of today has no name for it

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class ZeroedMemory:
    """A piece of private memory that reads as zeros and takes room page by page, where it is first written.

    Copying and attention walk through whole pools; with huge pages the processor looks up an address every 2 MiB
    instead of every 4 KiB. They are asked for here, because most systems give them only where they are asked to.
    """

    def __init__(self, num_bytes: int) -> None:
        """Reserve it. Raises OSError when the system refuses."""
        # A huge page begins at a multiple of its size. What lies before that and behind the end is never touched.
        mapping = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = np.frombuffer(mapping, np.uint8)
        start = -whole.ctypes.data % _HUGE_PAGE_BYTES
        # Not for the end that fills no huge page: the pool would take more than was asked for.
        huge_bytes = num_bytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        if sys.platform == "linux" and huge_bytes:
            with suppress(OSError):  # a system without them
                mapping.madvise(mmap.MADV_HUGEPAGE, start, huge_bytes)
        # The mapping goes with the last array or tensor that views it: nothing can be left pointing at nothing.
        self._array: _Bytes = whole[start : start + num_bytes]

    @property
    def array(self) -> _Bytes:
        """View all of it: [num_bytes], writable. The memory lives as long as any view does."""
        return self._array

    @property
    def num_bytes(self) -> int:
        """Size."""
        return len(self._array)


class BackgroundTouch:
    """A thread that maps the pages of memory in its order, so that whoever writes there first need not wait for it.

    It never writes: the system is asked for pages as if for writing, and those that exist stay as they are. So it may
    run beside readers and writers of the same bytes.
    """

    def __init__(self, memories: Sequence[ZeroedMemory]) -> None:
        """Start at once. It holds the memory until it has ended."""
        self._num_pending_bytes = sum(memory.num_bytes for memory in memories)
        # A plain flag and not an Event: stop() may run inside of a garbage collection, in whatever thread, and must
        # not meet a lock.
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, args=(tuple(memories),), name="giveway-touch", daemon=True)
        self._thread.start()

    @property
    def num_pending_bytes(self) -> int:
        """Bytes that are not touched yet and will be; 0 once the thread has ended."""
        return self._num_pending_bytes

    def wait(self) -> None:
        """Return when everything is touched."""
        self._thread.join()

    def stop(self) -> None:
        """End the thread, within the time that one huge page takes; calling it again does nothing."""
        self._is_stopped = True
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self, memories: Sequence[ZeroedMemory]) -> None:
        if sys.platform == "linux":
            with suppress(OSError):  # the thread runs like any other then
                os.setpriority(os.PRIO_PROCESS, 0, 19)  # of this thread alone; whoever computes goes first
            for memory in memories:
                if not self._touch(memory):
                    break
        self._num_pending_bytes = 0

    def _touch(self, memory: ZeroedMemory) -> bool:
        """Touch slice by slice; whether it makes sense to go on.

        A slice is one huge page: while one is being mapped, the rest of the process can map nothing.
        """
        # Through ctypes, which lets the other threads run meanwhile; mmap.madvise does not.
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        address = memory.array.ctypes.data
        for start in range(0, memory.num_bytes, _HUGE_PAGE_BYTES):
            if self._is_stopped:
                return False
            size = min(_HUGE_PAGE_BYTES, memory.num_bytes - start)
            if madvise(address + start, size, _MADV_POPULATE_WRITE):
                # An older system, or memory is short. Pages are then mapped where they are first written, and that is
                # slower but not wrong. There is no other way to do it from here: reading maps one shared page of zeros,
                # and writing, even zeros, would wipe out what a request wrote in the meantime.
                return False
            self._num_pending_bytes -= size
        return True
