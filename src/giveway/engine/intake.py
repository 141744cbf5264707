"""From what a caller says to a `RequestSpec`: text becomes tokens, open wishes become numbers, nonsense is refused."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from numbers import Integral
from typing import Any

from giveway.core.config import DEFAULT_CLASS, CacheConfig, SchedulerConfig, clamp_class
from giveway.core.constraint import ConstraintCompiler, ConstraintFactory
from giveway.core.errors import InvalidRequestError, RequestTooLargeError
from giveway.core.ids import RequestId, TokenId
from giveway.core.request import RequestSpec
from giveway.core.sampling import SamplingParams
from giveway.core.tokenizing import Tokenizing

Prompt = str | Sequence[TokenId]

MAX_CACHE_SALT_CHARS = 256
_LONG_PROMPT_CHARACTERS = 1 << 16


def check_text_length(num_characters: int, tokenizer: Tokenizing, max_tokens_in_all: int) -> None:
    """Refuse a text that cannot fit whatever its tokens are: finding them would take seconds.

    Raises RequestTooLargeError.
    """
    if num_characters < _LONG_PROMPT_CHARACTERS:
        return
    least = num_characters // tokenizer.longest_token_bytes
    if least >= max_tokens_in_all:
        raise RequestTooLargeError(
            f"the request can never fit: its text of {num_characters} characters has at least {least} tokens, and "
            f"prompt and output together may have {max_tokens_in_all}."
        )


def branch_id(request_id: RequestId, index: int) -> RequestId:
    """Name of one of several answers to a prompt: choice 0 bears the request's own name, choice 2 of `a` is `a/2`."""
    return request_id if index == 0 else RequestId(f"{request_id}/{index}")


def branch_seed(seed: int, index: int) -> int:
    """Seed of one of several answers to a prompt: choice 0 has the request's own, as if it were the only one.

    The others have 64 bits of BLAKE2b of (seed, index), so that no branch depends on how many there are, and the
    branches of neighbouring seeds have nothing in common. seed: from 0 up to 2**64 - 1, like the result.
    """
    if index == 0:
        return seed
    return int.from_bytes(blake2b(b"branch %d of seed %d" % (index, seed), digest_size=8).digest())


@dataclass(frozen=True, slots=True)
class Submission:
    """A prompt with all the answers that are wanted of it, resolved and checked, to be handed in as a whole."""

    branches: tuple[RequestSpec, ...]  # one for each answer, by index; never empty
    prompt: str | None  # None: it was given as token ids

    @property
    def request_id(self) -> RequestId:
        """Name of the whole, which is that of choice 0."""
        return self.branches[0].request_id

    @property
    def request_ids(self) -> tuple[RequestId, ...]:
        """Names of all branches, by index."""
        return tuple(spec.request_id for spec in self.branches)


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a request that says nothing gets."""

    temperature: float = 1.0
    top_p: float = 1.0
    priority: int = DEFAULT_CLASS


class Intake:
    """Makes submissions for one model. Holds no state but the source of seeds."""

    def __init__(
        self,
        tokenizer: Tokenizing,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        *,
        eos_token_ids: frozenset[TokenId],
        vocab_size: int | None = None,
        defaults: Defaults | None = None,
        seed: int | None = None,
        compile_constraint: ConstraintCompiler | None = None,
    ) -> None:
        """Make the intake of a model.

        vocab_size: how many ids a prompt may hold; a model may know, and so generate, more than the tokenizer has.
        None: those of the tokenizer. compile_constraint: None if the text of an answer cannot be given a form.
        """
        self._tokenizer = tokenizer
        self._vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        # A request fills at most this many positions; the last token is never stored.
        self._max_tokens_in_all = min(scheduler.max_model_len, cache.num_device_slots + 1)
        self._eos_token_ids = eos_token_ids
        self._defaults = defaults or Defaults()
        self._seeds = None if seed is None else random.Random(seed)  # noqa: S311  # repeatable on purpose
        self._compile_constraint = compile_constraint

    def resolve(
        self,
        request_id: RequestId,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        priority: int | None,
        cache_salt: str | None,
        arrival_s: float,
    ) -> Submission:
        """Resolve one prompt with all its branches; it is tokenized once. Raises InvalidRequestError."""
        token_ids = self._tokens(request_id, prompt)
        first = RequestSpec(
            request_id=request_id,
            prompt_token_ids=token_ids,
            max_new_tokens=self._max_new_tokens(request_id, len(token_ids), sampling),
            priority=self._class_of(request_id, priority),
            arrival_s=arrival_s,
            sampling=self._resolve(sampling),
            seed=self._draw_seed() if sampling.seed is None else sampling.seed % 2**64,
            stop_token_ids=self._stop_token_ids(sampling),
            bad_word_ids=self._bad_words(sampling),
            cache_salt=_salt_bytes(request_id, cache_salt),
        )
        branches = [first] if sampling.n == 1 else _branches_of(first)
        grammar = self._grammar(sampling)
        if grammar is not None:  # each answer is somewhere else in it
            branches = [replace(branch, constraint=grammar()) for branch in branches]
        return Submission(tuple(branches), prompt if isinstance(prompt, str) else None)

    def _tokens(self, request_id: RequestId, prompt: Prompt) -> tuple[TokenId, ...]:
        if isinstance(prompt, str):
            check_text_length(len(prompt), self._tokenizer, self._max_tokens_in_all)
            token_ids = tuple(self._tokenizer.encode(prompt))
        else:
            token_ids = self._checked_ids(request_id, prompt)
        if not token_ids:
            raise InvalidRequestError(f"request {request_id!r} has an empty prompt; at least 1 token is needed")
        return token_ids

    def _checked_ids(self, request_id: RequestId, prompt: object) -> tuple[TokenId, ...]:
        """Return ids given by a caller as plain integers; those of numpy are as good."""
        if isinstance(prompt, bytes | bytearray | Mapping) or not isinstance(prompt, Iterable):
            raise InvalidRequestError(
                f"request {request_id!r}: a prompt is text or a list of token ids, not {type(prompt).__name__}"
            )
        limit = self._vocab_size
        token_ids = []
        for token in prompt:
            number = _whole_number(token)
            if number is None or not 0 <= number < limit:
                raise InvalidRequestError(
                    f"request {request_id!r}: prompt token {token!r} is not an id from 0 to {limit - 1}"
                )
            token_ids.append(number)
        return tuple(token_ids)

    def _max_new_tokens(self, request_id: RequestId, num_prompt: int, sampling: SamplingParams) -> int:
        room = self._max_tokens_in_all - num_prompt
        if room < 1:
            raise RequestTooLargeError(
                f"request {request_id!r} can never fit: its prompt has {num_prompt} tokens, and prompt and output "
                f"together may have {self._max_tokens_in_all}. Shorten the prompt to {self._max_tokens_in_all - 1}, or "
                "raise --max-model-len or --num-kv-blocks."
            )
        if sampling.max_tokens is not None:
            return sampling.max_tokens  # one that names too many is refused by the scheduler, with the numbers
        if sampling.min_tokens > room:
            raise RequestTooLargeError(
                f"request {request_id!r}: min_tokens is {sampling.min_tokens}, but after {num_prompt} prompt tokens "
                f"only {room} fit"
            )
        return room

    def _class_of(self, request_id: RequestId, priority: int | None) -> int:
        if priority is None:
            return self._defaults.priority
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidRequestError(f"request {request_id!r}: priority must be a whole number, not {priority!r}")
        return clamp_class(priority)

    def _resolve(self, sampling: SamplingParams) -> SamplingParams:
        if sampling.temperature is not None and sampling.top_p is not None:
            return sampling
        temperature, top_p = sampling.temperature, sampling.top_p
        return replace(
            sampling,
            temperature=self._defaults.temperature if temperature is None else temperature,
            top_p=self._defaults.top_p if top_p is None else top_p,
        )

    def _draw_seed(self) -> int:
        return secrets.randbits(64) if self._seeds is None else self._seeds.getrandbits(64)

    def _stop_token_ids(self, sampling: SamplingParams) -> frozenset[TokenId]:
        vocab_size = self._vocab_size
        for field, tokens in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", sampling.logit_bias)):
            for token in tokens:
                if token >= vocab_size:
                    raise InvalidRequestError(f"{field}: token id {token} is not in the vocabulary of {vocab_size}")
        stops = frozenset(sampling.stop_token_ids)
        return stops if sampling.ignore_eos else stops | self._eos_token_ids

    def _grammar(self, sampling: SamplingParams) -> ConstraintFactory | None:
        if sampling.structured_output is None:
            return None
        if self._compile_constraint is None:
            raise InvalidRequestError("response_format: this engine was built without structured output")
        return self._compile_constraint(sampling.structured_output)

    def _bad_words(self, sampling: SamplingParams) -> tuple[tuple[TokenId, ...], ...]:
        """Token spellings of every bad word, at the start of a text and after a space."""
        spellings: dict[tuple[TokenId, ...], None] = {}
        for word in sampling.bad_words:
            for text in (word, " " + word.lstrip()):
                ids = tuple(self._tokenizer.encode(text, add_special_tokens=False, parse_special=False))
                if ids:
                    spellings[ids] = None
        return tuple(spellings)


def _branches_of(first: RequestSpec) -> list[RequestSpec]:
    """Every answer to a prompt as a request of its own: `first` and its siblings."""
    root = first.request_id
    # What the model thinks of the prompt is the same for all: one branch asks, and the others need not compute it.
    wishes_of_others = replace(first.sampling, prompt_logprobs=None)
    branches = [replace(first, branch_of=root)]
    for index in range(1, first.sampling.n):
        name, seed = branch_id(root, index), branch_seed(first.seed, index)
        branches.append(replace(first, request_id=name, seed=seed, sampling=wishes_of_others, branch_of=root))
    return branches


def _salt_bytes(request_id: RequestId, cache_salt: object) -> bytes:
    """Return a tenant's salt as bytes; none for None."""
    if cache_salt is None:
        return b""
    if not isinstance(cache_salt, str) or not 1 <= len(cache_salt) <= MAX_CACHE_SALT_CHARS:
        what = f"a text of {len(cache_salt)} characters" if isinstance(cache_salt, str) else repr(cache_salt)[:60]
        raise InvalidRequestError(
            f"request {request_id!r}: cache_salt is {what}; it must be a text of 1 to {MAX_CACHE_SALT_CHARS} characters"
        )
    try:
        return cache_salt.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"request {request_id!r}: cache_salt has a lone surrogate at character {error.start}, which is no text"
        ) from error


def _whole_number(value: Any) -> int | None:
    """Return an integer, also one of numpy's, as a plain one; None for anything else, truth values included."""
    if value is True or value is False or not isinstance(value, Integral):
        return None
    return int(value)
