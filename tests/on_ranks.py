"""Processes of one group on this machine: `run` starts them and gives back what each returned."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def free_port() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])


def environment(rank: int, port: str, world: int) -> dict[str, str]:
    """What torchrun sets."""
    return {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RANK": str(rank),
        "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip


def start(command: list[str], folder: Path, *, world: int = 2) -> list[subprocess.Popen[str]]:
    """One process a rank."""
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, *command], cwd=folder, env=environment(rank, port, world),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip


def finished(processes: list[subprocess.Popen[str]], timeout: float = 300) -> list[str]:
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
    processes = start(["-m", "tests.on_ranks", function, str(folder)], ROOT, world=world)
    said = finished(processes)
    files = [folder / f"returned.{rank}.json" for rank in range(world)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files], said


def main(function: str, folder: Path) -> None:
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    module, _, name = function.partition(":")
    dist.init_process_group("gloo")
    result = getattr(importlib.import_module(module), name)(rank, folder)
    (folder / f"returned.{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
