"""What every test needs: a home of its own, no network, and no more than its share of the machine.

The tests run in several workers (pytest-xdist), each of which is a process with its own home.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# torch, transformers, a browser's page and one training: what a worker takes at most.
WORKER_BYTES = 3 << 30
MOST_WORKERS = 8

# The networks of the tests are so small that handing work to a second thread costs more than it
# saves. Set before torch is imported; the processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_xdist_auto_num_workers() -> int | None:
    """``-n auto``: a worker a core, as far as the memory reaches; none beside ours on one core."""
    if os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    workers = min(cores, memory // WORKER_BYTES, MOST_WORKERS)
    return workers if workers > 1 else 0


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records and memories of tests never mix with those of the user who runs them."""
    home = tmp_path_factory.mktemp("home")
    os.environ["APOLLO_HOME"] = str(home)
    os.environ["HF_HUB_OFFLINE"] = "1"
    return home
