"""The strip under the player: true to the clips, light for thousands of them, usable by keys."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from apollo_cli.config import SamplingOptions
from apollo_cli.ui.timeline import Mark, Strip, clip_edges, draw
from apollo_cli.video.sampler import ClipPlan, plan_clips


def planned(duration: float, limit: int, options: SamplingOptions | None = None) -> ClipPlan:
    return plan_clips(
        duration,
        clip_seconds=2.0,
        frames_per_clip=4,
        limit=limit,
        options=options or SamplingOptions(),
    )


def strip(duration: float, plan: ClipPlan, name: str = "a.mp4", marks: tuple[Mark, ...] = ()):
    edges = clip_edges(plan.times, plan, duration)
    window = (plan.start_seconds, plan.end_seconds)
    return Strip(name, duration, window, edges, plan.describe(), is_seen=True, marks=marks)


def parse(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(html)


def drawn(html: str) -> list[tuple[float, float]]:
    """Start and width of each clip that is drawn, in units of the picture."""
    path = parse(html).find(".//path")
    assert path is not None
    found = re.findall(r"M([\d.]+) 3h([\d.]+)v18h-[\d.]+z", path.get("d", ""))
    return [(float(x), float(width)) for x, width in found]


def test_clips_are_drawn_where_they_are_and_gaps_stay_open():
    found = drawn(draw(strip(100.0, planned(100.0, 10))))
    assert len(found) == 10
    assert all(width == pytest.approx(20) for _, width in found)
    assert np.diff([x for x, _ in found]) == pytest.approx(100)


def test_a_video_that_is_seen_whole_has_no_gap():
    found = drawn(draw(strip(10.0, planned(10.0, 100))))
    assert [x for x, _ in found] == pytest.approx([0, 200, 400, 600, 800])
    assert found[-1][0] + found[-1][1] == pytest.approx(1000)


def test_borders_between_clips_that_touch_are_drawn_while_they_can_be_told_apart():
    ticks = parse(draw(strip(10.0, planned(10.0, 100)))).find(".//path[2]")
    assert ticks is not None
    assert ticks.get("d") == "M200.00 3v18M400.00 3v18M600.00 3v18M800.00 3v18"


def test_the_last_clip_ends_with_the_video():
    found = drawn(draw(strip(9.0, planned(9.0, 100))))
    assert found[-1][0] + found[-1][1] == pytest.approx(1000, abs=0.02)


def test_frames_that_are_spread_evenly_are_single_marks():
    plan = planned(60.0, 100, SamplingOptions(mode="uniform", frames=8))
    found = drawn(draw(strip(60.0, plan)))
    assert len(found) == 8
    assert "8 frames, one every 7.5 s" in draw(strip(60.0, plan))


def test_the_window_is_told_apart():
    plan = planned(100.0, 100, SamplingOptions(start_seconds=25, end_seconds=50))
    rect = parse(draw(strip(100.0, plan))).find(".//rect")
    assert rect is not None
    assert (rect.get("x"), rect.get("width")) == ("250.00", "250.00")


def test_a_lone_clip_of_ten_hours_is_still_visible():
    assert drawn(draw(strip(36_000.0, planned(36_000.0, 1))))[0][1] >= 1.5


def test_thousands_of_clips_are_one_path():
    html = draw(strip(20_000.0, planned(20_000.0, 10_000)))
    assert html.count("<path") == 1
    assert len(html) < 1_000_000


def test_marks_are_buttons_in_the_order_of_time_that_say_whether_the_moment_was_seen():
    marks = (Mark(90.0, "1:30", seen=False), Mark(5.0, "5 seconds", seen=True), Mark(200.0, "3:20"))
    buttons = parse(draw(strip(100.0, planned(100.0, 10), marks=marks))).findall(".//button")
    assert [button.get("data-seek") for button in buttons] == ["5", "90"]
    assert [button.get("aria-label") for button in buttons] == [
        "Go to 0:05, inside a clip that was seen",
        "Go to 1:30, not seen by the model",
    ]


def test_the_bar_is_a_slider_that_the_keyboard_reaches():
    bar = parse(draw(strip(100.0, planned(100.0, 10)))).find(".//div")
    assert bar is not None
    assert (bar.get("role"), bar.get("tabindex")) == ("slider", "0")
    assert float(bar.get("aria-valuemax", "")) == 100
    assert bar.get("aria-label") == "Position in a.mp4"


def test_a_hostile_name_stays_text():
    name = '"><img src=x onerror=alert(1)>.mp4'
    html = draw(strip(100.0, planned(100.0, 10), name))
    assert "<img" not in html
    bar = parse(html).find(".//div")
    assert bar is not None
    assert bar.get("aria-label") == f"Position in {name}"
