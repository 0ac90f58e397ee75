"""The options of `opcheck.check`, frozen and validated at birth."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from opcheck.errors import ArgumentError
from opcheck.records import OpRecord
from opcheck.validation import (
    a_count,
    a_flag,
    a_number,
    a_path,
    one_of,
    several_globs,
    wrong_type,
)

__all__ = [
    "CRITERIA",
    "DEFAULT_ATOL",
    "DEFAULT_MAX_CHECKS",
    "DEFAULT_MAX_NUMEL",
    "DEFAULT_RECORDED",
    "DEFAULT_RECORD_BYTES",
    "DEFAULT_REPROS",
    "DEFAULT_REPRO_BYTES",
    "DEFAULT_REPRO_SECONDS",
    "DEFAULT_RTOL",
    "DEFAULT_SHADOW_BYTES",
    "LARGE",
    "Settings",
]

LARGE = ("sample", "skip", "full")
CRITERIA = ("calibrated", "allclose")
DEFAULT_RTOL = 1e-4
DEFAULT_ATOL = 1e-5
DEFAULT_MAX_CHECKS = 10
DEFAULT_MAX_NUMEL = 1_000_000
DEFAULT_SHADOW_BYTES = 1 << 30
DEFAULT_REPRO_SECONDS = 20.0
DEFAULT_REPROS = 20
DEFAULT_REPRO_BYTES = 1 << 28
DEFAULT_RECORDED = 1000
DEFAULT_RECORD_BYTES = 1 << 30
RECORD = ("failures", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What `opcheck.check` was asked for; made by `from_arguments`, which validates."""

    log_dir: Path = Path("logs")
    rtol: float = DEFAULT_RTOL
    atol: float = DEFAULT_ATOL
    criterion: str = "calibrated"
    max_checks: int | None = DEFAULT_MAX_CHECKS
    log_once: bool = True
    max_numel: int = DEFAULT_MAX_NUMEL
    large: str = "sample"
    max_overhead: float | None = None
    """Seconds of checking for each second of the step's own; None: not bounded."""
    workers: int = 0
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    start_step: int = 0
    num_steps: int | None = None
    on_failure: str | Callable[[OpRecord], None] = "log"
    seed: int = 0
    quiet: bool = False
    blame: bool = False
    repeat: bool = False
    selftest: bool = False
    max_shadow_bytes: int = DEFAULT_SHADOW_BYTES
    repro_dir: Path | None = None
    repro_seconds: float = DEFAULT_REPRO_SECONDS
    max_repros: int = DEFAULT_REPROS
    max_repro_bytes: int = DEFAULT_REPRO_BYTES
    record: str | None = None
    record_dir: Path = Path("records")
    max_recorded: int = DEFAULT_RECORDED
    max_record_bytes: int = DEFAULT_RECORD_BYTES

    @classmethod
    def from_arguments(cls, **given: Any) -> Settings:
        """Validate arguments of `opcheck.check`, under their names; others have their defaults.

        `criterion=None` follows the tolerances; with `blame` and with `max_overhead` every call is
        to be checked unless `max_checks` is another number than its default.

        Raises:
            ArgumentError, ArgumentTypeError: the message names the field, the value and what is
                allowed.
        """
        found = {name: _VALIDATORS[name](name, value) for name, value in given.items()}
        if found.get("criterion") is None:
            found["criterion"] = _criterion_for(**found)
        asks_for_all = found.get("blame") or found.get("max_overhead") is not None
        if asks_for_all and found.get("max_checks", DEFAULT_MAX_CHECKS) == DEFAULT_MAX_CHECKS:
            found["max_checks"] = None
        return cls(**found)

    def as_json(self) -> dict[str, Any]:
        """The settings as the header of a log carries them."""
        found: dict[str, Any] = {}
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            found[name] = (
                list(value)
                if isinstance(value, tuple)
                else value
                if value is None or isinstance(value, (bool, int, float, str))
                else str(value)
            )
        return found


def _share(field: str, value: object) -> float | None:
    """0.5 of 0.5, "0.5" and "50%"."""
    if value is None:
        return None
    allowed = 'a finite number > 0, a percentage ("50%") or None'
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise wrong_type(field, allowed, value)
    text, percent, rest = str(value).partition("%")
    share = math.nan
    with contextlib.suppress(ValueError):
        share = math.nan if rest.strip() else float(text) / (100 if percent else 1)
    if not (math.isfinite(share) and share > 0):
        hint = "; max_checks=0 counts the calls and checks none" if share == 0 else ""
        raise ArgumentError(f"{field}: expected {allowed}, got {value!r}{hint}")
    return share


def _criterion_for(*, rtol: float = DEFAULT_RTOL, atol: float = DEFAULT_ATOL, **_: object) -> str:
    changed = (rtol, atol) != (DEFAULT_RTOL, DEFAULT_ATOL)
    return "allclose" if changed else "calibrated"


def _on_failure(field: str, value: object) -> Any:
    if callable(value) or value in ("log", "raise"):
        return value
    allowed = "'log', 'raise' or a function"
    if not isinstance(value, str):
        raise wrong_type(field, allowed, value)
    raise ArgumentError(f"{field}: expected {allowed}, got {value!r}")


_maybe_a_count = partial(a_count, optional=True)

_VALIDATORS: Mapping[str, Callable[[str, object], Any]] = MappingProxyType(
    {
        "log_dir": a_path,
        "rtol": a_number,
        "atol": a_number,
        "criterion": partial(one_of, allowed=CRITERIA, optional=True),
        "max_checks": _maybe_a_count,
        "max_overhead": _share,
        "log_once": a_flag,
        "max_numel": a_count,
        "large": partial(one_of, allowed=LARGE),
        "workers": a_count,
        "include": several_globs,
        "exclude": several_globs,
        "modules": several_globs,
        "start_step": a_count,
        "num_steps": _maybe_a_count,
        "on_failure": _on_failure,
        "seed": a_count,
        "quiet": a_flag,
        "blame": a_flag,
        "repeat": a_flag,
        "selftest": a_flag,
        "max_shadow_bytes": a_count,
        "repro_dir": partial(a_path, optional=True),
        "repro_seconds": a_number,
        "max_repros": a_count,
        "max_repro_bytes": a_count,
        "record": partial(one_of, allowed=RECORD, optional=True),
        "record_dir": a_path,
        "max_recorded": a_count,
        "max_record_bytes": a_count,
    }
)
