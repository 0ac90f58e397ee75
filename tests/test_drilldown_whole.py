"""The whole way: a step with a wrong compiler, its result, here or in a file, the culprit."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modulecheck import CompareResult, PrecisionChecker
from modulecheck.budget import Budget
from modulecheck.call_repro import write_call_repro
from modulecheck.cli import main
from modulecheck.culprit import Culprit
from modulecheck.drilldown import NoReproducer
from modulecheck.recording import RecordedCall
from modulecheck.snapshot import Snapshot
from tests.compiled import DYNAMO_WARNS, needs_compiler, real_model
from tests.hanging import HANGS_S
from tests.models import Workload
from tests.step_equality import capture, differences

pytestmark = [
    DYNAMO_WARNS,
    needs_compiler,
    pytest.mark.slow,
    pytest.mark.usefixtures("fresh_dynamo"),
]
ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def wrong_lowering(op: Any, relative: float = 1e-3) -> Iterator[None]:
    """Inductor's code for an op is off by a share."""
    from torch._inductor.lowering import lowerings, mul

    right = lowerings[op]
    lowerings[op] = lambda *args, **kwargs: mul(right(*args, **kwargs), 1 + relative)
    try:
        with torch._inductor.config.patch(fx_graph_cache=False):
            yield
    finally:
        lowerings[op] = right


def step_with_optimizer(workload: Workload) -> Tensor:
    return workload.step(torch.optim.SGD(workload.model.parameters(), lr=0.5))


def test_from_a_step_to_the_op_after_the_optimizer_and_nothing_is_left_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build, block = real_model("gpt2")
    workload = build()
    assert len([m for m in workload.model.modules() if isinstance(m, block)]) == 2
    checker = PrecisionChecker(backend="inductor")
    checker.wrap_by_policy(workload.model, block)
    with wrong_lowering(torch.ops.aten.tanh.default):
        with checker.installed(workload.model):
            loss = step_with_optimizer(workload)
        result = checker.collect(loss)
        assert str(result.verdict) == "FAIL"

        hidden = torch.compile(lambda x: x + 1, backend="eager")
        hidden(torch.ones(2))
        torch.manual_seed(3)
        before = capture(workload, loss)
        config = torch._inductor.config.save_config_portable()
        counters = {name: dict(counts) for name, counts in torch._dynamo.utils.counters.items()}
        culprits = checker.drilldown(result, repro_dir=tmp_path / "repro")
        assert torch._inductor.config.save_config_portable() == config
        assert {n: dict(c) for n, c in torch._dynamo.utils.counters.items()} == counters
        with torch.compiler.set_stance("fail_on_recompile"):
            hidden(torch.ones(2))  # still compiled
        assert not differences(before, capture(workload, loss))

    assert {culprit.stage for culprit in culprits} == {"inductor"}
    assert {culprit.op for culprit in culprits} == {"aten.tanh.default"}
    assert {(culprit.module, culprit.phase) for culprit in culprits} >= {
        ("transformer.h.0.mlp.act", "forward"),
        ("transformer.h.1.mlp.act", "forward"),
        ("transformer.h.0.mlp.act", "backward"),
    }
    assert all("in forward" in culprit.source for culprit in culprits)
    assert all(culprit.kernel.startswith("cpp_fused") for culprit in culprits)
    checker.report(result)
    section = capsys.readouterr().out.partition("DRILL-DOWN")[2]
    assert "aten.tanh.default" in section

    script = Path(culprits[0].repro)
    assert script.parent == tmp_path / "repro"
    plant = tmp_path / "plant.py"
    plant.write_text(
        "import torch\nfrom torch._inductor.lowering import lowerings, mul\n"
        "op = torch.ops.aten.tanh.default\nright = lowerings[op]\n"
        "lowerings[op] = lambda x: mul(right(x), 1.001)\n"
        "torch._inductor.config.fx_graph_cache = False\n"
    )
    alone = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(script)], env={**alone, "REPRO_LOAD": str(plant)}, cwd=tmp_path,
        capture_output=True, text=True, timeout=HANGS_S, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr


NET = """
import torch
from torch import nn
from torch._inductor.lowering import lowerings, mul

op = torch.ops.aten.erf.default
right = lowerings[op]


def wrong(x):
    # only in code for shapes that vary, which a later call gets
    varies = any(not str(size).isdigit() for size in x.get_size())
    return mul(right(x), 1.001) if varies else right(x)


lowerings[op] = wrong
torch._inductor.config.fx_graph_cache = False


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.block = nn.Linear(8, 16), Block()

    def forward(self, x):
        return self.block(self.inp(x)).square().mean()


def build():
    return Net()
"""

STEP = """
import torch
from modulecheck import PrecisionChecker
from net import Block, build

torch.manual_seed(0)
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
checker = PrecisionChecker(backend="inductor")
checker.wrap_by_policy(model, Block)
with checker.installed(model):
    loss = model(torch.randn(4, 8)) + model(torch.randn(6, 8))
    loss.backward()
    optimizer.step()
result = checker.collect(loss)
checker.save(result, "result.mc")
print([(call.name, call.index) for call in result.recordings])
"""


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=HANGS_S,
        check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_fault_of_a_later_call_is_found_in_a_fresh_process_from_an_empty_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there, empty = tmp_path / "there", tmp_path / "empty"
    there.mkdir()
    empty.mkdir()
    (there / "net.py").write_text(NET)
    (there / "step.py").write_text(STEP)
    done = run(there, "step.py")
    assert done.stdout == "[('block', 1)]\n", done.stderr

    command = ["-m", "modulecheck", "drilldown", "../there/result.mc", "--repro-dir", "-"]
    done = run(empty, *command, "--model", "../there/net.py:build")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr == ""  # no progress in a log
    number = 1 + next(n for n, text in enumerate(NET.split("\n")) if "gelu" in text)
    assert "aten.erf.default" in done.stdout
    assert f"net.py:{number} in forward" in done.stdout
    assert list(empty.iterdir()) == []

    assert main(["drilldown", str(there / "result.mc")]) == 2
    assert "--model package.module:factory" in capsys.readouterr().err


def test_passing_result_has_status_0_and_an_open_one_3(tmp_path: Path) -> None:
    from modulecheck import ModuleDiff, TensorDiff

    right = ModuleDiff("m", fwd_output=[TensorDiff(0, 0, 0, True, (1,))])
    wrong = ModuleDiff("m", fwd_output=[TensorDiff(1, 1, 1, False, (1,))])
    for status, diff in ((0, [right]), (3, [wrong]), (3, [])):
        CompareResult(1.0, 1.0, diff).save(tmp_path / "result.mc")
        assert main(["drilldown", str(tmp_path / "result.mc")]) == status
    assert main(["drilldown", str(tmp_path / "no_such_file")]) == 2
    assert main(["drilldown", str(tmp_path / "result.mc"), "--budget", "-1"]) == 2


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.gelu(self.up(hidden))


def test_two_pass_results_can_be_followed_too() -> None:
    model = nn.Sequential(Small(), nn.Linear(8, 1))
    checker = PrecisionChecker(backend="inductor", single_pass=False)
    checker.wrap(model[0])
    with wrong_lowering(torch.ops.aten.erf.default):
        result = checker.compare(lambda net: net(torch.ones(3, 4)).sum(), model)
        (culprit,) = checker.drilldown(result, repro_dir=None)
    assert (culprit.module, culprit.phase, culprit.op) == ("0", "forward", "aten.erf.default")
    assert culprit.repro == ""


def test_graph_that_does_not_show_the_fault_is_not_written(tmp_path: Path) -> None:
    module = Small()
    snapshot = Snapshot.take(module, (torch.ones(3, 4),), {}, cast_dtype=None)
    call = RecordedCall.of(
        "", module, snapshot, failed=[("output", 0)], actual={}, backend="aot_eager"
    )
    culprit = Culprit(module="", phase="forward", stage="aot_eager")
    with pytest.raises(NoReproducer, match="gives right results"):
        write_call_repro(tmp_path, call, [culprit], Budget())
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(NoReproducer, match="budget"):
        write_call_repro(tmp_path, call, [culprit], Budget(compiles=1))


def test_clean_model_gives_no_culprit() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    checker = PrecisionChecker(backend="inductor")
    checker.wrap(model[0])
    with checker.installed(model):
        loss = model(torch.ones(3, 4)).sum()
    result = checker.collect(loss)
    assert checker.drilldown(result) == []
