"""How numbers and names stand in a message, and how text is made harmless for a terminal."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

_MOST_DIGITS = 6


def count(number: int, one: str, many: str = "") -> str:
    """Such as ``1 sample`` and ``2 samples``.

    Args:
        one: what there is one of. many: the same for several; empty is ``one`` with an s.
    """
    return f"{number} {one}" if number == 1 else f"{number} {many or one + 's'}"


def apart(*values: float, digits: int = 1) -> tuple[str, ...]:
    """Numbers as text, with as many digits as it takes for different ones to look different.

    Args:
        digits: fewest behind the point; six are the most.
    """
    different = len({round(value, _MOST_DIGITS) for value in values})
    while True:
        texts = tuple(f"{value:.{digits}f}" for value in values)
        if digits >= _MOST_DIGITS or len(set(texts)) == different:
            return texts
        digits += 1


def percent(share: float, digits: int = 0) -> str:
    """A share from 0 to 1: ``under 1%`` and ``over 99%`` where rounding would say none or all."""
    step = 10.0 ** -(digits + 2)
    if 1e-9 < share < step:
        return f"under {step:.{digits}%}"
    if 1 - step / 2 <= share < 1 - 1e-9:
        return f"over {1 - step:.{digits}%}"
    return f"{share:.{digits}%}"


# Control characters of both sets, the ones that turn the direction of text, and line separators.
_CONTROLS = (
    *range(0x20), *range(0x7F, 0xA0), 0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F),
    *range(0x2066, 0x206A),
)  # fmt: skip
_ESCAPES = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    for code in _CONTROLS
    if chr(code) not in "\n\t"
}
# What Markdown and HTML act on: anywhere, and where a line begins. A bar inside a word is none.
_ACTIVE = re.compile(r"[\\`*\[\]<>&|~$]|(?<![^\W_])_|_(?![^\W_])")
_LINE_START = re.compile(r"^([ \t]*(?:\d+(?=[.)]\s))?)([#+=.)-])", re.MULTILINE)
_SECRETS = re.compile(
    r"(?P<kept>bearer\s+|[?&][\w-]*(?:token|secret|password|signature)=)[^\s&'\"]+"
    r"|(?P<before>://)[^/\s@]+(?=@)|\bhf_[a-z0-9]{16,}",
    re.IGNORECASE,
)
_SECRET_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "APOLLO_UI_AUTH")
_SHORTEST_SECRET = 6
_secrets: set[str] = set()


def clean_terminal(text: str) -> str:
    """Text with every character escaped that a terminal would act on; lines and tabs stay."""
    return text.replace("\r\n", "\n").translate(_ESCAPES)


def clean_markdown(text: str) -> str:
    """Text that Markdown shows as it is."""
    return _LINE_START.sub(r"\1\\\2", _ACTIVE.sub(r"\\\g<0>", text))


def clean_markdown_line(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return clean_markdown(" ".join(text.split()))


def clean_cell(text: str) -> str:
    """Text that a spreadsheet does not take for a formula."""
    is_formula = text.startswith(("=", "+", "-", "@", "\t", "\r")) and text != "-"
    return f"'{text}" if is_formula else text


def keep_secret(secret: str) -> None:
    """Blank a token in all text for users from now on."""
    if len(secret) >= _SHORTEST_SECRET:
        _secrets.add(secret)


def hide_secrets(text: str) -> str:
    """Text without tokens and passwords: those that are known, and what looks like one."""
    said = {os.environ.get(name, "").strip() for name in _SECRET_VARIABLES}
    values = said | {value.partition(":")[2] for value in said} | _secrets
    for value in sorted(values, key=len, reverse=True):
        if len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, "***")
    return _SECRETS.sub(lambda found: f"{found['kept'] or found['before'] or ''}***", text)


class CleanStream:
    """A text stream for people: what is written to it reaches a terminal harmless.

    Attributes:
        plain: the stream below, for who writes control codes of its own, as progress bars do.
        is_told: whether messages are written, which are searched for secrets too.
    """

    # Who looks for the bytes below, as click does for an encoding it dislikes, finds none.
    buffer = None

    def __init__(self, plain: TextIO, is_told: bool) -> None:
        self.plain, self.is_told = plain, is_told

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def write(self, text: str) -> int:
        """Write text, escaped."""
        self.plain.write(clean_terminal(hide_secrets(text) if self.is_told else text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write several."""
        for line in lines:
            self.write(line)


def plain_stream(stream: TextIO) -> TextIO:
    """The stream below those that clean."""
    while isinstance(stream, CleanStream):
        stream = stream.plain
    return stream


@contextmanager
def clean_streams() -> Iterator[None]:
    """Clean what is written on stderr, and on stdout where that is a terminal.

    Data on a pipe or in a file stays as it is.
    """
    before = sys.stdout, sys.stderr
    if sys.stdout.isatty():
        sys.stdout = cast(TextIO, CleanStream(sys.stdout, is_told=False))
    sys.stderr = cast(TextIO, CleanStream(sys.stderr, is_told=True))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
