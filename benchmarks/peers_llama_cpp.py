"""llama.cpp as a contender of `peers.py`: continuous batching around its `llama_decode`.

`llama_cpp.Llama` answers one request at a time; this drives the library below it the way a server
does: all running sequences share a batch with pieces of the prompts that came in.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Sequence

import attrs
import llama_cpp
import numpy as np
from peers_work import Answer, Ask, Load, common_start

BATCH = 512
"""Most tokens of a step, as in its default `n_ubatch`: a larger one delays the running answers."""
SHORTEST_PREFIX = 64
"""From this length on a start that all prompts share is computed once."""


@attrs.define(kw_only=True)
class Running:
    """One request while it runs."""

    ask: Ask
    sent: float
    tokens: Sequence[int]
    """What is still to be put into the cache."""
    position: int
    arrivals: list[float] = attrs.field(factory=list)


class Batch:
    """The arrays of a `llama_batch`, seen by numpy."""

    def __init__(self, capacity: int) -> None:
        self.tokens, self.positions, self.sequences = np.zeros((3, capacity), dtype=np.int32)
        self.counts = np.ones(capacity, dtype=np.int32)
        self.logits = np.zeros(capacity, dtype=np.int8)
        width = self.sequences.itemsize
        self.pointers = self.sequences.ctypes.data + width * np.arange(capacity, dtype=np.uintp)
        self.size = 0

    def add(self, tokens: Sequence[int], *, position: int, sequence: int, logits: bool) -> None:
        """Append tokens of a sequence; `logits` asks for those behind the last one."""
        part = slice(self.size, self.size + len(tokens))
        self.tokens[part] = tokens
        self.positions[part] = np.arange(position, position + len(tokens))
        self.sequences[part] = sequence
        self.logits[part] = 0
        self.logits[part.stop - 1] = logits
        self.size = part.stop

    def decode(self, context: llama_cpp.llama_context_p) -> None:
        """Compute it and start anew.

        Raises:
            RuntimeError: llama.cpp refuses.
        """
        made = llama_cpp.llama_batch()
        made.n_tokens = self.size
        for name, values in {
            "token": self.tokens,
            "pos": self.positions,
            "n_seq_id": self.counts,
            "seq_id": self.pointers,
            "logits": self.logits,
        }.items():
            kind = dict(llama_cpp.llama_batch._fields_)[name]
            setattr(made, name, ctypes.cast(values.ctypes.data, kind))
        failed = llama_cpp.llama_decode(context, made)
        if failed:
            raise RuntimeError(f"llama_decode returned {failed} for {self.size} tokens")
        self.size = 0


class LlamaCpp:
    """A loaded file, and a context for the load it answered last."""

    def __init__(self, place: str, *, threads: int) -> None:
        llama_cpp.llama_backend_init()
        loaded = llama_cpp.llama_model_load_from_file(
            place.encode(), llama_cpp.llama_model_default_params()
        )
        if not loaded:
            raise RuntimeError(f"llama.cpp cannot load {place}")
        self.model = loaded
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(loaded))
        self.threads = threads
        self.batch = Batch(BATCH)
        self.context = None
        self.shape: tuple[int, int, bool] | None = None
        self.unified: dict[str, bool] = {}

    def answer_all(self, load: Load) -> list[Answer]:
        """Answer a load with the kind of cache that was faster when it was tried first."""
        if load.name not in self.unified:
            seconds = {}
            for unified in (False, True):
                started = time.perf_counter()
                answers = self.run(load, unified=unified)
                seconds[unified] = time.perf_counter() - started
                if load.at_once == 1:
                    break  # with one sequence they are the same
            self.unified[load.name] = seconds.get(True, float("inf")) < seconds[False]
            print(f"{load.name}: seconds by unified cache: {seconds}")
            if len(seconds) == 1 or self.unified[load.name]:
                return answers  # the context that is open is the one to stay
        return self.run(load, unified=self.unified[load.name])

    def run(self, load: Load, *, unified: bool) -> list[Answer]:
        """Answer a load with one cache for all sequences, or with one for each."""
        prefix = common_start([ask.prompt_ids for ask in load.asks])
        keeps_prefix = len(prefix) >= SHORTEST_PREFIX
        self.open_context(load.at_once + keeps_prefix, load.longest, unified=unified)
        waiting, free = deque(load.asks), list(range(load.at_once))
        running: dict[int, Running] = {}
        answers = []
        began = time.perf_counter()
        if keeps_prefix:
            self.keep_prefix(prefix, sequence=load.at_once)
        while waiting or running:
            while waiting and free:
                ask, slot = waiting.popleft(), free.pop()
                done = len(prefix) if keeps_prefix else 0
                if keeps_prefix:
                    llama_cpp.llama_memory_seq_cp(self.memory, load.at_once, slot, -1, -1)
                # the first clients sent theirs before the prefix was computed
                sent = time.perf_counter() if answers else began
                running[slot] = Running(
                    ask=ask, sent=sent, tokens=ask.prompt_ids[done:], position=done
                )
            for slot in self.step(running):
                request = running.pop(slot)
                llama_cpp.llama_memory_seq_rm(self.memory, slot, -1, -1)
                free.append(slot)
                arrivals = request.arrivals
                answers.append(Answer(sent=request.sent, arrivals=arrivals, tokens=len(arrivals)))
        return answers

    def step(self, running: dict[int, Running]) -> list[int]:
        """Compute one batch: first the running answers, then prompts; returns who has ended."""
        by_length = sorted(running.items(), key=lambda item: not item[1].arrivals)
        asked = []
        for slot, request in by_length:
            piece = request.tokens[: BATCH - self.batch.size]
            if not piece:
                break
            is_last = len(piece) == len(request.tokens)
            self.batch.add(piece, position=request.position, sequence=slot, logits=is_last)
            request.position += len(piece)
            request.tokens = request.tokens[len(piece) :]
            if is_last:
                asked.append((slot, request))
        self.batch.decode(self.context)
        if not asked:
            return []
        logits = llama_cpp.llama_get_logits(self.context)
        chosen = np.ctypeslib.as_array(logits, (len(asked), self.vocab_size)).argmax(axis=1)
        now = time.perf_counter()
        ended = []
        for (slot, request), token in zip(asked, chosen.tolist(), strict=True):
            request.tokens = [token]
            request.arrivals.append(now)
            if len(request.arrivals) == request.ask.new_tokens:
                ended.append(slot)
        return ended

    def keep_prefix(self, prefix: Sequence[int], *, sequence: int) -> None:
        """Compute a prefix into a sequence of its own, to be copied from."""
        for start in range(0, len(prefix), BATCH):
            piece = prefix[start : start + BATCH]
            self.batch.add(piece, position=start, sequence=sequence, logits=False)
            self.batch.decode(self.context)

    def open_context(self, sequences: int, length: int, *, unified: bool) -> None:
        """Have an empty cache for that many sequences of that many tokens."""
        shape = (sequences, length, unified)
        if self.shape == shape:
            llama_cpp.llama_memory_clear(self.memory, False)
            return
        if self.context is not None:
            llama_cpp.llama_free(self.context)
        settings = llama_cpp.llama_context_default_params()
        rounded = -(-length // 256) * 256
        settings.n_ctx, settings.n_seq_max = sequences * rounded, sequences
        settings.n_batch = settings.n_ubatch = BATCH
        settings.n_threads = settings.n_threads_batch = self.threads
        settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        settings.kv_unified = unified
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        if not self.context:
            raise RuntimeError(f"llama.cpp made no context for {sequences} x {rounded} tokens")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.shape = shape


def start(place: str, *, threads: int) -> Callable[[Load], list[Answer]]:
    """Load a GGUF file; returns what answers a load."""
    return LlamaCpp(place, threads=threads).answer_all
