"""``python -m apollo_cli`` is the command ``apollo``."""

from __future__ import annotations

import sys

from apollo_cli.cli import main

if __name__ == "__main__":
    sys.exit(main())
