"""Whatever holds numbers -> snapshots: plain tensors on the CPU with memory of their own.

::

    leaves("tag", value)       (tag, Snapshot) for each tensor, array or number inside
    bits_of, tensor_of_bits    a tensor as an array of a dtype NumPy has, and back, without loss
    values_of                  a tensor as an array that can be compared
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.dlpack
from torch import Tensor

from opcheck.errors import ArgumentError, ArgumentTypeError
from opcheck.printing import visible
from opcheck.references import host_array

__all__ = ["Snapshot", "bits_of", "dtype_name", "leaves", "tensor_of_bits", "values_of"]

Array: TypeAlias = npt.NDArray[Any]
OnUnknown: TypeAlias = Callable[[str, str], None]

_EXPECTED = (
    "a tensor, an array, a number, an object with to_torch(), __dlpack__ or __array__,"
    " or a list, dict or dataclass of these"
)
_FOREIGN_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
    )
    if hasattr(torch, name)
}
"""dtypes that NumPy lacks, or has from another library under the same name."""
_NUMPY_KINDS = "biufc"


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """One tensor as it was when it was registered."""

    tensor: Tensor
    """Detached, on the CPU, strided, in memory of its own."""
    is_number: bool = False
    """It was a Python number: it has a value and a kind, but no dtype of its own."""
    device: str = "cpu"
    """Where it came from."""


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


# ---- leaves -------------------------------------------------------------------------------------


def leaves(
    tag: str, value: Any, *, on_unknown: OnUnknown | None = None, objects: bool = False
) -> Iterator[tuple[str, Snapshot]]:
    """One snapshot per leaf, with its tag: `tag` itself, `tag_0`, `tag_name`, `tag_0_name`.

    None inside a list, dict or dataclass is no leaf.

    Args:
        tag: of the whole.
        value: what to look into.
        on_unknown: told tag and type of what holds no numbers; without it that is an error.
        objects: look for tensors in the attributes of other objects too (a cache of keys and
            values, an output class of somebody's own).

    Raises:
        ArgumentTypeError: a leaf is of a type that holds no numbers; names tag and type.
        ArgumentError: a leaf has no values (meta, fake), or a list contains itself.
    """
    taken: set[str] = set()
    for name, leaf in _walk(tag, value, (), objects=objects):
        free, number = name, 1
        while free in taken:  # {"a": {"b": x}, "a_b": y}
            number += 1
            free = f"{name}_{number}"
        taken.add(free)
        try:
            found = snapshot(free, leaf)
        except (ArgumentTypeError, ArgumentError):
            if on_unknown is None:
                raise
            on_unknown(free, _type_name(leaf))
            continue
        yield free, found


def _walk(
    tag: str, value: Any, above: tuple[int, ...], *, objects: bool
) -> Iterator[tuple[str, Any]]:
    parts = _parts(value)
    if parts is None and objects:
        found = list(_attributes(tag, value, ()))
        if found:
            yield from found
            return
    if parts is None:
        yield tag, value
        return
    if id(value) in above:
        raise ArgumentError(f"tag {_shown(tag)}: a {_type_name(value)} contains itself")
    for key, item in parts:
        if item is not None:
            yield from _walk(f"{tag}_{key}", item, (*above, id(value)), objects=objects)


def _attributes(tag: str, value: Any, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Tensors and arrays in the attributes of an object, and below."""
    if isinstance(value, (Tensor, np.ndarray)):
        if above:
            yield tag, value
        return
    if isinstance(value, (type, torch.nn.Module)) or callable(value) or id(value) in above:
        return
    parts = _parts(value)
    if parts is None:
        parts = list(getattr(value, "__dict__", {}).items())
    for key, item in parts:
        yield from _attributes(f"{tag}_{key}", item, (*above, id(value)))


def _parts(value: Any) -> list[tuple[Any, Any]] | None:
    """What is inside of a container, by key; None for everything else."""
    if isinstance(value, Tensor):
        if value.is_nested:
            return list(enumerate(value.detach().unbind()))
        return None
    if isinstance(value, Mapping):  # outputs of transformers are mappings and dataclasses
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if _converter(value) is not None:
            return None
        fields = dataclasses.fields(value)
        return [(field.name, getattr(value, field.name, None)) for field in fields]
    return None


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _shown(tag: str) -> str:
    text = visible(tag)
    return repr(text) if len(text) <= 200 else f"{text[:200]!r}... ({len(tag)} characters)"


# ---- one leaf -----------------------------------------------------------------------------------


def snapshot(tag: str, value: Any) -> Snapshot:
    """A copy of one tensor, array or number.

    Raises:
        ArgumentTypeError: it holds no numbers.
        ArgumentError: it has no values, or they cannot be copied.
    """
    if isinstance(value, (bool, int, float, complex)) and not isinstance(value, np.generic):
        return Snapshot(_from_number(tag, value), is_number=True)
    try:
        tensor = _as_tensor(value)
    except (TypeError, ValueError, RuntimeError, BufferError, NotImplementedError) as error:
        raise ArgumentError(
            f"tag {_shown(tag)}: a {_type_name(value)} cannot be copied: {error}"
        ) from error
    if tensor is None:
        detail = f" of dtype {value.dtype}" if isinstance(value, (np.ndarray, np.generic)) else ""
        raise ArgumentTypeError(
            f"tag {_shown(tag)}: got {_type_name(value)}{detail}, expected {_EXPECTED}"
        )
    device = str(value.device) if isinstance(value, Tensor) else "cpu"
    return Snapshot(tensor, device=device)


def _from_number(tag: str, value: complex) -> Tensor:
    try:
        return torch.tensor(value, dtype=_number_dtype(value), device="cpu")
    except (OverflowError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"tag {_shown(tag)}: {value!r} does not fit into 64 bits") from error


def _number_dtype(value: complex) -> torch.dtype:
    if isinstance(value, bool):
        return torch.bool
    if isinstance(value, int):
        return torch.int64
    return torch.float64 if isinstance(value, float) else torch.complex128


def _as_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return _copy(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return _from_numpy(np.asarray(value))
    convert = _converter(value)
    return None if convert is None else convert()


def _converter(value: Any) -> Callable[[], Tensor | None] | None:
    """How a foreign object gives its values; None: it does not."""
    if isinstance(value, type):
        return None
    if callable(getattr(value, "to_torch", None)):
        return lambda: _as_tensor(value.to_torch())
    has_array = callable(getattr(value, "__array__", None))
    if callable(getattr(value, "__dlpack__", None)):
        return lambda: _from_dlpack(value, has_array=has_array)
    if has_array:
        return lambda: _from_numpy(np.asarray(value))
    return None


def _from_dlpack(value: Any, *, has_array: bool) -> Tensor | None:
    try:
        return _copy(torch.utils.dlpack.from_dlpack(value))
    except (TypeError, ValueError, RuntimeError, BufferError, AttributeError):
        if not has_array:  # a read-only buffer, a dtype that DLPack lacks
            raise
        return _from_numpy(np.asarray(value))


def _from_numpy(array: Array) -> Tensor | None:
    foreign = _FOREIGN_DTYPES.get(array.dtype.name)
    if foreign is not None:
        whole = np.uint16 if array.dtype.itemsize == 2 else np.uint8
        copy = np.array(array, copy=True, order="C").view(whole)
        return torch.from_numpy(copy).view(foreign)
    if array.dtype.kind not in _NUMPY_KINDS:
        return None
    copy = np.array(array, dtype=array.dtype.newbyteorder("="), copy=True, order="C")
    return torch.from_numpy(copy)


def _copy(value: Tensor) -> Tensor:
    plain = value.detach()
    gather = getattr(plain, "full_tensor", None)
    if callable(gather):  # DTensor: a collective, so every rank has to register the tag
        plain = gather().detach()
    if plain.is_quantized:
        plain = plain.dequantize()
    if plain.layout != torch.strided:
        plain = plain.to_dense()
    if plain.is_meta or plain.untyped_storage().device.type == "meta":
        raise ValueError("it has no values (meta or fake)")
    with torch.no_grad():
        plain = plain.clone() if plain.device.type == "cpu" else plain.to("cpu", copy=True)
    if type(plain) is not Tensor:
        plain = plain.as_subclass(Tensor)
    plain = plain.resolve_conj().resolve_neg()
    if plain.untyped_storage().nbytes() < plain.numel() * plain.itemsize:
        raise ValueError("it has no memory of its own (a wrapper)")
    return plain


# ---- arrays -------------------------------------------------------------------------------------


def bits_of(tensor: Tensor) -> Array:
    """The values as an array of a dtype that NumPy has: what it lacks as unsigned integers.

    Complex numbers of two 16-bit halves get a last dimension of size 2.
    """
    if tensor.dtype == torch.complex32:
        return torch.view_as_real(tensor).numpy()
    if dtype_name(tensor.dtype) in _FOREIGN_DTYPES:
        whole = torch.uint16 if tensor.itemsize == 2 else torch.uint8
        return tensor.view(whole).numpy()
    return tensor.numpy()


def tensor_of_bits(array: Array, dtype: str) -> Tensor:
    """The tensor of which `bits_of` made the array; it has memory of its own.

    Raises:
        ValueError: there is no such dtype, or the array cannot be one of it.
    """
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"no dtype {dtype[:100]!r}")
    tensor = torch.from_numpy(np.array(array, copy=True, order="C"))
    if kind == torch.complex32 and tensor.dtype == torch.float16 and array.shape[-1:] == (2,):
        shape = array.shape[:-1]
        return tensor.reshape(-1, 2).view(kind).reshape(shape) if array.size else _none(shape, kind)
    if dtype in _FOREIGN_DTYPES and tensor.itemsize == kind.itemsize:
        return tensor.view(kind)
    if tensor.dtype != kind:
        raise ValueError(f"an array of {array.dtype} is no tensor of {dtype}")
    return tensor


def _none(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")


def values_of(tensor: Tensor) -> Array:
    """The values as an array that can be compared: narrow floats as float32, exactly."""
    if dtype_name(tensor.dtype).startswith("float8"):
        return tensor.to(torch.float32).numpy()
    if tensor.dtype == torch.complex32:
        return torch.view_as_real(tensor).float().numpy().view(np.complex64)[..., 0]
    if dtype_name(tensor.dtype) in _FOREIGN_DTYPES and tensor.dtype != torch.bfloat16:
        return bits_of(tensor)
    return host_array(tensor)
