"""A second device on a machine without one: built from C++ at test time, kept in a cache folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
import types
from pathlib import Path

SOURCE = Path(__file__).parent / "device.cpp"
NAME = "second"
CACHE = "OPCHECK_TEST_CACHE"
"""Environment variable: where built extensions are kept; a folder of the temporary one else."""


def cache_folder(name: str) -> Path:
    """A folder that outlives the test run, for what takes long to make."""
    import torch

    base = os.environ.get(CACHE)
    root = Path(base) if base else Path(tempfile.gettempdir()) / f"opcheck-tests-{_user()}"
    python = f"{sys.version_info.major}{sys.version_info.minor}"
    return root / f"{name}-torch{torch.__version__}-py{python}"


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else "user"


def why_not() -> str:
    """Why the device cannot be built here, or ""."""
    from torch.utils.cpp_extension import get_cxx_compiler, is_ninja_available

    if shutil.which(get_cxx_compiler()) is None:
        return f"no C++ compiler ({get_cxx_compiler()}) to build the second device with"
    if not is_ninja_available():
        return "no ninja to build the second device with"
    return ""


def build() -> Path:
    """Build the extension unless the cache has it (about 40 s); the path of the library."""
    from torch.utils.cpp_extension import load

    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    folder = cache_folder("second-device") / digest
    library = folder / "second_device.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # a build that is killed leaves a lock behind, so that each has a folder of its own
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            load(
                "second_device", [str(SOURCE)], build_directory=scratch, extra_cflags=["-O0"],
                is_python_module=False,
            )  # fmt: skip
            (Path(scratch) / library.name).replace(library)
    return library


def activate() -> str:
    """Load the device into this process, which it cannot leave again; the name of its type."""
    import torch

    torch.ops.load_library(build())
    torch.utils.rename_privateuse1_backend(NAME)
    module = types.ModuleType(f"torch.{NAME}")
    module.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        current_stream=lambda *_: None,
        synchronize=lambda device=None: None,
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        _is_in_bad_fork=lambda: False,
        _lazy_init=lambda: None,
    )
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return NAME
