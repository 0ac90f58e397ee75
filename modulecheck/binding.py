"""Recordings from a file brought together with the code of their model."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from modulecheck import trees
from modulecheck.buffers import all_buffers
from modulecheck.distributed import is_gathered, own_class
from modulecheck.foreign import without_foreign
from modulecheck.recorded_files import UnknownBackend
from modulecheck.recording import RecordedCall
from modulecheck.snapshot import Snapshot
from opcheck.errors import ArgumentError, ArgumentTypeError
from opcheck.modules import clean_fqn

__all__ = ["bound", "named_object"]


def named_object(reference: str, option: str) -> Any:
    """What `package.module:name` or `path/to/file.py:name` is.

    The working directory is looked into, as by `python -m`.

    Args:
        reference: as above; `name` may have dots.
        option: named in the errors.

    Raises:
        ArgumentError: there is no such module or name, or importing it raised.
    """
    home, colon, name = reference.rpartition(":")
    if not colon or not home or not name:
        raise ArgumentError(
            f"{option}: expected package.module:name or file.py:name, got {reference!r}"
        )
    try:
        found = _imported(home)
    except Exception as error:
        raise ArgumentError(f"{option} {reference}: {_said(error)}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ArgumentError(f"{option} {reference}: {home} has no {name!r}")
        found = getattr(found, part)
    return found


def _imported(home: str) -> Any:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if not home.endswith(".py"):
        return importlib.import_module(home)
    path = Path(home)
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {home}")
    if str(path.resolve().parent) not in sys.path:
        sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{home} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # Dynamo looks up the module of a class
    spec.loader.exec_module(module)
    return module


def _said(error: BaseException) -> str:
    """The exception and where it was raised, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def model_of(model: Any, option: str = "model") -> nn.Module:
    """The model itself, or what the function that builds it gives.

    Raises:
        ArgumentError: building it raised.
        ArgumentTypeError: it is no module.
    """
    if not isinstance(model, nn.Module) and callable(model):
        try:
            model = model()
        except Exception as error:
            raise ArgumentError(f"{option}: building the model raised {_said(error)}") from error
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            f"{option}: expected a torch.nn.Module or a function that builds one, got"
            f" {type(model).__name__}"
        )
    return model


def bound(
    call: RecordedCall,
    *,
    model: nn.Module | None,
    backend: Any = None,
    classes: Iterable[type] = (),
) -> RecordedCall:
    """The call with its module and its backend.

    Args:
        call: stays as it is where it was recorded in this process and no model is given.
        model: in which the module is looked up; its parameters are not used and not written.
        backend: in place of the recorded one.
        classes: of which objects may be made from the file.

    Raises:
        ArgumentError: the module, the backend or a class is not to be had, or another one.
    """
    if backend is not None:
        call = dataclasses.replace(call, backend=backend)
    if isinstance(call.backend, UnknownBackend):
        raise ArgumentError(
            f"backend: the call of {_named(call)} was compiled by a function,"
            f" {call.backend.name}, which is not in the file: give it, --backend"
            " package.module:name"
        )
    if model is None and call.module is not None:
        if is_gathered(call.module):
            raise ArgumentError(
                f"model: {_named(call)} is sharded by FSDP2 and cannot be copied: give a function"
                " that builds the model without it"
            )
        return call
    if model is None:
        raise ArgumentError(
            f"model: the result comes from a file, which does not hold the code of {call.kind}:"
            " give the model, --model package.module:factory"
        )
    module = _module_at(model, call)
    return dataclasses.replace(call, module=module, snapshot=_with_objects(call.snapshot, classes))


def _named(call: RecordedCall) -> str:
    return call.name or "<root>"


def _module_at(model: nn.Module, call: RecordedCall) -> nn.Module:
    by_name = {clean_fqn(name, model): module for name, module in model.named_modules()}
    module: nn.Module | None = by_name.get(call.fqn)
    if module is None:
        raise ArgumentError(f"model: {type(model).__name__} has no module {call.fqn!r}")
    kind = call.kind.rpartition(":")[2]
    own = own_class(module).__qualname__
    if own != kind:
        raise ArgumentError(
            f"model: {call.fqn or '<root>'} is a {own}, the recorded one was a {kind}"
        )
    for what, given, recorded in (
        ("parameter", dict(module.named_parameters()), call.parameters),
        ("buffer", all_buffers(module), call.snapshot.buffers),
    ):
        _check_same(call, what, given, recorded)
    return module


def _check_same(
    call: RecordedCall, what: str, own: Mapping[str, Tensor], recorded: Mapping[str, Tensor]
) -> None:
    where = call.fqn or "<root>"
    others = sorted(own.keys() ^ recorded.keys())
    if others:
        side = "recorded one" if others[0] in own else "model given"
        raise ArgumentError(f"model: {where}: the {side} has no {what} {others[0]!r}")
    for name, tensor in recorded.items():
        if tensor.shape != own[name].shape:
            raise ArgumentError(
                f"model: {where}: {what} {name!r} has shape {tuple(own[name].shape)}, the recorded"
                f" one {tuple(tensor.shape)}"
            )


def _with_objects(snapshot: Snapshot, classes: Iterable[type]) -> Snapshot:
    names = {}
    for kind in classes:
        if not inspect.isclass(kind):
            raise ArgumentTypeError(f"classes: expected classes, got {kind!r}")
        names[f"{kind.__module__}:{kind.__qualname__}"] = kind
    args, kwargs = without_foreign((snapshot.args, snapshot.kwargs), names)
    missing = [
        item for item in trees.tensors((args, kwargs)) if id(item) not in snapshot.wants_grad
    ]
    if missing:
        raise ArgumentError("the arguments of the recorded call could not be put together")
    return dataclasses.replace(snapshot, args=args, kwargs=kwargs)
