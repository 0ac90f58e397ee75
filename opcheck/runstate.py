"""The state of the process and thread that a call's numbers may depend on, and how to set it."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from opcheck.version import __version__

__all__ = ["RunState", "factor_precision", "machine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Everything but the arguments; `now` reads it in the thread of the call."""

    num_threads: int = 1
    seed: int = 0
    grad_enabled: bool = False
    inference: bool = False
    autocast: tuple[tuple[str, str], ...] = ()
    """(device type, dtype) where it is on."""
    default_dtype: str = "float32"
    matmul_precision: str = "highest"
    deterministic: bool = False
    mkldnn: bool = True
    cuda_tf32: bool = False
    cudnn: bool = True
    cudnn_benchmark: bool = False
    cudnn_deterministic: bool = False
    cudnn_tf32: bool = True

    @classmethod
    def now(cls) -> RunState:
        """As it is; nothing is changed or drawn."""
        return cls(
            num_threads=torch.get_num_threads(),
            seed=torch.initial_seed(),
            grad_enabled=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(_autocast()),
            default_dtype=str(torch.get_default_dtype()).removeprefix("torch."),
            matmul_precision=_matmul_precision(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            mkldnn=bool(torch.backends.mkldnn.enabled),
            cuda_tf32=factor_precision("cuda", "matmul") == "tf32",
            cudnn=bool(torch.backends.cudnn.enabled),
            cudnn_benchmark=bool(torch.backends.cudnn.benchmark),
            cudnn_deterministic=bool(torch.backends.cudnn.deterministic),
            cudnn_tf32=factor_precision("cuda", "conv") == "tf32",
        )

    def as_json(self) -> dict[str, Any]:
        """The fields under their names."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> RunState:
        """Of what `as_json` gave; unknown fields are left out."""
        known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        if "autocast" in known:
            known["autocast"] = tuple(tuple(item) for item in known["autocast"])
        return cls(**known)

    # ---- as Python ----

    def settings(self) -> list[str]:
        """Statements that set it; what every process starts with is left out."""
        usual = RunState()
        lines = [
            f"torch.set_num_threads({self.num_threads})",
            f"torch.manual_seed({self.seed})",
        ]
        if self.default_dtype != usual.default_dtype:
            lines.append(f"torch.set_default_dtype(torch.{self.default_dtype})")
        if self.matmul_precision != usual.matmul_precision:
            lines.append(f"torch.set_float32_matmul_precision({self.matmul_precision!r})")
        if self.deterministic:
            lines.append("torch.use_deterministic_algorithms(True, warn_only=True)")
        for name, target in _FLAGS.items():
            if getattr(self, name) != getattr(usual, name):
                lines.append(f"torch.backends.{target} = {getattr(self, name)}")
        return lines

    def contexts(self) -> list[str]:
        """Context managers that the call ran in."""
        found = ["torch.inference_mode()"] if self.inference else []
        if not self.inference:
            found.append(f"torch.set_grad_enabled({self.grad_enabled})")
        found += [
            f"torch.autocast({device!r}, dtype=torch.{dtype})" for device, dtype in self.autocast
        ]
        return found


def _matmul_precision() -> str:
    """Of all backends; the usual one where each has its own, which torch refuses to sum up."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "highest"


def factor_precision(device: str, kind: str) -> str:
    """What the settings allow float32 factors of products to be rounded to.

    Not asked of `allow_tf32`: reading it raises once somebody has set `fp32_precision`.

    Args:
        device: "cuda", "cpu"; no other has such a setting.
        kind: "matmul", "conv" or "rnn".

    Returns:
        "tf32", "bf16" or "ieee".
    """
    backends: Any = torch.backends  # these attributes are made when they are asked for
    owners = {
        "cuda": {"matmul": backends.cuda.matmul, "conv": backends.cudnn.conv,
                 "rnn": backends.cudnn.rnn},
        "cpu": {"matmul": backends.mkldnn.matmul, "conv": backends.mkldnn.conv,
                "rnn": backends.mkldnn.rnn},
    }  # fmt: skip
    owner = owners.get(device, {}).get(kind)
    found = "ieee" if owner is None else str(owner.fp32_precision)
    return found if found in ("tf32", "bf16") else "ieee"


_FLAGS = {
    "mkldnn": "mkldnn.enabled",
    "cuda_tf32": "cuda.matmul.allow_tf32",
    "cudnn": "cudnn.enabled",
    "cudnn_benchmark": "cudnn.benchmark",
    "cudnn_deterministic": "cudnn.deterministic",
    "cudnn_tf32": "cudnn.allow_tf32",
}


def _autocast() -> Iterator[tuple[str, str]]:
    accelerator = _accelerator()
    for device in dict.fromkeys(("cpu", accelerator.type if accelerator else "cpu")):
        if torch.is_autocast_enabled(device):
            yield device, str(torch.get_autocast_dtype(device)).removeprefix("torch.")


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def machine() -> str:
    """Versions and machine, as one line."""
    accelerator, name = _accelerator(), ""
    if accelerator is not None:
        ask = getattr(torch.get_device_module(accelerator), "get_device_name", None)
        name = f", {ask() if ask is not None else accelerator.type}"
    return (
        f"torch {torch.__version__}, Python {platform.python_version()},"
        f" {platform.system()} {platform.machine()}{name}; opcheck {__version__}"
    )
