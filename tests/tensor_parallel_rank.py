"""Rank 1 of the tests of tensor parallelism: serves one model after the other, as torchrun would.

Its standard input has one line per model, a pickled builder in hexadecimal digits; it answers
"done" on standard output when rank 0 has closed that model.
"""

from __future__ import annotations

import pickle
import sys

import mistralrs_sdk


def main() -> None:
    for line in sys.stdin:
        builder = pickle.loads(bytes.fromhex(line))
        try:
            served = mistralrs_sdk.serve_rank(builder)
        except mistralrs_sdk.MistralRsError as error:
            print(f"{type(error).__name__}: {error}".replace("\n", " "), flush=True)
        else:
            print("done" if served else "not a rank", flush=True)


if __name__ == "__main__":
    main()
