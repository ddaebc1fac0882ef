"""The data of an event: Gradio takes the files that it names for granted, so they are checked."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import unquote

from apollo_cli.errors import ApolloError
from apollo_cli.ui.files import AllowedFolders


def names_only_uploads(raw: bytes, files: AllowedFolders) -> bool:
    """Whether each file that the data of an event names, at any depth, is an upload.

    Args:
        raw: JSON; nothing at all is fine.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        left = [json.loads(raw)] if raw else []
    except RecursionError:
        raise ValueError("nested too deep") from None
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += value.values()
            if not value.keys().isdisjoint(("path", "url", "meta")) and not _is_upload(
                value, files
            ):
                return False
        elif isinstance(value, list):
            left += value
    return True


def _is_upload(value: dict[str, Any], files: AllowedFolders) -> bool:
    path, url = value.get("path"), value.get("url")
    if not isinstance(path, str) or value.get("is_stream"):
        return False
    try:
        files.resolve_upload(path)
    except ApolloError:
        return False
    # Gradio's page sends along the address at which it shows the file.
    return url is None or unquote(str(url)).endswith(f"/gradio_api/file={path}")
