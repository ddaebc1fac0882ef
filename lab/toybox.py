"""The drawn world: short videos of coloured shapes and digits, whose every fact is known.

Everything follows from a seed. Lengths are in units of the longer side of the picture, times in
seconds. Things that move leave at one edge and come back at the opposite one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import pairwise
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageDraw, ImageFont

SHAPES = ("circle", "square", "triangle", "star", "cross")
# Never drawn from a seed, so apollo-nano never saw them: something new to teach it.
NEW_SHAPES = ("ring",)
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (215, 35, 40),
    "green": (40, 160, 60),
    "blue": (45, 80, 215),
    "yellow": (240, 220, 50),
    "orange": (240, 135, 25),
    "purple": (145, 50, 185),
    "white": (245, 245, 245),
    "black": (18, 18, 18),
}
DIRECTIONS: dict[str, tuple[int, int]] = {
    "left": (-1, 0),
    "right": (1, 0),
    "up": (0, -1),
    "down": (0, 1),
}
# Longer sides a second; the gaps between them keep the three words apart.
SPEEDS = {"slow": (0.06, 0.11), "medium": (0.18, 0.26), "fast": (0.36, 0.46)}
PICTURE_SIZES = ((160, 90), (160, 120), (128, 128), (192, 108), (320, 180), (240, 180), (90, 160))
FRAME_RATES = (8, 10, 12, 15)


@dataclass(frozen=True)
class Thing:
    """One coloured shape.

    Attributes:
        shape, colour: names in ``SHAPES`` and ``COLOURS``. rgb: the exact colour.
        size: diameter. x, y: centre at the start of the video, as parts of width and height.
        direction, speed: None for a thing that stands still. rate: longer sides a second.
        start_seconds, end_seconds: when it is there.
    """

    shape: str
    colour: str
    rgb: tuple[int, int, int]
    size: float
    x: float
    y: float
    direction: str | None
    speed: str | None
    rate: float
    start_seconds: float
    end_seconds: float

    def is_there(self, seconds: float) -> bool:
        """Whether it is on screen at a time."""
        return self.start_seconds <= seconds < self.end_seconds


@dataclass(frozen=True)
class Digit:
    """One digit that stands still for a while; x and y are its centre, height its size."""

    value: int
    rgb: tuple[int, int, int]
    height: float
    x: float
    y: float
    start_seconds: float
    end_seconds: float

    def is_there(self, seconds: float) -> bool:
        """Whether it is on screen at a time."""
        return self.start_seconds <= seconds < self.end_seconds


@dataclass(frozen=True)
class World:
    """One video: its size in pixels, its length, and all that is in it."""

    width: int
    height: int
    fps: int
    duration_seconds: float
    background: tuple[int, int, int]
    things: tuple[Thing, ...]
    digit: Digit | None

    @property
    def frame_count(self) -> int:
        """Number of pictures in the video."""
        return round(self.duration_seconds * self.fps)

    def things_at(self, seconds: float) -> list[Thing]:
        """The things on screen at a time, in the order of ``SHAPES``."""
        return by_shape([thing for thing in self.things if thing.is_there(seconds)])


def by_shape(things: Iterable[Thing]) -> list[Thing]:
    """Things in the order in which they are named."""
    return sorted(things, key=lambda thing: (*SHAPES, *NEW_SHAPES).index(thing.shape))


def place(world: World, thing: Thing, seconds: float) -> tuple[float, float]:
    """Centre of a thing at a time, in pixels of the world's picture."""
    side = max(world.width, world.height)
    dx, dy = DIRECTIONS[thing.direction] if thing.direction else (0, 0)
    # A margin past each edge: at least a fifth of a thing stays visible while it wraps around.
    margin = 0.3 * thing.size * side
    moved = thing.rate * side * seconds
    x = (thing.x * world.width + dx * moved + margin) % (world.width + 2 * margin) - margin
    y = (thing.y * world.height + dy * moved + margin) % (world.height + 2 * margin) - margin
    return x, y


def outline(shape: str) -> list[tuple[float, float]]:
    """Corners of a shape (other than the circle) in a square from -1 to 1."""
    if shape == "square":
        return [(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)]
    if shape == "triangle":
        return [(0.0, -1.0), (1.0, 0.85), (-1.0, 0.85)]
    if shape == "cross":
        a = 0.32
        half = [(-a, -1), (a, -1), (a, -a), (1, -a), (1, a), (a, a)]
        return [(x, y) for x, y in half] + [(-x, -y) for x, y in half]
    if shape == "ring":
        # One line around the outside and back around the hole.
        turns = [math.tau * i / 48 for i in range(49)]
        rounds = ((1.0, turns), (0.55, turns[::-1]))
        return [(r * math.cos(a), r * math.sin(a)) for r, angles in rounds for a in angles]
    radii = [1.1 if i % 2 == 0 else 0.45 for i in range(10)]
    angles = [math.pi * i / 5 - math.pi / 2 for i in range(10)]
    return [(r * math.cos(a), r * math.sin(a)) for r, a in zip(radii, angles, strict=True)]


@cache
def _font(pixels: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(pixels)


def draw(world: World, seconds: float) -> np.ndarray:
    """Draw the picture at a time: uint8 (height, width, 3)."""
    return _paint(world, seconds, "RGB")


def draw_owners(world: World, seconds: float) -> np.ndarray:
    """Who owns each pixel: uint8 (height, width); 0 nobody, 1.. the things, 255 the digit."""
    return _paint(world, seconds, "L")


def _paint(world: World, seconds: float, mode: str) -> np.ndarray:
    rgb = mode == "RGB"
    image = Image.new(mode, (world.width, world.height), world.background if rgb else 0)
    pen = ImageDraw.Draw(image)
    side = max(world.width, world.height)
    for number, thing in enumerate(world.things, start=1):
        if not thing.is_there(seconds):
            continue
        fill = thing.rgb if rgb else number
        x, y = place(world, thing, seconds)
        radius = thing.size * side / 2
        if thing.shape == "circle":
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
        else:
            corners = outline(thing.shape)
            pen.polygon([(x + radius * cx, y + radius * cy) for cx, cy in corners], fill=fill)
    digit = world.digit
    if digit is not None and digit.is_there(seconds):
        centre = (digit.x * world.width, digit.y * world.height)
        font = _font(round(digit.height * side))
        text = str(digit.value)
        if rgb:
            pen.text(centre, text, font=font, fill=digit.rgb, anchor="mm", stroke_width=1)
        else:
            pen.rectangle(pen.textbbox(centre, text, font=font, anchor="mm"), fill=255)
    return np.asarray(image)


def sample_world(
    seed: int, duration_seconds: float | None = None, *, crowded: bool = False
) -> World:
    """Draw the facts of one video from a seed.

    Args:
        seed: the same seed gives the same world.
        duration_seconds: None lets the seed choose 5 to 60 seconds.
        crowded: always three things, and nearly always a digit.
    """
    rng = np.random.default_rng(seed)
    width, height = PICTURE_SIZES[rng.integers(len(PICTURE_SIZES))]
    length = duration_seconds if duration_seconds is not None else _sample_duration(rng)
    grey = rng.uniform(75, 165)
    red, green, blue = (int(v) for v in np.clip(grey + rng.normal(0, 9, 3), 50, 190))
    count = 3 if crowded else int(rng.choice([1, 2, 3], p=[0.2, 0.4, 0.4]))
    shapes = rng.permutation(SHAPES)[:count]
    colours = rng.permutation(list(COLOURS))[:count]
    spans = _sample_spans(rng, count, length)
    centres = _sample_centres(rng, count + 1)
    things = tuple(
        _sample_thing(rng, str(shape), str(colour), centre, span)
        for shape, colour, centre, span in zip(shapes, colours, centres, spans, strict=False)
    )
    shows = rng.random() < (0.9 if crowded else 0.5)
    digit = _sample_digit(rng, centres[-1], length) if shows else None
    fps = int(rng.choice(FRAME_RATES))
    return World(width, height, fps, length, (red, green, blue), things, digit)


def with_new_shape(world: World, shape: str) -> World:
    """The same world with another shape for its first thing."""
    first, *others = world.things
    return replace(world, things=(replace(first, shape=shape), *others))


def _sample_duration(rng: np.random.Generator) -> float:
    seconds = math.exp(rng.uniform(math.log(5), math.log(60)))
    step = rng.choice([2, 1, 0.5], p=[0.6, 0.25, 0.15])
    return float(np.clip(round(seconds / step) * step, 5, 60))


def _sample_spans(rng: np.random.Generator, count: int, length: float) -> list[tuple[float, float]]:
    """When each thing is there: all taking turns, or each on its own."""
    if count > 1 and rng.random() < 0.3 and length >= 3 * count:
        cuts = np.sort(rng.uniform(0, length - 2 * count, count - 1))
        edges = [0.0, *(round(c + 2 * (i + 1), 1) for i, c in enumerate(cuts)), length]
        spans = list(pairwise(edges))
        return [spans[i] for i in rng.permutation(count)]
    spans = []
    for _ in range(count):
        kind = rng.choice(["whole", "late", "early", "middle"], p=[0.4, 0.3, 0.1, 0.2])
        start = round(rng.uniform(0.6, length - 2), 1) if kind in ("late", "middle") else 0.0
        first_end = start + 2 if kind == "middle" else 2.5
        ends = kind in ("early", "middle") and first_end < length - 0.6
        end = round(rng.uniform(first_end, length - 0.5), 1) if ends else length
        spans.append((start, end))
    return spans


def _sample_centres(rng: np.random.Generator, count: int) -> list[tuple[float, float]]:
    """Centres in parts of the picture, as far from each other as a few tries give."""
    tries = rng.uniform(0.18, 0.82, (40, count, 2))
    gaps = np.linalg.norm(tries[:, :, None] - tries[:, None, :], axis=-1) + np.eye(count)
    best = tries[np.argmax(gaps.min(axis=(1, 2)))]
    return [(float(x), float(y)) for x, y in best]


def _sample_thing(
    rng: np.random.Generator,
    shape: str,
    colour: str,
    centre: tuple[float, float],
    span: tuple[float, float],
) -> Thing:
    moves = rng.random() < 0.75
    direction = str(rng.choice(list(DIRECTIONS))) if moves else None
    speed = str(rng.choice(list(SPEEDS))) if moves else None
    rate = float(rng.uniform(*SPEEDS[speed])) if speed else 0.0
    shade = rng.normal(0, 7, 3)
    red, green, blue = (
        int(np.clip(c + s, 0, 255)) for c, s in zip(COLOURS[colour], shade, strict=True)
    )
    size = float(rng.uniform(0.19, 0.28))
    rgb = (red, green, blue)
    return Thing(shape, colour, rgb, size, *centre, direction, speed, rate, *span)


def _sample_digit(rng: np.random.Generator, centre: tuple[float, float], length: float) -> Digit:
    shown = rng.uniform(1.5, max(2.5, min(length, 12)))
    start = 0.0 if rng.random() < 0.2 else round(rng.uniform(0, max(0.0, length - shown)), 1)
    value = int(rng.integers(10))
    rgb = (250, 250, 250) if rng.random() < 0.5 else (10, 10, 10)
    height = float(rng.uniform(0.32, 0.46))
    x, y = (float(np.clip(part, 0.2, 0.8)) for part in centre)
    return Digit(value, rgb, height, x, y, start, min(length, round(start + shown, 1)))


def write_video(world: World, path: Path, scale: int = 1) -> None:
    """Write the world as an H.264 mp4, pictures enlarged by a whole number."""
    large = replace(world, width=world.width * scale, height=world.height * scale)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(world.fps))
        stream.width, stream.height, stream.pix_fmt = large.width, large.height, "yuv420p"
        stream.options = {"crf": "20", "threads": "1"}
        for number in range(world.frame_count):
            frame = av.VideoFrame.from_ndarray(draw(large, number / world.fps), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
