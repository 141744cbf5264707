"""A class of load out of its text."""

from __future__ import annotations

import math

import pytest

from giveway.bench.serve.load_class import ClassDefaults, LoadClass, Shape, TokenRange, parse_class
from giveway.core.errors import ConfigError

DEFAULTS = ClassDefaults(TokenRange(1024, 1024), TokenRange(128, 128))


def parse(text: str) -> LoadClass:
    return parse_class(text, DEFAULTS)


def test_the_two_classes_of_the_documentation_are_read() -> None:
    interactive = parse("interactive:rate=0.5,prompt=64,output=32,priority=0")
    assert (interactive.name, interactive.shape, interactive.rate) == ("interactive", Shape.RATE, 0.5)
    assert (interactive.prompt, interactive.output) == (TokenRange(64, 64), TokenRange(32, 32))
    assert interactive.priority == 0
    assert not interactive.is_endless
    batch = parse("batch:concurrency=48,prompt=256,output=256,priority=20")
    assert (batch.shape, batch.concurrency, batch.is_endless) == (Shape.CLOSED, 48, True)


def test_everything_that_a_class_can_say_is_read_and_told_in_the_report() -> None:
    text = "a:rate=2,prompt=100-512,output=1-9,service_tier=flex,num=7,burstiness=0.5,start=1.5,stream=0,priority=-3"
    load_class = parse(text)
    assert load_class == LoadClass(
        name="a",
        prompt=TokenRange(100, 512),
        output=TokenRange(1, 9),
        rate=2.0,
        burstiness=0.5,
        num_requests=7,
        start_s=1.5,
        priority=-3,
        service_tier="flex",
        is_streamed=False,
    )
    assert load_class.describe() == {
        "prompt": "100-512",
        "output": "1-9",
        "rate": 2.0,
        "burstiness": 0.5,
        "num": 7,
        "start": 1.5,
        "priority": -3,
        "service_tier": "flex",
        "stream": 0,
    }


def test_what_a_class_does_not_say_comes_from_the_other_flags() -> None:
    defaults = ClassDefaults(TokenRange(3, 4), TokenRange(5, 6), burstiness=2.0, num_open_loop_requests=11)
    open_loop = parse_class("a:rate=1", defaults)
    assert (open_loop.prompt, open_loop.output) == (TokenRange(3, 4), TokenRange(5, 6))
    assert (open_loop.burstiness, open_loop.num_requests) == (2.0, 11)
    # A closed loop without a number runs as long as the others; the flag must not end it.
    assert parse_class("b:concurrency=1", defaults).is_endless


def test_a_burst_is_its_own_number_of_requests() -> None:
    assert parse("a:burst=5").limit == 5
    with pytest.raises(ConfigError, match="burst=5 is already its number"):
        parse("a:burst=5,num=3")


def test_an_infinite_rate_is_told_in_a_way_that_json_has() -> None:
    assert math.isinf(parse("a:rate=inf,num=1").rate or 0)
    assert parse("a:rate=inf,num=1").describe()["rate"] == "inf"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("interactive", "write NAME:key=value"),
        (":rate=1", "write NAME:key=value"),
        ("a b:rate=1", "write NAME:key=value"),
        ("a:", "no shape given; it needs exactly one of rate="),
        ("a:rate=1,concurrency=2", "rate and concurrency given"),
        ("a:rate=1,prio=3", r"unknown setting 'prio'. Did you mean priority=\?"),
        ("a:rate=1,xyz=3", "unknown setting 'xyz'. Known are: rate, burst, concurrency"),
        ("a:rate=1,rate=2", "rate= is given twice"),
        ("a:rate", "'rate' is no key=value"),
        ("a:rate=0", "rate='0': must be above 0"),
        ("a:rate=nan", "rate='nan': must be above 0"),
        ("a:rate=fast", "rate='fast'"),
        ("a:concurrency=0", "must be from 1 to"),
        ("a:concurrency=1.5", "not a whole number"),
        ("a:concurrency=" + "9" * 400, "not a whole number"),
        ("a:rate=1,prompt=0", "tokens 0-0"),
        ("a:rate=1,prompt=9-3", "tokens 9-3"),
        ("a:rate=1,output=-5", "not a whole number"),
        ("a:rate=1,output=99999999999", "from 1 to 10000000"),
        ("a:rate=1,start=-1", "must be seconds from 0 on"),
        ("a:rate=1,start=inf", "must be seconds from 0 on"),
        ("a:rate=1,stream=yes", "must be 0 or 1"),
        ("a:rate=1,service_tier=a b", "a service tier has letters"),
    ],
)
def test_what_is_wrong_is_refused_by_the_name_of_class_and_setting(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse(text)
    assert "class " in str(caught.value)
