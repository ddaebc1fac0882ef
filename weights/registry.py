"""Names of models, and what a name, a folder or a repository stands for. Nothing is fetched."""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Literal

from apollo_cli.errors import WeightsError
from apollo_cli.weights.files import read_json

LICENCE_REMINDER = "check before use: the repository's own files decide"
_HERE = Path(__file__).parent
_REPOSITORY = re.compile(r"(?P<owner>[\w-][\w.-]*)/(?P<name>[\w-][\w.-]*)", re.ASCII)
_REVISION = re.compile(r"\w[\w./-]*", re.ASCII)
_WEB_PREFIXES = ("hf://", "https://huggingface.co/")


@dataclass(frozen=True)
class LlmShape:
    """Sizes of a language model, for estimates before a download."""

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    intermediate_size: int
    vocab_size: int
    tied: bool = False


@dataclass(frozen=True)
class ModelEntry:
    """A model that is known by name.

    Attributes:
        name: as typed by a user.
        summary: one line.
        language_model: what its language model was tuned from.
        licence: what follows from that; to be checked before use.
        mirror_label: the licence label seen on the repository; may disagree.
        repository: where it can be fetched; None for an embedded one.
        embedded: folder inside the package; None for one to fetch.
        approximate_bytes: download size, rounded; None when embedded.
        llm_shape: None when the checkpoint itself is at hand.
    """

    name: str
    summary: str
    language_model: str
    licence: str
    mirror_label: str | None = None
    repository: str | None = None
    embedded: str | None = None
    approximate_bytes: int | None = None
    llm_shape: LlmShape | None = None


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from.

    Attributes:
        kind: ``embedded`` in the package, a ``folder`` of the user, or a ``hub`` repository.
        name: what to call it in output.
        folder: set unless the kind is ``hub``.
        repository: ``owner/name``, set for ``hub``.
        revision: branch, tag or commit asked for; None is the default branch.
        entry: set when it was asked for by a known name.
    """

    kind: Literal["embedded", "folder", "hub"]
    name: str
    folder: Path | None = None
    repository: str | None = None
    revision: str | None = None
    entry: ModelEntry | None = None


@cache
def known_models() -> dict[str, ModelEntry]:
    """All models known by name, smallest first."""
    table = tomllib.loads((_HERE / "registry.toml").read_text(encoding="utf-8"))
    return {name: _entry(name, dict(row)) for name, row in table.items()}


def _entry(name: str, row: dict) -> ModelEntry:
    shape = row.pop("llm_shape", None)
    return ModelEntry(name=name, llm_shape=LlmShape(**shape) if shape else None, **row)


def resolve(name_or_path: str | Path) -> ModelSource:
    """Tell what a name stands for.

    Args:
        name_or_path: a known name, a folder, or ``owner/repository``; a name and a repository
            may carry ``@revision``. A known name wins over a folder of the same name, which can
            be written ``./name``.

    Raises:
        WeightsError: it is none of these; lists the known names.
    """
    text = str(name_or_path).strip()
    bare, at, revision = text.partition("@")
    entry = known_models().get(bare.lower())
    if entry is not None and not isinstance(name_or_path, Path):
        return _from_entry(entry, revision if at else None)
    place = os.path.expanduser(text)
    if os.path.isdir(place):
        return ModelSource("folder", name=text, folder=Path(place).absolute())
    for prefix in _WEB_PREFIXES:
        bare = bare.removeprefix(prefix)
    if not _looks_like_path(text) and _REPOSITORY.fullmatch(bare) and not os.path.exists(place):
        wanted = checked_revision(revision if at else None)
        return ModelSource("hub", name=bare, repository=bare, revision=wanted)
    raise _unknown(text)


def checked_revision(revision: str | None) -> str | None:
    """The revision itself, when it can be one.

    Raises:
        WeightsError: it cannot be a branch, tag or commit.
    """
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise WeightsError(
            f"revision {revision[:80]!r}", "a branch, tag or commit is needed after the @"
        )
    return revision


def _from_entry(entry: ModelEntry, revision: str | None) -> ModelSource:
    if entry.embedded is not None:
        if revision is not None:
            raise WeightsError(f"{entry.name}@{revision[:80]}", f"{entry.name} has no revisions")
        return ModelSource("embedded", entry.name, folder=_HERE / entry.embedded, entry=entry)
    return ModelSource(
        "hub",
        entry.name,
        repository=entry.repository,
        revision=checked_revision(revision),
        entry=entry,
    )


def _looks_like_path(text: str) -> bool:
    return text.startswith((".", "~", "/")) or "\\" in text or text.endswith("/")


def _unknown(text: str) -> WeightsError:
    names = list(known_models())
    near = get_close_matches(text.lower(), names, n=2, cutoff=0.6)
    shown = repr(text[:120])
    if _looks_like_path(text):
        what = "is not a folder" if os.path.exists(os.path.expanduser(text)) else "does not exist"
        received = f"the model folder {shown} {what}"
    else:
        received = f"unknown model {shown}"
    return WeightsError(
        received + (f" (did you mean {' or '.join(near)}?)" if near else ""),
        f"known names are {', '.join(names)}; a folder or owner/repository also works",
        "apollo models list shows what each is",
    )


CARD_FILE = "nano_card.json"
TOY_NOTICE = "this answer is by apollo-nano, a toy trained on drawn shapes; it knows nothing else"


@dataclass(frozen=True)
class KindScore:
    """One kind of question on held-out videos.

    Attributes:
        score, baseline, gate: in percent; the baseline is the same without the video.
        supported: whether the gate was met.
        pattern: regular expression of questions of this kind; None where words do not tell.
    """

    score: float
    baseline: float
    gate: float
    supported: bool
    pattern: str | None


def read_card(folder: Path) -> dict[str, KindScore]:
    """The scores by kind, in the order in which their patterns are tried; empty without a card.

    Raises:
        WeightsError: the card is damaged.
    """
    if not (folder / CARD_FILE).is_file():
        return {}
    card = read_json(folder / CARD_FILE)
    kinds = card["kinds"]
    return {
        name: KindScore(
            row["score"], row["baseline"], row["gate"], row["supported"], row.get("pattern")
        )
        for name in card["pattern_order"]
        for row in [kinds[name]]
    }


def question_kind(card: dict[str, KindScore], question: str) -> str | None:
    """Which kind of question this is, as far as its words tell; the first that fits decides."""
    for kind, score in card.items():
        if score.pattern and re.search(score.pattern, question.strip(), re.IGNORECASE):
            return kind
    return None


def toy_remarks(card: dict[str, KindScore], question: str) -> list[str]:
    """What a user of the toy should know about its answer to a question."""
    kind = question_kind(card, question)
    if kind is None:
        return [
            TOY_NOTICE,
            "this question has a kind, phrase or word that was not part of its training",
        ]
    score = card[kind]
    if score.supported:
        return [TOY_NOTICE]
    return [
        TOY_NOTICE,
        f"questions of the kind {kind!r} are unsupported: {score.score:.0f} % of them were "
        f"right on held-out videos",
    ]
