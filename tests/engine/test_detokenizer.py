"""Text comes whole, once, and never a part of a stop string."""

from __future__ import annotations

import random

import pytest

from giveway.core.sampling import SamplingParams
from giveway.engine.detokenizer import Detokenizer
from giveway.runtime.tokenizer.byte_tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()


def run(text: str, params: SamplingParams) -> tuple[list[str], str, str | None]:
    """Push the bytes of a text one by one. Returns the pieces handed out, the final text, and the stop string."""
    detokenizer = Detokenizer(TOKENIZER, params)
    pieces, stop = [], None
    for token in text.encode():
        stop = detokenizer.push(token)
        if stop is not None:
            break
        pieces.append(detokenizer.take_new(is_last=False))
    pieces.append(detokenizer.take_new(is_last=True))
    return pieces, detokenizer.text, stop


def test_characters_of_several_bytes_are_never_split() -> None:
    pieces, text, _ = run("aé漢🙂!", SamplingParams())
    assert text == "".join(pieces) == "aé漢🙂!"
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_character_that_never_came_whole_is_shown_at_the_end_only() -> None:
    detokenizer = Detokenizer(TOKENIZER, SamplingParams())
    detokenizer.push("é".encode()[0])
    assert detokenizer.take_new(is_last=False) == ""
    assert detokenizer.take_new(is_last=True) == "\ufffd"


@pytest.mark.parametrize(("include", "expected"), [(False, "one "), (True, "one END")])
def test_a_stop_string_cuts_the_text_and_no_part_of_it_leaks(include: bool, expected: str) -> None:
    pieces, text, stop = run("one END two", SamplingParams(stop=("END",), include_stop_str_in_output=include))
    assert (text, stop) == (expected, "END")
    assert "".join(pieces) == expected


def test_a_false_start_of_a_stop_string_is_handed_out_as_soon_as_it_is_clear() -> None:
    pieces, text, stop = run("a ENx", SamplingParams(stop=("END",)))
    assert stop is None
    assert pieces[:4] == ["a", " ", "", ""]
    assert "".join(pieces) == text == "a ENx"


def test_the_earliest_of_several_stop_strings_counts() -> None:
    _, text, stop = run("abcd", SamplingParams(stop=("cd", "bcd")))
    assert (text, stop) == ("a", "bcd")


def test_a_stop_string_before_min_tokens_does_not_end_the_request() -> None:
    # Goal: what came before min_tokens is not searched again later, also not in part.
    _, text, stop = run("##..##..", SamplingParams(stop=("##",), min_tokens=4, max_tokens=99))
    assert (text, stop) == ("##..", "##")


def test_a_character_begun_after_the_stop_string_is_cut_off_with_the_rest() -> None:
    class Pieces(ByteTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            return b"#" + "é".encode()[:1]

    detokenizer = Detokenizer(Pieces(), SamplingParams(stop=("#",)))
    assert detokenizer.push(0) == "#"
    assert detokenizer.take_new(is_last=True) == ""


def test_control_tokens_are_left_out_unless_asked_for() -> None:
    for skip, expected in ((True, "hi"), (False, "hi<|im_end|>")):
        detokenizer = Detokenizer(TOKENIZER, SamplingParams(skip_special_tokens=skip))
        for token in TOKENIZER.encode("hi<|im_end|>"):
            detokenizer.push(token)
        assert detokenizer.take_new(is_last=True) == expected


def test_a_tail_that_repeats_the_beginning_of_a_stop_string_is_held_back_no_longer_than_needed() -> None:
    # Oracle: the longest end of the text that the stop string begins with, found by trying them all.
    for seed in range(200):
        rng = random.Random(seed)
        stop = "".join(rng.choice("ab") for _ in range(rng.randint(2, 6)))
        detokenizer, given, text = Detokenizer(TOKENIZER, SamplingParams(stop=(stop,))), "", ""
        for _ in range(30):
            letter = rng.choice("ab")
            if stop in text + letter:
                break
            text += letter
            assert detokenizer.push(ord(letter)) is None
            given += detokenizer.take_new(is_last=False)
            held = max(length for length in range(len(stop)) if text.endswith(stop[:length]))
            assert given == text[: len(text) - held]


def test_handed_out_pieces_always_make_the_final_text() -> None:
    # Oracle: cut the whole text at the first stop string, however the pieces fell.
    for seed in range(300):
        rng = random.Random(seed)
        text = "".join(rng.choice("abé#") for _ in range(30))
        stops = tuple("".join(rng.choice("abé#") for _ in range(rng.randint(1, 4))) for _ in range(2))
        pieces, final, stop = run(text, SamplingParams(stop=stops))
        ends = [text.find(each) + len(each) for each in stops if each in text]
        if ends:
            cut = text[: min(ends)]
            places = [cut.find(each) for each in stops if each in cut]
            assert final == text[: min(places)]
            assert stop is not None
        else:
            assert (final, stop) == (text, None)
        assert "".join(pieces) == final
