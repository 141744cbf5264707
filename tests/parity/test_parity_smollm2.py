"""Greedy answers of the embedded model, against transformers in float32 with the same decoded weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from giveway.runtime import native
from giveway.runtime.model_source import ModelSource, open_model
from giveway.runtime.tokenizer.chat_template import encode_chat
from giveway.runtime.weights.dequantize import dequantize
from tests.backends import NAMES, load_backend
from tests.runtime.backend_driver import Driver
from tests.sample_inputs import sample_input

NEAR_TIE = 1e-4  # where the two best logits are closer than this, rounding may decide

PROMPTS = (
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "Write a haiku about the sea.",
    "What is 12 plus 30?",
    "Explain gravity to a child in two sentences.",
    "Translate 'good morning' into Spanish.",
    "Who wrote Romeo and Juliet?",
    "List the planets of the solar system.",
    "How do I boil an egg?",
    "What does a scheduler do in an operating system?",
    "Give me a recipe with tomatoes.",
    "Why is the sky blue?",
    "Tell me a joke about computers.",
    "Summarise: requests wait until there is room, and the urgent ones go first.",
    "What is the opposite of 'generous'?",
    "Write a function in Python that adds two numbers.",
    "How many days are there in a leap year?",
    "Describe a mountain lake at dawn.",
    "What are the benefits of regular exercise?",
    "Complete the sentence: The best way to learn is",
    "¿Cuál es la capital de España?",
    "What is the boiling point of water at sea level?",
)


@dataclass(frozen=True)
class Pair:
    name: str  # of the backend
    source: ModelSource
    driver: Driver
    reference: Any

    def prompt(self, text: str) -> list[int]:
        return chat_prompt(self.source, text)


def chat_prompt(source: ModelSource, text: str) -> list[int]:
    template = source.compile_chat_template()
    assert template is not None
    return encode_chat(source.tokenizer, template, [{"role": "user", "content": text}])


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return open_model()


@pytest.fixture(scope="module")
def reference(source: ModelSource) -> Any:
    import transformers

    config = source.checkpoint.config
    settings = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_size,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tied_embeddings,
        attn_implementation="eager",
    )
    with torch.device("meta"):
        reference = transformers.LlamaForCausalLM(settings)
    state = {name: torch.from_numpy(dequantize(source.checkpoint.tensor(name))) for name in config.tensor_shapes()}
    state["lm_head.weight"] = state.get("lm_head.weight", state["model.embed_tokens.weight"])
    reference.load_state_dict(state, assign=True)
    # What is computed and not stored does not survive the meta device.
    reference.model.rotary_emb = type(reference.model.rotary_emb)(config=settings)
    return reference.eval()


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest, source: ModelSource, reference: Any) -> Pair:
    backend = load_backend(request.param, source.checkpoint, dtype="float32")
    return Pair(request.param, source, Driver(backend, num_blocks=600), reference)


def answer_all(pair: Pair, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy answers of all prompts, decoded as one batch; nothing stops at an end-of-sequence token."""
    driver = pair.driver
    tables = [driver.table(len(prompt) + num_tokens) for prompt in prompts]
    known, computed = [list(prompt) for prompt in prompts], [0] * len(prompts)
    for _ in range(num_tokens):
        batch = [
            driver.chunk(tokens[start:], start, table, sample=sample_input())
            for tokens, start, table in zip(known, computed, tables, strict=True)
        ]
        for index, result in enumerate(driver.run(batch)):
            assert result.token_id is not None
            computed[index] = len(known[index])
            known[index].append(result.token_id)
    for table in tables:
        driver.give_back(table)
    return [tokens[len(prompt) :] for tokens, prompt in zip(known, prompts, strict=True)]


def first_differences(pair: Pair, texts: Sequence[str], num_tokens: int) -> list[str]:
    """Compare every answer with the reference's; returns the near-ties where they part. A real difference fails.

    The reference reads prompt and answer in one pass: its choice at each place is the largest logit there, and up to
    the first difference both have read the same tokens.
    """
    prompts = [pair.prompt(text) for text in texts]
    near_ties = []
    for text, prompt, answer in zip(texts, prompts, answer_all(pair, prompts, num_tokens), strict=True):
        with torch.inference_mode():
            logits = pair.reference(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        for place, (row, token) in enumerate(zip(logits, answer, strict=True)):
            if int(row.argmax()) == token:
                continue
            best = row.topk(2).values
            margin = float(best[0] - best[1])
            assert margin < NEAR_TIE, (
                f"{text!r}, token {place}: {token} instead of {int(row.argmax())}, margin {margin}"
            )
            near_ties.append(f"{text!r} at token {place}: the two best logits are {margin:.1e} apart")
            break
    return near_ties


def report(near_ties: list[str], num_prompts: int, num_tokens: int) -> None:
    print(f"\n{num_prompts} prompts x {num_tokens} tokens: {len(near_ties)} part at a near-tie")
    for line in near_ties:
        print(" ", line)


def test_greedy_answers_are_those_of_the_reference(pair: Pair) -> None:
    # Every day all prompts on what computes by default; on PyTorch beside it, which takes several times as long, a few.
    is_second = pair.name == "torch" and native.is_installed()
    texts = PROMPTS[::4] if is_second else PROMPTS
    report(first_differences(pair, texts, 16), len(texts), 16)


@pytest.mark.long
def test_long_greedy_answers_are_those_of_the_reference(pair: Pair) -> None:
    report(first_differences(pair, PROMPTS, 64), len(PROMPTS), 64)


def test_logits_are_those_of_the_reference(pair: Pair) -> None:
    tokens = pair.prompt(PROMPTS[4] + " " + PROMPTS[13])
    with torch.inference_mode():
        expected = pair.reference(torch.tensor([tokens])).logits[0]
    ours = pair.driver.logits_in_chunks(tokens, 16)
    cosine = torch.nn.functional.cosine_similarity(ours.double(), expected.double(), dim=-1)
    assert float(cosine.min()) > 1 - 1e-9
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=5e-3)


def test_the_capital_of_france_is_paris(pair: Pair) -> None:
    answer = pair.driver.generate(pair.prompt("What is the capital of France?"), 8)
    end = next(index for index, token in enumerate(answer) if token in pair.source.eos_token_ids)
    assert pair.source.tokenizer.decode(answer[:end]) == "The capital of France is Paris."


@pytest.mark.parametrize("backend", NAMES)
def test_bfloat16_knows_the_capital_too(backend: str, source: ModelSource) -> None:
    driver = Driver(load_backend(backend, source.checkpoint, dtype="bfloat16"))
    answer = driver.generate(chat_prompt(source, "What is the capital of France?"), 8)
    assert "Paris" in source.tokenizer.decode(answer)
