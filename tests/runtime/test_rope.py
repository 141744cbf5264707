"""The angles of rotary position embedding, against another library's way of computing them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from giveway.core.errors import UnsupportedModelError
from giveway.runtime import rope
from giveway.runtime.model_config import ModelConfig, RopeScaling
from giveway.runtime.rope import inverse_frequencies, make_rope_angles
from giveway.runtime.tiny import tiny_checkpoint
from giveway.runtime.torch.rope import make_rope_table

LLAMA3 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)


def config(head_size: int, theta: float, scaling: RopeScaling | None = None) -> ModelConfig:
    return replace(tiny_checkpoint(head_size=head_size).config, rope_theta=theta, rope_scaling=scaling)


def ulps_apart(left: np.ndarray, right: np.ndarray) -> int:
    """The largest distance of two float32 arrays, counted in numbers between them."""
    ordered = [np.where(bits < 0, -(bits & 0x7FFFFFFF), bits) for bits in (left.view(np.int32), right.view(np.int32))]
    return int(np.abs(ordered[0].astype(np.int64) - ordered[1]).max())


def by_torch(wanted: ModelConfig) -> torch.Tensor:
    exponents = torch.arange(0, wanted.head_size, 2, dtype=torch.int64).float() / wanted.head_size
    return 1.0 / (wanted.rope_theta**exponents)


@pytest.mark.parametrize("theta", [1e4, 1e5, 5e5, 1e6])
@pytest.mark.parametrize("head_size", [16, 64, 80, 128])
def test_frequencies_are_those_of_pytorch_but_for_its_last_digit(head_size: int, theta: float) -> None:
    # Goal: powers are rounded correctly here; those of a library for vectors are off by one now and then.
    wanted = config(head_size, theta)
    found, expected = inverse_frequencies(wanted), by_torch(wanted).numpy()
    assert found.dtype == np.float32
    assert ulps_apart(found, expected) <= 1
    assert (found != expected).sum() <= 1


def test_llama_3_keeps_short_waves_stretches_long_ones_and_goes_over_between() -> None:
    plain, stretched = (inverse_frequencies(config(64, 5e5, scaling)) for scaling in (None, LLAMA3))
    waves = 2 * np.pi / plain.astype(np.float64)
    assert stretched.dtype == np.float32
    assert (stretched[waves < 8192 / 4] == plain[waves < 8192 / 4]).all()
    assert (stretched[waves > 8192] == plain[waves > 8192] / 8).all()
    between = (waves >= 8192 / 4) & (waves <= 8192)
    share = (8192 / waves[between] - 1) / 3
    np.testing.assert_allclose(stretched[between], ((1 - share) / 8 + share) * plain[between], rtol=1e-6)
    assert between.any()


def test_divisors_of_a_file_are_applied_as_they_stand() -> None:
    divisors = tuple(float(number) for number in range(1, 9))
    wanted = replace(config(16, 1e4), rope_freq_factors=divisors)
    assert (inverse_frequencies(wanted) == inverse_frequencies(config(16, 1e4)) / np.array(divisors, np.float32)).all()


@pytest.mark.parametrize("theta", [1e300, 1e-300])
def test_a_base_that_gives_no_finite_angles_is_refused_in_one_line(theta: float) -> None:
    # Warnings are errors here: numpy's own would come first.
    with pytest.raises(UnsupportedModelError, match=f"rope_theta {theta:g}".replace("+", r"\+") + " rotary angles"):
        make_rope_angles(config(16, theta), 10)


def test_scaling_that_gives_no_finite_angles_is_refused_too() -> None:
    for factors in ((1e-45, *[1.0] * 7), (1e39, *[1.0] * 7)):
        with pytest.raises(UnsupportedModelError, match="rope_theta 10000 and its scaling rotary angles"):
            make_rope_angles(replace(config(16, 1e4), rope_freq_factors=factors), 10)


def test_cosine_and_sine_are_rounded_once_from_the_rounded_angle() -> None:
    wanted = config(64, 1e4)
    angles = make_rope_angles(wanted, 300)
    exact = np.outer(np.arange(300, dtype=np.float32), inverse_frequencies(wanted)).astype(np.float64)
    assert (angles.cosine == np.cos(exact).astype(np.float32)).all()
    assert (angles.sine == np.sin(exact).astype(np.float32)).all()
    assert ulps_apart(angles.cosine, torch.from_numpy(exact).float().cos().numpy()) <= 1
    assert angles.cosine.dtype == np.float32
    assert angles.cosine.shape == angles.sine.shape == (300, 32)


def test_a_position_has_the_same_bits_however_many_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = config(16, 1e4)
    many = make_rope_angles(wanted, 50)
    monkeypatch.setattr(rope, "_PIECE_POSITIONS", 7)
    few = make_rope_angles(wanted, 20)
    assert (few.cosine == many.cosine[:20]).all()
    assert (few.sine == many.sine[:20]).all()


def test_the_table_of_the_torch_backend_holds_these_angles_twice_the_first_sine_negative() -> None:
    wanted = config(16, 1e4)
    angles, table = make_rope_angles(wanted, 9), make_rope_table(wanted, 9, torch.device("cpu"))
    assert table.num_positions == 9
    assert (table.cosine[:, 0].numpy() == np.concatenate([angles.cosine, angles.cosine], 1)).all()
    assert (table.sine[:, 0].numpy() == np.concatenate([-angles.sine, angles.sine], 1)).all()
