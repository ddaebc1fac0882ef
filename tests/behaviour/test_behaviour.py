"""Today's behaviour equals what was recorded; a wanted change is recorded in the same commit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.behaviour.record import RECORDED, RECORDERS


def differences(found: dict[str, Any], recorded: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = {**recorded, **found}
    missing = "nothing"
    pairs = {name: (found.get(name, missing), recorded.get(name, missing)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


# Another processor may round the last bits of a tie between two words differently.
ALLOWED = {"answers": 1}


@pytest.mark.parametrize("name", RECORDERS)
def test_behaviour_equals_what_was_recorded(name: str):
    recorded = json.loads((RECORDED / f"{name}.json").read_text())
    found = json.loads(json.dumps(RECORDERS[name]()))
    changed = differences(found, recorded)
    assert len(changed) <= ALLOWED.get(name, 0), json.dumps(changed, indent=1)[:4000]
