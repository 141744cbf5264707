"""Bodies of answers in OpenAI's shapes, from results of the engine. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from giveway.core.ids import TokenId
from giveway.core.plan import TokenLogprobs
from giveway.core.tokenizing import Tokenizing
from giveway.engine.outputs import RequestOutput

Scores = Sequence[TokenLogprobs | None]


class TokenTexts:
    """Tokens as clients see them."""

    def __init__(self, tokenizer: Tokenizing) -> None:
        self._tokenizer = tokenizer

    def text(self, token: TokenId) -> str:
        """Return the text of a single token; bytes that are not whole characters become U+FFFD."""
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")

    def decode(self, tokens: Sequence[TokenId]) -> str:
        """Return the text of a prompt, with its control tokens."""
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def chat_logprobs(self, scores: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """Return the `logprobs` of a chat choice."""
        content = []
        for score in scores:
            entry = self._chat_entry(score.token_id, score.logprob)
            entry["top_logprobs"] = [self._chat_entry(token, value) for token, value in score.top]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _chat_entry(self, token: TokenId, logprob: float) -> dict[str, Any]:
        spelled = self._tokenizer.token_bytes(token)
        return {"token": spelled.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(spelled)}

    def completion_logprobs(self, tokens: Sequence[TokenId], scores: Scores, start: int) -> dict[str, Any]:
        """Return the `logprobs` of a completion choice. start: characters of the text before the first token."""
        texts = [self.text(token) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(start)
            start += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [None if score is None else score.logprob for score in scores],
            "top_logprobs": [None if score is None else self._top(score) for score in scores],
            "text_offset": offsets,
        }

    def _top(self, score: TokenLogprobs) -> dict[str, float]:
        """Return the likeliest tokens by their text, and the chosen one whatever its rank."""
        top: dict[str, float] = {}
        for token, value in (*score.top, (score.token_id, score.logprob)):
            top.setdefault(self.text(token), value)
        return top

    def prompt_logprobs(self, scores: Scores | None) -> list[dict[str, Any] | None] | None:
        """Return vLLM's `prompt_logprobs`: for each position a mapping of token id to its score."""
        if scores is None:
            return None
        return [None if score is None else self._ranked(score) for score in scores]

    def _ranked(self, score: TokenLogprobs) -> dict[str, Any]:
        ranked = {token: (value, rank) for rank, (token, value) in enumerate(score.top, 1)}
        ranked.setdefault(score.token_id, (score.logprob, score.rank))
        return {
            str(token): {"logprob": value, "rank": rank, "decoded_token": self.text(token)}
            for token, (value, rank) in ranked.items()
        }


def usage_of(num_prompt: int, num_completion: int, num_cached: int) -> dict[str, Any]:
    """Return `usage`. num_prompt: each prompt once, however many answers it has."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def usage_of_results(results: Sequence[RequestOutput]) -> dict[str, Any]:
    """Sum up the usage of answers to one or several prompts."""
    firsts = [result for result in results if result.index == 0]
    return usage_of(
        sum(len(result.prompt_token_ids) for result in firsts),
        sum(len(result.token_ids) for result in results),
        sum(result.stats.num_cached_tokens for result in firsts),
    )
