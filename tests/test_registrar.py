"""The registrar as a kernel library calls it: what is registered, checked, logged, and undone."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import opcheck
from opcheck import ArgumentError, ArgumentTypeError, LogWriteError, SkipReason, Verdict
from tests import kernel_library as kernels
from tests.registering import enabled, json_lines, log_lines, logged_ops, registered
from tests.step_equality import active_modes, global_hooks

X = torch.linspace(-2, 2, 6).reshape(2, 3)
WRONG_ADD = ("add.Tensor", kernels.spoiled(kernels.add))


@pytest.fixture(autouse=True)
def switched_off():
    yield
    opcheck.disable_precision_check()


@pytest.fixture
def log(tmp_path) -> Path:
    return tmp_path / "p.log"


def run_library():
    for call in kernels.calls(kernels.make_inputs()).values():
        call()


def checked_of(coverage: opcheck.Coverage) -> dict[str, int]:
    return {count.op: count.checked for count in coverage.calls if count.checked}


# ---- a whole library ----


@pytest.mark.parametrize("criterion", ["allclose", "calibrated"])
def test_correct_library_is_silent_and_every_kernel_is_checked(log, criterion):
    with registered(*kernels.CONFIG) as register, enabled(path=log, criterion=criterion):
        run_library()
    assert register.failed == {}
    assert log_lines(log) == []
    coverage = opcheck.coverage()
    assert coverage.adds_up
    assert (coverage.failed, coverage.errors, coverage.skipped) == (0, 0, {})
    names = {op.removeprefix("aten.").removesuffix(".default") for op in checked_of(coverage)}
    assert names == set(kernels.KERNELS)


@pytest.mark.parametrize("key", kernels.KERNELS)
def test_one_wrong_kernel_is_found_with_its_log_line(log, key):
    config = {**kernels.KERNELS, key: kernels.spoiled(kernels.KERNELS[key])}
    with registered(*config.items()), enabled(path=log):
        run_library()
    assert logged_ops(log) == [key]
    assert opcheck.coverage().errors == 0
    (failure,) = [record for record in json_lines(log) if record["verdict"] == "FAIL"]
    assert failure["reference"] == "cpu kernel"


def test_log_line_is_byte_for_byte_as_documented(log):
    def add(x, y, *, alpha=1):
        return torch.full_like(x, 2.25)

    with registered(("add.Tensor", add)), enabled(path=log):
        torch.ones(2, 3, dtype=torch.float16) + 1
    (line,) = log_lines(log)
    time, rest = line[:19], line[19:]
    assert time[4::3] == "-- ::"
    assert rest.startswith(
        " [WARNING] Op: add.Tensor | FAIL | in: [(2, 3):torch.float16]"
        " | out: (2, 3):torch.float16 | max_abs: 2.500000e-01 | max_rel: 1.250000e-01"
        " | rtol=0.01, atol=0.01 | "
    )
    appended = [field.partition(": ")[0] for field in rest.split(" | ")[7:]]
    assert appended[:4] == ["module", "phase", "step", "index"]


def test_log_can_be_reviewed(log):
    with registered(WRONG_ADD), enabled(path=log):
        X + X
    run = opcheck.load_run(log.with_suffix(".jsonl"))
    assert run.verdict == Verdict.FAIL
    assert [record.op for record in run.records] == ["aten.add.Tensor"]
    assert run.coverage.seen == 1


# ---- what is registered ----


def test_include_checks_those_alone(log):
    config = [("mm", kernels.mm), ("add.Tensor", kernels.add), ("_softmax", kernels.softmax)]
    others = [item for item in kernels.CONFIG if item not in config]
    with (
        registered(*config, *others, user_include_ops=["mm", "add", "softmax"]) as register,
        enabled(path=log),
    ):
        run_library()
    assert sorted(register.get_all_ops()) == ["add", "mm", "softmax"]
    assert set(checked_of(opcheck.coverage())) == {
        "aten.mm.default", "aten.add.Tensor", "aten._softmax.default",
    }  # fmt: skip
    assert opcheck.coverage().seen == opcheck.coverage().checked


@pytest.mark.parametrize("names", [["add", "mm"], ["add.Tensor", "mm"]], ids=["function", "key"])
def test_exclude_leaves_those_to_torch(names):
    with registered(*kernels.CONFIG, user_exclude_ops=names) as register:
        assert not {"add.Tensor", "mm"} & set(register.all_keys)
        assert len(register.all_keys) == len(kernels.CONFIG) - 2
        assert register.get_unused_ops() == names


def test_include_looks_up_functions_by_name_first():
    table = {"add": [("add.Tensor", kernels.add), ("add_.Tensor", kernels.add_, lambda: False)]}
    with registered(
        ("mm", kernels.mm), user_include_ops=["add", "mm"], full_config_by_func=table
    ) as register:
        assert register.all_keys == ["add.Tensor", "mm"]


def test_include_of_nothing_known_is_reported():
    with registered(("mm", kernels.mm), user_include_ops=["mm", "typo"]) as register:
        assert register.all_keys == ["mm"]
        assert "typo" in register.failed


def test_kernels_that_are_patched_in_cpp_are_left_alone():
    with registered(*kernels.CONFIG, cpp_patched_ops=["mm", "add"]) as register:
        assert not {"add.Tensor", "mm"} & set(register.all_keys)


@pytest.mark.parametrize("wanted", [True, False])
def test_condition_decides(wanted):
    with registered(("mm", kernels.mm, lambda: wanted)) as register:
        assert register.all_keys == (["mm"] if wanted else [])


@pytest.mark.parametrize(
    "item",
    [
        ("mul.Tensor", kernels.mul, ("Meta",)),
        ("mul.Tensor", kernels.mul, lambda: True, ("Meta",)),
        ("mul.Tensor", kernels.mul, None, ["Meta"]),
        ("mul.Tensor", kernels.mul, "Meta"),
    ],
)
def test_extra_dispatch_keys_are_registered_too(item):
    with registered(item) as register:
        assert register.all_keys == ["mul.Tensor"]
        assert {"aten/mul.Tensor/CPU", "aten/mul.Tensor/Meta"} <= register.lib._op_impls


def test_extra_keys_of_register_impl(log):
    with registered() as register, enabled(path=log):
        register.register_impl("mul.Tensor", kernels.mul, extra_dispatch_keys=("Meta",))
        assert (X.to("meta") * 2).shape == (2, 3)
        X * 2
        assert opcheck.coverage().checked == 1
        assert opcheck.coverage().skipped == {SkipReason.UNSUPPORTED_TYPE: 1}


def test_registrar_tells_what_it_did():
    with registered(("mm", kernels.mm), ("add.Tensor", kernels.add)) as register:
        assert register.all_ops == register.get_all_ops() == ["mm", "add"]
        assert register.all_keys == register.get_all_keys() == ["mm", "add.Tensor"]
        assert register.get_unused_ops() == []
        assert register.reg_key == "CPU"
        assert register.get_current_device() == "cpu"
        assert register.get_vendor_name() == "cpu"
        assert isinstance(register.lib, torch.library.Library)
        register.for_each()
        assert register.all_ops == ["mm", "add", "mm", "add"]


def test_dispatch_key_may_be_given():
    with registered(("mm", kernels.mm), dispatch_key="Meta") as register:
        assert register.reg_key == "Meta"
        assert register.lib._op_impls == {"aten/mm/Meta"}


@pytest.mark.parametrize(
    ("item", "says"),
    [
        (("no_such_op", kernels.mm), "no op aten::no_such_op"),
        (("add.Tensr", kernels.add), "add.Tensor"),
        (("mm", None), "function"),
        (("mm", kernels.mm, 7), "7"),
        (("mm",), "function"),
        ((7, kernels.mm), "7"),
    ],
)
def test_bad_item_is_reported_with_its_key_and_the_others_register(item, says):
    messages: list[str] = []
    sink = opcheck_messages(messages)
    try:
        with registered(("bmm", kernels.bmm), item, ("neg", kernels.neg)) as register:
            assert register.all_keys == ["bmm", "neg"]
            assert says in register.failed[str(item[0])]
    finally:
        remove(sink)
    assert any(str(item[0]) in message and says in message for message in messages)


def test_bad_extra_key_is_reported_and_the_first_stays():
    with registered(("mm", kernels.mm, ("NoSuchKey",)), ("neg", kernels.neg)) as register:
        assert register.all_keys == ["mm", "neg"]
        assert "NoSuchKey" in register.failed["mm"]


def opcheck_messages(messages: list[str]) -> int:
    from loguru import logger

    return logger.add(messages.append, filter=lambda message: "opcheck" in message["extra"])


def remove(sink: int) -> None:
    from loguru import logger

    logger.remove(sink)


def test_without_a_library_the_error_says_what_to_pass():
    with pytest.raises(ArgumentError, match=r"lib: .*Library\('aten', 'IMPL'\)"):
        opcheck.PrecisionCheckRegister([("mm", kernels.mm)])


def test_parameters_are_those_that_libraries_call():
    assert list(inspect.signature(opcheck.PrecisionCheckRegister).parameters) == [
        "config", "user_include_ops", "user_exclude_ops", "cpp_patched_ops", "lib",
        "full_config_by_func", "dispatch_key",
    ]  # fmt: skip


def test_kernels_of_another_namespace(log):
    torch.library.define("opcheck_test::twice", "(Tensor x) -> Tensor")
    base = torch.library.Library("opcheck_test", "FRAGMENT")
    try:
        base.impl("twice", lambda x: x * 2, "CPU")
        with (
            registered(("twice", lambda x: x * 2.1), namespace="opcheck_test"),
            enabled(path=log),
        ):
            torch.ops.opcheck_test.twice(X)
        (record,) = json_lines(log)
        assert (record["op"], record["verdict"]) == ("opcheck_test.twice.default", "FAIL")
        assert record["reference"] == "cpu kernel"
    finally:
        base._destroy()


# ---- taken off again ----


def test_destroying_the_library_restores_the_original(log):
    right = X + X
    with registered(WRONG_ADD), enabled(path=log):
        assert not torch.equal(X + X, right)
    assert torch.equal(X + X, right)


def test_leaving_scope_restores_the_original():
    right = X + X

    def in_scope() -> torch.Tensor:
        library = torch.library.Library("aten", "IMPL")
        register = opcheck.PrecisionCheckRegister([WRONG_ADD], lib=library)
        assert register.all_keys == ["add.Tensor"]
        return X + X

    assert not torch.equal(in_scope(), right)
    assert torch.equal(X + X, right)


# ---- enable and disable ----


class Counting:
    """A correct `mul` that counts its calls."""

    __name__ = "mul"

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, a, b):
        self.calls += 1
        return kernels.mul(a, b)


def test_disabled_kernel_runs_alone():
    mul = Counting()
    with registered(("mul.Tensor", mul)):
        X * X
    assert mul.calls == 1


def test_disabled_wrapper_adds_one_frame_and_nothing_else():
    checked = opcheck.checked_kernel("mul.Tensor", kernels.mul)
    names: list[str] = []
    sys.setprofile(lambda frame, event, _: event == "call" and names.append(frame.f_code.co_name))
    try:
        checked(X, X)
    finally:
        sys.setprofile(None)
    assert names == ["checked", "mul", "product", "_tensor_like"]


def test_wrapped_while_disabled_checks_once_enabled(log):
    with registered(WRONG_ADD):
        X + X
        with enabled(path=log):
            X + X
        X + X
    assert logged_ops(log) == ["add.Tensor"]
    assert opcheck.coverage().seen == 1


def test_disable_stops_the_second_run(log):
    runs = []
    original = torch.library.get_kernel("aten::mul.Tensor", "CPU")
    with registered(("mul.Tensor", kernels.mul)):
        with enabled(path=log):
            X * X
        assert opcheck.coverage().checked == 1
        opcheck.disable_precision_check()
        X * X
        runs.append(original)
    assert opcheck.coverage().checked == 1
    assert opcheck.coverage().seen == 1


def test_enabled_again_counters_and_settings_are_fresh(tmp_path):
    first, second = tmp_path / "first.log", tmp_path / "second.log"
    with registered(WRONG_ADD):
        with enabled(path=first, rtol=0.5, max_checks=1):
            X + X
            X + X
        assert opcheck.coverage().skipped == {SkipReason.BUDGET_USED_UP: 1}
        with enabled(path=second):
            X + X
    assert log_lines(first) == []
    assert logged_ops(second) == ["add.Tensor"]
    assert (opcheck.coverage().seen, opcheck.coverage().failed) == (1, 1)


def test_enabling_twice_ends_the_first_run(tmp_path):
    with registered(WRONG_ADD):
        opcheck.enable_precision_check(path=tmp_path / "first.log")
        opcheck.enable_precision_check(path=tmp_path / "second.log")
        X + X
        opcheck.disable_precision_check()
    assert log_lines(tmp_path / "first.log") == []
    assert len(json_lines(tmp_path / "first.log", "coverage")) == 1
    assert logged_ops(tmp_path / "second.log") == ["add.Tensor"]


def test_logs_are_appended_to(log):
    with registered(WRONG_ADD):
        for _ in range(2):
            with enabled(path=log):
                X + X
    assert logged_ops(log) == ["add.Tensor"] * 2
    assert len({line["run_id"] for line in json_lines(log, "header")}) == 2


def test_nothing_is_known_before_anything_was_enabled():
    code = "import opcheck; c = opcheck.coverage(); print(c.seen, c.adds_up)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, check=True
    )
    assert done.stdout.split() == [b"0", b"True"]


def test_enabling_installs_neither_mode_nor_hook(log):
    before = len(active_modes()), global_hooks()
    with enabled(path=log):
        assert (len(active_modes()), global_hooks()) == before


DOCUMENTED_DEFAULTS = {
    "rtol": 1e-4, "atol": 1e-5, "max_checks": 10, "log_once": True, "path": None,
    "criterion": "allclose", "large": "skip",
}  # fmt: skip


def test_parameters_and_defaults_are_the_documented_ones():
    parameters = inspect.signature(opcheck.enable_precision_check).parameters
    assert {name: item.default for name, item in parameters.items()} == DOCUMENTED_DEFAULTS
    assert [name for name, item in parameters.items() if item.kind is item.KEYWORD_ONLY] == [
        "criterion",
        "large",
    ]


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("rtol", -1.0, ArgumentError),
        ("atol", math.nan, ArgumentError),
        ("max_checks", -1, ArgumentError),
        ("max_checks", "ten", ArgumentTypeError),
        ("log_once", 1, ArgumentTypeError),
        ("path", 3, ArgumentTypeError),
        ("criterion", "close", ArgumentError),
    ],
)
def test_bad_argument_changes_nothing(log, field, value, error):
    with registered(WRONG_ADD), enabled(path=log):
        with pytest.raises(error, match=field):
            opcheck.enable_precision_check(**{field: value})
        X + X
    assert logged_ops(log) == ["add.Tensor"]


def test_unwritable_log_is_an_error_that_names_the_path(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(LogWriteError, match=r"path: cannot write .*p\.log"):
        opcheck.enable_precision_check(path=tmp_path / "file" / "p.log")


# ---- every parameter has its effect ----


@pytest.mark.parametrize(
    ("options", "fails"),
    [
        ({}, True),
        ({"rtol": 0.02}, False),
        ({"atol": 0.1}, False),
        ({"rtol": 1e-3, "atol": 1e-3}, True),
    ],
)
def test_tolerances(log, options, fails):
    with registered(WRONG_ADD), enabled(path=log, **options):
        X + X
    assert logged_ops(log) == (["add.Tensor"] if fails else [])


@pytest.mark.parametrize(("max_checks", "checked"), [(0, 0), (3, 3), (10, 10), (None, 14)])
def test_max_checks_counts_an_op_whatever_its_dtypes(log, max_checks, checked):
    with registered(("mul.Tensor", kernels.mul)), enabled(path=log, max_checks=max_checks):
        for _ in range(7):
            X * X
            X.double() * X.double()
    coverage = opcheck.coverage()
    assert (coverage.seen, coverage.checked) == (14, checked)
    assert coverage.skipped.get(SkipReason.BUDGET_USED_UP, 0) == 14 - checked


def test_budget_is_for_each_op(log):
    with registered(*kernels.CONFIG), enabled(path=log, max_checks=2):
        for _ in range(3):
            X * X
            X - X
    assert checked_of(opcheck.coverage()) == {"aten.mul.Tensor": 2, "aten.sub.Tensor": 2}


def test_log_once_ends_the_checks_of_an_op(log):
    with registered(WRONG_ADD), enabled(path=log):
        for _ in range(5):
            X + X
    assert logged_ops(log) == ["add.Tensor"]
    assert opcheck.coverage().skipped == {SkipReason.ALREADY_LOGGED: 4}


def test_without_log_once_every_failure_is_logged(log):
    with registered(WRONG_ADD), enabled(path=log, log_once=False, max_checks=4):
        for _ in range(6):
            X + X
    assert logged_ops(log) == ["add.Tensor"] * 4
    assert opcheck.coverage().skipped == {SkipReason.BUDGET_USED_UP: 2}


def test_criterion_calibrated_finds_what_allclose_tolerates(tmp_path):
    def add(a, b, *, alpha=1):
        return kernels.scaled_sum(kernels.add(a, b, alpha=alpha), 5e-5)

    for criterion, fails in (("allclose", []), ("calibrated", ["add.Tensor"])):
        log = tmp_path / f"{criterion}.log"
        with registered(("add.Tensor", add)), enabled(path=log, criterion=criterion):
            X + X
        assert logged_ops(log) == fails
        assert {record["criterion"] for record in json_lines(log)} == {criterion}


def test_default_path_is_in_logs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with registered(WRONG_ADD), enabled():
        X + X
    assert logged_ops(tmp_path / "logs" / "precision.log") == ["add.Tensor"]
    assert len(json_lines(tmp_path / "logs" / "precision.log")) == 1


def test_path_may_be_in_the_home_folder_or_without_suffix(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with registered(WRONG_ADD), enabled(path="~/checks/mine"):
        X + X
    assert logged_ops(tmp_path / "checks" / "mine") == ["add.Tensor"]
    assert len(json_lines(tmp_path / "checks" / "mine")) == 1


def test_text_log_that_is_called_jsonl_keeps_its_lines_apart(tmp_path):
    log = tmp_path / "p.jsonl"
    with registered(WRONG_ADD), enabled(path=log):
        X + X
    assert logged_ops(log) == ["add.Tensor"]
    assert (tmp_path / "p.jsonl.jsonl").exists()


@pytest.mark.parametrize("path", [None, "mine.log"])
def test_each_rank_has_its_own_files(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with registered(WRONG_ADD):
        for rank in (0, 1):
            monkeypatch.setenv("RANK", str(rank))
            with enabled(path=path):
                X + X
    stem = tmp_path / "logs" / "precision" if path is None else tmp_path / "mine"
    for rank in (0, 1):
        log = Path(f"{stem}.rank{rank}.log")
        assert logged_ops(log) == ["add.Tensor"]
        assert [record["rank"] for record in json_lines(log)] == [rank]


def test_a_process_that_ends_while_enabled_writes_its_coverage(log):
    code = (
        "import sys, torch, opcheck; from tests import kernel_library as k;"
        "lib = torch.library.Library('aten', 'IMPL');"
        "opcheck.PrecisionCheckRegister([('mm', k.spoiled(k.mm))], lib=lib);"
        "opcheck.enable_precision_check(path=sys.argv[1]); torch.ones(2, 2) @ torch.ones(2, 2)"
    )
    root = Path(__file__).parents[1]
    subprocess.run(
        [sys.executable, "-c", code, str(log)], cwd=root, capture_output=True, check=True
    )
    assert logged_ops(log) == ["mm"]
    assert [line["seen"] for line in json_lines(log, "coverage")] == [1]
