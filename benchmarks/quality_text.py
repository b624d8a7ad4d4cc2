"""The text of `quality.py`: prose of Python's language reference, cut into windows of tokens."""

from __future__ import annotations

import re

from mistralrs_sdk.loading.checkpoint import TokenizerFiles

_SHORTEST = 120
"""Characters; shorter paragraphs are mostly headings and table rows."""


def prose() -> str:
    """What `help("topics")` can show, without code, tables, lists of syntax and repetitions.

    Topics in alphabetical order; of each the paragraphs that start at the margin, have at least
    120 characters and end with a full stop, each of them on one line. A release of Python may
    change some of it: numbers of two releases differ a little.
    """
    from pydoc_data.topics import topics

    found: dict[str, None] = {}  # topics share sections; the first one counts
    for name in sorted(topics):
        for paragraph in re.split(r"\n[ \t]*\n", topics[name].strip("\n")):
            text = " ".join(paragraph.split())
            if paragraph[:1].strip() and len(text) >= _SHORTEST and text.endswith("."):
                found[text] = None
    return "\n\n".join(found)


def windows(files: TokenizerFiles, *, tokens: int, window: int, text: str) -> list[list[int]]:
    """Cut windows of one length, as long as `window` at most, spread evenly over the text.

    They have about `tokens` ids together (fewer by less than there are windows); each begins as
    raw text does for this tokenizer, with BOS or without.

    Raises: ValueError if the text is too short for windows that do not overlap.
    """
    ids: list[int] = files.tokenizer.encode(text, add_special_tokens=False).ids
    count = -(-tokens // window)
    size = tokens // count
    bos = files.tokenizer.token_to_id(files.bos_token) if files.bos_token else None
    start = [bos] if files.adds_bos and bos is not None else []
    body = size - len(start)
    if body < 1 or count * body > len(ids):
        raise ValueError(
            f"{tokens} tokens in windows of at most {window}: the text has {len(ids)} tokens and a "
            f"window needs {len(start) + 1} or more; ask for other sizes"
        )
    stride = len(ids) // count
    return [start + ids[i * stride : i * stride + body] for i in range(count)]
