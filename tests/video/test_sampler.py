"""The sampler equals the original where the original is right, and follows time elsewhere."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from apollo_cli.config import SamplingOptions
from apollo_cli.errors import FitError, MediaError
from apollo_cli.video.sampler import (
    ClipPlan,
    FrameGrid,
    largest_fitting,
    plan_clips,
    share_clips,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "golden.json").read_text())["sampler"]
NO_KEYS = np.empty(0, dtype=int)


def is_whole(case: dict) -> bool:
    step = case["fps"] * case["clip_duration"] / case["frames_per_clip"]
    return "error" not in case and step >= 1 and math.isclose(step, round(step))


def plan(
    duration: float, limit: int = 10_000, grid: FrameGrid | None = None, **options
) -> ClipPlan:
    return plan_clips(
        duration,
        clip_seconds=2,
        frames_per_clip=4,
        limit=limit,
        options=SamplingOptions(**options),
        grid=grid,
    )


@pytest.mark.parametrize("case", [case for case in GOLDEN if is_whole(case)])
def test_indices_equal_the_original_where_its_step_is_a_whole_number(case: dict):
    frames, fps = case["total_frames"], case["fps"]
    times = np.arange(frames) / fps
    share = case["clip_sampling_ratio_setting"] * case["model_max_length"]
    ours = plan_clips(
        frames / fps,
        clip_seconds=case["clip_duration"],
        frames_per_clip=case["frames_per_clip"],
        limit=math.ceil(share / case["num_output_tokens"]),
        options=SamplingOptions(),
        grid=FrameGrid(times, fps, NO_KEYS),
    )
    indices = np.searchsorted(times, ours.times + 1e-6) - 1
    assert indices.tolist() == case["clip_indices"]


@pytest.mark.parametrize("fps", [29.97, 25.0, 23.976])
def test_fractional_steps_follow_real_time_and_do_not_drift(fps: float):
    times = np.arange(round(3600 * fps)) / fps
    ours = plan(3600.0, grid=FrameGrid(times, fps, NO_KEYS))
    np.testing.assert_allclose(np.diff(ours.times, axis=1), 0.5)
    np.testing.assert_allclose(ours.times[:, 0], np.arange(1800) * 2.0)


def test_a_window_is_never_left():
    ours = plan(100.0, start_seconds=10.0, end_seconds=13.0)
    assert ours.times.min() >= 10.0
    assert ours.times.max() < 13.0
    grid = FrameGrid(np.arange(3000) / 30, 30.0, NO_KEYS)
    ours = plan(100.0, grid=grid, start_seconds=10.0, end_seconds=13.0)
    assert ours.times.min() >= 10.0
    assert ours.times.max() < 13.0


@pytest.mark.parametrize("duration", [0.04, 0.5, 1.9])
def test_a_video_shorter_than_a_clip_has_a_named_policy(duration: float):
    repeated = plan(duration, short="repeat")
    assert repeated.times.shape == (1, 4)
    assert repeated.times.max() < duration
    stretched = plan(duration, short="stretch")
    assert len(set(stretched.times[0])) == 4
    assert stretched.times.max() < duration
    with pytest.raises(MediaError, match="--short"):
        plan(duration, short="error")


def test_fewer_clips_than_everything_are_never_called_everything():
    assert plan(60.0, max_clips=10).describe() == "10 clips, 2.0 s seen of every 6.0 s (33%)"
    assert plan(60.0).describe() == "30 clips, every moment seen"


def test_the_budget_takes_the_most_clips_that_fit():
    assert largest_fitting(100, lambda clips: 10 + 7 * clips, 500) == 70
    assert largest_fitting(5, lambda clips: 10 + 7 * clips, 500) == 5
    with pytest.raises(FitError, match="one clip"):
        largest_fitting(5, lambda clips: 1000 + clips, 500)


@pytest.mark.parametrize(("wanted", "total"), [([10, 30, 1], 20), ([5, 5], 3), ([1, 1000], 50)])
def test_several_videos_share_the_budget_and_each_gets_a_clip(wanted: list[int], total: int):
    shares = share_clips(wanted, total)
    assert min(shares) >= 1
    assert sum(shares) <= max(total, len(wanted))
    assert all(share <= want for share, want in zip(shares, wanted, strict=True))
