"""The op of the eager module that is wrong: the call run again under opcheck."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

import opcheck
from modulecheck.rerun import Rerun
from opcheck.records import OpRecord

__all__ = ["wrong_eager_ops"]


def wrong_eager_ops(rerun: Rerun) -> list[OpRecord]:
    """Every op of the eager forward and backward against float64; those that fail, in order."""
    with tempfile.TemporaryDirectory(prefix="modulecheck-") as folder:
        session = opcheck.check(
            rerun.module, log_dir=folder, quiet=True, max_checks=None, max_numel=1 << 26
        )

        @contextlib.contextmanager
        def checking() -> Iterator[Any]:
            with session:
                yield

        rerun.run(checking=checking)
    return list(session.failures)
