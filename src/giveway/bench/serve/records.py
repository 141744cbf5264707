"""What was seen of one request: moments of the client's clock, counts, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

from giveway.bench.serve.answer_parts import AnswerPart
from giveway.bench.serve.workload import PlannedRequest


class Outcome(Enum):
    """How a request ended."""

    COMPLETED = "completed"
    CUT_OFF = "cut off"  # closed by us, because the run was over: no error
    FAILED = "failed"


class FailureKind(Enum):
    """Why a request failed. An HTTP status counts by its number."""

    STATUS = "http"
    CONNECTION = "connection"  # refused, or lost before the answer began
    TIMEOUT = "timeout"  # nothing came for as long as allowed
    BROKEN_STREAM = "broken stream"  # ended in the middle, or what came was no answer
    ERROR_EVENT = "error in the stream"  # the server said so after it had begun with status 200
    EMPTY_ANSWER = "empty answer"  # ended in order, without a token


class RequestFailure(Exception):
    """One request failed; it is counted and nobody else is affected."""

    def __init__(self, kind: FailureKind, detail: str, status: int | None = None) -> None:
        super().__init__(f"{kind.value}: {detail}")
        self.label = kind.value if status is None else f"{kind.value} {status}"
        self.detail = detail


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request, when it is over. Moments are seconds of one clock; lengths of time follow from them."""

    class_name: str
    name: str
    outcome: Outcome
    due_s: float
    sent_s: float | None  # None: it was over before its turn came
    token_times_s: tuple[float, ...]  # arrival of every event that carried tokens
    end_s: float
    wished_prompt_tokens: int
    wished_output_tokens: int
    num_seen_tokens: int  # counted from events; several in one text look like one
    usage_prompt_tokens: int | None = None  # None: the server does not say
    usage_output_tokens: int | None = None  # None: the server does not say
    is_streamed: bool = True
    failure: str | None = None  # label under which it is counted; None: it did not fail
    detail: str = ""  # of the failure

    @property
    def num_prompt_tokens(self) -> int:
        """As the server counted them, or as wished where it does not say."""
        return self.wished_prompt_tokens if self.usage_prompt_tokens is None else self.usage_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """As the server counted them, or as seen where it does not say."""
        return self.num_seen_tokens if self.usage_output_tokens is None else self.usage_output_tokens

    @property
    def ttft_s(self) -> float | None:
        """From the moment it was due to the first token; None: no token came."""
        return self.token_times_s[0] - self.due_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """From the first token to the last, for each token after the first; None: it had no second one to look at."""
        if not self.is_streamed or not self.token_times_s or self.num_output_tokens < 2:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.num_output_tokens - 1)

    @property
    def itls_s(self) -> list[float]:
        """Between one event with tokens and the next, however many tokens they carry."""
        return [after - before for before, after in pairwise(self.token_times_s)]

    @property
    def e2e_s(self) -> float:
        """From the moment it was due to the end of the answer."""
        return self.end_s - self.due_s

    @property
    def lag_s(self) -> float | None:
        """From the moment it was due to the moment it was sent: the client's own lateness; None: never sent."""
        return None if self.sent_s is None else self.sent_s - self.due_s


@dataclass(slots=True)
class Sighting:
    """Written while a request is under way, by whoever sees something of it; closed into a record."""

    request: PlannedRequest
    due_s: float
    sent_s: float | None = None
    end_s: float | None = None  # of an answer that came to its end
    has_end: bool = False  # a finish reason came
    _token_times_s: list[float] = field(default_factory=list)
    _num_seen_tokens: int = 0
    _usage_prompt_tokens: int | None = None
    _usage_output_tokens: int | None = None

    @property
    def has_tokens(self) -> bool:
        """Return whether a token has come."""
        return bool(self._token_times_s)

    def see(self, part: AnswerPart, now_s: float) -> None:
        """Take in one event of a stream, or a whole answer."""
        if part.num_tokens:
            self._token_times_s.append(now_s)
            self._num_seen_tokens += part.num_tokens
        if part.usage is not None:
            if part.usage.prompt_tokens is not None:
                self._usage_prompt_tokens = part.usage.prompt_tokens
            if part.usage.output_tokens is not None:
                self._usage_output_tokens = part.usage.output_tokens
        self.has_end |= part.is_end

    def close(self, outcome: Outcome, now_s: float, failure: RequestFailure | None = None) -> RequestRecord:
        """Return what was seen. now_s: the end, where the answer itself did not come to one."""
        return RequestRecord(
            class_name=self.request.class_name,
            name=self.request.name,
            outcome=outcome,
            due_s=self.due_s,
            sent_s=self.sent_s,
            token_times_s=tuple(self._token_times_s),
            end_s=now_s if self.end_s is None else self.end_s,
            wished_prompt_tokens=self.request.prompt_tokens,
            wished_output_tokens=self.request.output_tokens,
            num_seen_tokens=self._num_seen_tokens,
            usage_prompt_tokens=self._usage_prompt_tokens,
            usage_output_tokens=self._usage_output_tokens,
            is_streamed=self.request.is_streamed,
            failure=None if failure is None else failure.label,
            detail="" if failure is None else failure.detail,
        )
