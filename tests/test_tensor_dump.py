"""Dumps: which groups, under which names, and back without loss."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from modulecheck import DumpMode, TensorChecker, TensorFileError, load_dump
from opcheck import ArgumentTypeError
from tests.test_tensor_checker import DTYPES, HOSTILE


@pytest.fixture
def checker() -> TensorChecker:
    """Four groups: equal, not equal, not equal, on one side alone."""
    checker = TensorChecker(quiet=True)
    for tag, second in (("equal", 1.0), ("first", 2.0), ("second", 3.0)):
        checker.register_tensor(tag, torch.ones(2))
        checker.register_tensor(tag, torch.full((2,), second))
    checker.register_tensor("alone", torch.ones(1))
    return checker


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


EXPECTED = {
    DumpMode.ALL: ["alone.0", "equal.0", "equal.1", "first.0", "first.1", "second.0", "second.1"],
    DumpMode.NOT_EQUAL: ["first.0", "first.1", "second.0", "second.1"],
    DumpMode.FIRST_NOT_EQUAL: ["first.0", "first.1"],
}


@pytest.mark.parametrize("mode", EXPECTED)
@pytest.mark.parametrize("method", ["check_equal", "check_allclose", "check"])
def test_a_mode_dumps_exactly_its_groups(checker, tmp_path, mode, method):
    getattr(checker, method)(dump_mode=mode, dump_path=tmp_path)
    assert files(tmp_path) == sorted([*(f"{name}.npy" for name in EXPECTED[mode]), "index.json"])


def test_the_default_dumps_nothing(checker, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checker.check_equal()
    checker.check_equal(DumpMode.NOT, tmp_path / "x")
    assert files(tmp_path) == []


def test_not_equal_dumps_nothing_of_what_is_equal(tmp_path):
    checker = TensorChecker(quiet=True)
    for _ in range(2):
        checker.register_tensor("a", 1.0)
    for mode in (DumpMode.NOT_EQUAL, DumpMode.FIRST_NOT_EQUAL):
        assert checker.check_equal(dump_mode=mode, dump_path=tmp_path)
        assert files(tmp_path) == ["index.json"]
        assert load_dump(tmp_path) == {}


def test_the_members_are_the_documented_ones():
    assert [mode.name for mode in DumpMode] == ["NOT", "ALL", "NOT_EQUAL", "FIRST_NOT_EQUAL"]


@pytest.mark.parametrize("mode", [None, "all", 1])
def test_a_mode_is_a_dump_mode(checker, mode):
    with pytest.raises(ArgumentTypeError, match="dump_mode"):
        checker.check_equal(dump_mode=mode)


def test_numpy_reads_a_dump(checker, tmp_path):
    checker.check_equal(dump_mode=DumpMode.ALL, dump_path=str(tmp_path))
    assert np.load(tmp_path / "first.1.npy", allow_pickle=False).tolist() == [2.0, 2.0]


def test_the_index_says_what_each_file_is(tmp_path):
    checker = TensorChecker(quiet=True)
    for side, value in (("port", 2.0), ("torch", 1.0)):
        checker.register_tensor("layer/out", torch.full((2, 3), value), side=side)
    checker.check_equal(dump_mode=DumpMode.NOT_EQUAL, dump_path=tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    names = [item.pop("file") for item in index["files"]]
    values = [np.load(tmp_path / name).tobytes() for name in names]
    assert [item.pop("crc32") for item in index["files"]] == [zlib.crc32(data) for data in values]
    assert all((tmp_path / name).exists() for name in names)
    assert index["files"] == [
        {
            "tag": "layer/out",
            "position": position,
            "side": side,
            "verdict": "FAIL",
            "dtype": "float32",
            "shape": [2, 3],
        }
        for position, side in enumerate(["port", "torch"])
    ]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex32], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)], ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_dtype_comes_back_without_loss(tmp_path, dtype, shape):
    count = int(np.prod(shape))
    values = torch.arange(count).reshape(shape) % 2
    value = torch.complex(values.half(), -values.half()) if dtype == torch.complex32 else values
    value = value.to(dtype)
    checker = TensorChecker(quiet=True)
    checker.register_tensor("t", value)
    checker.register_tensor("t", value)
    checker.check_equal(dump_mode=DumpMode.ALL, dump_path=tmp_path)
    found = load_dump(tmp_path)["t"]
    assert len(found) == 2
    for tensor in found:
        assert (tensor.dtype, tensor.shape) == (value.dtype, value.shape)
        assert tensor.tolist() == value.tolist()


def test_a_dtype_that_numpy_lacks_has_a_sidecar(tmp_path):
    checker = TensorChecker(quiet=True)
    checker.register_tensor("t", torch.tensor([1.0, -0.0, float("nan")]).bfloat16())
    checker.register_tensor("u", torch.ones(1))
    checker.check_equal(dump_mode=DumpMode.ALL, dump_path=tmp_path)
    assert files(tmp_path) == ["index.json", "t.0.npy", "t.0.npy.json", "u.0.npy"]
    beside = json.loads((tmp_path / "t.0.npy.json").read_text())
    assert beside == {"dtype": "bfloat16", "shape": [3], "stored_as": "uint16"}
    assert np.load(tmp_path / "t.0.npy").tolist()[:2] == [0x3F80, 0x8000]


def test_hostile_tags_stay_in_the_folder_and_apart(tmp_path):
    tags = [*HOSTILE, "A", "a/b", "a_b", "a:b", "CON", "nul.txt", ".hidden", "-rf", "../../y" * 50]
    checker = TensorChecker(quiet=True)
    for number, tag in enumerate(tags):
        for _ in range(2):
            checker.register_tensor(tag, number)
    folder = tmp_path / "in" / "here"
    checker.check_equal(dump_mode=DumpMode.ALL, dump_path=folder)
    assert files(tmp_path) == ["in"]
    assert files(tmp_path / "in") == ["here"]
    names = files(folder)
    assert len({name.lower() for name in names}) == 2 * len(tags) + 1
    assert all(len(name) < 200 and name.isascii() for name in names)
    assert not any(name.startswith((".", "-")) for name in names)
    found = load_dump(folder)
    assert {tag: tensor[0].item() for tag, tensor in found.items()} == {
        tag: number for number, tag in enumerate(tags)
    }


def test_tags_that_look_alike_do_not_overwrite_each_other(tmp_path):
    checker = TensorChecker(quiet=True)
    for tag in ("x/y", "x/y#2"):
        for side in ("a", "b"):
            for value in (1, 2):
                checker.register_tensor(tag, value, side=side)
    checker.check_equal(dump_mode=DumpMode.ALL, dump_path=tmp_path)
    assert len(files(tmp_path)) == 2 * 2 * 2 + 1


def test_a_second_dump_leaves_nothing_of_the_first(checker, tmp_path):
    (tmp_path / "mine.npy").write_bytes(b"of the user")
    checker.check_equal(dump_mode=DumpMode.ALL, dump_path=tmp_path)
    checker.check_equal(dump_mode=DumpMode.FIRST_NOT_EQUAL, dump_path=tmp_path)
    assert files(tmp_path) == ["first.0.npy", "first.1.npy", "index.json", "mine.npy"]


def test_an_index_cannot_have_files_elsewhere_deleted(checker, tmp_path):
    victim = tmp_path / "victim.0.npy"
    victim.write_text("x")
    folder = tmp_path / "dump"
    folder.mkdir()
    index = {"schema": "modulecheck.dump", "version": 1, "files": [{"file": "../victim.0.npy"}]}
    (folder / "index.json").write_text(json.dumps(index))
    checker.check_equal(dump_mode=DumpMode.ALL, dump_path=folder)
    assert victim.exists()


def damaged() -> list[tuple[str, Any]]:
    head = {"schema": "modulecheck.dump", "version": 1}
    item = {"file": "a.0.npy", "tag": "a", "dtype": "float32"}
    return [
        ("none", None),
        ("text", "text"),
        ("list", []),
        ("no files", head),
        ("newer", {**head, "version": 2, "files": []}),
        ("path", {**head, "files": [{**item, "file": "../a.0.npy"}]}),
        ("missing file", {**head, "files": [item]}),
        ("dtype", {**head, "files": [{**item, "file": "b.0.npy", "dtype": "os"}]}),
        ("pickle", {**head, "files": [{**item, "file": "evil.0.npy"}]}),
    ]


@pytest.mark.parametrize(("name", "content"), damaged(), ids=lambda value: str(value)[:12])
def test_a_damaged_dump_is_an_error(tmp_path, name, content):
    np.save(tmp_path / "b.0.npy", np.ones(1, np.float32))
    np.save(tmp_path / "evil.0.npy", np.array([{}], dtype=object), allow_pickle=True)
    if content is not None:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "index.json").write_text(text)
    with pytest.raises(TensorFileError):
        load_dump(tmp_path)


def test_a_folder_that_cannot_be_made_is_an_error(checker, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match="file"):
        checker.check_equal(dump_mode=DumpMode.ALL, dump_path=tmp_path / "file")
