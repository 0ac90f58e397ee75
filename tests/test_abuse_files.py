"""Files of tensors and results that are damaged, lie or are something else: refused, or the same.

And tensors of every kind through register, compare, save and load.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import resource
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from modulecheck import CompareResult, DumpMode, TensorChecker, load_dump
from modulecheck.cli import main
from modulecheck.recording import RecordedCall
from modulecheck.snapshot import Snapshot
from opcheck import OpcheckError
from tests.exploring import examples

Reader = Callable[[Path], Any]


def bits(tensor: Tensor) -> tuple[Any, ...]:
    flat = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return tensor.dtype, tuple(tensor.shape), bytes(flat.reshape(-1).view(torch.uint8).numpy())


def filled() -> TensorChecker:
    checker = TensorChecker(quiet=True)
    for side, add in (("a", 0), ("b", 1)):
        checker.register_tensor("half", torch.arange(30).bfloat16() + add, side=side)
        checker.register_tensor("whole", torch.arange(24.0).reshape(2, 3, 4) * (1 + add), side=side)
        checker.register_tensor("number", 1.5, side=side)
    return checker


def of_tensors(path: Path) -> Any:
    loaded = TensorChecker.load(path, quiet=True)
    rows = [
        (entry.tag, entry.side, entry.number, entry.precision, entry.device, entry.site)
        for entry in loaded._entries
    ]
    values = [entry.stored.load() for entry in loaded._entries]
    found = [(bits(value.tensor), value.is_number) for value in values]
    return rows, found, loaded._sides, loaded._problems, loaded._module_names


def of_result(path: Path) -> Any:
    loaded = CompareResult.load(path)
    calls = [
        (
            call.name, call.kind, call.failed, call.training, repr(call.snapshot.random.python),
            [bits(item) for item in (*call.snapshot.args, *call.grads)],
            {name: bits(item) for name, item in call.parameters.items()},
            {key: array.tobytes() for key, array in call.actual.items()},
        )
        for call in loaded.recordings
    ]  # fmt: skip
    return repr(loaded), calls


def of_dump(path: Path) -> Any:
    """One file of a dump stands for the folder."""
    return {tag: [bits(item) for item in items] for tag, items in load_dump(path.parent).items()}


def save_tensors(folder: Path) -> Path:
    filled().save(folder / "side.tensors")
    return folder / "side.tensors"


def save_result(folder: Path) -> Path:
    module = nn.Linear(3, 2)
    snapshot = Snapshot.take(module, (torch.ones(4, 3),), {}, cast_dtype=None)
    actual = {("output", 0): np.arange(8.0).reshape(4, 2)}
    call = RecordedCall.of("part", module, snapshot, failed=[("output", 0)], actual=actual)
    CompareResult(math.nan, 1.0, recordings=[call]).save(folder / "result.mc")
    return folder / "result.mc"


def save_dump(folder: Path, name: str) -> Path:
    filled().check_equal(dump_mode=DumpMode.ALL, dump_path=folder)
    return folder / name


KINDS: dict[str, tuple[Callable[[Path], Path], Reader]] = {
    "tensors": (save_tensors, of_tensors),
    "result": (save_result, of_result),
    "dump": (lambda folder: save_dump(folder, "whole.1.npy"), of_dump),
    "index of a dump": (lambda folder: save_dump(folder, "index.json"), of_dump),
}
FILES = {name: kind for name, kind in KINDS.items() if name != "index of a dump"}


@pytest.fixture(params=KINDS)
def kind(request: Any, tmp_path: Path) -> tuple[Path, bytes, Reader]:
    write, read = KINDS[request.param]
    path = write(tmp_path)
    return path, path.read_bytes(), read


REFUSED = "refused"


def outcome(read: Reader, path: Path) -> Any:
    """The content, or that it was refused with a message that names the file."""
    try:
        return read(path)
    except OpcheckError as error:
        message = str(error)
    return REFUSED if str(path.parent) in message else message


# ---- damage -------------------------------------------------------------------------------------


def test_cut_anywhere_is_refused(kind: Any) -> None:
    path, data, read = kind
    chosen = random.Random(0)
    read(path)
    for end in [0, 1, len(data) - 2, *(chosen.randrange(len(data) - 1) for _ in range(60))]:
        path.write_bytes(data[:end])
        with pytest.raises(OpcheckError, match=path.name.replace(".", r"\.")):
            read(path)


def test_more_bytes_than_were_written(kind: Any) -> None:
    path, data, read = kind
    expected = read(path)
    path.write_bytes(data + b"\0" * 100)
    assert outcome(read, path) in (expected, REFUSED)


def test_a_flipped_bit_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    chosen, refused = random.Random(1), 0
    for name, (write, read) in FILES.items():  # the text of a JSON file has no checksum
        (tmp_path / name).mkdir()
        path = write(tmp_path / name)
        data, expected = path.read_bytes(), read(path)
        for _ in range(400):
            flipped = bytearray(data)
            place, bit = chosen.randrange(len(data)), chosen.randrange(8)
            flipped[place] ^= 1 << bit
            path.write_bytes(flipped)
            found = outcome(read, path)
            assert found in (expected, REFUSED), (name, place, bit)
            refused += found == REFUSED
    assert refused > 700


def test_a_flipped_bit_in_the_index_of_a_dump_raises_nothing_else(tmp_path: Path) -> None:
    path = save_dump(tmp_path, "index.json")
    data, chosen, refused = path.read_bytes(), random.Random(2), 0
    for _ in range(300):
        flipped = bytearray(data)
        flipped[chosen.randrange(len(data))] ^= 1 << chosen.randrange(8)
        path.write_bytes(flipped)
        refused += outcome(of_dump, path) == REFUSED
    assert refused > 100


# ---- something else in its place ----------------------------------------------------------------


class Boom:
    def __reduce__(self) -> Any:
        return os.mkdir, ("payload-ran",)


def _array_of_objects(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.array([Boom()], dtype=object), allow_pickle=True)


def _archive_of_pickles(path: Path) -> None:
    with zipfile.ZipFile(path) if zipfile.is_zipfile(path) else zipfile.ZipFile(path, "w") as old:
        names = old.namelist() or ["half.npy"]
    with zipfile.ZipFile(path, "w") as new:
        for name in names:
            new.writestr(name, pickle.dumps(Boom()))


OTHERS: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "nothing": lambda path: None,
    "folder": lambda path: path.mkdir(),
    "pickle": lambda path: path.write_bytes(pickle.dumps(Boom())),
    "torch.save": lambda path: torch.save({"a": Boom()}, path),
    "objects": _array_of_objects,
    "pickles": _archive_of_pickles,
    "image": lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100)),
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "broken header": lambda path: path.write_bytes(npy_of(b"{'descr': (((\n")),
    "header of bad blocks": lambda path: path.write_bytes(npy_of(b"  {\n1\n'\n")),
}


def npy_of(header: bytes, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


@pytest.mark.parametrize("other", OTHERS)
def test_another_thing_in_its_place_is_refused(
    other: str, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _, read = kind
    monkeypatch.chdir(path.parent)
    path.unlink()
    OTHERS[other](path)
    with pytest.raises(OpcheckError, match=path.name.replace(".", r"\.")):
        read(path)
    assert not Path("payload-ran").exists()


@pytest.mark.parametrize("other", OTHERS)
def test_the_command_line_says_it_in_one_line(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    OTHERS[other](tmp_path / "other")
    good = save_tensors(tmp_path)
    for line in (["tensors", "other", str(good)], ["drilldown", "other"]):
        assert main(line) not in (0, 1)
        said = capsys.readouterr()
        assert "other" in said.err + said.out
        assert "Traceback" not in said.err + said.out
    assert not Path("payload-ran").exists()


def test_a_link_to_the_file_is_the_file(kind: Any) -> None:
    path, _, read = kind
    expected = read(path)
    moved = path.rename(path.with_name("elsewhere"))
    path.symlink_to(moved)
    assert read(path) == expected


# ---- lies ---------------------------------------------------------------------------------------


def rewritten(path: Path, edit: Callable[[dict[str, Any], dict[str, bytes]], Any]) -> None:
    with zipfile.ZipFile(path) as old:
        members = {name: old.read(name) for name in old.namelist()}
    index = json.loads(members.pop("index.json"))
    edit(index, members)
    with zipfile.ZipFile(path, "w") as new:
        for name, content in {**members, "index.json": json.dumps(index).encode()}.items():
            new.writestr(name, content)


def _entry(**changes: Any) -> Callable[[dict[str, Any], dict[str, bytes]], Any]:
    return lambda index, _: index["entries"][1].update(changes)


def _whole(header: bytes, data: bytes = bytes(96)) -> Any:
    return lambda index, members: members.update(
        {f"{index['entries'][1]['member']}.npy": npy_of(header, data)}
    )


_HEAD = "{'descr': '%s', 'fortran_order': False, 'shape': %s, }\n"
HUGE = 1 << 44
LIES: dict[str, Any] = {
    "shape of the index": _entry(description="(2, 3, 5):float32"),
    "dtype of the index": _entry(description="(2, 3, 4):int32"),
    "no description": _entry(description=""),
    "dtype that is none": _entry(description="(2, 3, 4):os"),
    "path": _entry(member="../../etc/passwd"),
    "absolute path": _entry(member="/etc/passwd"),
    "side": _entry(side="c"),
    "infinite number": _entry(number=math.inf),
    "list for a tag": _entry(tag=["a"]),
    "huge shape": _whole((_HEAD % ("<f4", (HUGE,))).encode()),
    "overflowing shape": _whole((_HEAD % ("<f4", (1 << 62, 1 << 62))).encode()),
    "negative shape": _whole((_HEAD % ("<f4", (-2, -12))).encode()),
    "shape with less": _whole((_HEAD % ("<f4", (2, 3, 3))).encode()),
    "objects": _whole((_HEAD % ("|O", (24,))).encode()),
    "other byte order": _whole((_HEAD % (">f4", (2, 3, 4))).encode()),
    "fields": _whole(b"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (24,)}\n"),
    "too many bytes": _whole((_HEAD % ("<f4", (2, 3, 4))).encode(), bytes(100)),
}


@pytest.fixture
def bounded() -> Iterator[None]:
    """The memory that a test takes stays small."""
    tracemalloc.start()  # NumPy and Python tell it what they allocate
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50e6


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.usefixtures("bounded")
def test_a_file_of_tensors_that_lies_is_refused(lie: str, tmp_path: Path) -> None:
    path = save_tensors(tmp_path)
    rewritten(path, LIES[lie])
    with pytest.raises(OpcheckError, match=r"side\.tensors"):
        of_tensors(path)
    arguments = ["tensors", str(path), str(save_tensors(tmp_path / "good"))]
    assert main(arguments) not in (0, 1)


@pytest.mark.usefixtures("bounded")
def test_an_array_of_somebody_else_that_lies_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    for header, data in (
        (_HEAD % ("<f4", (HUGE,)), bytes(8)), (_HEAD % ("<f4", (1,)), bytes(8)),
        (_HEAD % ("|O", (1,)), pickle.dumps(Boom())),
    ):  # fmt: skip
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.npy", npy_of(header.encode(), data))
        with pytest.raises(OpcheckError, match=r"x\.npz"):
            of_tensors(path)


def test_arrays_of_somebody_else_are_read(tmp_path: Path) -> None:
    arrays = {"a": np.arange(6.0).reshape(2, 3), "f": np.asfortranarray(np.ones((2, 3), "i4"))}
    for number, save in enumerate((np.savez, np.savez_compressed)):
        path = tmp_path / f"{number}.npz"
        save(path, **arrays, z=np.zeros(100_000), none=np.zeros((0, 3)))
        _, found, *_ = of_tensors(path)
        assert [item[0] for item in found[:2]] == [
            bits(torch.from_numpy(array)) for array in arrays.values()
        ]
        assert len(found) == 4


@pytest.mark.usefixtures("bounded")
def test_a_member_that_says_it_is_huge_is_refused(tmp_path: Path) -> None:
    """The sizes in the directory of the archive, which nothing protects."""
    for write, read in (FILES["tensors"], FILES["result"]):
        path = write(tmp_path)
        data = bytearray(path.read_bytes())
        place = data.find(b"PK\x01\x02")
        for offset in (20, 24):
            data[place + offset : place + offset + 4] = (0x7FFFFFFF).to_bytes(4, "little")
        path.write_bytes(data)
        with pytest.raises(OpcheckError, match=r"which are not there|Overlapped"):
            read(path)


def test_a_huge_expanded_tensor_of_a_result_takes_no_memory(tmp_path: Path) -> None:
    """It fits into its bytes, as those of `expand` do."""
    path = save_result(tmp_path)
    rewritten(path, lambda index, _: index["tensors"][0].update(shape=[HUGE], stride=[0]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (call,) = CompareResult.load(path).recordings
    assert call.snapshot.args[0].shape == (HUGE,)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


@pytest.mark.parametrize(
    "change",
    [
        {"file": "../outside.0.npy"}, {"file": "/etc/passwd"}, {"file": "..\\x.0.npy"},
        {"dtype": "int32"}, {"dtype": "os"}, {"dtype": None}, {"shape": [24]},
        {"shape": [HUGE]}, {"shape": None}, {"file": 3}, {"crc32": 1},
    ],
    ids=str,
)  # fmt: skip
def test_an_index_of_a_dump_that_lies_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    path = save_dump(tmp_path / "dump", "index.json")
    (tmp_path / "outside.0.npy").write_bytes((path.parent / "whole.0.npy").read_bytes())
    index = json.loads(path.read_text())
    (item,) = (item for item in index["files"] if item["file"] == "whole.0.npy")
    item.update(change)
    path.write_text(json.dumps(index))
    with pytest.raises(OpcheckError):
        load_dump(path.parent)


@pytest.mark.usefixtures("bounded")
def test_a_file_of_a_dump_that_lies_is_refused(tmp_path: Path) -> None:
    path = save_dump(tmp_path, "whole.0.npy")
    for shape in ((HUGE,), (2, 3, 3), (1 << 62, 1 << 62), (-2, -12)):
        path.write_bytes(npy_of((_HEAD % ("<f4", shape)).encode(), bytes(96)))
        with pytest.raises(OpcheckError, match=r"whole\.0\.npy"):
            load_dump(tmp_path)


# ---- values of every kind -----------------------------------------------------------------------

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
OTHER_DTYPES = [
    torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128, torch.bool,
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64,
]  # fmt: skip
SPECIAL = [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e-40, 3e38, 65504.0]


HOW = ["plain", "transposed", "every other", "expanded", "overlapping", "negated view"]


@st.composite
def tensors(draw: Any) -> Tensor:
    dtype = draw(st.sampled_from(FLOATS + OTHER_DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    numbers = [draw(st.integers(0, 100)) for _ in range(math.prod(shape))]
    base = torch.tensor(numbers, dtype=torch.float64).reshape(shape)
    if (dtype.is_floating_point or dtype.is_complex) and numbers:
        base.reshape(-1)[draw(st.integers(0, len(numbers) - 1))] = draw(st.sampled_from(SPECIAL))
    made = base.to(dtype)
    if dtype.is_complex:
        made = torch.complex(made.real, made.real.flip(-1) if made.dim() else made.real)
        made = made.conj() if draw(st.booleans()) else made
    how = draw(st.sampled_from(HOW))
    if how == "negated view" and dtype in (torch.float32, torch.float64):
        return torch.complex(made, made).conj().imag
    if how == "transposed" and made.dim() > 1:
        return made.transpose(0, -1)
    if how == "every other" and made.dim():
        return made[::2]
    if how == "expanded":
        return made.unsqueeze(0).expand(3, *made.shape)
    if how == "overlapping" and made.numel() > 2 and not made.is_conj():
        return made.reshape(-1).as_strided((2, made.numel() - 1), (1, 1))
    return made


def verdicts(checker: TensorChecker, path: Path) -> bool:
    """Of the checker, which its file gives as well, from memory and from disk."""
    found = checker.check_equal(equal_nan=True)
    checker.save(path)
    for keep in ("all", "stats"):
        assert TensorChecker.load(path, keep=keep, quiet=True).check_equal(equal_nan=True) == found
    return found


def compared(first: Tensor, second: Tensor, path: Path) -> bool:
    checker = TensorChecker(quiet=True)
    for side, value in (("a", first), ("b", second)):
        checker.register_tensor("t", value, side=side)
        checker.register_tensor("one", 1, side=side)  # without any element there is no PASS
    return verdicts(checker, path)


@examples(120)
@given(tensor=tensors(), data=st.data())
def test_any_tensor_equals_its_clone_and_differs_by_one_element(
    tensor: Tensor, data: Any, tmp_path_factory: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.tensors"
    before = bits(tensor), tensor._version, tensor.stride(), tensor.data_ptr()
    clone = tensor.clone()
    equal = compared(tensor, clone, path)
    assert (bits(tensor), tensor._version, tensor.stride(), tensor.data_ptr()) == before
    assert equal, (tensor, clone)
    if not tensor.numel():
        return
    changed = tensor.resolve_conj().clone(memory_format=torch.contiguous_format)
    place = data.draw(st.integers(0, tensor.numel() - 1))
    flat = changed.reshape(-1)
    old = flat[place].item()
    is_one = old in (1, True)
    flat[place] = 0 if is_one else 1  # neither rounds to anything else
    assert not compared(tensor, changed, path), (tensor, changed)
    assert (bits(tensor), tensor._version, tensor.stride(), tensor.data_ptr()) == before
