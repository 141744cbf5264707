"""llama.cpp through the low-level API of llama-cpp-python, whose high-level one answers one request at a time.

Batched as llama.cpp's own server does it: a fixed number of slots, and in every step one token for each slot that
generates, then prompt tokens of the others until the batch is full.
Options: slots, n_batch, n_ubatch, flash_attn, kv_unified.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.workers.protocol import Finished, Limits, Loaded, Model, Request, Stopwatch, Unable, serve


@dataclass(slots=True)
class _Slot:
    """One sequence of the KV cache and the request in it."""

    number: int
    request: Request
    output: list[int]  # shared with the results of the run
    num_computed: int = 0

    @property
    def is_prompt_done(self) -> bool:
        return self.num_computed >= len(self.request.prompt)


@dataclass(slots=True)
class _Step:
    """The tokens of one call of llama_decode."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    logits_at: list[int] = field(default_factory=list)  # rows whose logits are wanted
    askers: list[_Slot] = field(default_factory=list)  # whose they are

    def add(self, slot: _Slot, tokens: Sequence[int], *, wants_logits: bool) -> None:
        """Append the next tokens of a slot."""
        self.tokens += tokens
        self.positions += range(slot.num_computed, slot.num_computed + len(tokens))
        self.sequences += [slot.number] * len(tokens)
        slot.num_computed += len(tokens)
        if wants_logits:
            self.logits_at.append(len(self.tokens) - 1)
            self.askers.append(slot)


class LlamaCppWorker:
    """Model, context and the one batch structure that every step fills again."""

    def load(self, model: Model, limits: Limits, options: dict[str, Any]) -> Loaded:
        """Load the GGUF file as it is: products in its own 4- and 8-bit formats."""
        settings = {
            "slots": limits.num_seqs,
            "n_batch": 2048,
            "n_ubatch": 512,
            "flash_attn": True,
            "kv_unified": False,
            **options,
        }
        self.num_slots = int(settings["slots"])
        self.n_batch = int(settings["n_batch"])
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(model.gguf.encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = self.num_slots
        # Without a unified cache every slot has an equal share of n_ctx and must hold the longest request.
        params.n_ctx = limits.kv_tokens if settings["kv_unified"] else limits.max_model_len * self.num_slots
        params.kv_unified = bool(settings["kv_unified"])
        params.n_batch, params.n_ubatch = self.n_batch, int(settings["n_ubatch"])
        params.n_threads = params.n_threads_batch = limits.threads
        params.flash_attn_type = int(settings["flash_attn"])
        self.context = llama_cpp.llama_init_from_model(self.model, params) if self.model else None
        if not self.context:
            raise Unable("the model or its context could not be made; see its log")
        self.num_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(self.n_batch, 0, 1)
        features = llama_cpp.llama_print_system_info().decode()
        return Loaded(llama_cpp.__version__, {**settings, "threads": limits.threads, "features": features})

    def run(self, requests: Sequence[Request]) -> Finished:
        """Answer all requests."""
        memory = llama_cpp.llama_get_memory(self.context)
        llama_cpp.llama_memory_clear(memory, True)
        watch = Stopwatch()
        outputs: list[list[int]] = [[] for _ in requests]
        waiting = deque(zip(requests, outputs, strict=True))
        free, running = list(range(self.num_slots)), list[_Slot]()
        while waiting or running:
            while free and waiting:
                running.append(_Slot(free.pop(), *waiting.popleft()))
            step = self._fill(running)
            for slot, token in zip(step.askers, self._decode(step), strict=True):
                watch.saw_token()
                slot.output.append(token)
                if len(slot.output) == slot.request.max_tokens:
                    llama_cpp.llama_memory_seq_rm(memory, slot.number, -1, -1)
                    running.remove(slot)
                    free.append(slot.number)
        return watch.finish(outputs)

    def _fill(self, running: Sequence[_Slot]) -> _Step:
        step = _Step()
        prefilling = [slot for slot in running if not slot.is_prompt_done]
        for slot in running:
            if slot.is_prompt_done:
                step.add(slot, slot.output[-1:], wants_logits=True)
        for slot in prefilling:
            room = self.n_batch - len(step.tokens)
            chunk = slot.request.prompt[slot.num_computed : slot.num_computed + room]
            if chunk:
                is_last = slot.num_computed + len(chunk) == len(slot.request.prompt)
                step.add(slot, chunk, wants_logits=is_last)
        return step

    def _decode(self, step: _Step) -> list[int]:
        """Compute one step. Returns the most likely token for each row in `logits_at`."""
        batch, size = self.batch, len(step.tokens)
        batch.n_tokens = size
        _view(batch.token, size)[:] = step.tokens
        _view(batch.pos, size)[:] = step.positions
        _view(batch.n_seq_id, size)[:] = 1
        for row, sequence in enumerate(step.sequences):
            batch.seq_id[row][0] = sequence
        wanted = _view(batch.logits, size)
        wanted[:] = 0
        wanted[step.logits_at] = 1
        code = llama_cpp.llama_decode(self.context, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode of {size} tokens returned {code}")
        if not step.logits_at:
            llama_cpp.llama_synchronize(self.context)
            return []
        logits = llama_cpp.llama_get_logits(self.context)
        return list(np.ctypeslib.as_array(logits, (len(step.logits_at), self.num_vocab)).argmax(axis=1))


def _view(pointer: Any, size: int) -> Any:
    """The first elements of a C array as a numpy array on the same memory."""
    return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(pointer._type_)), (size,))


if __name__ == "__main__":
    serve(LlamaCppWorker)
