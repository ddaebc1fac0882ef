"""The same batch on a Ray cluster: Ray Data hands out the videos, one model to a worker."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from typing import Any

from apollo_cli.commands.asking import Request
from apollo_cli.commands.batch import run_batch
from apollo_cli.commands.output import silent
from apollo_cli.errors import UsageError


class Worker:
    """One model in one process of the cluster; answers the questions of one video at a time."""

    def __init__(self, model: dict[str, Any], request: Request, use_cache: bool) -> None:
        from apollo_cli.engine import load

        self.apollo = load(**model, use_cache=use_cache)
        self.request = request

    def __call__(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """The rows of one video; a failure is a row with ``error``."""
        done = {(row["video"], question) for question in row["done"]}
        found = run_batch(self.apollo, [row["video"]], self.request, done, silent)
        # As text: Ray would give all rows the same fields, and fill in what a row does not have.
        return [{"row": json.dumps(answered)} for answered in found]


def run_on_ray(
    videos: list[str],
    request: Request,
    done: set[tuple[str, str]],
    *,
    model: dict[str, Any],
    use_cache: bool,
    workers: int,
) -> Iterator[dict[str, Any]]:
    """Answer each question about each video on the cluster that Ray finds, or on this machine.

    Args:
        done: pairs of video and question to leave out.
        model: arguments of ``engine.load``. workers: models that run at the same time.

    Raises:
        UsageError: Ray is not installed.
    """
    # Nothing leaves the machine that the user did not ask for.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray  # pyright: ignore[reportMissingImports]
        import ray.data  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UsageError(
            "--ray: Ray is not installed", next_step="pip install 'apollo-video-cli[ray]'"
        ) from error
    import torch

    quiet = logging.ERROR
    ray.init(
        ignore_reinit_error=True, log_to_driver=False, include_dashboard=False, logging_level=quiet
    )
    logging.getLogger("ray.data").setLevel(quiet)
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = [{"video": v, "done": [q for name, q in done if name == v]} for v in videos]
    left = [row for row in rows if len(row["done"]) < len(request.questions)]
    if not left:
        return
    answers = ray.data.from_items(left, override_num_blocks=len(left)).flat_map(
        Worker,
        fn_constructor_args=(model, request, use_cache),
        concurrency=workers,
        num_gpus=1 if torch.cuda.is_available() else 0,
    )
    for row in answers.iter_rows():
        yield json.loads(row["row"])
