"""Captured graphs as files: one for each graph that is compiled while a step is checked.

Names are `__compiled_fn_N.STAGE_Graph.HASH.py`: N counts the files of a run, HASH is of the
content. The text comes from torch's own structured trace of compilation; nothing is patched.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

from modulecheck.compiled_graphs import compiled_graphs
from modulecheck.distributed import rank_of_several
from opcheck.whole_files import write_atomically

__all__ = ["GraphDump"]


class GraphDump:
    """Writes graphs into a folder while it is on."""

    def __init__(self, folder: Path | None) -> None:
        """Nothing is written yet.

        Args:
            folder: where to, with a folder for each rank where there are several; None: nowhere.
        """
        rank = rank_of_several()
        self._folder = folder if folder is None or rank is None else folder / f"rank{rank}"
        self._num_written = 0
        self._problem = ""

    @contextlib.contextmanager
    def written(self) -> Iterator[None]:
        """Every graph that is compiled inside is written; off again afterwards."""
        folder = self._folder
        if folder is None:
            yield
            return
        self._num_written, self._problem = 0, ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._problem = f"{type(error).__name__}: {error}"
            yield
            return
        with compiled_graphs(self._write):
            yield

    def _write(self, stage: str, text: str) -> None:
        """Write one graph; the user's step goes on whatever happens to the file."""
        if self._folder is None or self._problem:
            return
        data = text.encode("utf-8", "backslashreplace")
        digest = hashlib.sha256(data).hexdigest()[:8]
        name = f"__compiled_fn_{self._num_written}.{stage}_Graph.{digest}.py"
        try:
            write_atomically(self._folder / name, lambda file: file.write(data))
        except OSError as error:
            self._problem = f"{type(error).__name__}: {error}"
            return
        self._num_written += 1

    def notes(self) -> list[str]:
        """How many graphs were written where, or why not."""
        if self._folder is None:
            return []
        if self._problem:
            return [f"graph_dir={str(self._folder)!r} cannot be written: {self._problem}"]
        if not self._num_written:
            return [
                f"no graph was written to {self._folder}: nothing was compiled, or Dynamo had"
                " compiled it before (torch._dynamo.reset() makes it compile again)"
            ]
        return [f"{self._num_written} graphs were written to {self._folder}"]
