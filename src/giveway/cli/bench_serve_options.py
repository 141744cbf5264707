"""From the flags of `giveway bench serve` to its options: checked, and refused with the flag's name."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from giveway.core.errors import ConfigError

if TYPE_CHECKING:
    from giveway.bench.serve.figures import Metric, Question
    from giveway.bench.serve.load_class import ClassDefaults, LoadClass
    from giveway.bench.serve.run import ServeOptions
    from giveway.bench.serve.workload import Trace, Workload

_DEFAULT_NUM_PROMPTS = 1000
_DEFAULT_PERCENTILES = (50.0, 90.0, 99.0)  # always computed: the file's flat keys name them
_KEY_VARIABLE = "OPENAI_API_KEY"


def read_options(given: Mapping[str, Any], json_file: str | None) -> ServeOptions:
    """Return what was asked for. given: flags by name. json_file: of --json. Raises ConfigError, naming the flag."""
    from giveway.bench.serve.client import Target
    from giveway.bench.serve.run import ServeOptions

    _check_numbers(given)
    _check_files(given, json_file)
    target = Target(
        base_url=_base_url(given),
        endpoint=_endpoint(given["endpoint"]),
        headers=_headers(given["header"]),
        silence_s=given["timeout_sec"],
        verifies_certificate=not given["insecure"],
    )
    return ServeOptions(
        target=target,
        workload=_workload(given, is_chat=target.is_chat),
        question=_question(given),
        metrics=_metrics(given["percentile_metrics"]),
        model=given["model_name"],
        ignores_eos=given["ignore_eos"],
        temperature=given["temperature"],
        extra_body=_extra_body(given["extra_body"]),
        max_concurrency=None if _is_plain_closed_loop(given) else given["max_concurrency"],
        num_warmups=given["num_warmups"],
        ready_timeout_s=given["ready_check_timeout_sec"],
        shows_progress=not given["disable_tqdm"],
        metadata=_pairs("--metadata", given["metadata"]),
    )


_LEAST = {
    "num_prompts": 1,
    "max_concurrency": 1,
    "trace_limit": 1,
    "random_prefix_len": 0,
    "num_warmups": 0,
    "ready_check_timeout_sec": 0,
    "temperature": 0,
}


def _check_numbers(given: Mapping[str, Any]) -> None:
    for name, least in _LEAST.items():
        if given[name] is not None and not least <= given[name] < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} {given[name]}: must be from {least} on")
    for name in ("request_rate", "burstiness"):
        if not given[name] > 0:
            raise ConfigError(f"--{name.replace('_', '-')} {given[name]}: must be above 0")
    for name in ("time_scale", "timeout_sec", "duration_s"):
        if given[name] is not None and not 0 < given[name] < math.inf:
            raise ConfigError(f"--{name.removesuffix('_s').replace('_', '-')} {given[name]}: must be above 0")
    if not 0 <= given["random_range_ratio"] < 1:
        raise ConfigError(f"--random-range-ratio {given['random_range_ratio']}: must be from 0 to below 1")
    if not 1 <= given["port"] <= 65535:
        raise ConfigError(f"--port {given['port']}: must be from 1 to 65535")


# Where it goes


def _check_files(given: Mapping[str, Any], json_file: str | None) -> None:
    if json_file is None and not given["save_result"]:
        for name in ("save_detailed", "metadata"):
            if given[name]:
                raise ConfigError(f"--{name.replace('_', '-')} needs a file: --json FILE or --save-result")
    for name in ("result_dir", "result_filename"):
        if given[name] and not given["save_result"]:
            raise ConfigError(f"--{name.replace('_', '-')} is for --save-result, which is not given")


def _base_url(given: Mapping[str, Any]) -> str:
    url = given["base_url"] or f"http://{given['host']}:{given['port']}"
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_whole = False
    if not is_whole or any(letter.isspace() for letter in url):
        raise ConfigError(f"--base-url {url!r}: write it like http://127.0.0.1:8000")
    if parts.username or parts.password:
        raise ConfigError("--base-url holds a user name or password, which would be printed; use --header instead")
    return url.rstrip("/")


def _endpoint(endpoint: str) -> str:
    if not endpoint.startswith("/") or any(letter.isspace() for letter in endpoint):
        raise ConfigError(f"--endpoint {endpoint!r}: write a path such as /v1/completions")
    return endpoint


def _headers(pairs: Sequence[str]) -> dict[str, str]:
    from giveway.bench.serve.client import check_headers

    headers = _pairs("--header", pairs)
    key = os.environ.get(_KEY_VARIABLE)
    if key and "authorization" not in {name.lower() for name in headers}:
        headers["Authorization"] = f"Bearer {key}"
    try:
        check_headers(headers)
    except ValueError as error:
        raise ConfigError(f"--header: {error}") from None
    return headers


def _pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for number, text in enumerate(texts, start=1):
        name, equals, value = text.partition("=")
        if not equals or not name.strip():  # the text is not shown: it may be a secret that lacks its name
            raise ConfigError(f"{option}: value {number} is no NAME=VALUE")
        pairs[name.strip()] = value.strip()
    return pairs


def _extra_body(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--extra-body is not valid JSON ({error})") from None
    if not isinstance(fields, dict):
        raise ConfigError("--extra-body must be a JSON object such as '{\"top_p\": 0.9}'")
    return fields


# What is sent


def _is_plain_closed_loop(given: Mapping[str, Any]) -> bool:
    """Return whether the flags without classes mean so many at a time, each replaced when it ends.

    All due at once and let in one by one would be the same load, but every time would begin at the start of the run.
    """
    is_plain = not given["classes"] and not given["trace_file"]
    return is_plain and given["max_concurrency"] is not None and math.isinf(given["request_rate"])


def _workload(given: Mapping[str, Any], *, is_chat: bool) -> Workload:
    from giveway.bench.serve.prompts import PromptFormat, PromptMaker, Vocabulary
    from giveway.bench.serve.workload import Workload

    prompt_format = given["prompt_format"] or ("text" if is_chat else "ids")
    first, dash, last = given["random_vocab"].partition("-")
    if not (dash and first.strip().isdecimal() and last.strip().isdecimal()):
        raise ConfigError(f"--random-vocab {given['random_vocab']!r}: write FIRST-LAST such as 1000-20000")
    prompts = PromptMaker(
        PromptFormat(prompt_format), Vocabulary(int(first), int(last)), given["load_seed"], given["random_prefix_len"]
    )
    prefix = given["request_id_prefix"]
    return Workload(
        classes=_classes(given),
        trace=_trace(given),
        duration_s=given["duration_s"],
        seed=given["load_seed"],
        prompts=prompts,
        name_prefix=f"bench-{secrets.token_hex(4)}-" if prefix is None else _id_prefix(prefix),
    )


def _id_prefix(prefix: str) -> str:
    if not (prefix.isascii() and prefix.isprintable() and " " not in prefix):
        raise ConfigError(f"--request-id-prefix {prefix!r}: ASCII without blanks is needed")
    return prefix


def _classes(given: Mapping[str, Any]) -> tuple[LoadClass, ...]:
    from giveway.bench.serve.load_class import parse_class

    defaults = _class_defaults(given)
    if given["classes"]:
        if not math.isinf(given["request_rate"]):
            raise ConfigError("--request-rate is for a run without --class; a class has its own rate=")
        return tuple(parse_class(text, defaults) for text in given["classes"])
    if given["trace_file"] is not None:
        return ()
    number = given["num_prompts"] or _DEFAULT_NUM_PROMPTS
    if _is_plain_closed_loop(given):
        return (parse_class(f"all:concurrency={given['max_concurrency']},num={number}", defaults),)
    return (parse_class(f"all:rate={given['request_rate']},num={number}", defaults),)


def _class_defaults(given: Mapping[str, Any]) -> ClassDefaults:
    from giveway.bench.serve.load_class import ClassDefaults, TokenRange

    def around(length: int) -> TokenRange:
        share = given["random_range_ratio"]
        return TokenRange(max(1, math.floor(length * (1 - share))), math.ceil(length * (1 + share)))

    return ClassDefaults(
        prompt=around(given["random_input_len"]),
        output=around(given["random_output_len"]),
        burstiness=given["burstiness"],
        num_open_loop_requests=given["num_prompts"],
    )


def _trace(given: Mapping[str, Any]) -> Trace | None:
    from giveway.bench.serve.traces import TraceFormat, find_format, look_through
    from giveway.bench.serve.workload import Trace

    name = given["trace_format"]
    if given["trace_file"] is None:
        if name not in ("auto", "random"):
            raise ConfigError(f"--trace-format {name} needs the file: --trace FILE")
        return None
    if name == "random":
        raise ConfigError("--dataset-name random has no file; leave out --trace")
    path, limit = Path(given["trace_file"]), given["trace_limit"] or given["num_prompts"]
    trace_format = find_format(path) if name == "auto" else TraceFormat(name)
    duration_s, time_scale = given["duration_s"], given["time_scale"]
    until_s = None if duration_s is None else duration_s / time_scale
    summary = look_through(path, trace_format, limit=limit, until_s=until_s)
    return Trace(path, trace_format, summary, limit, time_scale)


# What is reported


def _question(given: Mapping[str, Any]) -> Question:
    from giveway.bench.serve.figures import Question, parse_goodput

    limits = parse_goodput(given["goodput"]) if given["goodput"] else None
    percents = set(_DEFAULT_PERCENTILES)
    for text in given["metric_percentiles"].split(","):
        try:
            percent = float(text)
        except ValueError:
            percent = math.nan
        if not 0 <= percent <= 100:
            raise ConfigError(f"--metric-percentiles {text!r}: numbers from 0 to 100 are needed, such as 50,95,99.9")
        percents.add(percent)
    return Question(tuple(sorted(percents)), limits, fixed_lengths=given["ignore_eos"])


def _metrics(text: str) -> tuple[Metric, ...]:
    from giveway.bench.serve.figures import Metric

    names = [name.strip() for name in text.split(",")]
    known = [metric.value for metric in Metric]
    for name in names:
        if name not in known:
            raise ConfigError(f"--percentile-metrics {name!r}: known are {', '.join(known)}")
    return tuple(metric for metric in Metric if metric.value in names)


def result_file(given: Mapping[str, Any]) -> str | None:
    """Return the file that --save-result writes, its directory made; None: none. Raises ConfigError."""
    if not given["save_result"]:
        return None
    directory = Path(given["result_dir"] or ".")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--result-dir {directory}: cannot be made: {error.strerror}") from error
    moment = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    name = given["result_filename"] or f"bench-serve-{(given['model'] or 'model').rpartition('/')[2]}-{moment}.json"
    return str(directory / name)
