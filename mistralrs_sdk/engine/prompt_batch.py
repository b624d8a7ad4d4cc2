"""Which prompts share a prefill pass, and how many tokens of each.

The rules are those of mistral.rs' paged scheduler. A sequence that cannot share the pass is left
running with what it has; the original preempts it.
"""

from __future__ import annotations

import attrs

from mistralrs_sdk.engine.sequence import Sequence

PROMPT_BUCKET = 256
"""Unpacked whole prompts run together if their lengths fall into the same bucket of this size."""

CPU_MIXED_PROMPT_TOKENS = 512
"""Prompt tokens of a step that also writes answers, on a CPU: many more make the answers wait
without making the products faster, fewer make those slower."""


@attrs.frozen(kw_only=True)
class BatchRules:
    """What a model and its backend can take in one forward.

    The defaults fit every model and backend there is today; the rest is for adapters that need the
    whole prompt, models with recurrent state and backends without ragged batches.
    """

    uniform_prompts: bool = False
    """Prompts of one pass must start at the same token and be equally long."""
    uniform_decodes: bool = False
    """Decodes of one pass must be equally long."""
    packed_prefill: bool = True
    """Whole prompts of any lengths may share a forward."""
    atomic_prompts: bool = False
    """No prompt can be split (adapters that need the whole prompt at once)."""
    align_chunks: bool = False
    """Chunks end at block boundaries (models with recurrent state, which is saved there)."""


def chunk_end(sequence: Sequence, *, chunk_size: int, block_size: int, rules: BatchRules) -> int:
    """Return where the sequence's next chunk ends, at most `chunk_size` tokens on.

    A chunk neither splits a span that cannot be split, nor, with `align_chunks`, ends inside a
    block except at the prompt's end; then it also stops at the last boundary that an identical
    prompt could reuse.
    """
    start, length = sequence.num_computed_tokens, len(sequence)
    end = min(start + chunk_size, length)
    for first, last in sequence.request.unsplittable:
        if first <= start < last:
            return last
        if start < first < end:
            end = first
    if not rules.align_chunks or end - start <= 0:
        return end
    reusable = (length - 1) // block_size * block_size
    if start < reusable < end:
        end = reusable
    aligned = end // block_size * block_size
    return end if end == length or aligned <= start else aligned


def choose_prompts(
    candidates: list[Sequence], *, budget: int, block_size: int, rules: BatchRules
) -> list[tuple[Sequence, int]]:
    """Return who of `candidates` computes how many tokens; the first of them always takes part.

    The budget is divided evenly over all candidates of the first one's kind. Atomic prompts run
    whole.
    """
    first = candidates[0]
    atomic = rules.atomic_prompts or first.request.raw_logits
    kind = [s for s in candidates if (rules.atomic_prompts or s.request.raw_logits) == atomic]
    if rules.uniform_prompts:
        kind = [s for s in kind if s.num_computed_tokens == first.num_computed_tokens]
    if atomic:
        return [(s, s.num_uncomputed_tokens) for s in _same_bucket(kind, rules)]
    kind = kind[:budget]
    chunk_size = max(1, budget // len(kind))
    chunks = [
        (s, chunk_end(s, chunk_size=chunk_size, block_size=block_size, rules=rules)) for s in kind
    ]
    ends = chunks[0][1] == len(first)
    # Prompts that end in this pass and prompts that go on are not mixed.
    chosen = [(s, end - s.num_computed_tokens) for s, end in chunks if (end == len(s)) == ends]
    if rules.uniform_prompts or rules.align_chunks or not rules.packed_prefill:
        chosen = [(s, count) for s, count in chosen if count == chosen[0][1]]
    return chosen


def fill_prompts(
    candidates: list[Sequence], *, budget: int, block_size: int, rules: BatchRules
) -> list[tuple[Sequence, int]]:
    """Return who of `candidates` computes how many tokens: in order, each as much as is left.

    For passes that answers in progress wait for: few tokens, which bring one prompt to its end
    instead of many a little further. What must run whole, or alike, is chosen as in any pass.
    """
    raw = any(s.request.raw_logits for s in candidates)
    alike = rules.uniform_prompts or rules.align_chunks or not rules.packed_prefill
    if raw or alike or rules.atomic_prompts:
        return choose_prompts(candidates, budget=budget, block_size=block_size, rules=rules)
    chosen = []
    for sequence in candidates:
        if budget <= 0:
            break
        end = chunk_end(sequence, chunk_size=budget, block_size=block_size, rules=rules)
        chosen.append((sequence, end - sequence.num_computed_tokens))
        budget -= end - sequence.num_computed_tokens
    return chosen


def choose_decodes(candidates: list[Sequence], *, rules: BatchRules) -> list[Sequence]:
    """Return the decodes that may share a forward with the first (oldest) of them."""
    if not rules.uniform_decodes:
        return candidates
    return [s for s in candidates if len(s) == len(candidates[0])]


def _same_bucket(atomic: list[Sequence], rules: BatchRules) -> list[Sequence]:
    first = atomic[0]
    if first.request.raw_logits:
        return [first]  # their logits are wanted at every position: always alone
    ragged = [s for s in atomic if not s.request.raw_logits]
    if rules.packed_prefill and not rules.uniform_prompts:
        return ragged

    def bucket(sequence: Sequence) -> int:
        length = sequence.num_uncomputed_tokens
        return length if rules.uniform_prompts else -(-length // PROMPT_BUCKET)

    return [s for s in ragged if bucket(s) == bucket(first)]
