"""Which pages are still there: each says so now and then, and once more when it is closed.

It does so in short requests. A browser keeps six lines to a server, for all of its tabs together,
and each page holds one for its events already; a second one would leave room for three tabs only.
"""

from __future__ import annotations

import secrets

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from apollo_cli.ui.desk import Desk

# What a page says of itself, and after how many seconds of silence it counts as closed: a browser
# lets the clock of a hidden page tick once a minute.
_PATIENCE = {"shown": 12.0, "hidden": 150.0, "gone": 0.0}


class Presence:
    """The route that pages report to.

    Args:
        desk: is told which visits are looked at.
    """

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        # A page that was drawn by another run of the server knows another name.
        self.server = secrets.token_hex(8)

    def routes(self) -> list[Route]:
        """``/presence?page=&state=``, for POST; ``state`` is shown, hidden or gone."""
        return [Route("/presence", self._hear, methods=["POST"])]

    async def _hear(self, request: Request) -> Response:
        page, state = (request.query_params.get(name, "") for name in ("page", "state"))
        is_known = self.desk.hear(page, _PATIENCE.get(state, _PATIENCE["hidden"]))
        told = {"server": self.server, "known": is_known}
        return JSONResponse(told, headers={"cache-control": "no-store"})
