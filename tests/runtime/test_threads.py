"""How many threads a backend gets, and that it never gets an absurd number: the system would end the process."""

from __future__ import annotations

import pytest

from giveway.core.errors import ConfigError
from giveway.runtime.threads import check_num_threads, default_num_threads
from giveway.runtime.tiny import tiny_checkpoint
from tests.backends import NAMES, load_backend

backends = pytest.mark.parametrize("name", NAMES)


@backends
@pytest.mark.parametrize("count", [-1, 0, 1025, 100_000])
def test_an_absurd_number_of_threads_is_refused_before_anything_is_loaded(name: str, count: int) -> None:
    with pytest.raises(ConfigError, match=f"num_threads is {count}; it must be from 1 to 1024"):
        load_backend(name, tiny_checkpoint(), num_threads=count)


@backends
def test_an_absurd_number_in_the_environment_is_refused_by_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "50000,2")
    with pytest.raises(ConfigError, match="OMP_NUM_THREADS is 50000; it must be from 1 to 1024"):
        load_backend(name, tiny_checkpoint())


def test_a_number_that_is_given_counts_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "50000")
    check_num_threads(2)
    with pytest.raises(ConfigError, match="OMP_NUM_THREADS"):
        default_num_threads()


@pytest.mark.parametrize("text", ["", "0", "-3", "many"])
def test_what_openmp_passes_over_is_passed_over(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    check_num_threads(None)
    assert default_num_threads() >= 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert default_num_threads() == 3
