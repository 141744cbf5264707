"""Requests that can never be served: refused at submission, with the numbers and the remedy."""

from __future__ import annotations

from giveway.core.config import CacheConfig, SchedulerConfig
from giveway.core.errors import InvalidRequestError, RequestTooLargeError
from giveway.core.request import RequestSpec, blocks_to_finish


def check_limits(spec: RequestSpec, config: SchedulerConfig, cache: CacheConfig) -> None:
    """Raise InvalidRequestError, with the numbers, if a request can never be served however long it waited."""
    num_prompt, num_output = len(spec.prompt_token_ids), spec.max_new_tokens
    asked = f"request {spec.request_id!r} can never fit: {num_prompt} prompt + {num_output} output tokens"
    if not num_prompt:
        raise InvalidRequestError(f"request {spec.request_id!r} has an empty prompt; at least 1 token is needed")
    if num_output < 1:
        raise InvalidRequestError(f"request {spec.request_id!r}: max_tokens is {num_output}; at least 1")
    if num_prompt + num_output > config.max_model_len:
        raise RequestTooLargeError(
            f"{asked}, max_model_len is {config.max_model_len}. "
            + _lower_max_tokens(config.max_model_len - num_prompt)
            + " or raise --max-model-len."
        )
    needed = blocks_to_finish(spec, cache.block_size)
    if needed > cache.num_device_blocks:
        raise RequestTooLargeError(
            f"{asked} need {needed} KV blocks, the device pool has {cache.num_device_blocks} "
            f"({cache.block_size} tokens each). {_lower_max_tokens(cache.num_device_slots + 1 - num_prompt)} "
            f"or raise --num-kv-blocks to {needed}."
        )


def _lower_max_tokens(limit: int) -> str:
    return f"Lower max_tokens to {limit}" if limit >= 1 else "Shorten the prompt"
