"""For kernel libraries: a registrar that wraps each kernel with a check against torch's own.

::

    opcheck.enable_precision_check()
    library.enable(registrar=opcheck.PrecisionCheckRegister)

`enable_precision_check` sets what wrapped kernels read and installs no mode. Without it, and
outside of `opcheck.check`, a wrapped kernel is just the kernel.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from loguru import logger

from opcheck import _torch
from opcheck.errors import ArgumentError, ArgumentTypeError
from opcheck.kernel_table import kernels
from opcheck.kernelcheck import CHECKS, KernelCheck, find_op, wrap_kernel
from opcheck.records import Coverage
from opcheck.settings import DEFAULT_ATOL, DEFAULT_MAX_CHECKS, DEFAULT_RTOL, Settings
from opcheck.validation import a_path, a_string, several, several_strings, wrong_type

__all__ = [
    "PrecisionCheckRegister",
    "checked_kernel",
    "coverage",
    "disable_precision_check",
    "enable_precision_check",
]

Kernel = Callable[..., Any]

kernels()  # torch's own kernels, before anybody can register others through this module


def enable_precision_check(
    rtol: float = DEFAULT_RTOL,
    atol: float = DEFAULT_ATOL,
    max_checks: int | None = DEFAULT_MAX_CHECKS,
    log_once: bool = True,  # noqa: FBT001, FBT002 - the documented signature
    path: str | os.PathLike[str] | None = None,
    *,
    criterion: str | None = "allclose",
    large: str = "skip",
) -> None:
    """Check the calls of wrapped kernels from now on; counters start afresh.

    Layout, random and `out=` ops are skipped and counted, and so are calls with a tensor of more
    than a million elements unless `large` says otherwise.

    Args:
        rtol: relative tolerance; at least 1e-2 where an input is float16 or bfloat16.
        atol: absolute tolerance, likewise.
        max_checks: checks of each op; None checks every call, 0 checks nothing and still counts.
        log_once: an op is not checked again after its first logged failure.
        path: text log, `logs/precision.log` by default; the JSON lines lie beside it with the
            suffix `.jsonl`. Of several ranks each has its own, `precision.rankN.log`.
        criterion: "allclose", or "calibrated" as in `opcheck.check`; None is calibrated unless a
            tolerance was changed.
        large: "skip", "sample" or "full", as in `opcheck.check`.

    Raises:
        ArgumentError, ArgumentTypeError: an argument is not allowed; nothing was changed.
        LogWriteError: the log cannot be written.
    """
    file = a_path("path", path, optional=True)
    file = None if file is None else file.expanduser()
    settings = Settings.from_arguments(
        log_dir="logs" if file is None else file.parent, rtol=rtol, atol=atol,
        criterion=criterion, max_checks=max_checks, log_once=log_once, large=large,
    )  # fmt: skip
    CHECKS.enable(KernelCheck(settings, file))


def disable_precision_check() -> None:
    """Stop checking wrapped kernels and close the log; no kernel is run twice any more."""
    CHECKS.disable()


def coverage() -> Coverage:
    """What became of the calls of wrapped kernels since checking was last enabled.

    Calls inside `opcheck.check` are counted by that session.
    """
    return CHECKS.coverage()


def checked_kernel(key: str, fn: Kernel) -> Kernel:
    """`fn` with a check, for libraries that register their kernels themselves.

    Args:
        key: the op that `fn` computes, `add.Tensor`, `aten::mm`.
        fn: takes the arguments of that op.

    Raises:
        ArgumentError, ArgumentTypeError: there is no such op, or `fn` is no function.
    """
    if not callable(fn):
        raise wrong_type("fn", f"a function for {key!r}", fn)
    return wrap_kernel(find_op(key), fn, CHECKS.switch)


class PrecisionCheckRegister:
    """Registers the kernels of a library, each wrapped with a check.

    Args:
        config: `(op key, function)`, each optionally followed by a condition function (registered
            only when it returns true) and by a tuple of further dispatch keys.
        user_include_ops: register these alone; function names or op keys.
        user_exclude_ops: leave these to torch; function names or op keys.
        cpp_patched_ops: these have a C++ kernel already; function names or op keys.
        lib: the `torch.library.Library` that the kernels live in; destroying it takes them off.
        full_config_by_func: function name -> its items of the config, looked up for
            `user_include_ops` before the config itself.
        dispatch_key: the key to register for; that of the present accelerator, else `CPU`.

    Attributes:
        all_ops: names of the registered functions.
        all_keys: their op keys.
        lib: as given.
        reg_key: the dispatch key in force.
        failed: op key -> why it could not be registered; also said in the log.

    Raises:
        ArgumentError: no `lib` was given.
        ArgumentTypeError: an argument has a type that is not allowed.
    """

    def __init__(
        self,
        config: Iterable[tuple[Any, ...]],
        user_include_ops: Iterable[str] | None = None,
        user_exclude_ops: Iterable[str] | None = None,
        cpp_patched_ops: Iterable[str] | None = None,
        lib: Any = None,
        full_config_by_func: Mapping[str, Any] | None = None,
        *,
        dispatch_key: str | None = None,
    ) -> None:
        if lib is None or not hasattr(lib, "impl"):
            raise ArgumentError(
                f"lib: expected a torch.library.Library to register in, got {lib!r};"
                " pass lib=torch.library.Library('aten', 'IMPL')"
            )
        self.lib = lib
        self.device = _present_device()
        self.reg_key = a_string(
            "dispatch_key", dispatch_key, optional=True
        ) or _torch.dispatch_key_of(self.device)
        self.all_ops: list[str] = []
        self.all_keys: list[str] = []
        self.failed: dict[str, str] = {}
        self._unused = list(several_strings("user_exclude_ops", user_exclude_ops or ()))
        self._patched = {*several_strings("cpp_patched_ops", cpp_patched_ops or ())}
        self.config = several("config", config, "a list of (op key, function)")
        if user_include_ops:
            wanted = several_strings("user_include_ops", user_include_ops)
            self.config = self._included(list(wanted), full_config_by_func or {})
        self.for_each()

    def for_each(self) -> None:
        """Register every function of the config that is wanted."""
        for item in self.config:
            try:
                key, fn, condition, extra = _parse(item)
                if self._is_unwanted(key, fn) or not (condition is None or condition()):
                    continue
                self.register_impl(key, fn, extra)
            except Exception as error:  # noqa: BLE001 - one bad kernel must not cost the others
                self._report(item, error)

    def register_impl(self, key: str, fn: Kernel, extra_dispatch_keys: Iterable[str] = ()) -> None:
        """Register `fn`, wrapped, for one op under `reg_key` and the extra dispatch keys.

        Raises:
            ArgumentError, ArgumentTypeError: there is no such op, or `fn` is no function.
            RuntimeError: torch refused it.
        """
        if not callable(fn):
            raise wrong_type("fn", f"a function for {key!r}", fn)
        func = find_op(key, getattr(self.lib, "ns", "aten"))
        checked = wrap_kernel(func, fn, CHECKS.switch)
        with warnings.catch_warnings():
            # torch tells once a process that a kernel was overridden, which is the point here
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered")
            self.lib.impl(key, checked, self.reg_key)
            self.all_ops.append(_name(fn))
            self.all_keys.append(key)
            for dispatch_key in extra_dispatch_keys:
                if dispatch_key != self.reg_key:
                    self.lib.impl(key, checked, dispatch_key)

    # ---- what was registered ----

    def get_all_ops(self) -> list[str]:
        """Names of the registered functions."""
        return self.all_ops

    def get_all_keys(self) -> list[str]:
        """Op keys of the registered functions."""
        return self.all_keys

    def get_unused_ops(self) -> list[str]:
        """What the caller excluded."""
        return self._unused

    def get_current_device(self) -> str:
        """`cuda`, `cpu`, ...: the type of the device that the default key is of."""
        return self.device

    def get_vendor_name(self) -> str:
        """`nvidia`, `amd`, ...; the device type where no vendor is known."""
        if self.device == "cuda" and torch.version.hip is not None:
            return "amd"
        return _VENDORS.get(self.device, self.device)

    # ---- choice ----

    def _included(self, names: list[str], by_function: Mapping[str, Any]) -> list[Any]:
        found: list[Any] = []
        for name in names:
            items = list(by_function.get(name, ())) or [
                item for item in self.config if name in _spellings(*item[:2])
            ]
            if not items:
                self._report((name,), "no kernel of the config has this name")
            found += [item for item in items if item not in found]
        return found

    def _is_unwanted(self, key: str, fn: Kernel) -> bool:
        names = _spellings(key, fn)
        return bool(names & {*self._unused, *self._patched})

    def _report(self, item: Any, error: Exception | str) -> None:
        key = str(item[0]) if isinstance(item, (tuple, list)) and item else str(item)
        self.failed[key] = str(error)
        logger.bind(opcheck="registrar").warning(f"kernel not registered: {key}: {error}")


_VENDORS = {
    "cuda": "nvidia", "npu": "ascend", "musa": "mthreads", "mlu": "cambricon", "xpu": "intel",
    "mps": "apple", "hpu": "intel",
}  # fmt: skip


def _present_device() -> str:
    device = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if device is None else device.type


def _name(fn: Kernel) -> str:
    return str(getattr(fn, "__name__", type(fn).__name__))


def _spellings(key: Any, fn: Kernel) -> set[str]:
    """The names under which a kernel may be included or excluded."""
    return {_name(fn), str(key), str(key).rpartition("::")[2]}


def _parse(item: Any) -> tuple[str, Kernel, Callable[[], Any] | None, tuple[str, ...]]:
    if not isinstance(item, (tuple, list)) or len(item) < 2:
        raise ArgumentTypeError(f"config: expected (op key, function, ...), got {item!r}")
    key, fn, *rest = item
    condition, extra = None, []
    for value in rest:
        if value is None:
            continue
        if callable(value):
            condition = value
        elif isinstance(value, str):
            extra.append(value)
        elif isinstance(value, (tuple, list)):
            extra += value
        else:
            raise ArgumentTypeError(
                f"config: expected a condition function or dispatch keys, got {value!r}"
            )
    return key, fn, condition, tuple(extra)
