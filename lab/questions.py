"""Questions about the drawn world, their answers, and how an answer is judged."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lab.phrases import NAMES, PHRASES
from lab.toybox import (
    COLOURS,
    DIRECTIONS,
    SHAPES,
    SPEEDS,
    Thing,
    World,
    by_shape,
)

LOOKUPS = ("colour", "shape", "direction", "speed", "digit")
KINDS = (*LOOKUPS, "at", "when", "yesno", "choice")
EXTRA_KINDS = ("describe",)
WHEN_TOLERANCE_SECONDS = 1.0
STILL, NO_DIGIT, NOTHING = "it stands still", "no digit", "nothing"
LETTERS = "ABCD"


@dataclass(frozen=True)
class Question:
    """One question with its answer; ``seconds`` is the exact truth behind a "when"."""

    kind: str
    text: str
    answer: str
    seconds: float | None = None


def ask(world: World, kind: str, rng: np.random.Generator) -> Question | None:
    """Make one question of a kind, or None where the world has nothing to ask."""
    return _MAKERS[kind](world, rng)


def is_right(question: Question, answer: str) -> bool:
    """Judge an answer: the right words, or for "when" a time within a second."""
    told = normalise_answer(answer)
    if question.seconds is not None:
        numbers = re.findall(r"\d+(?:\.\d+)?", told)
        near = [abs(float(n) - question.seconds) <= WHEN_TOLERANCE_SECONDS for n in numbers]
        return len(near) == 1 and bool(near[0])
    return told == normalise_answer(question.answer)


def normalise_answer(text: str) -> str:
    """Lower case, single spaces, no full stop."""
    return " ".join(text.lower().strip().rstrip(".").split())


def _pick(rng: np.random.Generator, options: tuple[str, ...] | list[str]) -> str:
    return str(options[rng.integers(len(options))])


def _thing(world: World, rng: np.random.Generator) -> Thing:
    return world.things[rng.integers(len(world.things))]


def _by_shape(thing: Thing, rng: np.random.Generator) -> str:
    return f"the {_pick(rng, NAMES[thing.shape])}"


def _by_colour(thing: Thing, rng: np.random.Generator) -> str:
    return f"the {thing.colour} {_pick(rng, ('object', 'thing', 'shape', 'one'))}"


def _refer(world: World, thing: Thing, rng: np.random.Generator) -> str:
    roll = rng.random()
    if len(world.things) == 1 and roll < 0.15:
        return f"the {_pick(rng, ('object', 'thing', 'shape'))}"
    if roll < 0.6:
        return _by_shape(thing, rng)
    if roll < 0.8:
        return _by_colour(thing, rng)
    return f"the {thing.colour} {_pick(rng, NAMES[thing.shape])}"


def _phrase(kind: str, rng: np.random.Generator, **words: str) -> str:
    words["colour"] = _pick(rng, ("colour", "color"))
    words["digit"] = _pick(rng, ("digit", "number"))
    text = _pick(rng, PHRASES[kind]).format(**words)
    return text[:-1] if rng.random() < 0.1 else text


def _colour(world: World, rng: np.random.Generator) -> Question:
    thing = _thing(world, rng)
    alone = len(world.things) == 1 and rng.random() < 0.2
    it = "the object" if alone else _by_shape(thing, rng)
    return Question("colour", _phrase("colour", rng, it=it), thing.colour)


def _shape(world: World, rng: np.random.Generator) -> Question:
    thing = _thing(world, rng)
    alone = len(world.things) == 1 and rng.random() < 0.2
    it = "the object" if alone else _by_colour(thing, rng).replace("shape", "object")
    return Question("shape", _phrase("shape", rng, it=it), thing.shape)


def _direction(world: World, rng: np.random.Generator) -> Question:
    thing = _thing(world, rng)
    text = _phrase("direction", rng, it=_refer(world, thing, rng))
    return Question("direction", text, thing.direction or STILL)


def _speed(world: World, rng: np.random.Generator) -> Question:
    thing = _thing(world, rng)
    text = _phrase("speed", rng, it=_refer(world, thing, rng))
    return Question("speed", text, thing.speed or STILL)


def _digit(world: World, rng: np.random.Generator) -> Question | None:
    if world.digit is None and rng.random() < 0.85:
        return None
    answer = str(world.digit.value) if world.digit else NO_DIGIT
    return Question("digit", _phrase("digit", rng), answer)


def list_things(things: list[Thing], digit: int | None) -> str:
    """Name things and a digit in one phrase."""
    articles = {"orange": "an"}
    parts = [f"{articles.get(t.colour, 'a')} {t.colour} {t.shape}" for t in things]
    if digit is not None:
        parts.append(f"the digit {digit}")
    if len(parts) < 2:
        return "".join(parts) or NOTHING
    return ", ".join(parts[:-1]) + " and " + parts[-1]


def _shown(world: World, seconds: float) -> str:
    digit = world.digit if world.digit and world.digit.is_there(seconds) else None
    return list_things(world.things_at(seconds), digit.value if digit else None)


def _time_words(seconds: float, rng: np.random.Generator) -> str:
    number = f"{seconds:g}"
    unit = "second" if number == "1" else "seconds"
    forms = [f"{number} {unit}"] * 4 + [f"second {number}", f"{number} s", f"{number} sec"]
    return _pick(rng, forms)


def _at(world: World, rng: np.random.Generator) -> Question | None:
    step = 0.5 if rng.random() < 0.15 else 1.0
    for _ in range(12):
        seconds = float(rng.integers(int(world.duration_seconds / step)) * step)
        near = [min(seconds + d, world.duration_seconds - 0.01) for d in (-0.5, 0, 0.5)]
        answers = {_shown(world, max(0.0, t)) for t in near}
        # Near a change the right answer would hang on a single picture.
        if len(answers) == 1 and (answers != {NOTHING} or rng.random() < 0.4):
            text = _phrase("at", rng, time=_time_words(seconds, rng))
            return Question("at", text, answers.pop())
    return None


def _when(world: World, rng: np.random.Generator) -> Question | None:
    late = [t for t in world.things if t.start_seconds > 0]
    digit = world.digit
    roll = rng.random()
    if digit is not None and roll < 0.3:
        it, start = f"the {_pick(rng, ('digit', 'number'))}", digit.start_seconds
    elif late and roll < 0.85:
        thing = late[rng.integers(len(late))]
        it, start = _refer(world, thing, rng), thing.start_seconds
    else:
        thing = _thing(world, rng)
        it, start = _refer(world, thing, rng), thing.start_seconds
    # What is there from the start is asked seldom: it would teach to answer 0.
    if start == 0 and rng.random() < 0.6:
        return None
    whole = round(start)
    answer = f"at {whole} {'second' if whole == 1 else 'seconds'}"
    return Question("when", _phrase("when", rng, it=it), answer, seconds=start)


def _other(rng: np.random.Generator, options: tuple[str, ...], right: str) -> str:
    return _pick(rng, [option for option in options if option != right])


def _yes_no(world: World, rng: np.random.Generator) -> Question:
    thing, yes = _thing(world, rng), rng.random() < 0.5
    roll = rng.random()
    if roll < 0.3:
        colour = thing.colour if yes else _other(rng, tuple(COLOURS), thing.colour)
        text = f"Is {_by_shape(thing, rng)} {colour}?"
    elif roll < 0.6:
        text, yes = _existence(world, thing, yes, rng)
    elif roll < 0.8:
        way = thing.direction if yes and thing.direction else None
        way = way or _other(rng, tuple(DIRECTIONS), thing.direction or "")
        yes = way == thing.direction
        verb = _pick(rng, ("Does {it} move {way}?", "Is {it} moving {way}?", "Does {it} go {way}?"))
        text = verb.format(it=_refer(world, thing, rng), way=way)
    elif roll < 0.9:
        movers = [t for t in world.things if (t.direction is not None) == yes]
        thing = movers[rng.integers(len(movers))] if movers else thing
        yes = thing.direction is not None
        verb = _pick(rng, ("Does {it} move?", "Is {it} moving?"))
        text = verb.format(it=_refer(world, thing, rng))
    else:
        yes = world.digit is not None
        digit = _pick(rng, ("digit", "number"))
        forms = ("Is there a {d}?", "Is a {d} shown?", "Is there a {d} in the video?")
        text = _pick(rng, forms).format(d=digit)
    return Question("yesno", text, "yes" if yes else "no")


def _existence(world: World, thing: Thing, yes: bool, rng: np.random.Generator) -> tuple[str, bool]:
    ending = _pick(rng, ("", " in the video"))
    shapes = {t.shape for t in world.things}
    article = {"orange": "an"}
    if rng.random() < 0.4:
        shape = thing.shape if yes else _pick(rng, [s for s in SHAPES if s not in shapes])
        return f"Is there a {_pick(rng, NAMES[shape])}{ending}?", yes
    colour, shape = thing.colour, thing.shape
    if not yes and rng.random() < 0.5:
        colour = _other(rng, tuple(COLOURS), colour)
    elif not yes:
        shape = _other(rng, SHAPES, shape)
    name = _pick(rng, NAMES[shape])
    return f"Is there {article.get(colour, 'a')} {colour} {name}{ending}?", yes


_EITHER = {
    "colour": ("Is {it} {first} or {second}?",),
    "direction": ("Does {it} move {first} or {second}?", "Is {it} moving {first} or {second}?"),
}


def _either_subject(world: World, base: Question, rng: np.random.Generator) -> str:
    """A reference to the one thing that has the answer as its property."""
    key = base.kind
    owners = [t for t in world.things if getattr(t, key) == base.answer]
    thing = owners[rng.integers(len(owners))]
    return _by_shape(thing, rng) if key == "colour" else _refer(world, thing, rng)


def _choice(world: World, rng: np.random.Generator) -> Question | None:
    pools: dict[str, tuple[str, ...]] = {
        "colour": tuple(COLOURS),
        "shape": SHAPES,
        "direction": tuple(DIRECTIONS),
        "speed": tuple(SPEEDS),
        "digit": tuple("0123456789"),
    }
    kind = _pick(rng, LOOKUPS)
    base = ask(world, kind, rng)
    if base is None or base.answer not in pools[kind]:
        return None
    count = int(rng.integers(2, 1 + min(len(LETTERS), len(pools[kind]))))
    wrong = [option for option in pools[kind] if option != base.answer]
    if kind in _EITHER and rng.random() < 0.25:
        pair = [str(o) for o in rng.permutation([base.answer, _pick(rng, wrong)])]
        it = _either_subject(world, base, rng)
        text = _pick(rng, _EITHER[kind]).format(it=it, first=pair[0], second=pair[1])
        return Question("choice", text, base.answer)
    options = [base.answer, *(str(o) for o in rng.permutation(wrong)[: count - 1])]
    options = [str(o) for o in rng.permutation(options)]
    form = _pick(rng, ("({letter}) {o}", "({letter}) {o}", "{letter}. {o}", "{letter}) {o}"))
    gap = _pick(rng, (" ", "\n"))
    lines = [form.format(letter=a, o=o) for a, o in zip(LETTERS, options, strict=False)]
    return Question("choice", base.text + gap + gap.join(lines), base.answer)


def _describe(world: World, rng: np.random.Generator) -> Question:
    things = by_shape(world.things)
    digit = world.digit.value if world.digit else None
    return Question("describe", _phrase("describe", rng), list_things(things, digit))


_MAKERS: dict[str, Callable[[World, np.random.Generator], Question | None]] = {
    "colour": _colour,
    "shape": _shape,
    "direction": _direction,
    "speed": _speed,
    "digit": _digit,
    "at": _at,
    "when": _when,
    "yesno": _yes_no,
    "choice": _choice,
    "describe": _describe,
}
