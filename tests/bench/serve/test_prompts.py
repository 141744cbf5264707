"""Prompts of a wished length that share nothing, or exactly what they shall."""

from __future__ import annotations

import pytest

from giveway.bench.serve.prompts import BLOCK_TOKENS, PromptFormat, PromptMaker, Vocabulary
from giveway.bench.serve.words import WORDS
from giveway.core.errors import ConfigError

VOCABULARY = Vocabulary(1000, 20000)


def ids(seed: int = 0, prefix: int = 0) -> PromptMaker:
    return PromptMaker(PromptFormat.IDS, VOCABULARY, seed, prefix)


def text(seed: int = 0, prefix: int = 0) -> PromptMaker:
    return PromptMaker(PromptFormat.TEXT, VOCABULARY, seed, prefix)


def test_ids_have_the_wished_number_and_stay_in_their_range() -> None:
    for serial in range(50):
        prompt = ids().fresh(serial, 1 + serial * 7)
        assert isinstance(prompt, list)
        assert len(prompt) == 1 + serial * 7
        assert all(1000 <= token <= 20000 for token in prompt)


def test_no_two_prompts_begin_with_the_same_token_as_long_as_there_are_tokens() -> None:
    # Goal: a prefix cache finds nothing, not even one block of one token.
    small = PromptMaker(PromptFormat.IDS, Vocabulary(10, 29), seed=3)
    first = [small.fresh(serial, 8)[0] for serial in range(20)]
    assert len(set(first)) == 20
    # With more prompts than tokens the first two together still differ.
    pairs = [tuple(small.fresh(serial, 8)[:2]) for serial in range(400)]
    assert len(set(pairs)) == 400


def test_prompts_of_words_begin_unlike_each_other_too() -> None:
    prompts = [text().fresh(serial, 12) for serial in range(2000)]
    assert all(isinstance(prompt, str) and len(prompt.split()) == 12 for prompt in prompts)
    assert len({tuple(str(prompt).split()[:2]) for prompt in prompts}) == 2000
    assert set(str(prompts[0]).split()) <= set(WORDS)
    assert len(set(WORDS)) == len(WORDS) > 200


def test_the_seed_decides_everything() -> None:
    assert ids(seed=1).fresh(5, 40) == ids(seed=1).fresh(5, 40)
    ours, others = ids(seed=1).fresh(5, 40), ids(seed=2).fresh(5, 40)
    assert sum(left == right for left, right in zip(ours, others, strict=True)) < 5


def test_a_wished_prefix_stands_in_front_of_every_prompt() -> None:
    first, second = ids(prefix=30).fresh(1, 10), ids(prefix=30).fresh(2, 10)
    assert len(first) == len(second) == 40
    assert first[:30] == second[:30]
    assert first[30] != second[30]


@pytest.mark.parametrize("maker", [ids(), text()], ids=["ids", "text"])
def test_equal_block_ids_give_equal_blocks_and_others_do_not(maker: PromptMaker) -> None:
    def symbols(serial: int, number: int, blocks: list[int]) -> list[int] | list[str]:
        prompt = maker.from_blocks(serial, number, blocks)
        return prompt.split() if isinstance(prompt, str) else prompt

    first = symbols(1, 1300, [7, 8, 9])
    second = symbols(2, 1100, [7, 8, 10])
    assert (len(first), len(second)) == (1300, 1100)
    assert first[: 2 * BLOCK_TOKENS] == second[: 2 * BLOCK_TOKENS]
    assert first[2 * BLOCK_TOKENS : 1100] != second[2 * BLOCK_TOKENS :]
    assert symbols(3, 1300, [7, 8, 9]) == first
    # What no block covers is the request's own.
    assert symbols(4, 600, [7])[BLOCK_TOKENS:] != symbols(5, 600, [7])[BLOCK_TOKENS:]


def test_a_vocabulary_needs_two_ids_in_order() -> None:
    for first, last in ((5, 5), (9, 3), (-1, 4), (0, 1 << 31)):
        with pytest.raises(ConfigError, match="--random-vocab"):
            Vocabulary(first, last)
