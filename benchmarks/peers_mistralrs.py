"""mistral.rs as a contender of `peers.py`: its Python package, a thread and a stream a client."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mistralrs
from peers_work import Answer, Ask, Load

RAW_TEMPLATE = "{{ messages[0]['content'] }}"


def start(place: str, *, isq: str | None = None) -> Callable[[Load], list[Answer]]:
    """Load a GGUF file as it is, or a folder in float32; returns what answers a load.

    The number of threads is rayon's, from the environment.
    """
    template = Path(place).parent / "raw.jinja"
    template.write_text(RAW_TEMPLATE)
    if place.endswith(".gguf"):
        which = mistralrs.Which.GGUF(str(Path(place).parent), Path(place).name)
    else:
        which = mistralrs.Which.Plain(
            place, arch=mistralrs.Architecture.Llama, dtype=mistralrs.ModelDType.F32
        )
    runner = mistralrs.Runner(
        which=which, max_seqs=32, jinja_explicit=str(template), in_situ_quant=isq
    )
    sending = threading.Lock()  # it refuses two calls at the same time, not two streams
    return lambda load: answer_all(runner, load, sending)


def answer_all(runner: Any, load: Load, sending: threading.Lock) -> list[Answer]:
    """Let the clients work through the requests."""
    waiting: queue.SimpleQueue[Ask] = queue.SimpleQueue()
    for ask in load.asks:
        waiting.put(ask)

    def client() -> list[Answer]:
        answers = []
        while True:
            try:
                ask = waiting.get_nowait()
            except queue.Empty:
                return answers
            answers.append(answer(runner, ask, sending))

    with ThreadPoolExecutor(load.at_once) as pool:
        clients = [pool.submit(client) for _ in range(load.at_once)]
        return [each for done in clients for each in done.result()]


def answer(runner: Any, ask: Ask, sending: threading.Lock) -> Answer:
    """Send one request and note when its chunks come.

    Raises:
        RuntimeError: the model saw other tokens, or gave fewer, than were asked for.
    """
    request = mistralrs.ChatCompletionRequest(
        model="default",
        messages=[{"role": "user", "content": ask.text}],
        max_tokens=ask.new_tokens,
        top_k=1,
        temperature=0.0,
        ignore_eos=True,
        stream=True,
    )
    arrivals, usage = [], None
    sent = time.perf_counter()
    with sending:
        stream = runner.send_chat_completion_request(request)
    for chunk in stream:
        arrivals.append(time.perf_counter())
        usage = chunk.usage or usage
    if usage is None or usage.prompt_tokens != len(ask.prompt_ids):
        read = usage and usage.prompt_tokens
        raise RuntimeError(f"the prompt of {len(ask.prompt_ids)} tokens was read as {read}")
    if usage.completion_tokens != ask.new_tokens:
        raise RuntimeError(f"{usage.completion_tokens} tokens came for {ask.new_tokens}")
    return Answer(sent=sent, arrivals=arrivals, tokens=usage.completion_tokens)
