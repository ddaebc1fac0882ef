"""What an hour of 1080p costs to decode and prepare: CPU time, peak memory, wrong pictures.

    python benchmarks/decode.py [--minutes 60] [--clips 666] [--practice-clips 20]

Each part runs in a process of its own, on one file that the benchmark makes itself: moving
content, a key picture every 2 s, 3 B-pictures, 30 a second. All figures are ratios of one run.
The practice is what users do without this package: decord (or, where that is not installed, PyAV
decoding everything) gives pictures at full size, each is padded to a full-size square for each
encoder, and Pillow resizes the squares. It is measured on fewer clips and scaled up. Memory by
length, whole commands and many openings are measured by ``decode_more.py``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.video.stream import VideoStream
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent))

from apollo_cli.video.guard import GuardedReader
from apollo_cli.video.probe import probe
from apollo_cli.video.reader import read_clips
from apollo_cli.video.transforms import PixelSpec
from apollo_cli.video.walk import Walk

SIZE, FPS, LOOP_SECONDS = (1920, 1080), 30, 20
MARK, BITS = 48, 10
FRAMES, CLIP_STEP = 4, 0.5
SPECS = (
    PixelSpec("siglip", 384, "bicubic", (127, 127, 127), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    PixelSpec(
        "internvideo2",
        224,
        "bilinear",
        (123, 116, 103),
        (0.485, 0.456, 0.406),
        (0.229, 0.224, 0.225),
    ),
)


def make_hour(path: Path, minutes: float, size: tuple[int, int] = SIZE) -> None:
    """Encode 20 s with a number in each picture, and repeat its packets."""
    width, height = size
    chance = np.random.default_rng(0)
    tiles = chance.integers(0, 256, (height // 8 + 40, width // 8 + 80, 3), dtype=np.uint8)
    ground = tiles.repeat(8, axis=0).repeat(8, axis=1)
    noise = chance.integers(0, 12, (height, width, 3), dtype=np.uint8)
    loop = path.with_name("loop.mp4")
    with av.open(str(loop), "w") as container:
        stream = container.add_stream("libx264", rate=FPS)
        assert isinstance(stream, VideoStream)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.gop_size = 2 * FPS
        stream.options = {"preset": "veryfast", "bf": "3"}
        for number in range(LOOP_SECONDS * FPS):
            top, left = number % 300, 2 * number % 600
            picture = ground[top : top + height, left : left + width] // 2
            picture = picture + np.roll(noise, 37 * number, axis=1)
            bits = [number >> bit & 1 for bit in range(BITS)]
            picture[:MARK, : MARK * BITS] = np.repeat(bits, MARK)[:, None] * np.uint8(200)
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, FPS)
            container.mux(stream.encode(frame.reformat(format="yuv420p")))
        container.mux(stream.encode())
    with av.open(str(loop)) as source, av.open(str(path), "w") as target:
        stream = source.streams.video[0]
        copy = target.add_stream_from_template(stream)
        packets = [p for p in source.demux(stream) if p.size]
        length = int(LOOP_SECONDS / (stream.time_base or 1))
        for turn in range(round(minutes * 60 / LOOP_SECONDS)):
            for packet in packets:
                again = av.Packet(bytes(packet))
                again.pts = (packet.pts or 0) + turn * length
                again.dts = (packet.dts or 0) + turn * length
                again.duration, again.time_base = packet.duration, packet.time_base
                again.is_keyframe, again.stream = packet.is_keyframe, copy
                target.mux(again)


def plan(clips: int, minutes: float) -> np.ndarray:
    """Clips spread over the whole file, each of a few pictures half a second apart."""
    starts = np.floor(np.arange(clips) * (minutes * 60 - 2) / clips * FPS) / FPS
    return starts[:, None] + np.arange(FRAMES) * CLIP_STEP


def wrong_pictures(siglip: np.ndarray, times: np.ndarray) -> int:
    """How many of (B, frames, 3, 384, 384) squares do not show the number of their time."""
    scale = SPECS[0].size / SIZE[0]
    row = int(((SIZE[0] - SIZE[1]) / 2 + MARK / 2) * scale)
    columns = [int((bit + 0.5) * MARK * scale) for bit in range(BITS)]
    bits = siglip[:, :, 1, row, columns] > 100
    numbers = (bits << np.arange(BITS)).sum(axis=2)
    return int((numbers != np.rint(times * FPS).astype(int) % (LOOP_SECONDS * FPS)).sum())


def ours(path: Path, times: np.ndarray) -> int:
    """Read in this process; returns how many pictures are wrong, as all parts do."""
    return sum(
        wrong_pictures(batch.pixels["siglip"], batch.seconds)
        for batch in read_clips(probe(path), times, SPECS)
    )


def guarded(path: Path, times: np.ndarray) -> int:
    """Read in the guarded child."""
    with GuardedReader() as reader:
        return sum(
            wrong_pictures(batch.pixels["siglip"], batch.seconds)
            for batch in reader.read_clips(reader.probe(path), times, SPECS)
        )


def decoding_only(path: Path, times: np.ndarray) -> int:
    """Decode what must be decoded, and drop it."""
    info = probe(path)
    assert info.timeline is not None
    walk = Walk(path, info.stream_index, info.timeline, info.times)
    wanted = np.unique(info.frames_at(times)).tolist()
    return len(wanted) - sum(1 for _ in walk.fetch(wanted))


def practice(path: Path, times: np.ndarray) -> int:
    """What users do today, all pictures of the clips in memory at once."""
    indices = np.rint(times * FPS).astype(int)
    if importlib.util.find_spec("decord"):
        decord = importlib.import_module("decord")
        reader = decord.VideoReader(str(path), num_threads=1)
        pictures = [reader.get_batch(clip.tolist()).asnumpy() for clip in indices]
    else:
        wanted = set(indices.flat)
        with av.open(str(path)) as container:
            decoded = itertools.islice(container.decode(video=0), max(wanted) + 1)
            pictures = [
                frame.to_ndarray(format="rgb24")[None]
                for number, frame in enumerate(decoded)
                if number in wanted
            ]
    for rgb in itertools.chain.from_iterable(pictures):
        side = max(rgb.shape)
        for spec in SPECS:
            square = np.full((side, side, 3), spec.pad_colour, dtype=np.uint8)
            top = (side - rgb.shape[0]) // 2
            square[top : top + rgb.shape[0]] = rgb
            Image.fromarray(square).resize((spec.size, spec.size), Image.Resampling.BICUBIC)
    return 0


PARTS: dict[str, Callable[[Path, np.ndarray], int]] = {
    "ours": ours,
    "guarded": guarded,
    "decoding only": decoding_only,
    "practice": practice,
}


def run_part(name: str, path: Path, clips: int, minutes: float) -> dict[str, float]:
    """Run one part in a process of its own."""
    command = [sys.executable, __file__, "--part", name, "--file", str(path)]
    command += ["--clips", str(clips), "--minutes", str(minutes)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(name: str, path: Path, clips: int, minutes: float) -> dict[str, float]:
    """CPU seconds and the rise of peak memory of one part, in this process and its children."""
    own, children = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    before, peak = resource.getrusage(own), peak_kilobytes()
    wrong = PARTS[name](path, plan(clips, minutes))
    cpu = -before.ru_utime - before.ru_stime
    for who in (own, children):
        usage = resource.getrusage(who)
        cpu += usage.ru_utime + usage.ru_stime
    return {"cpu": cpu, "megabytes": (peak_kilobytes() - peak) / 1024, "wrong": wrong}


def peak_kilobytes() -> int:
    """The most memory that this process has held; getrusage would count its parent's too."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(status.read_text().split("VmHWM:")[1].split()[0])


def main() -> None:
    """Make the file, run all parts, print their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clips", type=int, default=666)
    parser.add_argument("--practice-clips", type=int, default=20)
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--file", type=Path)
    args = parser.parse_args()
    if args.part:
        print(json.dumps(measure(args.part, args.file, args.clips, args.minutes)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hour.mp4"
        make_hour(path, args.minutes)
        few = args.practice_clips
        # The same spacing of clips, on the part of the file that they cover.
        share = args.minutes * few / args.clips
        found = {name: run_part(name, path, args.clips, args.minutes) for name in list(PARTS)[:3]}
        found["practice"] = run_part("practice", path, few, share)
    found["practice"]["cpu"] *= args.clips / few
    for name, part in found.items():
        print(f"{name:14} {part['cpu']:8.1f} s CPU   {part['megabytes']:6.0f} MB above imports")
    for name in ("ours", "guarded"):
        print(f"wrong pictures, {name}: {found[name]['wrong']:.0f} of {args.clips * FRAMES}")
    cpu = {name: part["cpu"] for name, part in found.items()}
    print(f"ours / practice       {cpu['ours'] / cpu['practice']:.3f}   wanted at most 0.18")
    print(f"ours / decoding only  {cpu['ours'] / cpu['decoding only']:.3f}   wanted at most 1.15")
    print(f"guarded / ours        {cpu['guarded'] / cpu['ours']:.3f}   wanted at most 1.10")


if __name__ == "__main__":
    main()
