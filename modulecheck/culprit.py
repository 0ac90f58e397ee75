"""What a drill-down found: plain data, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from opcheck.records import Metrics

__all__ = ["NOT_REPRODUCED", "Culprit"]

NOT_REPRODUCED = "not reproduced"


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """Where an error is born, as deep as it could be followed."""

    module: str
    """FQN inside the model, the failing module's own name in front; "" is the root."""
    phase: str
    """"forward" or "backward"."""
    stage: str
    """"eager" (the program itself), "aot_eager" (Dynamo or functionalization),
    "decomposition", "inductor", the name of the user's backend, or "not reproduced"."""
    kernel: str = ""
    """Name of the generated or library kernel, "" where none was reached."""
    op: str = ""
    """Full overload name, `aten.erf.default`."""
    node: str = ""
    """Name of the node in the compiler's graph."""
    source: str = ""
    """The user's line, `model.py:41 in forward: <code>`."""
    metrics: Metrics = field(default_factory=Metrics)
    """Of the first tensor that is wrong at that place, by the module-level rule."""
    repro: str = ""
    """Path of a saved call that shows it, "" where none was saved."""
    explanation: str = ""
    """One sentence."""
    advice: tuple[str, ...] = ()
    """What was tried and changes the result."""
    reproduced: bool = True
    """False: the call run again did not show the fault. That is no clean bill."""
    not_reached: str = ""
    """What the budget, or the generated code, kept from being looked at."""
    other_ops: tuple[str, ...] = ()
    """The other ops of a fused kernel, in its order."""
    also_in: tuple[str, ...] = ()
    """Where else the same op goes wrong: `module (kernel)`."""
    tensor: str = ""
    """Argument, buffer or output that ended wrong, where the fault is a lost or reordered write."""
