"""A talk about videos: its turns, what it looks at, and the file that keeps it."""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from apollo_cli.answer import Answer
from apollo_cli.atomic import write_whole
from apollo_cli.config import GenerationOptions, ReadingOptions, SamplingOptions
from apollo_cli.engine import Apollo
from apollo_cli.errors import UsageError
from apollo_cli.model.prompt import Turn
from apollo_cli.scoring import BlindCheck, blind_check
from apollo_cli.text import clean_markdown, clean_markdown_line, count
from apollo_cli.video.info import VideoInfo
from apollo_cli.video_memory import VideoMemory
from apollo_cli.watcher import Progress, no_progress
from apollo_cli.weights.files import apollo_home

Options = TypeVar("Options", SamplingOptions, GenerationOptions)

FORMAT = 1
# Tokens kept free for the turns of a talk: an eighth of the context, up to this many.
_MOST_HISTORY_TOKENS = 4096
_MOST_TURNS = 2000


@dataclass(frozen=True)
class KeptTurn(Turn):
    """A turn of a talk, and what its answer was made with.

    Attributes:
        files: absolute paths of what was looked at. seen: what of each was seen, in words.
        sampling: which moments were asked for; None where that is not known. model: its name.
        check: what a blind check of the answer said, a sentence each; empty without one.
    """

    files: tuple[str, ...] = ()
    seen: tuple[str, ...] = ()
    sampling: SamplingOptions | None = None
    model: str = ""
    check: tuple[str, ...] = ()

    @property
    def basis(self) -> str:
        """What the answer rests on, in one line."""
        return "; ".join(part for part in (self.model, *self.seen) if part)


@dataclass
class Conversation:
    """One talk. The videos are watched once; each question costs its own tokens only.

    Attributes:
        apollo: the model. options: how answers are written. sampling, reading: what is looked at.
        files: names of the videos and images. memories: what was seen of them.
        answers: all answers so far, in order.
    """

    apollo: Apollo
    options: GenerationOptions = field(default_factory=GenerationOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    reading: ReadingOptions = field(default_factory=ReadingOptions)
    files: list[str] = field(default_factory=list)
    memories: list[VideoMemory] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    @property
    def reserve_tokens(self) -> int:
        """Tokens kept free for the turns of the talk and for an answer."""
        context = self.apollo.network.config.context
        return min(_MOST_HISTORY_TOKENS, context // 8) + self.options.max_new_tokens

    def watch(self, files: Sequence[str | VideoInfo], on_progress: Progress = no_progress) -> None:
        """Look at other files from now on, or at what ``probe`` said of them; the turns stay.

        Raises:
            MediaError: a file cannot be read; what was looked at before stays.
        """
        self.memories = self.apollo.watch_all(
            files,
            self.sampling,
            reserve_tokens=self.reserve_tokens,
            reading=self.reading,
            on_progress=on_progress,
        )
        paths = [file.path if isinstance(file, VideoInfo) else Path(file) for file in files]
        self.files = [str(path.absolute()) for path in paths]

    def look_at(self, start: float, end: float | None, on_progress: Progress = no_progress) -> None:
        """Look at another window of the same files.

        Raises:
            UsageError: the window lies outside of a video; the old one stays, as whenever it fails.
        """
        before = self.sampling
        self.sampling = replace(before, start_seconds=start, end_seconds=end)
        try:
            self.watch(self.files, on_progress)
        except BaseException:
            self.sampling = before
            raise

    def ask(self, question: str) -> Generator[str, None, None]:
        """Ask the next question; yields the text as it is written.

        The turn is kept when the answer is complete; ``answers[-1]`` is then its record.
        """
        stream = self.apollo.stream(self.memories, question, self.options, self.turns)
        yield from stream
        answer = stream.finish()
        self.answers.append(answer)
        self.turns.append(
            KeptTurn(
                answer.question,
                answer.text,
                tuple(self.files),
                tuple(map(_say_seen, answer.videos)),
                self.sampling,
                self.apollo.located.name,
            )
        )

    def check_blind(self) -> BlindCheck:
        """Ask the last question again without the video; its turn is told what came of it.

        Raises:
            UsageError: there is no answer yet, or other files or another window are in view.
        """
        last = self.turns[-1] if self.answers and self.turns else None
        if not isinstance(last, KeptTurn) or not self.memories:
            raise UsageError("a blind check", "ask a question about a video first")
        if (last.files, last.sampling) != (tuple(self.files), self.sampling):
            raise UsageError(
                "the last answer was about another file or window", next_step="ask again"
            )
        check = blind_check(
            self.apollo, self.memories, self.answers[-1], self.options, self.turns[:-1]
        )
        self.note_check(check.describe())
        return check

    def note_check(self, said: Sequence[str]) -> None:
        """Keep what a blind check said of the last answer."""
        if self.turns and isinstance(last := self.turns[-1], KeptTurn):
            self.turns[-1] = replace(last, check=tuple(said))

    def to_dict(self) -> dict[str, Any]:
        """Everything that is needed to go on with it."""
        return {
            "format": FORMAT,
            "model": self.apollo.describe(),
            "files": self.files,
            "sampling": asdict(self.sampling),
            "options": asdict(self.options),
            "turns": [asdict(turn) for turn in self.turns],
        }

    def to_markdown(self) -> str:
        """The talk for reading; what answers rest on stands before the first of them.

        All that was said stays text: no viewer fetches or runs anything of it.
        """
        turns = [turn for turn in self.turns if isinstance(turn, KeptTurn)]
        files = [file for turn in turns for file in turn.files] or self.files
        names = dict.fromkeys(Path(file).name for file in files)
        lines, basis = [f"# {clean_markdown_line(', '.join(names)) or 'A talk'}", ""], ""
        for turn in self.turns:
            kept = turn if isinstance(turn, KeptTurn) else KeptTurn(turn.question, turn.answer)
            if kept.basis and kept.basis != basis:
                basis = kept.basis
                lines += [f"_{clean_markdown_line(basis)}_", ""]
            lines += [
                f"**{clean_markdown_line(turn.question)}**",
                "",
                clean_markdown(turn.answer),
                "",
            ]
            if kept.check:
                lines += [
                    *(f"- blind check: {clean_markdown_line(said)}" for said in kept.check),
                    "",
                ]
        return "\n".join(lines)

    def save(self, path: Path, text: str | None = None) -> None:
        """Write the talk: as JSON that ``restore`` reads, or as the text that is given.

        Raises:
            UsageError: the file cannot be written.
        """
        text = json.dumps(self.to_dict(), indent=2) + "\n" if text is None else text
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text)
        except OSError as error:
            raise UsageError(f"{path} cannot be written ({error.strerror})") from error

    def restore(self, path: Path, on_progress: Progress = no_progress) -> None:
        """Go on with a saved talk: its turns, its files, and where none were given, its options.

        Raises:
            UsageError: there is none, or it cannot be read.
            MediaError: a file of it is gone or broken.
        """
        try:
            saved = read_talk(path.read_text("utf-8"), str(path))
        except FileNotFoundError as error:
            raise UsageError(f"{path}: there is no saved talk", next_step="start one") from error
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} is not a saved talk, or damaged") from error
        self.turns = list(saved.turns)
        if self.sampling == SamplingOptions():
            self.sampling = saved.sampling
        if self.options == GenerationOptions() and saved.generation is not None:
            self.options = saved.generation
        self.watch(saved.files, on_progress)


@dataclass(frozen=True)
class SavedTalk:
    """What a saved talk is gone on with: its turns, what was looked at, and of which files.

    Attributes:
        generation: how answers were written; None in talks of before.
    """

    turns: tuple[KeptTurn, ...]
    files: tuple[str, ...]
    sampling: SamplingOptions
    generation: GenerationOptions | None = None


def read_talk(text: str, name: str) -> SavedTalk:
    """Read the JSON of a saved talk. Nothing is opened.

    Args:
        name: what errors call it.

    Raises:
        UsageError: it is not a saved talk, damaged, or of a later version.
    """
    try:
        saved = json.loads(text)
        if int(saved.get("format", FORMAT)) > FORMAT:
            raise UsageError(f"{name} is a talk of a later version", next_step="update apollo")
        if len(saved["turns"]) > _MOST_TURNS:
            raise UsageError(
                f"{name} is a talk of {len(saved['turns']):,} turns", f"allowed are {_MOST_TURNS:,}"
            )
        turns = tuple(map(_read_turn, saved["turns"]))
        files = tuple(str(file) for file in saved["files"])
        options = saved.get("options")
        generation = _read_options(GenerationOptions, options) if options else None
        sampling = _read_options(SamplingOptions, saved["sampling"])
        return SavedTalk(turns, files, sampling, generation)
    except (
        LookupError,
        ValueError,
        ArithmeticError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise UsageError(f"{name} is not a saved talk, or damaged") from error


def _read_turn(row: dict[str, Any]) -> KeptTurn:
    """A turn of a file; talks that were saved before have question and answer only."""
    question, answer = str(row["question"]), str(row["answer"])
    # As of questions: surrogates stand for bytes that are no UTF-8.
    (question + answer).encode()
    lists = [tuple(map(str, row.get(name, ()))) for name in ("files", "seen", "check")]
    sampling = row.get("sampling")
    return KeptTurn(
        question,
        answer,
        lists[0],
        lists[1],
        _read_options(SamplingOptions, sampling) if sampling else None,
        str(row.get("model", "")),
        lists[2],
    )


def _read_options(kind: type[Options], values: dict[str, Any]) -> Options:
    """Options of a file.

    Raises:
        TypeError: a value is of another type than its field, or no finite number.
    """
    hints = get_type_hints(kind)
    for name, value in values.items():
        if not _is_of(value, hints[name]):
            raise TypeError(name)
    return kind(**values)


def _is_of(value: object, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if hint is float:
        return isinstance(value, int | float) and math.isfinite(value)
    return type(value) is hint or any(_is_of(value, one) for one in get_args(hint))


def _say_seen(video: dict[str, Any]) -> str:
    """What of a video was seen, as ``Answer.videos`` tells it."""
    lines = video["subtitles"]
    said = f", {count(lines, 'line')} of subtitles" if lines else ""
    return f"{Path(video['path']).name}: {video['coverage_text']}{said}"


def last_talk() -> Path:
    """Where the talk that was held last is kept."""
    return apollo_home() / "talks" / "last.json"
