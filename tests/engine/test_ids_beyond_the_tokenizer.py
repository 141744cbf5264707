"""A model may embed more ids than its tokenizer has, and may generate them: they have no text, but may be handed in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from giveway import LLM, SamplingParams
from giveway.core.errors import InvalidRequestError
from tests.checkpoints import VOCAB_SIZE, write_hf_checkpoint
from tests.server.running import running

VOCAB_OF_MODEL, PROMPT, UNKNOWN = VOCAB_SIZE + 17, [5, 6, 7], VOCAB_SIZE + 9
# Every token of the answer is one that the tokenizer does not know.
WISH = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logit_bias=dict.fromkeys((UNKNOWN, 333), 100.0))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_checkpoint(tmp_path_factory.mktemp("hf"), "llama", tied=True, vocab_size=VOCAB_OF_MODEL)


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(str(directory), device="cpu", num_kv_blocks=16, swap_space="1MiB", check_invariants=True) as llm:
        yield llm


def test_generated_ids_without_a_text_can_be_handed_in_again(llm: LLM) -> None:
    (answer,) = llm.generate([PROMPT], WISH)
    assert set(answer.token_ids) <= {UNKNOWN, 333}
    assert answer.text == ""
    (more,) = llm.generate([[*PROMPT, *answer.token_ids[:4]]], WISH)
    assert more.token_ids[:4] == answer.token_ids[4:]
    assert llm.built.model.tokenizer.decode([*PROMPT, UNKNOWN]) == llm.built.model.tokenizer.decode(PROMPT)
    with pytest.raises(
        InvalidRequestError, match=f"token {VOCAB_OF_MODEL} is not an id from 0 to {VOCAB_OF_MODEL - 1}"
    ):
        llm.generate([[VOCAB_OF_MODEL]], WISH)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_victim_with_ids_that_have_no_text_gets_the_undisturbed_answer(directory: Path, mode: str) -> None:
    params = SamplingParams(
        temperature=1,
        seed=3,
        max_tokens=60,
        ignore_eos=True,
        logit_bias=dict.fromkeys(range(VOCAB_SIZE, VOCAB_OF_MODEL), 12.0),
    )
    prompts, priorities = [PROMPT, [8, 9], [UNKNOWN, 10]], [20, 20, 0]
    with LLM(str(directory), device="cpu", num_kv_blocks=16) as ample:
        wanted = [answer.token_ids for answer in ample.generate(prompts, params)]
    assert all(max(token_ids) >= VOCAB_SIZE for token_ids in wanted)
    with LLM(str(directory), device="cpu", num_kv_blocks=6, swap_space="1MiB", preemption_mode=mode) as small:
        answers = small.generate(prompts, params, priorities=priorities)
    assert [answer.token_ids for answer in answers] == wanted
    assert sum(answer.stats.num_preemptions for answer in answers) > 0


def test_the_server_takes_and_shows_ids_that_have_no_text(directory: Path) -> None:
    with running(model=str(directory), device="cpu", num_kv_blocks=16) as server:
        body = {"prompt": [*PROMPT, UNKNOWN], "max_tokens": 3, "logit_bias": {str(UNKNOWN): 100}, "logprobs": 1}
        answer = server.post("/v1/completions", body | {"echo": True, "temperature": 0})
        assert answer.status_code == 200
        (choice,) = answer.json()["choices"]
        assert choice["text"] == server.post("/detokenize", {"tokens": PROMPT}).json()["prompt"]
        assert choice["logprobs"]["tokens"][-4:] == [""] * 4
        assert server.post("/detokenize", {"tokens": [UNKNOWN]}).json() == {"prompt": ""}
        assert server.post("/detokenize", {"tokens": [VOCAB_OF_MODEL]}).status_code == 400
