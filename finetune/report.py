"""What is learned from a sample, as text: the prompt that the network sees, and what is trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np

from apollo_cli.errors import DataError
from apollo_cli.finetune.data.samples import Cost, Fault, Kind, Sample, count_lost
from apollo_cli.finetune.data.survey import Length
from apollo_cli.finetune.recipe import Recipe
from apollo_cli.finetune.training.examples import IGNORED, plan_sample, spell_turns
from apollo_cli.model.prompt import VISUAL_ID
from apollo_cli.planner import Planner
from apollo_cli.text import count, percent
from apollo_cli.video.container import shown
from apollo_cli.video.info import VideoInfo

Role = Literal["given", "trained", "visual"]


@dataclass(frozen=True)
class Piece:
    """A stretch of a prompt. role: whether it is text that is given, trained on, or seen."""

    text: str
    role: Role


@dataclass(frozen=True)
class Preview:
    """One sample as the network takes it."""

    name: str
    pieces: tuple[Piece, ...]


def build_preview(
    sample: Sample, infos: Sequence[VideoInfo], planner: Planner, recipe: Recipe
) -> Preview:
    """Spell out a sample from its real ids and labels; nothing is decoded.

    Args:
        infos: of its videos and images.

    Raises:
        FitError: it is too long.
    """
    planned = plan_sample(planner, sample, infos, recipe.sampling, recipe.max_tokens)
    parts = [planner.part(file) for file in planned.files]
    prefix = planner.prompts.prefix_ids(parts) if parts else []
    ids, labels = spell_turns(planner.prompts, sample.turns, bool(parts))
    marked = zip(prefix + ids, [IGNORED] * len(prefix) + labels, strict=True)

    def role(token: tuple[int, int]) -> Role:
        if token[0] == VISUAL_ID:
            return "visual"
        return "given" if token[1] == IGNORED else "trained"

    pieces: list[Piece] = []
    for kind, group in groupby(marked, key=role):
        run = [token for token, _ in group]
        # Unlike for an answer, special tokens are what one wants to see here.
        spell = planner.prompts.tokenizer.backend.decode
        is_visual = kind == "visual"
        text = f"<{len(run)} visual tokens>" if is_visual else spell(run, skip_special_tokens=False)
        pieces.append(Piece(text, kind))
    return Preview(sample.name, tuple(pieces))


_COSTS: dict[Cost, str] = {
    "run": "FAULTS THAT STOP THE RUN",
    "sample": "WOULD BE LEFT OUT",
    "note": "NOTES",
}
_EXAMPLES = 3


@dataclass(frozen=True)
class SourceFacts:
    """One file of data. samples: that can be trained on. share: of the mixture."""

    name: str
    samples: int
    share: float


@dataclass(frozen=True)
class LengthFacts:
    """Lengths of all samples in tokens.

    Attributes:
        least, half, most_of, most: the shortest, the median, the one that nine of ten do not
            exceed, and the longest. allowed: longest that a sample may be.
        mean: of all tokens. trained: mean number of tokens that the loss looks at.
        thinned: samples whose videos are not seen whole.
    """

    least: int
    half: int
    most_of: int
    most: int
    allowed: int
    mean: float
    trained: float
    thinned: int

    @classmethod
    def of(cls, lengths: Sequence[Length], allowed: int) -> LengthFacts:
        """Sum up lengths, of which there is at least one."""
        tokens = np.array([length.tokens for length in lengths])
        least, half, most_of, most = np.percentile(
            tokens, [0, 50, 90, 100], method="closest_observation"
        ).tolist()
        return cls(
            least,
            half,
            most_of,
            most,
            allowed,
            float(tokens.mean()),
            float(np.mean([length.trained for length in lengths])),
            sum(length.coverage < 1 for length in lengths),
        )


@dataclass(frozen=True)
class CheckReport:
    """What ``check_recipe`` found.

    Attributes:
        recipe: that was checked. sources: its data. held_out: samples to measure with.
        shares: how often each kind of sample is learned from. steps: of the whole run.
        lengths: None where nothing can be measured.
        estimate: memory and time, names and words. assumed: what of the model is not known.
        faults: all of them. previews: some samples as they are learned.
        lacking: what is to be done before the run can begin.
    """

    recipe: Recipe
    sources: tuple[SourceFacts, ...]
    held_out: int
    shares: dict[Kind, float]
    steps: int
    lengths: LengthFacts | None
    estimate: tuple[tuple[str, str], ...]
    assumed: tuple[str, ...]
    faults: tuple[Fault, ...]
    previews: tuple[Preview, ...]
    lacking: tuple[str, ...] = ()

    def groups(self) -> dict[Cost, dict[str, list[Fault]]]:
        """Faults by what they cost, then by kind; the most frequent kind first."""
        found: dict[Cost, dict[str, list[Fault]]] = {cost: {} for cost in _COSTS}
        for fault in self.faults:
            found[fault.cost].setdefault(fault.kind, []).append(fault)
        return {
            cost: dict(sorted(kinds.items(), key=lambda item: -len(item[1])))
            for cost, kinds in found.items()
        }

    def error(self) -> DataError | None:
        """The error of a recipe that loses samples or cannot run; None where all is well."""
        lost = count_lost(self.faults)
        stopping = sum(fault.cost == "run" for fault in self.faults)
        if not lost and not stopping:
            return None
        stop = "stops" if stopping == 1 else "stop"
        words = [f"{count(stopping, 'fault')} that {stop} it"] if stopping else []
        words += [f"{count(lost, 'sample')} that would be left out"] if lost else []
        many = stopping + lost > 1
        next_step = f"repair {'them' if many else 'it'}"
        if not stopping:
            next_step += f", or run without {'these samples' if many else 'this sample'}"
        return DataError(f"{self.recipe.path} has {' and '.join(words)}", next_step=next_step)

    def describe(self, examples: int = _EXAMPLES) -> str:
        """The report as text.

        Args:
            examples: most samples that are named for each kind of fault.
        """
        lines = [*self._facts(), *self._learned()]
        if any(fault.kind == "recipe" for fault in self.faults):
            # Nothing that it makes of the data is known.
            lines = [f"{shown(self.recipe.path.name)}: faults of the recipe, and of its data"]
        for cost, kinds in self.groups().items():
            if kinds:
                lines += ["", _COSTS[cost]]
            for kind, faults in kinds.items():
                lines += _group(kind, faults, examples)
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, with every fault."""
        return {
            "recipe": str(self.recipe.path),
            "good": self.error() is None,
            "sources": [asdict(source) for source in self.sources],
            "held_out": self.held_out,
            "shares": self.shares,
            "steps": self.steps,
            "lengths": asdict(self.lengths) if self.lengths else None,
            "estimate": dict(self.estimate),
            "assumed": list(self.assumed),
            "run_needs_first": list(self.lacking),
            "faults": [
                {
                    "kind": fault.kind,
                    "cost": fault.cost,
                    "where": fault.where,
                    "received": fault.received,
                    "remedy": fault.remedy,
                }
                for fault in self.faults
            ],
            "previews": [asdict(preview) for preview in self.previews],
        }

    def _facts(self) -> Iterator[str]:
        recipe = self.recipe
        yield (
            f"{shown(recipe.path.name)}: stage {recipe.stage}, {recipe.method}, trains "
            f"{' and '.join(recipe.train)} of {shown(recipe.model)}"
        )
        rows = [
            (
                source.name,
                f"{count(source.samples, 'sample')}, {percent(source.share)} of the mixture",
            )
            for source in self.sources
        ]
        rows.append(("held out", count(self.held_out, "sample")))
        kinds = ", ".join(f"{kind} {percent(share)}" for kind, share in self.shares.items())
        rows.append(("kinds", kinds))
        if self.lengths:
            each = self.lengths
            rows.append(
                (
                    "tokens",
                    f"{each.least} to {each.most} a sample, half up to {each.half}, nine of ten "
                    f"up to {each.most_of}; allowed are {each.allowed}",
                )
            )
            rows.append(("trained", f"{each.trained:.0f} tokens a sample on average"))
        rows.append(("steps", f"{self.steps}, of {count(recipe.batch_size, 'sample')} each"))
        rows += self.estimate
        rows += [("assumed", text) for text in self.assumed]
        rows += [("run needs first", text) for text in self.lacking]
        width = max(len(name) for name, _ in rows)
        yield from (f"  {name.ljust(width)}  {value}" for name, value in rows)

    def _learned(self) -> Iterator[str]:
        if self.previews:
            yield ""
            yield "WHAT IS LEARNED, between [[ and ]]"
        for preview in self.previews:
            yield f"  {preview.name}"
            text = "".join(_spelled(piece) for piece in _shortened(preview.pieces))
            yield from (f"    {line}" for line in text.split("\n"))


def _shortened(pieces: Sequence[Piece]) -> list[Piece]:
    """The first two clips and the last one stand for the clips of a long video."""
    last = max((n for n, piece in enumerate(pieces) if piece.role == "visual"), default=0)
    clips = sum(piece.role == "visual" for piece in pieces[4 : last - 1])
    if not clips:
        return list(pieces)
    return [
        *pieces[:4],
        Piece(f"\n... {count(clips, 'more clip')} ...", "given"),
        *pieces[last - 1 :],
    ]


def _spelled(piece: Piece) -> str:
    """A piece without characters that would change the terminal."""
    text = "\n".join(map(shown, piece.text.split("\n")))
    return f"[[{text}]]" if piece.role == "trained" else text


def _group(kind: str, faults: Sequence[Fault], examples: int) -> Iterator[str]:
    same = len({fault.remedy for fault in faults}) == 1
    remedy = f": {faults[0].remedy}" if same and faults[0].remedy else ""
    yield f"  {kind} ({len(faults)}){remedy}"
    # A recipe has few, and all of them are mended in one place.
    examples = len(faults) if kind == "recipe" else examples
    for fault in faults[:examples]:
        tail = "" if same or not fault.remedy else f"; {fault.remedy}"
        yield f"    {fault.where}: {fault.received}{tail}"
    if len(faults) > examples:
        yield f"    and {len(faults) - examples} more"
