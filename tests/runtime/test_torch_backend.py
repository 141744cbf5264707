"""The backend's own behaviour: settings, checks before any write, faults, prompt log-probabilities."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from giveway.core.errors import ConfigError, DeviceFaultError, InvariantError, MissingDependencyError
from giveway.core.ids import DeviceBlockId
from giveway.core.sampling import SamplingParams
from giveway.runtime.backend import Backend, BatchSequence, SequenceResult, TokenLogprobs
from giveway.runtime.tiny import tiny_checkpoint
from giveway.runtime.torch import load_backend
from giveway.runtime.torch.backend import TorchBackend, _to_host
from tests.runtime.backend_driver import Driver, random_tokens
from tests.sample_inputs import GREEDY, sample_input

TINY_UP_VALUES = [-0.28119218349456787, -0.3039258122444153, 0.020030884072184563]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def driver() -> Driver:
    return Driver(load_backend(tiny_checkpoint()), num_blocks=64)


def kv_sum(backend: TorchBackend) -> float:
    storage = backend._storage
    assert storage is not None
    return float(sum(storage.blocks(layer, which).double().abs().sum() for layer in (0, 1) for which in (0, 1)))


# Settings


def test_the_description_names_device_dtype_and_promise() -> None:
    assert load_backend(tiny_checkpoint()).description == "cpu, float32, PyTorch exact"
    fast: Backend = load_backend(tiny_checkpoint(), dtype="bfloat16", exact=False)
    assert fast.description.startswith("cpu, bfloat16, PyTorch")
    assert fast.description.endswith("not exact: answers may depend on the batch")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int8"}, "dtype is 'int8'; it must be 'auto', 'float32', 'bfloat16', 'float16'"),
        ({"dtype": "float16"}, "Use 'float32' or 'bfloat16'"),
        ({"device": "tpu"}, "device is 'tpu'; it must be 'auto', 'cpu' or 'cuda'"),
        ({"num_threads": 0}, "num_threads is 0"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_backend(tiny_checkpoint(), **settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_missing_gpu_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="finds no CUDA device"):
        load_backend(tiny_checkpoint(), device="cuda")


def test_missing_torch_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'giveway\[torch\]'"):
        load_backend(tiny_checkpoint())


def test_importing_the_package_does_not_import_torch() -> None:
    code = (
        "import sys; import giveway.runtime.torch, giveway.runtime.tiny, giveway.runtime.sampler; "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_waiting_threads_do_not_spin_for_long_unless_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")  # so that the monkeypatch restores it
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    load_backend(tiny_checkpoint())
    assert "GOMP_SPINCOUNT" not in os.environ
    monkeypatch.delenv("OMP_WAIT_POLICY")
    load_backend(tiny_checkpoint())
    assert os.environ["GOMP_SPINCOUNT"] == "10000"


def test_sizes_are_those_of_the_geometry(driver: Driver) -> None:
    assert driver.backend.vocab_size == 260
    assert driver.backend.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4  # layers, K and V, KV heads, head, float32
    assert driver.backend.free_memory_bytes > 0


def test_pools_can_be_allocated_anew() -> None:
    driver = Driver(load_backend(tiny_checkpoint()), num_blocks=8)
    tokens = random_tokens(0, 100, 260)
    before = driver.logits_in_chunks(tokens, 100)
    again = Driver(driver.backend, num_blocks=20, block_size=8)
    assert torch.equal(again.logits_in_chunks(tokens, 100), before)


def test_using_it_before_allocation_or_after_closing_is_a_bug_of_ours() -> None:
    backend = load_backend(tiny_checkpoint())
    with pytest.raises(InvariantError, match="before allocate"):
        backend.forward([])
    backend.allocate(num_device_blocks=1, num_host_blocks=0, block_size=16)
    assert backend.forward([]) == []
    backend.close()
    with pytest.raises(InvariantError, match="after close"):
        backend.forward([])


def test_closing_twice_or_before_allocation_is_harmless() -> None:
    backend = load_backend(tiny_checkpoint())
    backend.close()
    backend.close()
    with pytest.raises(InvariantError, match="after close"):
        backend.allocate(num_device_blocks=1, num_host_blocks=0, block_size=16)
    backend = Driver(load_backend(tiny_checkpoint()), num_blocks=8).backend
    backend.close()
    backend.close()
    for use in (backend.forward, backend.logits, backend.copy_out, backend.copy_in, backend.copy_within):
        with pytest.raises(InvariantError, match="after close"):
            use([])


def test_pools_that_would_be_replaced_count_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    # Goal: sized by what is free, a second allocation comes out as large as the first one.
    monkeypatch.setattr("giveway.runtime.torch.backend.available_bytes", lambda device: 1000)
    backend = load_backend(tiny_checkpoint())
    assert backend.free_memory_bytes == 1000
    monkeypatch.setattr("giveway.runtime.torch.kv_storage.KVStorage.num_pending_bytes", 600)
    backend.allocate(num_device_blocks=7, num_host_blocks=4, block_size=16)
    # What is not touched yet is among the 1000 already.
    assert backend.free_memory_bytes == 1000 - 600 + (7 + 1 + 4) * 16 * backend.kv_bytes_per_token
    backend._device = torch.device("cuda")  # the host pool lies elsewhere
    assert backend.free_memory_bytes == 1000 + (7 + 1) * 16 * backend.kv_bytes_per_token
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    backend.close()
    assert backend.free_memory_bytes == 1000


def test_old_pools_are_gone_before_the_new_ones_are_sized(monkeypatch: pytest.MonkeyPatch) -> None:
    # Goal: also for somebody who still holds the old storage; and PyTorch's cache is emptied on a GPU.
    backend = load_backend(tiny_checkpoint())
    backend.allocate(num_device_blocks=7, num_host_blocks=4, block_size=16)
    old = backend._storage
    assert old is not None
    left: list[int] = []
    monkeypatch.setattr(
        "giveway.runtime.main_memory_pools.check_room",
        lambda *_, **__: left.append(old.num_device_bytes + old.num_host_bytes),
    )
    backend.allocate(num_device_blocks=7, num_host_blocks=4, block_size=16)
    assert left == [0, 0]
    emptied: list[bool] = []
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: emptied.append(backend._storage is None))
    backend._device = torch.device("cuda")
    backend.close()
    assert emptied == [True]


def test_impossible_pools_are_refused() -> None:
    backend = load_backend(tiny_checkpoint())
    with pytest.raises(ConfigError, match="at least 1 device block"):
        backend.allocate(num_device_blocks=0, num_host_blocks=0, block_size=16)
    with pytest.raises(ConfigError, match="Lower --kv-cache-memory-bytes or --num-kv-blocks"):
        backend.allocate(num_device_blocks=10**9, num_host_blocks=0, block_size=16)


@pytest.mark.parametrize("block_size", [1, 5, 16, 128, 200])
def test_every_block_size_gives_the_same_logits(block_size: int) -> None:
    tokens = random_tokens(1, 150, 260)
    usual = Driver(load_backend(tiny_checkpoint())).logits_in_chunks(tokens, 64)
    other = Driver(load_backend(tiny_checkpoint()), block_size=block_size)
    assert torch.equal(other.logits_in_chunks(tokens, 64), usual)


def test_the_tiny_model_is_the_same_everywhere() -> None:
    # Goal: its weights come from integers of a counter-based generator; these values were written down once.
    values = np.frombuffer(tiny_checkpoint(0).tensor("model.layers.1.mlp.up_proj.weight").data.tobytes(), "<f4")
    assert values[:3].tolist() == TINY_UP_VALUES
    assert (
        tiny_checkpoint(1).tensor("model.norm.weight").data.tobytes()
        != tiny_checkpoint(0).tensor("model.norm.weight").data.tobytes()
    )


def test_the_tiny_model_says_something(driver: Driver) -> None:
    # Goal: tests that compare answers need answers that vary and whose best token is well ahead of the second.
    answers = [driver.generate(random_tokens(seed, 12, 260), 32) for seed in range(6)]
    assert all(len(set(answer)) > 10 for answer in answers)
    assert len({tuple(answer) for answer in answers}) == 6
    best = driver.logits_in_chunks(answers[0], 32).topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > 1e-3


# Checks


def whole(tokens: list[int], table: tuple[int, ...], **fields: Any) -> BatchSequence:
    fields = {"request_id": "bad", "start": 0, "sample": sample_input(), **fields}
    return BatchSequence(token_ids=tokens, block_table=tuple(DeviceBlockId(block) for block in table), **fields)


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        (whole([1, 260], (0,)), "request 'bad': token id 260 is outside the vocabulary of 260"),
        (whole([-1], (0,)), "token id -1 is outside"),
        (whole([1], (64,)), "KV block 64 is outside the pool of 64"),
        (whole([1], (-1,)), "KV block -1 is outside"),
        (whole([1] * 17, (0,)), "17 tokens need 2 KV blocks, its table has 1"),
        (whole([], (0,)), "0 tokens from position 0 cannot be computed"),
        (whole([1], (0,), start=-1), "from position -1"),
        (whole([1], tuple(range(64)) * 2, start=1024), "position 1024 is beyond the last"),
    ],
)
def test_a_bad_batch_is_refused_before_anything_is_written(
    driver: Driver, sequence: BatchSequence, message: str
) -> None:
    # Goal: the good neighbour's KV is not written either, so the engine knows that no slot changed.
    before = kv_sum(driver.backend)
    good = whole(random_tokens(9, 16, 260), (3,))
    with pytest.raises(DeviceFaultError, match=message):
        driver.run([good, sequence])
    assert kv_sum(driver.backend) == before


def test_a_failure_inside_the_forward_pass_is_a_device_fault(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("out of memory, say")

    monkeypatch.setattr("giveway.runtime.torch.backend.forward_hidden", broken)
    with pytest.raises(DeviceFaultError, match="2 tokens of 1 requests failed on cpu: out of memory, say"):
        driver.run([whole([1, 2], (0,))])


# Results


def test_nothing_is_sampled_unless_asked(driver: Driver) -> None:
    results = driver.run([whole([1, 2], (0,), sample=None), whole([1, 2], (1,))])
    assert results[0] == SequenceResult()
    assert results[1].token_id is not None


def test_a_request_with_not_finite_logits_harms_itself_only() -> None:
    # Goal: a broken embedding row makes one request's logits NaN; its mate's result is that of the mate alone.
    good = tiny_checkpoint()
    embedding = np.frombuffer(good.tensor("model.embed_tokens.weight").data.tobytes(), "<f4").reshape(260, 64).copy()
    embedding[7] = np.nan
    driver = Driver(load_backend(tiny_checkpoint(overrides={"model.embed_tokens.weight": embedding})))
    poisoned, healthy = driver.table(20), driver.table(20)
    mate = driver.chunk([1, 2, 3], 0, healthy, sample=sample_input())
    alone = driver.run([mate])[0]
    batch = [driver.chunk([5, 7, 9], 0, poisoned, sample=sample_input()), mate]
    broken, fine = driver.run(batch)
    assert broken.token_id is None
    assert broken.fault == "logits are not finite: 260 of 260 values are NaN or infinite"
    assert fine == alone
    # The blocks that hold NaN now go to somebody else, who writes only a part of them.
    reused = driver.chunk([1, 2, 3], 0, poisoned, sample=sample_input())
    assert driver.run([reused])[0] == alone
    drawn = driver.run(
        [driver.chunk([7], 0, poisoned, sample=sample_input(SamplingParams(temperature=1.0, top_p=1.0)))]
    )
    assert drawn[0].fault is not None


def test_a_request_whose_every_token_is_forbidden_fails_alone(driver: Driver) -> None:
    sample = sample_input(GREEDY, forbidden=tuple(range(260)))
    results = driver.run([whole([1], (0,), sample=sample), whole([1], (1,))])
    assert results[0].fault == "all 260 tokens are forbidden at output position 0"
    assert results[1].fault is None


def test_sampled_rows_cross_to_the_host_in_one_transfer() -> None:
    # Goal: every transfer waits for the device, so one a row would cost a batch of 64 as many stops.
    class OnDevice:
        device = torch.device("meta")
        num_transfers = 0

        def index_select(self, dimension: int, rows: torch.Tensor) -> OnDevice:
            assert (dimension, len(rows)) == (0, 2)
            return self

        def cpu(self) -> torch.Tensor:
            self.num_transfers += 1
            return torch.tensor([[1.0, 2.0], [3.0, 4.0]])

    logits: Any = OnDevice()
    rows = _to_host(logits, [5, 8])
    assert {row: values.tolist() for row, values in rows.items()} == {5: [1.0, 2.0], 8: [3.0, 4.0]}
    assert logits.num_transfers == 1
    assert _to_host(logits, []) == {}
    assert logits.num_transfers == 1


def test_a_batch_of_every_kind_of_sampling_gives_each_what_it_gives_alone(driver: Driver) -> None:
    wishes = [
        sample_input(),
        None,
        sample_input(SamplingParams(temperature=0.0, top_p=1.0, logprobs=3)),
        sample_input(SamplingParams(temperature=1.0, top_p=0.9), seed=4),
        sample_input(GREEDY, forbidden=tuple(range(260))),
        sample_input(SamplingParams(temperature=1.0, top_p=1.0, logprobs=0), seed=5),
    ]
    batch = [whole([3 + row, 9], (row,), sample=sample) for row, sample in enumerate(wishes)]
    together = driver.run(batch)
    assert together == [driver.run([sequence])[0] for sequence in batch]
    assert [result.token_id is None for result in together] == [False, True, False, False, True, False]
    assert [result.logprobs is None for result in together] == [True, True, False, True, True, False]


def test_prompt_logprobs_are_the_models_own(driver: Driver) -> None:
    # Goal: each entry is about the token that follows, from the raw distribution, whatever the chunks.
    tokens = random_tokens(6, 100, 260)
    logits = driver.logits_in_chunks(tokens, 100).double()
    expected = torch.log_softmax(logits, -1)
    for chunk_size in (100, 33):
        table = driver.table(100)
        entries: list[TokenLogprobs] = []
        for start in range(0, 100, chunk_size):
            piece = tokens[start : start + chunk_size]
            following = tokens[start + 1 : start + 1 + len(piece)]
            sample = sample_input() if start + len(piece) == 100 else None
            chunk = driver.chunk(piece, start, table, sample=sample, num_prompt_logprobs=2, next_token_ids=following)
            result = driver.run([chunk])[0]
            entries += result.prompt_logprobs
        driver.give_back(table)
        assert result.token_id == int(logits[-1].argmax())
        assert [entry.token_id for entry in entries] == tokens[1:]
        for row, entry in enumerate(entries):
            assert entry.logprob == pytest.approx(float(expected[row, entry.token_id]), abs=1e-9)
            best = expected[row].topk(2)
            assert [token for token, _ in entry.top] == best.indices.tolist()
            assert entry.rank == 1 + int((expected[row] > expected[row, entry.token_id]).sum())


def test_prompt_logprobs_of_a_single_token_prompt_are_empty(driver: Driver) -> None:
    result = driver.run([whole([5], (0,), num_prompt_logprobs=3, next_token_ids=())])[0]
    assert result.prompt_logprobs == ()
    assert result.token_id is not None


# CUDA


@needs_cuda
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("exact", [False, True])
def test_cuda_agrees_with_cpu(dtype: str, exact: bool) -> None:
    checkpoint = tiny_checkpoint(3, head_size=64)
    tokens = random_tokens(3, 200, 260)
    reference = Driver(load_backend(checkpoint)).logits_in_chunks(tokens, 200)
    backend = load_backend(checkpoint, device="cuda", dtype=dtype, exact=exact)
    logits = Driver(backend, block_size=16).logits_in_chunks(tokens, 64).cpu()
    cosine = torch.nn.functional.cosine_similarity(logits, reference, dim=-1)
    assert float(cosine.min()) > (1 - 1e-4 if dtype == "float32" else 0.99)
    if exact:
        assert torch.equal(Driver(backend).logits_in_chunks(tokens, 7).cpu(), logits)


@needs_cuda
def test_a_swap_on_cuda_changes_no_bit() -> None:
    driver = Driver(load_backend(tiny_checkpoint(3), device="cuda", exact=True))
    tokens = random_tokens(5, 90, 260)
    expected = driver.logits_in_chunks(tokens, 90)[80:]
    old, new = driver.table(90), driver.table(90)
    driver.backend.logits([driver.chunk(tokens[:80], 0, old)])
    hosts = list(range(len(old)))
    driver.backend.copy_out(list(zip(old, hosts, strict=True)))
    driver.backend.copy_in(list(zip(hosts, new, strict=True)))
    assert torch.equal(driver.backend.logits([driver.chunk(tokens[80:], 80, new)]), expected)
