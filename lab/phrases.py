"""The words of questions about the drawn world: names of shapes, and phrases for each kind."""

from __future__ import annotations

NAMES = {
    "circle": ("circle", "ball", "ball", "disc"),
    "square": ("square", "square", "box"),
    "triangle": ("triangle",),
    "star": ("star",),
    "cross": ("cross", "cross", "plus"),
    "ring": ("ring",),
}
PHRASES = {
    "colour": (
        "What {colour} is {it}?",
        "What {colour} is {it}?",
        "Which {colour} is {it}?",
        "What is the {colour} of {it}?",
        "Which {colour} does {it} have?",
        "What {colour} does {it} have?",
        "Tell me the {colour} of {it}.",
    ),
    "shape": (
        "What shape is {it}?",
        "Which shape is {it}?",
        "What is the shape of {it}?",
        "What shape does {it} have?",
        "What kind of shape is {it}?",
        "Which shape does {it} have?",
    ),
    "direction": (
        "Which way does {it} move?",
        "Which way is {it} moving?",
        "Which way does {it} go?",
        "In which direction does {it} move?",
        "In what direction is {it} moving?",
        "Where does {it} move?",
        "Where is {it} going?",
        "Which direction does {it} move in?",
        "What direction is {it} moving?",
        "What is the direction of {it}?",
        "How does {it} move?",
    ),
    "speed": (
        "How fast does {it} move?",
        "How fast is {it}?",
        "How fast is {it} moving?",
        "What is the speed of {it}?",
        "At what speed does {it} move?",
        "How quickly does {it} move?",
    ),
    "digit": (
        "Which {digit} is shown?",
        "What {digit} is shown?",
        "What {digit} do you see?",
        "Which {digit} appears?",
        "What {digit} appears in the video?",
        "Which {digit} can be seen?",
        "What is the {digit}?",
        "What {digit} is on the screen?",
        "Which {digit} is shown in the video?",
    ),
    "at": (
        "What is shown at {time}?",
        "What is shown at {time}?",
        "What is on screen at {time}?",
        "What is on the screen at {time}?",
        "What is visible at {time}?",
        "What can be seen at {time}?",
        "What do you see at {time}?",
        "What objects are there at {time}?",
        "Which objects are visible at {time}?",
        "At {time}, what is shown?",
        "What is there at {time}?",
    ),
    "when": (
        "When does {it} appear?",
        "When does {it} appear?",
        "When does {it} first appear?",
        "When does {it} show up?",
        "When does {it} come into view?",
        "When is {it} first seen?",
        "When is {it} shown?",
        "When can {it} first be seen?",
        "At what time does {it} appear?",
        "At which second does {it} appear?",
    ),
    "describe": (
        "What is in the video?",
        "What is shown in the video?",
        "What does the video show?",
        "What do you see?",
        "Describe the video.",
        "Which objects are in the video?",
        "What happens in the video?",
    ),
}

_COLOURS = "red|green|blue|yellow|orange|purple|white|black"
_NOUNS = "|".join(sorted({name for key, names in NAMES.items() if key != "ring" for name in names}))
_IT = rf"the (?:(?:{_COLOURS}) )?(?:{_NOUNS}|object|thing|shape|one)"
_WORDS = {
    "colour": "colou?r",
    "digit": "(?:digit|number)",
    "it": _IT,
    "time": r"(?:\d+(?:\.\d+)? ?(?:seconds?|s|sec)|second \d+(?:\.\d+)?)",
}
_WAYS, _SPEEDS = "left|right|up|down", "slow|medium|fast"
_OPTION = rf"(?:{_COLOURS}|{_NOUNS}|{_WAYS}|{_SPEEDS}|\d)"


def _phrases_of(kind: str, **words: str) -> str:
    told = (_WORDS | words).items()
    phrases = "|".join(dict.fromkeys(text.lower().rstrip("?.") for text in PHRASES[kind]))
    for name, pattern in told:
        phrases = phrases.replace(f"{{{name}}}", pattern)
    return f"(?:{phrases})"


def _whole(*patterns: str) -> str:
    return rf"^(?:{'|'.join(patterns)})\s*[?.]?$"


_LOOKUP = "|".join(map(_phrases_of, ("colour", "shape", "direction", "speed", "digit")))
# What kind a question is: the phrases and words that were trained, and no others. Any other
# question gets a warning.
KIND_PATTERNS = {
    "choice": _whole(
        rf"(?:{_LOOKUP})[?.]?(?:\s+\(?[a-d][.)] {_OPTION})+",
        rf"is {_IT} (?:{_COLOURS}) or (?:{_COLOURS})",
        rf"(?:does {_IT} move|is {_IT} moving) (?:{_WAYS}) or (?:{_WAYS})",
    ),
    "when": _whole(_phrases_of("when", it=rf"(?:{_IT}|the (?:digit|number))")),
    **{
        kind: _whole(_phrases_of(kind))
        for kind in ("at", "colour", "digit", "speed", "direction", "shape")
    },
    "yesno": _whole(
        rf"is {_IT} (?:{_COLOURS})",
        rf"is there an? (?:(?:{_COLOURS}) )?(?:{_NOUNS})(?: in the video)?",
        rf"(?:does {_IT} (?:move|go)|is {_IT} moving)(?: (?:{_WAYS}))?",
        r"is there a (?:digit|number)(?: in the video)?|is a (?:digit|number) shown",
    ),
    "describe": _whole(_phrases_of("describe")),
}
