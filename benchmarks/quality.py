"""How far quantised weights and 8-bit products move a model's predictions.

    python benchmarks/quality.py [MODEL] [--tokens 2000] [--types q4k,q8_0] [--json FILE]

Reads prose of Python's language reference and compares, token by token, what models predict next:
by the Kullback-Leibler divergence in nats, and by how often the likeliest token is the same. Lines
with a limit pass or fail, and the exit code is 1 if one fails.

* "native f32": unquantised float32 against transformers in float32, and the same with keys and
  values in f16 (weights in 8-bit products would hide the difference: theirs is larger, and any
  change of their inputs rounds them anew);
* "as stored": the file's own weights in the native kernels, as by default on a CPU, against the
  same weights dequantised to float32;
* for each type three lines: the kernels alone (native against the same blocks dequantised), the
  weights alone (those against the file's), and both.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from quality_models import (
    F16,
    copy_dequantised,
    load_dense,
    load_quantised,
    load_stored,
    load_transformers,
    predict,
    predict_by_transformers,
)
from quality_numbers import Comparison, Differences, Limit, compare, distance, table, to_json
from quality_text import prose, windows
from torch import Tensor

from mistralrs_sdk.cli.model_flags import model_place
from mistralrs_sdk.config import ModelSource
from mistralrs_sdk.isq import RUNNABLE_TYPES, IsqType
from mistralrs_sdk.kernels import native
from mistralrs_sdk.loading.checkpoint import Checkpoint
from mistralrs_sdk.loading.loader import open_checkpoint
from mistralrs_sdk.machine import default_num_threads
from mistralrs_sdk.models.decoder import CausalLM

TYPES = (F16, *(kind.value for kind in RUNNABLE_TYPES))
KERNELS = Limit(kl=0.005, top1=0.98)
EIGHT_BITS = Limit(kl=0.006)
EXACT = Limit(kl=1e-5)

_EIGHT_BITS = (IsqType.Q8_0, IsqType.HQQ8)

Texts = Sequence[list[int]]


def measure(checkpoint: Checkpoint, texts: Texts, types: Iterable[str]) -> Iterator[Comparison]:
    """Make all comparisons, one after the other."""
    dense = load_dense(checkpoint)
    yield from _exact(checkpoint, texts, dense)
    reference = [predict(dense, ids) for ids in texts]
    yield _stored(checkpoint, texts, reference)
    for kind in types:
        native_model = load_quantised(checkpoint, kind)
        copy_dequantised(native_model, dense)
        kernels: list[Differences] = []
        weights: list[Differences] = []
        both: list[Differences] = []
        for ids, expected in zip(texts, reference, strict=True):
            exact, found = predict(dense, ids), predict(native_model, ids, kv=torch.float16)
            kernels.append(compare(exact, found))
            weights.append(compare(expected, exact))
            both.append(compare(expected, found))
        original, bound = "the file's weights", EIGHT_BITS if kind in _EIGHT_BITS else None
        yield _comparison(f"{kind}: kernels", "its weights in f32", kernels, limit=KERNELS)
        yield _comparison(f"{kind}: weights", original, weights)
        yield _comparison(f"{kind}: both", original, both, limit=bound)


def _exact(checkpoint: Checkpoint, texts: Texts, dense: CausalLM) -> Iterator[Comparison]:
    peer = load_transformers(checkpoint)
    exact: list[Differences] = []
    halves: list[Differences] = []
    for ids in texts:
        found = predict(dense, ids, kv=torch.float32)
        exact.append(compare(predict_by_transformers(peer, ids), found))
        halves.append(compare(found, predict(dense, ids, kv=torch.float16)))
    yield _comparison("native f32", "transformers in f32", exact, limit=EXACT)
    yield _comparison("keys and values in f16", "those in f32", halves)


def _stored(checkpoint: Checkpoint, texts: Texts, reference: Sequence[Tensor]) -> Comparison:
    model = load_stored(checkpoint)
    kernels = [
        compare(expected, predict(model, ids, kv=torch.float16))
        for ids, expected in zip(texts, reference, strict=True)
    ]
    return _comparison("as stored", "its weights in f32", kernels, limit=KERNELS)


def _comparison(
    what: str, against: str, parts: Sequence[Differences], *, limit: Limit | None = None
) -> Comparison:
    return Comparison(what=what, against=against, distance=distance(parts), limit=limit)


def parse_types(text: str) -> list[str]:
    """Types by name, with commas between them; as for with_isq, and f16.

    Raises: argparse.ArgumentTypeError for another name.
    """
    found = []
    for word in filter(None, map(str.strip, text.split(","))):
        try:
            kind = F16 if word.lower() == F16 else IsqType(word).value
        except ValueError:
            kind = word
        if kind not in TYPES:
            raise argparse.ArgumentTypeError(f"{word!r} is not one of {', '.join(TYPES)}")
        found.append(kind)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default="demo", help="GGUF file, folder or demo")
    parser.add_argument("--tokens", type=int, default=2000, help="length of the text (2000)")
    parser.add_argument("--window", type=int, default=512, help="most tokens in a window (512)")
    parser.add_argument(
        "--types", type=parse_types, default=list(TYPES), help="such as q4k,q8_0,f16 (all)"
    )
    parser.add_argument("--threads", type=int, default=default_num_threads())
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the numbers")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    if not native.available():
        sys.exit(f"there are no native kernels to judge: {native.reason()}")
    checkpoint = open_checkpoint(ModelSource(model_id=model_place(args.model)))
    texts = windows(checkpoint.tokenizer, tokens=args.tokens, window=args.window, text=prose())
    python = ".".join(map(str, sys.version_info[:3]))
    print(
        f"{Path(checkpoint.name).name}: {checkpoint.format}; {len(texts)} windows of "
        f"{len(texts[0])} tokens, text of Python {python}; {native.reason()}",
        flush=True,
    )
    comparisons = []
    for one in measure(checkpoint, texts, args.types):
        comparisons.append(one)
        print(f"  {one.what}: KL {one.distance.kl:.2g}", file=sys.stderr, flush=True)
    print(table(comparisons))
    if args.json:
        args.json.write_text(json.dumps(to_json(comparisons), indent=2))
    return 1 if any(one.passes is False for one in comparisons) else 0


if __name__ == "__main__":
    sys.exit(main())
