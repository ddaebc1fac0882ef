"""What a training run leaves: a folder that is put on the model it was trained from."""

from __future__ import annotations

MANIFEST = "apollo_adapter.json"
