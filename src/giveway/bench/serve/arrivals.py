"""When the requests of an open loop are due."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import count, repeat, takewhile

from giveway.bench.serve.load_class import LoadClass
from giveway.core.errors import InvariantError


def gaps_s(rng: random.Random, *, rate: float, burstiness: float) -> Iterator[float]:
    """Yield seconds between arrivals for ever; their mean is 1 / rate.

    Gamma distributed with shape `burstiness`, as in `vllm bench serve`: 1 is a Poisson process, less comes in bursts,
    more comes evenly, infinity at even gaps. Unlike there, the sum is not stretched to fit the mean: what a Poisson
    process leaves to chance stays so.
    """
    if math.isinf(rate):
        yield from repeat(0.0)
    elif math.isinf(burstiness):
        yield from repeat(1 / rate)
    else:
        while True:
            yield rng.gammavariate(burstiness, 1 / (rate * burstiness))


def due_times_s(load_class: LoadClass, rng: random.Random, *, duration_s: float | None) -> Iterator[float]:
    """Yield the moment of each arrival of an open loop, in seconds after the start of the run.

    duration_s: no arrival later than this; None: only the class's own number of requests ends it.
    """
    due: Iterator[float]
    if load_class.burst is not None:
        due = repeat(load_class.start_s, load_class.burst)
    elif load_class.rate is not None:
        due = _at_rate(load_class, load_class.rate, rng)
    else:
        raise InvariantError(f"class {load_class.name!r} is a closed loop; its requests are due when one has ended")
    return due if duration_s is None else takewhile(lambda moment_s: moment_s <= duration_s, due)


def _at_rate(load_class: LoadClass, rate: float, rng: random.Random) -> Iterator[float]:
    moment_s, gaps = load_class.start_s, gaps_s(rng, rate=rate, burstiness=load_class.burstiness)
    for number in count():
        if number == load_class.num_requests:
            return
        moment_s += next(gaps)
        yield moment_s
