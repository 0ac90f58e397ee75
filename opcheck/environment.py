"""What the header of a log says of the process: rank, versions, settings."""

from __future__ import annotations

import functools
import os
import platform
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opcheck.records import SCHEMA, SCHEMA_VERSION
from opcheck.settings import Settings
from opcheck.version import __version__

__all__ = ["process_rank", "run_header"]


def process_rank() -> tuple[int, int]:
    """(rank, world size) of this process: of the process group, or of the environment."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    try:
        rank = int(os.environ.get("RANK", "0"))
        return rank, max(int(os.environ.get("WORLD_SIZE", "1")), rank + 1)
    except ValueError:
        return 0, 1


def run_header(run_id: str, rank: int, world_size: int, settings: Settings) -> dict[str, Any]:
    """The fields that begin a run in a log."""
    return {
        "schema": SCHEMA,
        "version": SCHEMA_VERSION,
        "run_id": run_id,
        "rank": rank,
        "world_size": world_size,
        "started": datetime.fromtimestamp(time.time(), timezone.utc).isoformat(),
        "environment": _environment(),
        "settings": settings.as_json(),
    }


@functools.cache
def _environment() -> dict[str, Any]:
    has_device = torch.accelerator.is_available()
    accelerator = torch.accelerator.current_accelerator() if has_device else None
    return {
        "opcheck": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "accelerator": str(accelerator or "none"),
        "threads": torch.get_num_threads(),
        "script": Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "",
    }
