"""What tests of registered kernels share: a library for the length of a block, and its log."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import opcheck

DOCUMENTED = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[WARNING\] Op: \S+ \| FAIL"
    r" \| in: \[(\(.*?\):torch\.\w+(, )?)*\] \| out: .*?"
    r" \| max_abs: \d\.\d{6}e[+-]\d\d \| max_rel: \d\.\d{6}e[+-]\d\d"
    r" \| rtol=[\d.e-]+, atol=[\d.e-]+( \| .*)?"
)
"""The log line as it is documented, and then our fields."""


@contextmanager
def registered(
    *config: tuple[Any, ...], namespace: str = "aten", **options: Any
) -> Iterator[opcheck.PrecisionCheckRegister]:
    """Register kernels through the registrar, on the CPU unless told otherwise."""
    library = torch.library.Library(namespace, "IMPL")
    try:
        yield opcheck.PrecisionCheckRegister(config, lib=library, **options)
    finally:
        library._destroy()


@contextmanager
def enabled(**options: Any) -> Iterator[None]:
    """Enable checking of registered kernels for the length of the block."""
    opcheck.enable_precision_check(**options)
    try:
        yield
    finally:
        opcheck.disable_precision_check()


def log_lines(path: Path) -> list[str]:
    """Lines of the text log; each is checked to be as documented."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for line in lines:
        assert DOCUMENTED.fullmatch(line), line
    return lines


def logged_ops(path: Path) -> list[str]:
    """Op of each line of the text log."""
    return [line.partition("Op: ")[2].partition(" | ")[0] for line in log_lines(path)]


def json_lines(path: Path, kind: str = "record") -> list[dict[str, Any]]:
    """The JSON lines of one type beside a text log."""
    lines = path.with_suffix(".jsonl").read_text(encoding="ascii").splitlines()
    return [item for item in map(json.loads, lines) if item["type"] == kind]
