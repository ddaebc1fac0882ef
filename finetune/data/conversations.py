"""From one entry of a data file to a sample: who says what, and which files the tags stand for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from apollo_cli.config import parse_moment
from apollo_cli.errors import UsageError
from apollo_cli.finetune.data.keys import (
    FILE,
    MESSAGE,
    SOUND,
    TEXT_PART,
    key_faults,
    row_key_faults,
)
from apollo_cli.finetune.data.samples import (
    Fault,
    MediaFolder,
    Refused,
    Sample,
    Visual,
    kind_of,
    shorten,
)
from apollo_cli.model.prompt import Turn
from apollo_cli.scoring import LETTERS
from apollo_cli.text import count

# A run of white space is tried from its start only, however long it is.
_TAG = re.compile(r"(?:(?<![ \t\r\n])[ \t\r\n]+)?<(video|image)>[ \t\r\n]*")
# All special tokens of the released tokenizers have this form.
_SPECIAL = re.compile(r"<\|\w{1,40}\|>")
_ROLES = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "system": "system",
}
# An answer that names an option instead of saying it, such as 3, B or (b).
_BARE = re.compile(r"\(?([A-Za-z]|\d{1,2})\)?[.:]?", re.ASCII)

# No video lasts a year.
_LATEST_SECONDS = 31_536_000
# Half of a pair, which JSON may spell and no tokenizer takes.
_SURROGATE = re.compile("[\ud800-\udfff]")

VisualKind = Literal["video", "image"]
_Read = TypeVar("_Read")


@dataclass(frozen=True)
class Entry:
    """One piece of a data file.

    Attributes:
        where: its place, such as ``bees.jsonl:12``. fields: what it says.
        labels: names of its choices, where the file has them; else letters from A on.
    """

    where: str
    fields: dict[str, Any]
    labels: tuple[str, ...] = ()


@dataclass
class _Talk:
    """What is known of an entry while it is read.

    Attributes:
        tags: kind and turn of each tag, in order. inline: files that stand inside messages.
        faults: that cost the sample. strays: keys of messages and files that were not known.
        is_whole: whether all messages could be read.
    """

    entry: Entry
    media: MediaFolder
    notes: list[Fault]
    tags: list[tuple[VisualKind, int]] = field(default_factory=list)
    inline: dict[VisualKind, list[dict[str, Any]]] = field(
        default_factory=lambda: {"video": [], "image": []}
    )
    faults: list[Fault] = field(default_factory=list)
    strays: set[str] = field(default_factory=set)
    is_whole: bool = True

    def refuse(self, kind: str, received: str, allowed: str = "", next_step: str = "") -> NoReturn:
        raise Refused(Fault(kind, self.entry.where, received, allowed, next_step))

    def add(self, kind: str, received: str) -> None:
        """Note a fault that does not keep the rest of the entry from being read."""
        self.faults.append(Fault(kind, self.entry.where, received))

    def attempt(self, read: Callable[..., _Read], *arguments: Any) -> _Read | None:
        """What a function reads, or None where the entry keeps it from reading on."""
        try:
            return read(self, *arguments)
        except Refused as refused:
            self.faults += refused.faults
            return None

    def check_keys(self, what: str, found: dict[str, Any], known: tuple[str, ...]) -> None:
        """Add a fault for each unknown key, once a key: it mostly stands in every message."""
        unseen = {k: value for k, value in found.items() if k not in known and k not in self.strays}
        if unseen:
            self.faults += key_faults(self.entry.where, what, unseen, known)
            self.strays |= unseen.keys()

    def either(self, what: str, found: dict[str, Any], first: str, second: str) -> Any:
        """The value of one of two keys that mean the same."""
        values = [found[key] for key in (first, second) if found.get(key) is not None]
        if len(values) > 1:
            words = f"{what} has both {first} and {second}"
            self.refuse("wrong_type", words, "one of them", "take one out")
        return values[0] if values else None

    def note(self, kind: str, received: str) -> None:
        self.notes.append(Fault(kind, self.entry.where, received))


def build_sample(entry: Entry, media: MediaFolder, notes: list[Fault]) -> Sample:
    """Make a sample of an entry.

    Args:
        media: where its files are. notes: what is worth knowing is added to them.

    Raises:
        Refused: the entry cannot be trained on, with all that is wrong.
    """
    talk = _Talk(entry, media, notes)
    fields = entry.fields
    talk.faults += row_key_faults(entry.where, fields)
    if any(fields.get(name) for name in SOUND):
        talk.add("unsupported_media", "it has sound")
    turns = talk.attempt(_turns)
    talk.is_whole = talk.is_whole and turns is not None
    visuals = talk.attempt(_visuals)
    choices = talk.attempt(_choices)
    if turns and choices:
        turns = talk.attempt(_spell_out, turns, choices)
    if talk.faults or turns is None or visuals is None or choices is None:
        raise Refused(*talk.faults)
    name = entry.where
    if isinstance(fields.get("id"), str | int):
        name = f"{name} ({shorten(str(fields['id']), 80)})"
    return Sample(name, turns, visuals, choices)


def _turns(talk: _Talk) -> tuple[Turn, ...]:
    """Questions and answers; tags are taken out and remembered."""
    turns: list[Turn] = []
    lead: list[str] = []
    question: str | None = None
    for role, content in _messages(talk):
        if role == "assistant":
            if question is None:
                talk.refuse("wrong_role", f"answer {len(turns) + 1} has no question before it")
            turns.append(Turn(question, _answer(talk, content, len(turns) + 1)))
            question = None
        elif question is not None or (role == "system" and turns):
            talk.refuse("wrong_role", f"a {role} message follows a question or an answer")
        elif role == "system":
            lead.append(_question(talk, content, 0))
        else:
            question = _question(talk, content, len(turns))
    if not turns:
        talk.refuse("nothing_to_train", "it has no answer" if question else "it has no messages")
    if question is not None:
        talk.note("unanswered_question", "the last question has no answer")
    if any(lead):
        talk.note("system_moved", "it has a system message")
        first = "\n\n".join(text for text in (*lead, turns[0].question) if text)
        turns[0] = Turn(first, turns[0].answer)
    if any(not turn.question for turn in turns):
        talk.note("empty_question", "a question has no words")
    return tuple(turns)


def _messages(talk: _Talk) -> list[tuple[str, Any]]:
    """Roles and contents, in both ways of writing them."""
    fields = talk.entry.fields
    messages = talk.either("the row", fields, "messages", "conversations")
    if not isinstance(messages, list):
        what = "it has no messages" if messages is None else f"messages is {kind_of(messages)}"
        talk.refuse("wrong_type", what, "messages or conversations is a list")
    found: list[tuple[str, Any]] = []
    if fields.get("system"):
        found.append(("system", fields["system"]))
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            talk.refuse("wrong_type", f"message {number} is {kind_of(message)}", "it is an object")
        talk.check_keys(f"message {number}", message, MESSAGE)
        role = talk.either(f"message {number}", message, "role", "from")
        if not isinstance(role, str) or role not in _ROLES:
            words = "no role" if role is None else f"role {shorten(str(role), 40)}"
            allowed = "roles are user, assistant and system"
            remedy = "leave it out, or give it one of these"
            talk.refuse("wrong_role", f"message {number} has {words}", allowed, remedy)
        content = talk.either(f"message {number}", message, "content", "value")
        found.append((_ROLES[role], content))
    return found


def _text(talk: _Talk, content: Any) -> str | None:
    """The text of a message, None for a wrong one; files that stand in it leave a tag."""
    text = talk.attempt(_joined, content)
    talk.is_whole = talk.is_whole and text is not None
    return text


def _joined(talk: _Talk, content: Any) -> str:
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        talk.refuse("wrong_type", f"a content is {kind_of(content)}", "text or a list of parts")
    pieces: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            talk.check_keys("a text part", part, TEXT_PART)
            pieces.append(part["text"])
        elif kind in ("video", "image"):
            if talk.either(f"a {kind} part", part, kind, "path") is not None:
                talk.inline[kind].append(part)
            pieces.append(f"<{kind}>")
        else:
            talk.refuse("wrong_type", "a part of a content", "parts are text, video or image")
    text = "".join(pieces)
    if _SURROGATE.search(text):
        talk.refuse("wrong_type", "a text with half of a character", "valid Unicode")
    return text


def _check_plain(talk: _Talk, text: str, what: str) -> None:
    special = _SPECIAL.search(text)
    if special:
        talk.add("special_token", f"{what} has {special.group()}")


def _question(talk: _Talk, content: Any, turn: int) -> str:
    text = _text(talk, content) or ""
    _check_plain(talk, text, "a question")
    for found in _TAG.finditer(text):
        talk.tags.append(("video" if found.group(1) == "video" else "image", turn))
    return _TAG.sub(lambda found: "\n" if "\n" in found.group() else " ", text).strip()


def _answer(talk: _Talk, content: Any, number: int) -> str:
    text = _text(talk, content)
    if text is None:
        return ""
    text = text.strip()
    tag = _TAG.search(text)
    if tag:
        talk.add("tag_in_answer", f"answer {number} has {tag.group().strip()}")
    _check_plain(talk, text, f"answer {number}")
    if not text:
        talk.add("empty_answer", f"answer {number} is empty")
    return text


def _visuals(talk: _Talk) -> tuple[Visual, ...]:
    """The files in the order of their tags."""
    found = {kind: talk.attempt(_files, kind) for kind in talk.inline}
    files = {kind: visuals for kind, visuals in found.items() if visuals is not None}
    if len(files) < len(found) or not talk.is_whole:
        return ()
    order = _order(talk, len(files["video"]), len(files["image"]))
    left = {kind: iter(visuals) for kind, visuals in files.items()}
    placed = (next(left[kind]) for kind in order)
    return tuple(visual for visual in placed if visual is not None)


def _order(talk: _Talk, videos: int, images: int) -> tuple[VisualKind, ...]:
    """The kind of each file, in the order of their tags."""
    order: tuple[VisualKind, ...] = tuple(kind for kind, _ in talk.tags)
    counts = Counter(order)
    if not order:
        if (videos or images) and _expects_tags(talk.entry.fields):
            talk.note("no_tag", f"no tag for {count(videos + images, 'file')}")
        return (*repeat("video", videos), *repeat("image", images))
    if (counts["video"], counts["image"]) != (videos, images):
        is_swapped = len(order) == videos + images and len(counts) == 1 and not (videos and images)
        if not is_swapped:
            tags = f"{counts['video']} video and {count(counts['image'], 'image tag')}"
            told = f"{tags} for {count(videos, 'video')} and {count(images, 'image')}"
            kind = "tag_without_file" if len(order) > videos + images else "file_without_tag"
            talk.refuse(kind, told)
        talk.note("tag_of_other_kind", f"<{order[0]}> stands for another kind of file")
        other: VisualKind = "video" if videos else "image"
        order = (other,) * len(order)
    if any(turn for _, turn in talk.tags):
        talk.note("tag_moved", "a tag stands in a later question")
    return order


def _expects_tags(fields: dict[str, Any]) -> bool:
    """Whether the form of an entry marks its files with tags; ours need not."""
    return bool("conversations" in fields or fields.get("videos") or fields.get("images"))


def _files(talk: _Talk, kind: VisualKind) -> list[Visual | None]:
    """All files of a kind; None for one with a fault."""
    fields = talk.entry.fields
    named: list[Any] = []
    for key in (kind, f"{kind}s"):
        value = fields.get(key)
        if value is not None:
            named += value if isinstance(value, list) else [value]
    inside = talk.inline[kind]
    if named and inside:
        talk.refuse("wrong_type", f"{kind} files stand in the messages and beside them", "one way")
    parts = inside or [item if isinstance(item, dict) else {kind: item} for item in named]
    shared = {key: fields[key] for key in ("from", "to") if fields.get(key) is not None}
    if shared and kind == "video" and talk.is_whole:
        if len(parts) != 1:
            talk.refuse("wrong_window", f"from and to, and {count(len(parts), 'video')}")
        parts = [{**shared, **parts[0]}]
    return [talk.attempt(_visual, kind, part) for part in parts]


def _visual(talk: _Talk, kind: VisualKind, part: dict[str, Any]) -> Visual | None:
    talk.check_keys(f"{'an' if kind == 'image' else 'a'} {kind}", part, FILE[kind])
    path = talk.attempt(_find, kind, talk.either(f"a {kind}", part, kind, "path"))
    if path is None:
        return None
    if kind == "image":
        return Visual(path, kind)
    start, end = (_seconds(talk, part.get(key), key) for key in ("from", "to"))
    start = start or 0.0
    if end is not None and end <= start:
        talk.refuse("wrong_window", f"from {start:g} to {end:g}")
    return Visual(path, kind, start, end)


def _find(talk: _Talk, kind: VisualKind, name: Any) -> Path:
    return talk.media.find(talk.entry.where, name, kind)


def _seconds(talk: _Talk, value: Any, key: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = parse_moment(value.strip())
        except UsageError as error:
            talk.refuse("wrong_type", f"{key}: {shorten(error.received, 60)}", error.allowed)
    if isinstance(value, bool) or not isinstance(value, int | float):
        allowed = f"{key} is a number of seconds, or a time such as 0:01:30"
        talk.refuse("wrong_type", f"{key} is {kind_of(value)}", allowed)
    if not 0 <= value <= _LATEST_SECONDS:
        talk.refuse("wrong_window", f"{key} is {shorten(str(value), 40)}")
    return float(value)


def _choices(talk: _Talk) -> tuple[str, ...]:
    choices = talk.entry.fields.get("choices")
    if choices is None:
        return ()
    if not isinstance(choices, list) or not all(
        isinstance(c, str) and c.strip() and not _SURROGATE.search(c) for c in choices
    ):
        talk.refuse("wrong_type", f"choices is {kind_of(choices)}", "choices is a list of texts")
    return tuple(choice.strip() for choice in choices)


def _spell_out(talk: _Talk, turns: tuple[Turn, ...], choices: tuple[str, ...]) -> tuple[Turn, ...]:
    """The turns, where the last answer is the text of its choice and not a number or letter."""
    question, answer = turns[-1].question, turns[-1].answer
    bare = _BARE.fullmatch(answer)
    labels = talk.entry.labels or tuple(LETTERS.lower()[: len(choices)])
    named = dict(zip(labels, choices, strict=False)).get(bare[1].lower() if bare else "")
    # Columns of options have names, so that a text that is such a name may be meant either way.
    unsure = bool(talk.entry.labels) and answer in choices and named not in (None, answer)
    is_listed = all(choice.casefold() in question.casefold() for choice in choices)
    if bare is None or (answer in choices and not unsure):
        if answer not in choices:
            talk.note("answer_not_a_choice", f"{shorten(answer, 60)} is not among choices")
        return turns
    if is_listed and re.search(rf"\b{bare[1]}\b", question):
        # The question shows the options with their letters, and asks for one of these.
        return turns
    if named is None or unsure:
        talk.refuse("option_number", f"the answer is {answer}, of {count(len(choices), 'choice')}")
    talk.note("option_spelled_out", f"the answer {answer} is learned as {shorten(named, 60)}")
    return (*turns[:-1], replace(turns[-1], answer=named))
