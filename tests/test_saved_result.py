"""A result saved and loaded is the same one, and no file, however made, does anything else."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from modulecheck import CompareResult, ModuleDiff, PrecisionChecker, TensorDiff, trees
from modulecheck.foreign import Foreign, without_foreign
from modulecheck.recorded_files import UnknownBackend
from modulecheck.recording import RecordedCall
from modulecheck.snapshot import Snapshot
from opcheck import ArgumentError, LogWriteError, Metrics, Verdict
from tests.compiled import DYNAMO_WARNS, Block, add_to_one, checked_step, mark, stack, wrong_backend
from tests.exploring import examples

pytestmark = [DYNAMO_WARNS, pytest.mark.usefixtures("fresh_dynamo")]


def saved_and_loaded(result: CompareResult, folder: Path) -> CompareResult:
    path = folder / "result.mc"
    PrecisionChecker().save(result, path)
    assert [item.name for item in folder.iterdir()] == ["result.mc"]
    return CompareResult.load(path)


# ---- plain fields -------------------------------------------------------------------------------


def every_field(kind: Any, **chosen: Any) -> st.SearchStrategy[Any]:
    """Values for each field, those with defaults included, by its type."""
    names = [field.name for field in dataclasses.fields(kind) if field.name not in chosen]
    return st.builds(kind, **chosen, **dict.fromkeys(names, ...))


st.register_type_strategy(Metrics, every_field(Metrics))
st.register_type_strategy(TensorDiff, every_field(TensorDiff))
st.register_type_strategy(
    ModuleDiff, every_field(ModuleDiff, calls=st.lists(every_field(ModuleDiff, calls=st.just([]))))
)
DTYPES = st.sampled_from([None, torch.bfloat16, torch.float16])


@examples(12)
@given(result=every_field(CompareResult, recordings=st.just([]), cast_dtype=DTYPES))
def test_every_field_comes_back(result: CompareResult, tmp_path_factory: Any) -> None:
    loaded = saved_and_loaded(result, tmp_path_factory.mktemp("saved"))
    assert repr(loaded) == repr(result)  # NaN is not equal to itself, its text is
    assert loaded.judgement == result.judgement
    assert loaded.suspects == result.suspects


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, -0.0, 5e-324])
def test_numbers_come_back_bit_for_bit(number: float, tmp_path: Path) -> None:
    diff = TensorDiff(number, 0.1, number, True, (), Verdict.PASS, Metrics(actual_at=1 + 1j * 2))
    result = CompareResult(number, 1 / 3, [ModuleDiff("m", fwd_output=[diff])])
    loaded = saved_and_loaded(result, tmp_path)
    assert np.float64(loaded.loss_eager).tobytes() == np.float64(number).tobytes()
    assert loaded.loss_compiled == 1 / 3
    assert repr(loaded.diffs) == repr(result.diffs)


# ---- recordings ---------------------------------------------------------------------------------


def failing() -> CompareResult:
    workload = stack("dropout")
    mark(workload.model)
    backend = wrong_backend(forward=add_to_one(1e-2), backward=lambda grad: grad * 2)
    result, _ = checked_step(workload, Block, backend)
    assert result.recordings
    return result


def bits(tensor: Tensor) -> Any:
    return (
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.requires_grad,
        bytes(tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy()),
    )


def test_recording_comes_back(tmp_path: Path) -> None:
    result = failing()
    (old,) = result.recordings
    (new,) = saved_and_loaded(result, tmp_path).recordings
    assert new.module is None
    assert new.kind == "tests.compiled:Block"
    for name in ("name", "fqn", "kind", "index", "training", "sources", "failed", "phases"):
        assert getattr(new, name) == getattr(old, name), name
    for name in ("parameters",):
        assert {k: bits(v) for k, v in getattr(new, name).items()} == {
            k: bits(v) for k, v in getattr(old, name).items()
        }
    assert [bits(grad) for grad in new.grads] == [bits(grad) for grad in old.grads]
    assert list(new.actual) == list(old.actual)
    for key, array in old.actual.items():
        np.testing.assert_array_equal(new.actual[key], array, strict=True)
    assert isinstance(new.backend, UnknownBackend)
    assert new.backend.name == "tests.compiled.wrong_backend.<locals>.backend"


def test_snapshot_comes_back_field_by_field(tmp_path: Path) -> None:
    result = failing()
    old = result.recordings[0].snapshot
    new = saved_and_loaded(result, tmp_path).recordings[0].snapshot
    # of parameters that are not there any more; of the model and the code that a drill-down has
    compared = {"parameter_versions", "attributes", "outer"}
    assert [bits(item) for item in trees.tensors((new.args, new.kwargs))] == [
        bits(item) for item in trees.tensors((old.args, old.kwargs))
    ]
    wants = [
        [side.wants_grad[id(item)] for item in trees.tensors((side.args, side.kwargs))]
        for side in (old, new)
    ]
    assert wants[0] == wants[1] == [True]
    compared |= {"args", "kwargs", "wants_grad"}
    assert {k: bits(v) for k, v in new.buffers.items()} == {
        k: bits(v) for k, v in old.buffers.items()
    }
    assert torch.equal(new.random.torch_cpu, old.random.torch_cpu)
    assert new.random.python == old.random.python
    assert repr(new.random.numpy) == repr(old.random.numpy)
    compared |= {"buffers", "random"}
    for name in ("autocast", "grad_enabled", "inference", "cast_dtype", "unset"):
        assert getattr(new, name) == getattr(old, name), name
        compared.add(name)
    assert compared == {field.name for field in dataclasses.fields(Snapshot)}


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class Cache:
    """An object with tensors in it."""

    def __init__(self) -> None:
        self.kept = [torch.ones(2)]
        self.kind = Cache
        self.device = torch.device("cpu")


def record(*args: Any, module: nn.Module | None = None, **kwargs: Any) -> CompareResult:
    module = module or nn.Linear(2, 2)
    snapshot = Snapshot.take(module, args, kwargs, cast_dtype=None)
    call = RecordedCall.of("part", module, snapshot, failed=[("output", 0)], actual={})
    return CompareResult(math.nan, 1.0, recordings=[call])


def loaded_arguments(
    tmp_path: Path, *args: Any, classes: Any = (), **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (call,) = saved_and_loaded(record(*args, **kwargs), tmp_path).recordings
    names = {f"{kind.__module__}:{kind.__qualname__}": kind for kind in classes}
    found = without_foreign((call.snapshot.args, call.snapshot.kwargs), names)
    assert all(id(item) in call.snapshot.wants_grad for item in trees.tensors(found))
    return found


def test_containers_and_scalars_come_back(tmp_path: Path) -> None:
    given = [1, 1.5, math.inf, 1j, True, None, "text", b"\x00", torch.float16, (1, [2], {3})]
    given += [slice(1, None), torch.Size((2, 3)), torch.device("cpu"), {"a": {"tensor": 1}}]
    args, kwargs = loaded_arguments(tmp_path, *given, key=[])
    assert list(args) == given
    assert list(map(type, args)) == list(map(type, given))
    assert kwargs == {"key": []}


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(24.0).view(4, 6)[1:, ::2],
        lambda: torch.arange(6.0).expand(3, 6),
        lambda: torch.randn(3, 2, dtype=torch.complex64).conj(),
        lambda: torch.randn(3).to(torch.bfloat16),
        lambda: torch.randn(3).to(torch.float8_e4m3fn),
        lambda: torch.tensor(3, dtype=torch.uint16),
        lambda: torch.empty(0, 4),
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ],
    ids=["sliced", "expanded", "conjugated", "bfloat16", "float8", "scalar", "empty", "channels"],
)
def test_tensors_come_back_with_their_strides(make: Callable[[], Tensor], tmp_path: Path) -> None:
    given = make()
    (args, _) = loaded_arguments(tmp_path, given)
    assert bits(args[0]) == bits(given)


def test_tensors_that_share_memory_share_it_again(tmp_path: Path) -> None:
    base = torch.zeros(4)
    (args, _) = loaded_arguments(tmp_path, base, base[1:3], base)
    args[0][1] = 7.0
    assert args[1][0] == 7.0
    assert args[2] is args[0]


def test_objects_come_back_where_their_classes_are_allowed(tmp_path: Path) -> None:
    from transformers.modeling_outputs import BaseModelOutput

    cache = Cache()
    out = BaseModelOutput(last_hidden_state=torch.ones(3))
    (args, kwargs) = loaded_arguments(
        tmp_path, Pair(torch.ones(1), torch.zeros(1)), cache, out, again=cache,
        classes=(Pair, Cache, BaseModelOutput),
    )  # fmt: skip
    assert isinstance(args[0], Pair)
    assert args[0].left == 1.0
    assert torch.equal(args[1].kept[0], torch.ones(2))
    assert args[1].kind is Cache
    assert kwargs["again"] is args[1]
    assert torch.equal(args[2]["last_hidden_state"], torch.ones(3))
    assert list(args[2]) == ["last_hidden_state"]
    assert args[2].to_tuple()[0] is args[2].last_hidden_state


def test_objects_are_not_made_unless_allowed(tmp_path: Path) -> None:
    (call,) = saved_and_loaded(record(Cache()), tmp_path).recordings
    assert isinstance(call.snapshot.args[0], Foreign)
    with pytest.raises(ArgumentError, match=r"--allow-class tests.test_saved_result:Cache, or"):
        without_foreign(call.snapshot.args, {})


def test_all_classes_that_are_missing_are_named_at_once(tmp_path: Path) -> None:
    cache = Cache()
    cache.kept = Pair(torch.ones(1), torch.ones(1))  # type: ignore[assignment]
    (call,) = saved_and_loaded(record([cache]), tmp_path).recordings
    with pytest.raises(ArgumentError) as caught:
        without_foreign(call.snapshot.args, {})
    home = "--allow-class tests.test_saved_result"
    assert f"{home}:Cache {home}:Pair, or" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (torch.eye(2).to_sparse(), "a sparse tensor"),
        (torch.ones(2, device="meta"), "a meta tensor"),
        (lambda: None, "class function"),
        (nn.Linear(1, 1), "class Linear"),
        (np.ones(2), "class ndarray"),
    ],
    ids=["sparse", "meta", "function", "module", "array"],
)
def test_what_has_no_form_in_a_file_is_left_out_and_said(
    value: Any, why: str, tmp_path: Path
) -> None:
    result = record(value)
    result.recordings += failing().recordings
    loaded = saved_and_loaded(result, tmp_path)
    assert [call.name for call in loaded.recordings] == ["blocks.1"]
    (note,) = loaded.notes
    assert "the recorded call of part was left out" in note
    assert why in note
    assert result.notes == []


def test_loop_is_left_out(tmp_path: Path) -> None:
    cache = Cache()
    result = record(1)
    cache.kept.append(cache)  # type: ignore[arg-type]
    call = result.recordings[0]
    call.snapshot.args = (cache,)
    call.snapshot.wants_grad = {id(cache.kept[0]): False}
    assert "holds itself" in saved_and_loaded(result, tmp_path).notes[0]


def test_tied_parameters_stay_tied(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    (call,) = saved_and_loaded(record(torch.ones(1), module=module), tmp_path).recordings
    assert list(call.parameters) == ["0.weight", "0.bias", "1.bias"]


def test_loaded_result_can_be_saved_again(tmp_path: Path) -> None:
    first = saved_and_loaded(failing(), tmp_path)
    again = tmp_path / "again"
    again.mkdir()
    second = saved_and_loaded(first, again)
    assert repr(second) == repr(first)
    assert second.recordings[0].backend == first.recordings[0].backend


# ---- bad files ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good_file(tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("good") / "result.mc"
    failing().save(path)
    return path


def test_cut_files_are_refused(good_file: Path, tmp_path: Path) -> None:
    data = good_file.read_bytes()
    for share in (0.0, 0.01, 0.3, 0.7, 0.99):
        path = tmp_path / "cut"
        path.write_bytes(data[: int(len(data) * share)])
        with pytest.raises(ArgumentError, match="cannot be read as a saved result"):
            CompareResult.load(path)


def test_flipped_bytes_are_refused_or_do_not_matter(good_file: Path, tmp_path: Path) -> None:
    data, path = good_file.read_bytes(), tmp_path / "flipped"
    expected = repr(CompareResult.load(good_file))
    chosen = random.Random(0)
    refused = 0
    for _ in range(150):
        flipped = bytearray(data)
        flipped[chosen.randrange(len(data))] ^= 1 << chosen.randrange(8)
        path.write_bytes(flipped)
        try:
            assert repr(CompareResult.load(path)) == expected
        except ArgumentError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("what", ["missing", "folder", "pickle", "text", "torch.save"])
def test_other_files_are_refused(what: str, tmp_path: Path) -> None:
    path = tmp_path / "other"
    if what == "folder":
        path.mkdir()
    elif what == "pickle":
        path.write_bytes(pickle.dumps(Boom()))
    elif what == "text":
        path.write_text("RESULT: ALL PASS")
    elif what == "torch.save":
        torch.save({"schema": "modulecheck.result"}, path)
    with pytest.raises(ArgumentError, match=r"other: cannot be read as a saved result: \S"):
        CompareResult.load(path)


class Boom:
    def __reduce__(self) -> Any:
        return pytest.fail, ("code of a file was run",)


Edit = Callable[[dict[str, Any]], Any]
LIES: dict[str, Edit] = {
    "schema": lambda i: i.update(schema="opcheck.log"),
    "version": lambda i: i.update(version=99),
    "byteorder": lambda i: i.update(byteorder="middle"),
    "no_result": lambda i: i.pop("result"),
    "field_of_another_type": lambda i: i["result"].update(loss_compiled="1.0"),
    "unknown_field": lambda i: i["result"].update(extra=1),
    "verdict": lambda i: i["result"]["diffs"][0]["calls"][0]["fwd_output"][0].update(verdict="OK"),
    "shape": lambda i: i["tensors"][0].update(shape=[10**6]),
    "huge_shape": lambda i: i["tensors"][0].update(shape=[2**62, 2**62]),
    "stride": lambda i: i["tensors"][0].update(stride=[10**6] * len(i["tensors"][0]["shape"])),
    "negative": lambda i: i["tensors"][0].update(offset=-4),
    "dtype": lambda i: i["tensors"][0].update(dtype="nn"),
    "storage": lambda i: i["tensors"][0].update(storage=10**6),
    "grad_of_integers": lambda i: i["tensors"][0].update(dtype="int32", requires_grad=True),
    "no_such_tensor": lambda i: i["recordings"][0].update(grads=[10**6]),
    "tensor_by_name": lambda i: i["recordings"][0].update(grads=["../../etc"]),
    "argument": lambda i: i["recordings"][0].update(args={"eval": "1"}),
    "random": lambda i: i["recordings"][0]["random"].update(python=[3, [1, 2], None]),
    "numpy": lambda i: i["recordings"][0]["random"].update(numpy=["MT19937", [], 0, 0, 0.0]),
    "deep": lambda i: i["recordings"][0].update(args=nested(100)),
    "key": lambda i: i["recordings"][0].update(failed=[["output"]]),
}


def nested(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = {"list": [found]}
    return found


def rewritten(source: Path, path: Path, edit: Edit, method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w", method) as new:
        for name in old.namelist():
            content = old.read(name)
            if name == "index.json":
                index = json.loads(content)
                edit(index)
                content = json.dumps(index).encode()
            new.writestr(name, content)
    return path


@pytest.mark.parametrize("lie", LIES)
def test_index_that_lies_is_refused(lie: str, good_file: Path, tmp_path: Path) -> None:
    path = rewritten(good_file, tmp_path / "lie", LIES[lie])
    with pytest.raises(ArgumentError, match="cannot be read as a saved result"):
        CompareResult.load(path)


def test_untouched_rewrite_is_read(good_file: Path, tmp_path: Path) -> None:
    path = rewritten(good_file, tmp_path / "same", lambda index: None)
    assert repr(CompareResult.load(path)) == repr(CompareResult.load(good_file))


def test_compressed_members_are_refused(good_file: Path, tmp_path: Path) -> None:
    """A small file must not grow large in memory."""
    path = rewritten(good_file, tmp_path / "bomb", lambda index: None, zipfile.ZIP_DEFLATED)
    with pytest.raises(ArgumentError, match="compressed"):
        CompareResult.load(path)


def test_device_that_is_not_there_leaves_the_call_out(good_file: Path, tmp_path: Path) -> None:
    def elsewhere(index: dict[str, Any]) -> None:
        for row in index["tensors"]:
            row["device"] = "mtia:0"

    loaded = CompareResult.load(rewritten(good_file, tmp_path / "else", elsewhere))
    assert loaded.recordings == []
    assert "recorded on mtia:0, which this machine does not have" in loaded.notes[-1]


# ---- writing ------------------------------------------------------------------------------------


def test_file_that_cannot_be_written_is_said_and_the_old_one_stays(
    good_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kept"
    path.write_bytes(good_file.read_bytes())
    result = CompareResult.load(path)

    def full(*args: Any, **options: Any) -> Any:
        raise OSError("no space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    with pytest.raises(LogWriteError, match="no space left"):
        result.save(path)
    assert path.read_bytes() == good_file.read_bytes()
    assert [item.name for item in tmp_path.iterdir()] == ["kept"]


def test_folders_are_made_and_a_file_in_the_way_is_said(tmp_path: Path) -> None:
    result = CompareResult(1.0, 1.0)
    result.save(tmp_path / "a" / "b" / "result.mc")
    assert CompareResult.load(tmp_path / "a" / "b" / "result.mc") == result
    (tmp_path / "file").write_text("")
    with pytest.raises(LogWriteError, match="cannot be written"):
        result.save(tmp_path / "file" / "result.mc")


def test_saving_changes_nothing(tmp_path: Path) -> None:
    result = failing()
    before = copy.copy(vars(result))
    result.save(tmp_path / "result.mc")
    assert vars(result) == before
