"""Processes of one group on this machine: `run` starts them and gives back what each returned."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from tests.hanging import HANGS_S

ROOT = Path(__file__).parents[1]


def environment(rank: int, world: int, meeting: Path) -> dict[str, str]:
    """What torchrun sets, but for a port: one that was free when asked for may be taken."""
    return {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RANK": str(rank),
        "WORLD_SIZE": str(world), "MEETING": str(meeting),
    }  # fmt: skip


def start(command: list[str], folder: Path, *, world: int = 2) -> list[subprocess.Popen[str]]:
    """One process a rank; `folder` is where they meet."""
    meeting = folder / f".port.{uuid.uuid4().hex}"
    return [
        subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=environment(rank, world, meeting),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip


def join_group() -> int:
    """Become a rank of the group of all that `start` began; which one."""
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting = Path(os.environ["MEETING"])
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        unfinished = meeting.with_name(f"{meeting.name}.unfinished")
        unfinished.write_text(str(store.port))
        unfinished.rename(meeting)
    else:
        while not meeting.exists():  # who started it kills it
            time.sleep(0.02)
        store = dist.TCPStore("127.0.0.1", int(meeting.read_text()), world, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    return rank


def finished(processes: list[subprocess.Popen[str]], timeout: float = HANGS_S) -> list[str]:
    """What each printed; none is left running."""
    try:
        return [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


def run(function: str, folder: Path, *, world: int = 2) -> tuple[list[Any], list[str]]:
    """Call `tests.module:function(rank, folder)` on every rank.

    Returns:
        What each gave back (None where it has ended otherwise), and what each printed.
    """
    processes = start(["-m", "tests.on_ranks", function, str(folder)], folder, world=world)
    said = finished(processes)
    files = [folder / f"returned.{rank}.json" for rank in range(world)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files], said


def main(function: str, folder: Path) -> None:
    import torch.distributed as dist

    module, _, name = function.partition(":")
    rank = join_group()
    result = getattr(importlib.import_module(module), name)(rank, folder)
    (folder / f"returned.{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
