"""Hooks that register what the modules of a model hold, take and give.

They copy, and change nothing: `forward` is untouched, and they come off. Modules inside of
`nn.TransformerEncoderLayer` are watched by global hooks, because a hook on one of them would switch
its fused path off.
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import module as _module

from modulecheck import _torch
from modulecheck._torch import inside_autograd
from modulecheck.tensor_groups import mismatches, output_tag
from modulecheck.tensor_names import Rename, mapped_names
from modulecheck.tensor_records import NameMismatch, Site
from modulecheck.tensor_values import leaves
from modulecheck.tensors import TensorChecker
from modulecheck.versions import Version
from opcheck.errors import ArgumentError
from opcheck.validation import a_flag, an_instance, several, several_globs, several_strings

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ModelHooks", "RegisteredModels", "module_register_tensor_checker"]

_FUSED = (nn.TransformerEncoderLayer,)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    parameters: bool
    buffers: bool
    inputs: bool
    outputs: bool
    exclude: tuple[str, ...]


def module_register_tensor_checker(
    modules: nn.Module | Sequence[nn.Module],
    checker: TensorChecker,
    *,
    side: str | Sequence[str] | None = None,
    rename: Rename | None = None,
    strict: bool = False,
    exclude: Iterable[str] = (),
    parameters: bool = True,
    buffers: bool = True,
    inputs: bool = True,
    outputs: bool = True,
) -> RegisteredModels:
    """Register all parameters, buffers, inputs and outputs of a model's modules as it runs.

    Parameters and buffers are taken when the first module runs, buffers that a call writes to again
    after it. Calls made inside a backward (recomputation) are left out.

    Args:
        modules: a model, or several, each of which is a side of its own.
        checker: where to register.
        side: name of the side, or one name per model; "model 1", "model 2" otherwise.
        rename: gives modules and parameters the names that the reference has. A dict from names or
            their beginnings (whole parts) to new ones, a list of (pattern, replacement) for
            `re.sub`, or a function. None as the new name: it has no counterpart, leave it out.
        strict: raise if the names are not those of the model registered first.
        exclude: globs over tags that are left out, `checker_*dropout*`; a module whose own tag
            matches is left out as a whole.
        parameters: register them.
        buffers: register them.
        inputs: register them.
        outputs: register them.

    Returns:
        A handle: `remove()` takes the hooks off, and so does leaving it as a context manager.

    Raises:
        ArgumentTypeError: an argument has a type that is not allowed.
        ArgumentError: a model is registered already, a side is taken, two modules get one name, or
            names do not match and `strict` is set.
    """
    models = _models(modules)
    an_instance("checker", checker, TensorChecker, "a TensorChecker")
    a_flag("strict", strict)
    options = _Options(
        parameters=a_flag("parameters", parameters),
        buffers=a_flag("buffers", buffers),
        inputs=a_flag("inputs", inputs),
        outputs=a_flag("outputs", outputs),
        exclude=several_globs("exclude", exclude),
    )
    names = _sides(checker, side, len(models))
    registered = RegisteredModels([])
    try:
        for model, name in zip(models, names, strict=True):
            hooks = ModelHooks(model, checker, name, rename, options)
            registered.models.append(hooks)
            hooks.install(strict=strict)
    except BaseException:
        registered.remove()
        raise
    return registered


def _models(modules: Any) -> list[nn.Module]:
    allowed = "a torch.nn.Module, or a list of them"
    if isinstance(modules, nn.Module):
        return [modules]
    found = several("modules", modules, allowed)
    return [an_instance("modules", model, nn.Module, allowed) for model in found]


def _sides(checker: TensorChecker, side: str | Sequence[str] | None, count: int) -> list[str]:
    if side is None:
        free = (f"model {number}" for number in range(1, len(checker.sides) + count + 1))
        names = [name for name in free if name not in checker.sides][:count]
    else:
        names = list(several_strings("side", side))
        if len(names) != count:
            raise ArgumentError(f"side: expected {count} names, got {len(names)}")
    if len(set(names)) != len(names) or set(names) & set(checker.model_hooks()):
        raise ArgumentError(f"side: {names} are taken, or given twice")
    return names


class RegisteredModels:
    """The hooks of one call of `module_register_tensor_checker`."""

    def __init__(self, models: list[ModelHooks]) -> None:
        self.models = models

    def remove(self) -> None:
        """Take the hooks off; what was registered stays with the checker."""
        for model in self.models:
            model.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


@dataclass(slots=True)
class _Frame:
    """One open call of a module."""

    hooks: ModelHooks
    module: nn.Module
    side: str
    site: Site | None
    """None: the call belongs to another model that shares the module."""
    versions: dict[str, Version]
    """Of its buffers, before the call."""


class ModelHooks:
    """The hooks of one model."""

    def __init__(
        self,
        model: nn.Module,
        checker: TensorChecker,
        side: str,
        rename: Rename | None,
        options: _Options,
    ) -> None:
        for other_side, hooks in checker.model_hooks().items():
            if hooks.model() is model:
                raise ArgumentError(
                    f"modules: this model is registered already, as {other_side!r};"
                    " it would be compared with itself"
                )
        self.side = side
        self.model = weakref.ref(model)
        self.handles: list[Callable[[], None]] = []
        self._checker = checker
        self._options = options
        self._names = mapped_names(model, rename, options.exclude)
        self._watched: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._fused: set[int] = set()
        self._calls: dict[str, int] = {}
        self._generation = -1

    # ---- life ----

    def install(self, *, strict: bool) -> None:
        """Put the hooks on.

        Raises:
            ArgumentError: `strict`, and the names differ from those of the first model.
        """
        checker = self._checker
        own = self._names.names
        known = checker.module_names
        if strict and known:
            first = next(iter(known))
            found = mismatches({first: known[first], self.side: own})
            if found:
                raise ArgumentError(f"modules: names do not match: {_spelled(found)}")
        fused = self._inside_fused()
        for name, module in self._names.hooked():
            self._watched[module] = name
            if id(module) not in fused:
                before = module.register_forward_pre_hook(self._before, with_kwargs=True)
                after = module.register_forward_hook(
                    self._after, with_kwargs=True, always_call=True
                )
                self.handles += [before.remove, after.remove]
        if fused:
            self.handles += _global_hooks(self._before_fused, self._after_fused)
        self._fused = fused
        checker.add_model(self.side, self, own)
        model = self.model()
        if model is not None:  # global hooks go with the model
            weakref.finalize(model, _remove_all, self.handles).atexit = False

    def _inside_fused(self) -> set[int]:
        return {
            id(inner)
            for _, module in self._names.hooked()
            if isinstance(module, _FUSED)
            for inner in module.modules()
        }

    def remove(self) -> None:
        """Take the hooks off."""
        _remove_all(self.handles)
        self._checker.remove_model(self.side)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelHooks:
        """A copy of a module has our hooks, too; they are those of the module."""
        return self

    # ---- hooks ----

    def _before_fused(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if id(module) in self._fused and module in self._watched:
            self._before(module, args, {})

    def _after_fused(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        if id(module) in self._fused and module in self._watched:
            frames = self._checker.running.frames
            if kwargs and frames and frames[-1].module is module and frames[-1].site is not None:
                self._guarded(self._add_inputs, frames[-1].site, kwargs.items())
            self._after(module, args, kwargs, out)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if torch.compiler.is_compiling() or inside_autograd() or module not in self._watched:
            return
        frames = self._checker.running.frames
        if module is self.model():  # an interrupt may have left some
            frames[:] = [frame for frame in frames if frame.hooks is not self]
        is_ours = not frames or any(frame.hooks is self for frame in frames)
        frame = _Frame(self, module, self.side, None, {})
        if is_ours:
            self._guarded(self._enter, frame, frames)
        frames.append(frame)
        if frame.site is not None:
            self._checker.keep_call(self.side, frame.site, module, args, kwargs)
            self._guarded(self._add_inputs, frame.site, [*enumerate(args), *kwargs.items()])

    def _enter(self, frame: _Frame, frames: Sequence[_Frame]) -> None:
        if self._generation != self._checker.generation:
            self._generation = self._checker.generation
            self._calls.clear()
            self._add_state()
        name = self._watched[frame.module]
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        above = next(
            (item.site for item in reversed(frames) if item.hooks is self and item.site), None
        )
        parent = None if above is None else (above.module, above.call)
        frame.site = Site(module=name, role="input", call=call, parent=parent)
        frame.versions = {key: Version.of(buffer) for key, buffer in _buffers(frame.module)}

    def _after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> None:
        if torch.compiler.is_compiling() or inside_autograd():
            return
        frames = self._checker.running.frames
        place = len(frames) - 1
        while place >= 0 and not (frames[place].module is module and frames[place].hooks is self):
            place -= 1
        if place < 0:
            return
        frame = frames.pop(place)
        if frame.site is not None:
            self._guarded(self._add_results, frame, out)

    def _guarded(self, function: Callable[..., None], *args: Any) -> None:
        """A crash of ours is noted; the step goes on."""
        try:
            function(*args)
        except Exception:  # noqa: BLE001 - whatever it is, it is not the step's
            self._checker.note_problem(traceback.format_exc())

    # ---- what is registered ----

    def _add(self, tag: str, value: Any, site: Site) -> None:
        is_output = site.role == "output"

        def on_unknown(leaf_tag: str, kind: str) -> None:
            self._checker.note_unknown(leaf_tag, kind, is_output=is_output)

        for leaf_tag, snapshot in leaves(tag, value, on_unknown=on_unknown, objects=is_output):
            self._checker.add(
                leaf_tag, snapshot, side=self.side, site=site, exclude=self._options.exclude
            )

    def _add_state(self) -> None:
        for name, owner, value, is_buffer in self._names.state():
            wanted = self._options.buffers if is_buffer else self._options.parameters
            if wanted:
                role = "buffer" if is_buffer else "param"
                site = Site(module=owner, role=role)
                self._guarded(self._add, f"checker_{name}", value, site)

    def _add_inputs(self, site: Site, items: Iterable[tuple[Any, Any]]) -> None:
        if self._options.inputs:
            for key, value in items:
                if _may_hold_tensors(value):
                    self._add(f"{output_tag(site.module)}_input_{key}", value, site)

    def _add_results(self, frame: _Frame, out: Any) -> None:
        site = frame.site
        if site is None:
            return
        if self._options.buffers:
            after = Site(
                module=site.module, role="buffer_after", call=site.call, parent=site.parent
            )
            for key, buffer in _buffers(frame.module):
                # batch norm writes its statistics without a new version
                if frame.module.training or frame.versions.get(key) != Version.of(buffer):
                    name = f"{site.module}.{key}" if site.module else key
                    self._add(f"checker_{name}_after", buffer, after)
        if self._options.outputs and _may_hold_tensors(out):
            given = Site(module=site.module, role="output", call=site.call, parent=site.parent)
            self._add(output_tag(site.module), out, given)


def _may_hold_tensors(value: Any) -> bool:
    """Flags, names and what is absent are no tensors that somebody would miss."""
    return value is not None and not isinstance(value, (bool, str, bytes))


def _buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _remove_all(handles: list[Callable[[], None]]) -> None:
    while handles:
        handles.pop()()


def _global_hooks(
    before: Callable[..., None], after: Callable[..., None]
) -> list[Callable[[], None]]:
    before_handle = _module.register_module_forward_pre_hook(before)
    after_handle = _module.register_module_forward_hook(after, with_kwargs=True, always_call=True)

    def remove_after() -> None:
        after_handle.remove()
        # on 2.13 the handle forgets this entry, which slows every later module call down
        _torch.forward_hooks_with_kwargs.pop(after_handle.id, None)

    return [before_handle.remove, remove_after]


def _spelled(found: Sequence[NameMismatch]) -> str:
    shown = [
        f"{item.name or '<root>'} (in {item.side} only"
        + (f"; closest: {', '.join(item.closest)})" if item.closest else ")")
        for item in found[:10]
    ]
    more = f" and {len(found) - 10} more" if len(found) > 10 else ""
    return ", ".join(shown) + more
