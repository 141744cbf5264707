"""Merge rules for a SentencePiece vocabulary, which ranks whole pieces instead of pairs.

SentencePiece's BPE joins the two neighbours whose union has the best score. A list of merges that is sorted by the
score of the union does the same. Source: `convert_slow_tokenizer.py` of Hugging Face Transformers, whose order of equal
scores is kept, so that the ids are those of the published `tokenizer.json`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

MAX_PIECE_CHARACTERS = 512  # a longer piece gets no merges: cutting it everywhere would take forever


def merges_from_scores(
    vocabulary: Mapping[str, int], scores: Sequence[float], *, without: Collection[str]
) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, best score first.

    vocabulary: piece -> id. scores: by id, larger is better. without: names that text must not reach by merging.
    """
    ranked = []
    for piece, index in vocabulary.items():
        if piece in without or len(piece) > MAX_PIECE_CHARACTERS:
            continue
        pairs = []
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary and left not in without and right not in without:
                pairs.append((left, right))
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        ranked += [(scores[index], pair) for pair in pairs]
    ranked.sort(key=lambda item: (item[0], len(item[1][0]), len(item[1][1])), reverse=True)
    return [pair for _, pair in ranked]
