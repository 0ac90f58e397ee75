"""Did the checker change the step? The step run under an empty dispatch mode and under the checker.

The empty mode is the yardstick because ATen takes another formula in a few places as soon as any
mode is active.
"""

from __future__ import annotations

import copy
import hashlib
import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from opcheck import _torch
from opcheck.golden import Contents, contents_kept
from opcheck.modes import PassingMode, active_modes
from opcheck.validation import a_function, an_instance, several

__all__ = ["Certificate", "Surroundings", "certify"]


@dataclass(frozen=True, slots=True)
class Certificate:
    """What the checker left as it was; `str()` is for a person.

    Attributes:
        runs: 1: the surroundings before and after the context were compared; 2: the step ran with
            and without the checker from the same state; 3: once more without, to see whether it
            repeats itself.
        unchanged: what was compared and found equal bit for bit.
        differences: what was not, a line each; empty when the checker changed nothing.
        unrepeatable: what differs between two runs without the checker, too: says nothing.
    """

    runs: int
    unchanged: tuple[str, ...]
    differences: tuple[str, ...] = ()
    unrepeatable: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Something was compared, and nothing differs."""
        return bool(self.unchanged) and not self.differences and not self.unrepeatable

    def __str__(self) -> str:
        how = "before and after" if self.runs == 1 else "step with and without the checker"
        lines = [f"certificate ({how}): {'unchanged' if self.holds else 'NOT proven'}"]
        lines += [f"  equal: {item}" for item in self.unchanged]
        lines += [f"  DIFFERS: {item}" for item in self.differences]
        lines += [f"  does not repeat itself without the checker: {x}" for x in self.unrepeatable]
        return "\n".join(lines)


# ---- one run: what surrounds the step -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Mode:
    """Equal for the same mode alone, also when it has died and another has its address."""

    itself: weakref.ref[Any]
    name: str

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Modes, hooks and settings of the process and thread."""

    facts: dict[str, Any]
    modules: list[tuple[str, bool, tuple[int, ...]]]
    """Name, training, number of hooks of each kind; taken at every step, so nothing is spelled."""

    @classmethod
    def now(cls, model: nn.Module | None) -> Surroundings:
        """As they are; nothing is changed."""
        facts: dict[str, Any] = {
            "dispatch modes": [
                _Mode(weakref.ref(mode), type(mode).__name__) for mode in active_modes()
            ],
            "global hooks": _torch.global_hook_counts(),
            "grad mode": torch.is_grad_enabled(),
            "inference mode": torch.is_inference_mode_enabled(),
            "threads": torch.get_num_threads(),
            "default dtype": torch.get_default_dtype(),
            "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
            "autocast": torch.is_autocast_enabled("cpu"),
        }
        return cls(facts, [] if model is None else _modules_of(model))

    def beside(self, later: Surroundings) -> Certificate:
        """What is as it was."""
        before, after = self.spelled(), later.spelled()
        names = before.keys() | after.keys()
        changed = sorted(n for n in names if before.get(n) != after.get(n))
        lines = tuple(
            f"{name}: {before.get(name)} became {after.get(name)} (by the step itself or"
            " by the checker; Session.certify tells)"
            for name in changed
        )
        return Certificate(1, tuple(_grouped(names - set(changed))), lines)

    def spelled(self) -> dict[str, Any]:
        """Everything, each with its name."""
        facts = dict(self.facts)
        for name, training, counts in self.modules:
            facts[f"train/eval mode of {name or '<root>'}"] = training
            facts[f"hooks of {name or '<root>'}"] = dict(
                zip(_torch.HOOK_KINDS, counts, strict=True)
            )
        return facts


def _modules_of(model: nn.Module) -> list[tuple[str, bool, tuple[int, ...]]]:
    return [
        (name, module.training, _torch.hook_counts_of(module))
        for name, module in model.named_modules()
    ]


def _grouped(names: Iterable[str]) -> Iterator[str]:
    """One line for a kind of thing, however many modules or tensors there are of it."""
    counts: dict[str, int] = {}
    for name in sorted(names):
        kind = name.rsplit(" of ", 1)[0]
        counts[kind] = counts.get(kind, 0) + 1
    for kind, count in counts.items():
        yield kind if count == 1 else f"{kind} ({count})"


# ---- two runs: what the step leaves behind ------------------------------------------------------


@dataclass(slots=True)
class _Kept:
    """The state before the step, to start from again."""

    model: nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    tensors: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    gradients: list[tuple[Tensor, Tensor | None, Tensor | None]] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)
    modules: list[tuple[nn.Module, bool, dict[str, Any]]] = field(default_factory=list)
    generators: Any = None

    def __post_init__(self) -> None:
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            self.tensors.append((tensor, tensor.detach().clone()))
        for parameter in self.model.parameters():
            grad = parameter.grad
            self.gradients.append((parameter, grad, None if grad is None else grad.clone()))
        for module in self.model.modules():
            hooks = {kind: dict(table) for kind, table in _torch.hook_tables_of(module).items()}
            self.modules.append((module, module.training, hooks))
        self.states = [copy.deepcopy(item.state_dict()) for item in self.optimizers]
        self.generators = _generators()

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, value in self.tensors:
                tensor.copy_(value)
            for parameter, grad, former in self.gradients:
                parameter.grad = grad
                if grad is not None and former is not None:
                    grad.copy_(former)
        for module, training, hooks in self.modules:
            module.training = training
            for kind, table in _torch.hook_tables_of(module).items():
                table.clear()
                table.update(hooks[kind])
        for optimizer, state in zip(self.optimizers, self.states, strict=True):
            optimizer.load_state_dict(copy.deepcopy(state))
        torch.set_rng_state(self.generators[0])
        if self.generators[1]:
            torch.cuda.set_rng_state_all(self.generators[1])
        random.setstate(self.generators[2])
        np.random.set_state(self.generators[3])  # noqa: NPY002 - the global one is the step's


def _generators() -> tuple[Tensor, list[Tensor], Any, Any]:
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return (
        torch.get_rng_state(),
        torch.cuda.get_rng_state_all() if cuda else [],
        random.getstate(),
        np.random.get_state(),  # noqa: NPY002
    )


def certify(
    step: Callable[[], Any],
    model: nn.Module,
    checked: Callable[[], AbstractContextManager[Any]],
    *,
    optimizers: Iterable[torch.optim.Optimizer] = (),
) -> Certificate:
    """Run `step()` without and with the checker from the same state, and compare bit for bit.

    Afterwards everything is as if the step had run once, checked. Parameters, buffers, gradients,
    attributes of the modules, optimizers and generators are put back between the runs; what else
    the step writes to (a data iterator, a file) sees it twice.

    Args:
        step: the step; its result is compared as well.
        model: whose parameters, buffers, gradients and modules are compared.
        checked: makes the context of the checked run.
        optimizers: that the step uses.

    Raises:
        ArgumentTypeError: the step is no function, or an optimizer is none.
        Whatever `step` raises; the state is then as before.
    """
    a_function("step", step)
    allowed = "a list of torch.optim.Optimizer"
    given = [
        an_instance("optimizers", item, torch.optim.Optimizer, allowed)
        for item in several("optimizers", optimizers, allowed)
    ]
    kept = _Kept(model, tuple(given))
    attributes = Contents(vars(item) for item in model.modules())
    try:
        return _certified(_Runs(step, kept), checked)
    except BaseException:
        attributes.put_back()
        kept.restore()
        raise


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs the step, and tells what it left behind."""

    step: Callable[[], Any]
    kept: _Kept

    def plain(self) -> dict[str, Any]:
        """Without the checker; what modules hold is put back."""
        modules = [vars(item) for item in self.kept.model.modules()]
        with contents_kept(modules):
            return self._run(PassingMode())  # type: ignore[no-untyped-call]

    def checked(self, context: AbstractContextManager[Any]) -> dict[str, Any]:
        """With it."""
        return self._run(context)

    def _run(self, context: AbstractContextManager[Any]) -> dict[str, Any]:
        versions = {id(tensor): _torch.version_of(tensor) for tensor, _ in self.kept.tensors}
        surroundings = Surroundings.now(self.kept.model)
        with context:
            out = self.step()
        return _left_behind(self.kept, out, versions, surroundings)


def _certified(runs: _Runs, checked: Callable[[], AbstractContextManager[Any]]) -> Certificate:
    kept = runs.kept
    plain = runs.plain()
    kept.restore()
    actual = runs.checked(checked())
    changed = _changed(plain, actual)
    if not changed:
        return Certificate(2, tuple(_grouped(plain)))
    after = _Kept(kept.model, kept.optimizers)
    kept.restore()
    again = runs.plain()
    after.restore()
    restless = set(_changed(plain, again))
    return Certificate(
        3,
        tuple(_grouped(plain.keys() - set(changed))),
        tuple(name for name in changed if name not in restless),
        tuple(sorted(restless)),
    )


def _left_behind(
    kept: _Kept, out: Any, versions: dict[int, int], before: Surroundings
) -> dict[str, Any]:
    """Everything of a step that a later one could notice, as bytes."""
    found: dict[str, Any] = {}
    for number, leaf in enumerate(_torch.tree_leaves(out)):
        found[f"results of the step of {number}"] = _comparable(leaf)
    named = [("parameter", kept.model.named_parameters()), ("buffer", kept.model.named_buffers())]
    for kind, items in named:
        for name, tensor in items:
            found[f"{kind}s of {name}"] = _bits(tensor)
            found[f"versions of {name}"] = _torch.version_of(tensor) - versions.get(id(tensor), 0)
    for name, parameter in kept.model.named_parameters():
        grad = parameter.grad
        found[f"gradients of {name}"] = None if grad is None else (_bits(grad), grad.stride())
    for number, optimizer in enumerate(kept.optimizers):
        for place, leaf in enumerate(_torch.tree_leaves(optimizer.state_dict()["state"])):
            found[f"optimizer state of {number}.{place}"] = _comparable(leaf)
    cpu, devices, python, numpy = _generators()
    found["random state of torch"] = cpu.numpy().tobytes(), [_bits(item) for item in devices]
    found["random state of Python"] = python
    found["random state of NumPy"] = repr(numpy)
    earlier, later = before.spelled(), Surroundings.now(kept.model).spelled()
    for name in earlier.keys() | later.keys():
        if name == "dispatch modes":
            continue
        found[name] = later.get(name)
    return found


def _comparable(value: Any) -> Any:
    """Equal for equal results, NaN included; of objects that say nothing the type."""
    if isinstance(value, Tensor):
        return _bits(value)
    known = isinstance(value, (bool, int, float, complex, str, bytes, type(None)))
    return repr(value) if known else type(value)


def _bits(tensor: Tensor) -> tuple[Any, ...]:
    plain = tensor.detach().cpu()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    # not contiguous(): it keeps the stride of a dimension of size 1, which view() then refuses
    flat = plain.clone(memory_format=torch.contiguous_format).reshape(-1)
    # not .numpy(): the storage of the user's tensor could never be resized again
    data = np.from_dlpack(flat.view(torch.uint8)).tobytes() if flat.numel() else b""
    return tuple(tensor.shape), tensor.dtype, hashlib.blake2b(data).digest()


def _changed(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    return sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))
