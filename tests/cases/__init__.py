"""Small videos of the kinds that users bring, with the facts that are known about each."""

from __future__ import annotations

import json
from pathlib import Path

FOLDER = Path(__file__).parent
CASES: list[dict] = json.loads((FOLDER / "cases.json").read_text(encoding="utf-8"))["cases"]
