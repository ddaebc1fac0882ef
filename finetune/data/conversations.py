"""From one entry of a data file to a sample: who says what, and which files the tags stand for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from difflib import get_close_matches
from itertools import repeat
from string import ascii_lowercase
from typing import Any, NoReturn, TypeVar

from apollo_cli.config import parse_moment
from apollo_cli.errors import UsageError
from apollo_cli.finetune.data.samples import (
    Entry,
    Fault,
    MediaFolder,
    Refused,
    Sample,
    Visual,
    VisualKind,
    kind_of,
    shorten,
)
from apollo_cli.model.prompt import Turn
from apollo_cli.text import count

_Read = TypeVar("_Read")

_ROW_KEYS = (
    *("messages", "conversations", "system", "video", "videos", "image", "images"),
    *("from", "to", "choices", "id"),
)
_MESSAGE_KEYS = ("role", "content", "from", "value")
# A file stands in a message as a part, and beside the messages as an object of the same keys.
_PART_KEYS = {
    "text": ("type", "text"),
    "video": ("type", "video", "path", "from", "to"),
    "image": ("type", "image", "path"),
}
# What other tools call our keys.
_OTHER_NAMES = (
    dict.fromkeys(("start", "start_time", "start_seconds", "video_start", "begin"), "from")
    | dict.fromkeys(("end", "end_time", "end_seconds", "video_end", "stop"), "to")
    | dict.fromkeys(("options", "candidates", "multi_choice"), "choices")
    | dict.fromkeys(("video_path", "video_file", "video_name", "videopath"), "video")
    | dict.fromkeys(("image_path", "image_file", "image_name", "imagepath"), "image")
    | {"system_prompt": "system", "conversation": "conversations", "text": "content"}
)
# Keys of a row by which other tools change what is learned.
_NOT_READ = frozenset(
    [
        *("loss", "loss_mask", "loss_weight", "loss_scale", "weight", "mask", "train", "masked"),
        *("tools", "tool_calls", "functions", "chosen", "rejected", "rejected_response"),
        *("clip", "clips", "window", "segment", "span", "timestamps", "fps", "nframes", "frames"),
        *("num_frames", "max_frames", "min_frames", "max_pixels", "min_pixels", "crop", "bbox"),
        *("rotate", "objects", "answer", "answers", "answer_idx", "answer_index", "correct"),
        *("audio", "audios"),
    ]
)
# Keys that tell where a row comes from; a key that ends in id does too.
_METADATA = frozenset(
    [
        *("", "index", "idx", "name", "source", "data_source", "dataset", "split", "task", "type"),
        *("question_type", "category", "duration", "width", "height", "metadata", "license"),
    ]
)
# Names of metadata are short and like each other: only a near miss counts.
_NEAR = 0.75

# A run of white space is tried from its start only, however long it is.
_TAG = re.compile(r"(?:(?<![ \t\r\n])[ \t\r\n]+)?<(video|image)>[ \t\r\n]*")
# All special tokens of the released tokenizers have this form.
_SPECIAL = re.compile(r"<\|\w{1,40}\|>")
# Half of a pair, which JSON may spell and no tokenizer takes.
_SURROGATE = re.compile("[\ud800-\udfff]")
_ROLES = ("user", "assistant", "system")
_OTHER_ROLES = {"human": "user", "gpt": "assistant"}
# An answer that names an option instead of saying it, such as 3, B or (b).
_BARE = re.compile(r"\(?([A-Za-z]|\d{1,2})\)?[.:]?", re.ASCII)
# No video lasts a year.
_LATEST_SECONDS = 31_536_000


def read_entry(entry: Entry, media: MediaFolder) -> tuple[Sample | None, list[Fault]]:
    """The sample of an entry and its faults; None where one of them costs the sample."""
    reader = _EntryReader(entry, media)
    sample = reader.read_sample()
    return sample, reader.faults


class _EntryReader:
    """Reads one entry part by part; a part that is refused does not hide the faults of others."""

    def __init__(self, entry: Entry, media: MediaFolder) -> None:
        self.where, self.fields, self.labels = entry.where, entry.fields, entry.labels
        self.media = media
        self.faults: list[Fault] = []
        # The tags in the questions, and the files that stand in the messages.
        self.tags: list[VisualKind] = []
        self.inline: dict[VisualKind, list[dict[str, Any]]] = {"video": [], "image": []}

    def read_sample(self) -> Sample | None:
        self.check_keys("the row", self.fields, _ROW_KEYS)
        turns = self.attempt(self.read_turns)
        visuals = self.attempt(self.read_visuals, turns is not None)
        choices = self.attempt(self.read_choices)
        if turns and choices:
            turns = self.attempt(self.spell_out, turns, choices)
        is_lost = any(fault.cost == "sample" for fault in self.faults)
        if is_lost or turns is None or visuals is None or choices is None:
            return None
        name, own = self.where, self.fields.get("id")
        if isinstance(own, str | int):
            name = f"{name} ({shorten(str(own), 80)})"
        return Sample(name, turns, visuals, choices)

    def add(self, kind: str, received: str, allowed: str = "", next_step: str = "") -> None:
        self.faults.append(Fault(kind, self.where, received, allowed, next_step))

    def refuse(self, kind: str, received: str, allowed: str = "", next_step: str = "") -> NoReturn:
        raise Refused(Fault(kind, self.where, received, allowed, next_step))

    def attempt(self, read: Callable[..., _Read], *arguments: Any) -> _Read | None:
        """What a function reads; None where it is refused."""
        try:
            return read(*arguments)
        except Refused as refused:
            self.faults.append(refused.fault)
            return None

    def check_keys(self, what: str, found: dict[str, Any], known: Collection[str]) -> None:
        """Add a fault for each key that is not known, once for all messages of the entry.

        Dropping such a key would change what is learned. In the row itself metadata passes, and
        a key that is not like a known one is a note. A key without a value counts as absent.
        """
        for key, value in found.items():
            name, is_row = key.lower(), known is _ROW_KEYS
            is_metadata = name in _METADATA or name.endswith(("id", "ids"))
            if value is None or key in known or (is_row and is_metadata):
                continue
            nearest = _OTHER_NAMES.get(name, "")
            if nearest not in known:
                nearest = next(iter(get_close_matches(name, known, n=1, cutoff=_NEAR)), "")
            if is_row and name not in _NOT_READ and not nearest:
                self.add("unknown_field", f'"{shorten(key, 60)}"')
                continue
            words = f'has the key "{shorten(key, 60)}", which is not read'
            if not any(fault.received.endswith(words) for fault in self.faults):
                remedy = f"did you mean {nearest}?" if nearest else ""
                self.add("unknown_key", f"{what} {words}", f"known are {', '.join(known)}", remedy)

    def read_either(self, what: str, found: dict[str, Any], first: str, second: str) -> Any:
        """The value of one of two keys that mean the same."""
        values = [found[key] for key in (first, second) if found.get(key) is not None]
        if len(values) > 1:
            self.refuse("wrong_type", f"{what} has both {first} and {second}", "one of them")
        return values[0] if values else None

    def read_turns(self) -> tuple[Turn, ...]:
        """Questions and answers; tags are taken out and remembered."""
        turns: list[Turn] = []
        system: list[str] = []
        question: str | None = None
        for role, content in self.read_messages():
            if role == "assistant":
                number = len(turns) + 1
                if question is None:
                    self.refuse("wrong_role", f"answer {number} has no question before it")
                turns.append(Turn(question, self.read_answer(content, f"answer {number}")))
                question = None
            elif question is not None or (role == "system" and turns):
                self.refuse("wrong_role", f"a {role} message follows a question or an answer")
            elif role == "system":
                system.append(self.read_question(content))
            else:
                question = self.read_question(content)
        if not turns:
            self.refuse("nothing_to_train", "it has no answer")
        if question is not None:
            self.add("unanswered_question", "the last question has no answer")
        if any(system):
            self.add("system_moved", "it has a system message")
            first = "\n\n".join(text for text in (*system, turns[0].question) if text)
            turns[0] = replace(turns[0], question=first)
        return tuple(turns)

    def read_messages(self) -> list[tuple[str, Any]]:
        """Role and content of each message."""
        messages = self.read_either("the row", self.fields, "messages", "conversations")
        if not isinstance(messages, list):
            what = "it has no messages" if messages is None else f"messages is {kind_of(messages)}"
            self.refuse("wrong_type", what, "messages or conversations is a list")
        system = self.fields.get("system")
        found: list[tuple[str, Any]] = [("system", system)] if system else []
        for number, message in enumerate(messages, start=1):
            what = f"message {number}"
            if not isinstance(message, dict):
                self.refuse("wrong_type", f"{what} is {kind_of(message)}", "it is an object")
            self.check_keys(what, message, _MESSAGE_KEYS)
            role = self.read_either(what, message, "role", "from")
            role = _OTHER_ROLES.get(role, role) if isinstance(role, str) else role
            if role not in _ROLES:
                words = "no role" if role is None else f"role {shorten(str(role), 40)}"
                allowed = "roles are user, assistant and system"
                remedy = "leave it out, or give it one of these"
                self.refuse("wrong_role", f"{what} has {words}", allowed, remedy)
            found.append((role, self.read_either(what, message, "content", "value")))
        return found

    def read_question(self, content: Any) -> str:
        text = self.read_text(content, "a question")
        for found in _TAG.finditer(text):
            self.tags.append("video" if found.group(1) == "video" else "image")
        return _TAG.sub(lambda found: "\n" if "\n" in found.group() else " ", text).strip()

    def read_answer(self, content: Any, what: str) -> str:
        text = self.read_text(content, what).strip()
        tag = _TAG.search(text)
        if tag:
            self.add("tag_in_answer", f"{what} has {tag.group().strip()}")
        if not text:
            self.add("empty_answer", f"{what} is empty")
        return text

    def read_text(self, content: Any, what: str) -> str:
        """The text of a message; files that stand in it leave a tag."""
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, list):
            self.refuse("wrong_type", f"a content is {kind_of(content)}", "text or a list of parts")
        text = ""
        for part in parts:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "text" and isinstance(part.get("text"), str):
                self.check_keys("a text part", part, _PART_KEYS["text"])
                text += part["text"]
            elif kind in ("video", "image"):
                if part.get(kind) is not None or part.get("path") is not None:
                    self.inline[kind].append(part)
                text += f"<{kind}>"
            else:
                self.refuse("wrong_type", "a part of a content", "parts are text, video or image")
        if _SURROGATE.search(text):
            self.refuse("wrong_type", "a text with half of a character", "valid Unicode")
        special = _SPECIAL.search(text)
        if special:
            self.add("special_token", f"{what} has {special.group()}")
        return text

    def read_visuals(self, has_turns: bool) -> tuple[Visual, ...]:
        """The files in the order of their tags.

        Args:
            has_turns: whether all messages could be read, so that all tags are known.
        """
        videos, images = (self.read_files(kind, has_turns) for kind in self.inline)
        if not has_turns or None in videos or None in images:
            return ()
        left = {"video": iter(videos), "image": iter(images)}
        placed = [next(left[kind]) for kind in self.order_files(len(videos), len(images))]
        return tuple(visual for visual in placed if visual is not None)

    def order_files(self, videos: int, images: int) -> tuple[VisualKind, ...]:
        """The kind of each file, in the order of the tags."""
        if not self.tags:
            return (*repeat("video", videos), *repeat("image", images))
        tags = Counter(self.tags)
        if (tags["video"], tags["image"]) == (videos, images):
            return tuple(self.tags)
        number = len(self.tags)
        if number != videos + images or len(tags) > 1 or (videos and images):
            words = f"{tags['video']} video and {count(tags['image'], 'image tag')}"
            words += f" for {count(videos, 'video')} and {count(images, 'image')}"
            is_short = number > videos + images
            self.refuse("tag_without_file" if is_short else "file_without_tag", words)
        self.add("tag_of_other_kind", f"<{self.tags[0]}> stands for another kind of file")
        return tuple(repeat("video" if videos else "image", number))

    def read_files(self, kind: VisualKind, has_turns: bool) -> list[Visual | None]:
        """All files of a kind; None for one with a fault."""
        named: list[Any] = []
        for key in (kind, f"{kind}s"):
            value = self.fields.get(key)
            if value is not None:
                named += value if isinstance(value, list) else [value]
        inside = self.inline[kind]
        if named and inside:
            words = f"{kind} files stand in the messages and beside them"
            self.refuse("wrong_type", words, "one way")
        parts = inside or [item if isinstance(item, dict) else {kind: item} for item in named]
        times = {key: self.fields.get(key) for key in ("from", "to")}
        window = {key: value for key, value in times.items() if value is not None}
        if window and kind == "video" and has_turns:
            if len(parts) != 1:
                self.refuse("wrong_window", f"from and to, and {count(len(parts), 'video')}")
            parts = [{**window, **parts[0]}]
        return [self.attempt(self.read_visual, kind, part) for part in parts]

    def read_visual(self, kind: VisualKind, part: dict[str, Any]) -> Visual:
        what = f"{'an' if kind == 'image' else 'a'} {kind}"
        self.check_keys(what, part, _PART_KEYS[kind])
        path = self.media.find(self.where, self.read_either(what, part, kind, "path"), kind)
        if kind == "image":
            return Visual(path, kind)
        start, end = (self.read_seconds(part.get(key), key) for key in ("from", "to"))
        start = start or 0.0
        if end is not None and end <= start:
            self.refuse("wrong_window", f"from {start:g} to {end:g}")
        return Visual(path, kind, start, end)

    def read_seconds(self, value: Any, key: str) -> float | None:
        if value is None:
            return None
        if isinstance(value, str):
            try:
                value = parse_moment(value.strip())
            except UsageError as error:
                self.refuse("wrong_type", f"{key}: {shorten(error.received, 60)}", error.allowed)
        elif isinstance(value, bool) or not isinstance(value, int | float):
            allowed = f"{key} is a number of seconds, or a time such as 0:01:30"
            self.refuse("wrong_type", f"{key} is {kind_of(value)}", allowed)
        if not 0 <= value <= _LATEST_SECONDS:
            self.refuse("wrong_window", f"{key} is {shorten(str(value), 40)}")
        return float(value)

    def read_choices(self) -> tuple[str, ...]:
        choices = self.fields.get("choices")
        if choices is None:
            return ()
        if not isinstance(choices, list) or not all(
            isinstance(c, str) and c.strip() and not _SURROGATE.search(c) for c in choices
        ):
            self.refuse(
                "wrong_type", f"choices is {kind_of(choices)}", "choices is a list of texts"
            )
        return tuple(choice.strip() for choice in choices)

    def spell_out(self, turns: tuple[Turn, ...], choices: tuple[str, ...]) -> tuple[Turn, ...]:
        """The turns, with the text of its choice as last answer in place of a number or letter."""
        question, answer = turns[-1].question, turns[-1].answer
        bare = _BARE.fullmatch(answer)
        labels = self.labels or tuple(ascii_lowercase)
        named = dict(zip(labels, choices, strict=False)).get(bare[1].lower() if bare else "")
        # Columns of options have names, so that a text that is such a name may be meant either way.
        unsure = bool(self.labels) and answer in choices and named not in (None, answer)
        if bare is None or (answer in choices and not unsure):
            if answer not in choices:
                self.add("answer_not_a_choice", f"{shorten(answer, 60)} is not among choices")
            return turns
        is_listed = all(choice.casefold() in question.casefold() for choice in choices)
        if is_listed and re.search(rf"\b{bare[1]}\b", question):
            # The question shows the options with their letters, and asks for one of these.
            return turns
        if named is None or unsure:
            words = f"the answer is {answer}, of {count(len(choices), 'choice')}"
            self.refuse("option_number", words)
        self.add("option_spelled_out", f"the answer {answer} is learned as {shorten(named, 60)}")
        return (*turns[:-1], replace(turns[-1], answer=named))
