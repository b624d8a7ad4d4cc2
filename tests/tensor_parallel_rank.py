"""Rank 1 of the tests of tensor parallelism: serves one model after the other, as torchrun would.

Its standard input has one line per model, a pickled builder in hexadecimal digits, after "gpu " if
it is to run as on a GPU; it answers "done" on standard output when rank 0 has closed that model, or
"replayed" if steps of it were replayed from graphs.
"""

from __future__ import annotations

import pickle
import sys

import mistralrs_sdk
from tests.gpu_engine import gpu_engine


def main() -> None:
    for line in sys.stdin:
        where, _, text = line.rpartition(" ")
        builder = pickle.loads(bytes.fromhex(text))
        try:
            print(serve_as_on_a_gpu(builder) if where else serve(builder), flush=True)
        except mistralrs_sdk.MistralRsError as error:
            print(f"{type(error).__name__}: {error}".replace("\n", " "), flush=True)


def serve(builder: mistralrs_sdk.ModelBuilder) -> str:
    return "done" if mistralrs_sdk.serve_rank(builder) else "not a rank"


def serve_as_on_a_gpu(builder: mistralrs_sdk.ModelBuilder) -> str:
    with gpu_engine() as played:
        said = serve(builder)
    return "replayed" if any(graphs.stats.replayed for graphs in played.graphs) else said


if __name__ == "__main__":
    main()
