"""What every test needs: a home of its own, and no network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records and memories of tests never mix with those of the user who runs them."""
    home = tmp_path_factory.mktemp("home")
    os.environ["APOLLO_HOME"] = str(home)
    os.environ["HF_HUB_OFFLINE"] = "1"
    return home
