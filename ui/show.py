"""From a state to HTML. All text is escaped: answers and file names are not trusted."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from apollo_cli.answer import Citation, times_in
from apollo_cli.ui.costs import duration
from apollo_cli.ui.files import Listing
from apollo_cli.ui.handlers import Shown, State
from apollo_cli.ui.timeline import Mark, draw
from apollo_cli.ui.visit import Stage, Told

STAGES = {"open": "Open", "decode": "Decode", "encode": "Encode", "read": "Read", "write": "Write"}
_MOST_SAID = 1000
_EXAMPLES = ("What happens in this video?", "What is shown first?", "What happens at the end?")


def text(value: str) -> str:
    """Text that stays text, in an element or between quotes."""
    return escape(value, quote=True)


def _brief(said: str) -> str:
    """A sentence, of which a very long value that was typed leaves out the middle."""
    middle = " \u2026 "
    return said if len(said) <= _MOST_SAID else f"{said[:300]}{middle}{said[-300:]}"


def model_line(state: State) -> str:
    """Which model answers, or how far it is."""
    if state.model_error:
        return f'<span class="chip bad" title="{text(state.model_error)}">no model</span>'
    if not state.model:
        share = f"{state.model_share:.0%}" if state.model_share else ""
        return f'<span class="chip busy" role="status">loading the model {share}</span>'
    toy = "A toy, trained on drawn shapes only. For a real model: apollo models list"
    hint = f' title="{toy}"' if state.is_toy else ""
    name = f"{text(state.model)}{' · toy' if state.is_toy else ''}"
    return f'<span class="chip"{hint}>{name}</span>'


def player(state: State) -> str:
    """The files in view, each with its player and strip; a tab for each where there are several."""
    if not state.files:
        opening = state.task == "open"
        return (
            '<div class="frame empty"><p class="big">'
            + ("Opening the file …" if opening else "Open a video to begin")
            + "</p><p>Type its path above, browse, or drop a file here.<br>"
            "A path is played where it lies; nothing is copied, nothing leaves this machine.</p>"
            "</div>"
        )
    tabs = ""
    if len(state.files) > 1:
        names = "".join(
            f'<button type="button" data-show="{number}" title="{text(shown.name)}" '
            f'aria-pressed="{str(number == state.chosen).lower()}">'
            f"{text(shown.name)}</button>"
            for number, shown in enumerate(state.files)
        )
        tabs = f'<div class="tabs" role="group" aria-label="Files in view">{names}</div>'
    files = "".join(_file(shown) for shown in state.files)
    return (
        f'{tabs}<div class="files" data-opened="{state.opened}" data-chosen="{state.chosen}">'
        f"{files}</div>"
    )


def _file(shown: Shown) -> str:
    strip = draw(shown.strip) if shown.strip else ""
    return (
        f'<section class="file" aria-label="{text(shown.name)}"><div class="frame">'
        f"{_media(shown)}</div>{strip}</section>"
    )


def _media(shown: Shown) -> str:
    media, name = shown.media, text(shown.name)
    if media.address and media.kind == "image":
        return f'<img src="{text(media.address)}" alt="{name}">'
    if media.address:
        return (
            f'<video src="{text(media.address)}" controls playsinline preload="metadata" '
            f'aria-label="{name}"></video>'
        )
    if media.state == "making a preview":
        return (
            f'<div class="wait" role="status"><p>A light preview is being made: '
            f'{media.share:.0%}</p><progress max="1" value="{media.share:.3f}"></progress>'
            f"<p>{text(media.reason)}. The model reads the original; you can ask already.</p></div>"
        )
    return (
        f'<div class="wait"><p>This file cannot be shown here</p><p>{text(media.reason)}</p>'
        "<p>You can still ask about it.</p></div>"
    )


def plan_line(state: State) -> str:
    """What the next question looks at and what it costs, in one line."""
    if not state.files:
        return ""
    if state.cost_error:
        return f'<p class="plan bad" role="alert">{text(_brief(state.cost_error))}</p>'
    name = f"<b>{text(state.files[0].name)}</b>" if len(state.files) == 1 else ""
    waits = "the plan follows" + ("" if state.model else " when the model is loaded")
    phrases = state.cost or ("no plan without a model" if state.model_error else waits,)
    parts = "".join(f"<span>{text(phrase)}</span>" for phrase in phrases)
    parts = f"<span>{name}</span>{parts}" if name else parts
    return f'<p class="plan" title="What the next question looks at, and what it costs">{parts}</p>'


def told(state: State) -> str:
    """All turns so far."""
    if not state.told and not state.text and not state.question:
        if not state.files:
            return (
                '<div class="hint"><p>Answers appear here, with times that you can click.</p></div>'
            )
        chips = "".join(
            f'<button type="button" data-ask="{text(example)}">{text(example)}</button>'
            for example in _EXAMPLES
        )
        return f'<div class="hint"><p>Ask anything about it.</p><div>{chips}</div></div>'
    last = max((n for n, turn in enumerate(state.told) if turn.is_kept), default=-1)
    return "".join(
        _turn(turn, _places(state, turn.files), can_check=state.can_check and number == last)
        for number, turn in enumerate(state.told)
    )


def now(state: State) -> str:
    """The turn that is being written."""
    if state.task != "ask":
        return ""
    places = _places(state, tuple(str(shown.path) for shown in state.files))
    dots = '<span class="dots" aria-label="working"></span>'
    answer = linked(state.text, places) if state.text else dots
    return (
        f'<article class="turn"><p class="question">{text(state.question)}</p>'
        f'<p class="answer writing">{answer}</p></article>'
    )


def _places(state: State, files: Sequence[str]) -> tuple[int, ...]:
    """Which players the times of an answer may mean; none where not all of its files are in view.

    Times are of a video, and where there are several, nobody knows of which.
    """
    known = [str(shown.path) for shown in state.files]
    if not set(files) <= set(known):
        return ()
    views = enumerate(state.files)
    return tuple(n for n, shown in views if str(shown.path) in files and not shown.is_image)


def _turn(turn: Told, places: Sequence[int], *, can_check: bool) -> str:
    notes = "".join(f"<li>{text(note)}</li>" for note in turn.notes)
    check = "".join(f"<li>{text(line)}</li>" for line in turn.check)
    kind, stopped = "kept checkable" if can_check else "kept", ""
    if not turn.is_kept:
        why = "Stopped" if turn.reason in ("", "stopped") else f"Not answered: {turn.reason}"
        kind, stopped = (
            "dropped",
            (
                f'<p class="stopped">{text(why)}; this turn is not kept. '
                f'<button type="button" data-ask="{text(turn.question)}">Ask again</button></p>'
            ),
        )
    return (
        f'<article class="turn {kind}">'
        f'<p class="question">{text(turn.question)}</p>'
        f'<p class="answer">{linked(turn.answer, places, turn.citations)}</p>{stopped}'
        + (f'<ul class="check" aria-label="Blind check">{check}</ul>' if check else "")
        + (f'<ul class="notes">{notes}</ul>' if notes else "")
        + "</article>"
    )


def linked(answer: str, places: Sequence[int], citations: Sequence[Citation] = ()) -> str:
    """An answer in which each time is a button that moves a player there.

    Args:
        places: numbers of the players that are meant; of several, the one that is shown.
    """
    if not places:
        return text(answer)
    numbers = " ".join(map(str, places))
    known = {(c.text, c.seconds): c for c in citations}
    out, place = [], 0
    for start, end, moments in times_in(answer):
        said, seconds = answer[start:end], moments[0]
        found = known.get((said, seconds))
        if citations and found is None:
            # Behind the end of the video: no place in it.
            continue
        mark = Mark(seconds, said, found.seen if found else None)
        kind = " unseen" if found and not found.seen else ""
        out.append(text(answer[place:start]))
        out.append(
            f'<button type="button" class="time{kind}" data-seek="{seconds:g}" data-of="{numbers}" '
            f'title="{text(mark.label)}" aria-label="{text(said)}: go to {text(mark.label)}">'
            f"{text(said)}</button>"
        )
        place = end
    return "".join([*out, text(answer[place:])])


def work(state: State) -> str:
    """What is being done, how far it is, and how long it takes yet."""
    if state.task is None:
        return ""
    if not state.model and state.task != "open":
        return _bar("Waiting for the model to load", state.model_share, "")
    if state.place:
        before = "one question comes" if state.place == 1 else f"{state.place} questions come"
        return _bar(f"Waiting: {before} first", None, "")
    stage = state.stage or Stage("open")
    share = stage.done / stage.total if stage.total and stage.name != "write" else None
    left = f"{duration(stage.seconds_left)} left" if stage.seconds_left is not None else ""
    names = "" if state.task == "open" else _steps(stage.name)
    return _bar(_doing(state, stage), share, left) + names


def _doing(state: State, stage: Stage) -> str:
    check = "Blind check: " if state.task == "blind" else ""
    units = {"decode": "clips", "encode": "clips", "read": "tokens", "write": "tokens"}
    verbs = {"open": "opening the file", "decode": "decoding", "encode": "encoding"}
    verbs |= {"read": "reading", "write": "writing"}
    doing = check + verbs[stage.name]
    if not stage.total:
        return doing[0].upper() + doing[1:]
    is_writing = stage.name == "write"
    of, count = ("", stage.done) if is_writing else (f" of {stage.total:,}", stage.total)
    unit = units[stage.name].removesuffix("s" if count == 1 else "")
    return f"{doing[0].upper()}{doing[1:]}: {stage.done:,}{of} {unit}"


def _steps(current: str) -> str:
    order, items = list(STAGES), []
    for name, label in STAGES.items():
        place = order.index(name) - order.index(current)
        kind = "done" if place < 0 else "todo"
        is_now = ' aria-current="step"' if place == 0 else f' class="{kind}"'
        items.append(f"<li{is_now}>{label}</li>")
    return f'<ol class="steps">{"".join(items)}</ol>'


def _bar(label: str, share: float | None, left: str) -> str:
    value = "" if share is None else f' value="{share:.3f}"'
    return (
        f'<div class="work" role="status"><span>{text(label)}</span><span>{text(left)}</span></div>'
        f'<progress max="1"{value} aria-label="{text(label)}"></progress>'
    )


def alert(state: State) -> str:
    """What went wrong, in the words of the command line."""
    problem = state.error or state.model_error
    if problem:
        return f'<p class="alert" role="alert">{text(_brief(problem))}</p>'
    return f'<p class="notice" role="status">{text(state.notice)}</p>' if state.notice else ""


def picker(listing: Listing) -> str:
    """Folders and files to pick from."""
    rows = []
    if listing.above:
        rows.append(_row(listing.above, "..", "folder", ""))
    for entry in listing.entries:
        kind = "folder" if entry.is_folder else "file"
        size = "" if entry.is_folder else f"{entry.size_bytes / 1e6:,.1f} MB"
        rows.append(_row(str(entry.path), entry.name, kind, size))
    note = listing.note or ("" if listing.entries else "no video or image here")
    return f'<div class="rows">{"".join(rows)}</div><p>{text(note)}</p>'


def _row(path: str, name: str, kind: str, size: str) -> str:
    return (
        f'<button type="button" class="{kind}" data-pick="{text(path)}" title="{text(name)}">'
        f"<span>{text(name)}</span><small>{size}</small></button>"
    )
