"""Ask questions of long local videos, on one machine.

    import apollo_cli
    apollo = apollo_cli.load("apollo-nano")
    video = apollo.watch("examples/toybox.mp4")
    print(apollo.ask(video, "What colour is the ball?"))

The public names are loaded on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from apollo_cli._version import __version__

if TYPE_CHECKING:
    from apollo_cli.engine import Answer, Apollo, load

__all__ = ["Answer", "Apollo", "__version__", "load"]


def __getattr__(name: str) -> Any:
    if name in ("Answer", "Apollo", "load"):
        from apollo_cli import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
