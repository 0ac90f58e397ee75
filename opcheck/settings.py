"""The options of `opcheck.check`, frozen and validated at birth."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opcheck.errors import ArgumentError, ArgumentTypeError
from opcheck.records import OpRecord

__all__ = [
    "CRITERIA",
    "DEFAULT_ATOL",
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
DEFAULT_SHADOW_BYTES = 1 << 30
DEFAULT_REPRO_SECONDS = 20.0
DEFAULT_REPROS = 20
DEFAULT_REPRO_BYTES = 1 << 28
DEFAULT_RECORDED = 1000
DEFAULT_RECORD_BYTES = 1 << 30
RECORD = ("failures", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What `opcheck.check` was asked for.

    Raises:
        ArgumentError, ArgumentTypeError: the message names the field, the value and what is
            allowed.
    """

    log_dir: Path = Path("logs")
    rtol: float = DEFAULT_RTOL
    atol: float = DEFAULT_ATOL
    criterion: str = "calibrated"
    max_checks: int | None = 10
    log_once: bool = True
    max_numel: int = 1_000_000
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
        """Validate the arguments of `opcheck.check`.

        `criterion=None` follows the tolerances; with `blame` and with `max_overhead` every call is
        to be checked unless `max_checks` is another number than its default.
        """
        rtol = _number("rtol", given["rtol"])
        atol = _number("atol", given["atol"])
        blame = _flag("blame", given.get("blame", False))
        max_checks = _count("max_checks", given["max_checks"], optional=True)
        max_overhead = _share("max_overhead", given.get("max_overhead"))
        if (blame or max_overhead is not None) and max_checks == DEFAULT_MAX_CHECKS:
            max_checks = None
        return cls(
            log_dir=_path("log_dir", given["log_dir"]),
            rtol=rtol,
            atol=atol,
            criterion=_criterion(given["criterion"], rtol, atol),
            max_checks=max_checks,
            log_once=_flag("log_once", given["log_once"]),
            max_numel=_count("max_numel", given["max_numel"]),
            large=_one_of("large", given["large"], LARGE),
            max_overhead=max_overhead,
            workers=_count("workers", given.get("workers", 0)),
            include=_globs("include", given["include"]),
            exclude=_globs("exclude", given["exclude"]),
            modules=_globs("modules", given["modules"]),
            start_step=_count("start_step", given["start_step"]),
            num_steps=_count("num_steps", given["num_steps"], optional=True),
            on_failure=_on_failure(given["on_failure"]),
            seed=_count("seed", given["seed"]),
            quiet=_flag("quiet", given["quiet"]),
            blame=blame,
            repeat=_flag("repeat", given.get("repeat", False)),
            selftest=_flag("selftest", given.get("selftest", False)),
            max_shadow_bytes=_count(
                "max_shadow_bytes", given.get("max_shadow_bytes", DEFAULT_SHADOW_BYTES)
            ),
            **_saving(given),
        )

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


def _saving(given: dict[str, Any]) -> dict[str, Any]:
    """What is kept of calls beyond their records."""
    folder = given.get("repro_dir")
    return {
        "repro_dir": None if folder is None else _path("repro_dir", folder),
        "repro_seconds": _number(
            "repro_seconds", given.get("repro_seconds", DEFAULT_REPRO_SECONDS)
        ),
        "max_repros": _count("max_repros", given.get("max_repros", DEFAULT_REPROS)),
        "max_repro_bytes": _count(
            "max_repro_bytes", given.get("max_repro_bytes", DEFAULT_REPRO_BYTES)
        ),
        "record": _record(given.get("record")),
        "record_dir": _path("record_dir", given.get("record_dir", "records")),
        "max_recorded": _count("max_recorded", given.get("max_recorded", DEFAULT_RECORDED)),
        "max_record_bytes": _count(
            "max_record_bytes", given.get("max_record_bytes", DEFAULT_RECORD_BYTES)
        ),
    }


def _record(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ArgumentTypeError(
            f"record: expected one of {RECORD} or None, got {value!r} ({_kind(value)})"
        )
    if value is not None and value not in RECORD:
        raise ArgumentError(f"record: expected one of {RECORD} or None, got {value!r}")
    return value


def _number(field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentTypeError(f"{field}: expected a number >= 0, got {value!r} ({_kind(value)})")
    if not (math.isfinite(value) and value >= 0):
        raise ArgumentError(f"{field}: expected a finite number >= 0, got {value!r}")
    return float(value)


def _share(field: str, value: object) -> float | None:
    """0.5 of 0.5, "0.5" and "50%"."""
    if value is None:
        return None
    allowed = 'a finite number > 0, a percentage ("50%") or None'
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ArgumentTypeError(f"{field}: expected {allowed}, got {value!r} ({_kind(value)})")
    text, percent, rest = str(value).partition("%")
    share = math.nan
    with contextlib.suppress(ValueError):
        share = math.nan if rest.strip() else float(text) / (100 if percent else 1)
    if not (math.isfinite(share) and share > 0):
        hint = "; max_checks=0 counts the calls and checks none" if share == 0 else ""
        raise ArgumentError(f"{field}: expected {allowed}, got {value!r}{hint}")
    return share


def _count(field: str, value: object, *, optional: bool = False) -> Any:
    if value is None and optional:
        return None
    allowed = "an int >= 0" + (" or None" if optional else "")
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{field}: expected {allowed}, got {value!r} ({_kind(value)})")
    if value < 0:
        raise ArgumentError(f"{field}: expected {allowed}, got {value!r}")
    return value


def _flag(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{field}: expected True or False, got {value!r} ({_kind(value)})")
    return value


def _globs(field: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Iterable):
        raise ArgumentTypeError(
            f"{field}: expected globs (strings), got {value!r} ({_kind(value)})"
        )
    found = tuple(value)
    for item in found:
        if not isinstance(item, str):
            raise ArgumentTypeError(
                f"{field}: expected globs (strings), got {item!r} ({_kind(item)})"
            )
    return found


def _path(field: str, value: object) -> Path:
    if not isinstance(value, (str, os.PathLike)):
        raise ArgumentTypeError(f"{field}: expected a path, got {value!r} ({_kind(value)})")
    return Path(value)


def _criterion(value: object, rtol: float, atol: float) -> str:
    if value is None:
        changed = (rtol, atol) != (DEFAULT_RTOL, DEFAULT_ATOL)
        return "allclose" if changed else "calibrated"
    if not isinstance(value, str):
        raise ArgumentTypeError(
            f"criterion: expected one of {CRITERIA} or None, got {value!r} ({_kind(value)})"
        )
    if value not in CRITERIA:
        raise ArgumentError(f"criterion: expected one of {CRITERIA} or None, got {value!r}")
    return value


def _one_of(field: str, value: object, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str):
        raise ArgumentTypeError(
            f"{field}: expected one of {allowed}, got {value!r} ({_kind(value)})"
        )
    if value not in allowed:
        raise ArgumentError(f"{field}: expected one of {allowed}, got {value!r}")
    return value


def _on_failure(value: object) -> Any:
    if callable(value) or value in ("log", "raise"):
        return value
    kind = ArgumentError if isinstance(value, str) else ArgumentTypeError
    raise kind(f"on_failure: expected 'log', 'raise' or a callable, got {value!r}")


def _kind(value: object) -> str:
    return type(value).__name__
