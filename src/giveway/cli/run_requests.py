"""The loop of `giveway run`: lines in, a bounded number of requests under way, records out in order of completion."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

from giveway.build import BuiltEngine
from giveway.cli.run_input import Digest, InputLine, custom_id_of, parse_object, parse_request
from giveway.core.errors import InvalidRequestError
from giveway.core.ids import RequestId
from giveway.core.request import FinishReason
from giveway.core.sampling import SamplingParams
from giveway.engine.outputs import RequestOutput

# Under way, every answer to a prompt counted: enough for the scheduler to choose from, and no more memory however long
# the file.
REQUESTS_PER_SEAT = 4
_MAX_DETAIL = 200  # characters of another library's message


class Records(Protocol):
    """Where answers go."""

    def write(self, line_number: int, digest: Digest, values: Mapping[str, Any]) -> None:
        """Append one record."""


@dataclass(slots=True)
class Progress:
    """Counts so far."""

    num_answered: int = 0
    num_errors: int = 0
    num_output_tokens: int = 0

    @property
    def num_done(self) -> int:
        """Lines that have a record now."""
        return self.num_answered + self.num_errors


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What holds for every line that does not say otherwise."""

    sampling: Mapping[str, Any]  # fields of SamplingParams
    priority_field: str
    max_line_bytes: int
    seed: int | None  # lines without a seed get one made of this and their number: the same in every start


class RequestRun:
    """One run over the lines that still want an answer."""

    def __init__(self, built: BuiltEngine, settings: RunSettings, lines: Iterator[InputLine], records: Records) -> None:
        self._built = built
        self._settings = settings
        self._lines = lines
        self._records = records
        self._window = REQUESTS_PER_SEAT * built.scheduler_config.max_num_seqs
        self._under_way: dict[RequestId, tuple[InputLine, str | int | None]] = {}
        self.progress = Progress()

    def run(self, *, is_stopped: Callable[[], bool], tell: Callable[[Progress], None]) -> bool:
        """Answer all lines. True: done. False: `is_stopped` said so; what was not finished has no record.

        tell: called after every step. Raises OutputFileError when the output cannot be written.
        """
        engine = self._built.engine
        has_lines = True
        while not is_stopped():
            while has_lines and engine.num_unfinished < self._window and not is_stopped():
                has_lines = self._take_line()
            if not self._under_way:
                tell(self.progress)
                return True
            for update in engine.step():
                if update.whole is not None:
                    self._finish(update.whole)
                elif update.result is not None and update.result.finish_reason is FinishReason.ERROR:
                    engine.abort(update.submission_id)  # the line ends with an error: its other answers are for nobody
            tell(self.progress)
        return False

    def _take_line(self) -> bool:
        """Hand in the next line, or answer it with its error; False: there is none."""
        line = next(self._lines, None)
        if line is None:
            return False
        custom_id: str | int | None = None
        try:
            if line.content is None:
                raise InvalidRequestError(
                    f"the line is longer than {self._settings.max_line_bytes} bytes (raise --max-line-bytes)"
                )
            values = parse_object(line.content)
            custom_id = custom_id_of(values)
            name = self._submit(line, values)
        except InvalidRequestError as error:
            self._record_error(line, custom_id, type(error).__name__, str(error))
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
            # A check is missing somewhere; what this line says must not end the run of all the others.
            message = f"no request can be made of the line ({type(error).__name__}: {str(error)[:_MAX_DETAIL]})"
            self._record_error(line, custom_id, InvalidRequestError.__name__, message)
        else:
            self._under_way[name] = (line, custom_id)
        return True

    def _submit(self, line: InputLine, values: Mapping[str, Any]) -> RequestId:
        settings = self._settings
        request = parse_request(values, settings.priority_field)
        sampling = {**settings.sampling, **request.sampling}
        if "seed" not in sampling and settings.seed is not None:
            sampling["seed"] = _seed_of(settings.seed, line.number)
        try:
            params = SamplingParams(**sampling)
        except TypeError as error:  # for example a list where a number belongs
            raise InvalidRequestError(f"a sampling field has the wrong type: {error}") from error
        prompt = request.prompt if request.messages is None else self._built.model.encode_chat(request.messages)
        assert prompt is not None
        return self._built.engine.submit(
            prompt,
            params,
            priority=request.priority,
            request_id=f"line-{line.number}",
            cache_salt=request.cache_salt,
        )

    def _finish(self, result: RequestOutput) -> None:
        line, custom_id = self._under_way.pop(result.request_id)
        failed = [choice for choice in result.choices if choice.finish_reason is FinishReason.ERROR]
        if failed:
            which = f"choice {failed[0].index}: " if result.others else ""
            message = which + (failed[0].error or "the request failed")
            self._record_error(line, custom_id, "RequestFailedError", message)
            return
        self._records.write(line.number, line.digest, {"id": custom_id, **_answer_of(result)})
        self.progress.num_answered += 1
        self.progress.num_output_tokens += sum(len(choice.token_ids) for choice in result.choices)

    def _record_error(self, line: InputLine, custom_id: str | int | None, kind: str, message: str) -> None:
        self._records.write(line.number, line.digest, {"id": custom_id, "error": {"type": kind, "message": message}})
        self.progress.num_errors += 1


def _answer_of(result: RequestOutput) -> dict[str, Any]:
    """Text, reason, usage and stats of a line's answer; of several answers, a list of choices and the usage of all."""
    usage = {
        "prompt_tokens": len(result.prompt_token_ids),  # once, however many answers there are
        "completion_tokens": sum(len(choice.token_ids) for choice in result.choices),
    }
    if not result.others:
        return {**_said(result), "usage": usage, "stats": _stats_of(result)}
    choices = [{"index": choice.index, **_said(choice), "stats": _stats_of(choice)} for choice in result.choices]
    return {"choices": choices, "usage": usage}


def _said(result: RequestOutput) -> dict[str, Any]:
    return {"text": result.text, "finish_reason": result.finish_reason.value}


def _stats_of(result: RequestOutput) -> dict[str, Any]:
    stats = result.stats
    return {
        "queue_s": stats.queue_s,
        "ttft_s": stats.ttft_s,
        "e2e_s": stats.e2e_s,
        "preemptions": {mode.value: count for mode, count in stats.preemptions.items()},
        "recomputed_tokens": stats.num_recomputed_tokens,
    }


def _seed_of(seed: int, line_number: int) -> int:
    digest = blake2b(f"{seed}:{line_number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest)
