"""A drill-down that is cut short or cannot write: nothing of it is left, and it is said."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from modulecheck import CompareResult, PrecisionChecker
from modulecheck.call_repro import write_call_repro
from tests.compiled import DYNAMO_WARNS
from tests.cutting import Cut
from tests.test_abuse_disk import room_for
from tests.test_abuse_interrupts import NEVER, of_module, places, surroundings

pytestmark = [DYNAMO_WARNS, pytest.mark.usefixtures("fresh_dynamo")]


def spoiled(graph: fx.GraphModule, _: Any) -> Any:
    """A backend under which every product is off by a thousandth."""

    def run(*args: Any) -> Any:
        return [out * 1.001 if isinstance(out, Tensor) else out for out in graph(*args)]

    return run


def failing(width: int = 8) -> tuple[PrecisionChecker, CompareResult, nn.Module]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Sequential(nn.Linear(width, width), nn.Tanh()), nn.Linear(width, 4))
    checker = PrecisionChecker(backend=spoiled)
    checker.wrap_all_children(net, depth=0)
    checker.install(net)
    loss = net(torch.randn(4, width)).square().sum()
    loss.backward()
    result = checker.collect(loss)
    assert str(result.verdict) == "FAIL"
    return checker, result, net


def all_around() -> dict[str, Any]:
    return {
        **surroundings(),
        "inductor": torch._inductor.config.save_config_portable(),
        "dynamo": torch._dynamo.config.save_config_portable(),
        "generators": (torch.get_rng_state().numpy().tobytes(), random.getstate()),
        "counters": {name: dict(counts) for name, counts in torch._dynamo.utils.counters.items()},
        "default dtype": torch.get_default_dtype(),
        "compiler": torch._C._dynamo.eval_frame.get_eval_frame_callback(),  # noqa: TID251 - from outside
    }


def drill(checker: PrecisionChecker, result: CompareResult, folder: Path) -> list[Any]:
    return checker.drilldown(result, repro_dir=folder, progress=False)


def complete(folder: Path) -> bool:
    """Nothing but whole reproducers: scripts, and tensors beside a script."""
    found = list(folder.iterdir()) if folder.exists() else []
    scripts = {path.stem for path in found if path.suffix == ".py"}
    return all(path.suffix in (".py", ".pt") and path.stem in scripts for path in found)


@pytest.mark.slow
def test_ctrl_c_anywhere_in_a_drilldown(tmp_path: Path) -> None:
    checker, result, net = failing()
    for number in range(2):
        cut = Cut(NEVER)
        culprits = cut.run(drill, checker, result, tmp_path / f"whole{number}")
        assert any(item.repro for item in culprits), culprits
    before, shape = all_around(), of_module(net)
    values = {name: item.clone() for name, item in net.state_dict().items()}
    for at in places(cut.count, 10):
        cut, folder, reached = Cut(at), tmp_path / f"{at}", False
        found: list[Any] = []
        try:
            found = cut.run(drill, checker, result, folder)
        except KeyboardInterrupt:
            reached = True
        now = all_around()
        assert {key for key in now if now[key] != before[key]} == set(), (at, cut.where)
        assert of_module(net) == shape, cut.where
        assert all(torch.equal(values[name], item) for name, item in net.state_dict().items())
        assert complete(folder), (at, cut.where, list(folder.iterdir()))
        named = {Path(item.repro) for item in found if item.repro}
        written = set(folder.glob("*.py")) if folder.exists() else set()
        if not reached:
            assert named <= written, (at, cut.where)  # one more if it came after it had shown it
            said = any("interrupt" in f"{item.explanation}{item.not_reached}" for item in found)
            assert said or cut.was_dropped or not cut.where, (at, cut.where, found)
    assert any(item.repro for item in drill(checker, result, tmp_path / "after"))


def test_a_full_disk_costs_the_reproducer_alone(tmp_path: Path) -> None:
    checker, result, _ = failing(width=64)  # its tensors are in a file of their own
    drill(checker, result, tmp_path / "whole")
    sizes = sorted(path.stat().st_size for path in (tmp_path / "whole").iterdir())
    assert len(sizes) > 1
    for room in (0, 1, sizes[0] - 1, sizes[-1] // 2, sizes[-1] - 1):
        folder = tmp_path / f"room{room}"
        with room_for(room):
            culprits = drill(checker, result, folder)
        assert any(item.reproduced for item in culprits)
        shown = [item for item in culprits if item.reproduced and not item.repro]
        assert any("no reproducer" in item.not_reached for item in shown), room
        assert complete(folder), (room, list(folder.iterdir()))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_script_that_was_not_seen_to_show_the_fault_does_not_stay(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker, result, _ = failing()

    def stopped(*_: Any, **__: Any) -> bool:
        raise error("while it is tried")

    monkeypatch.setattr(f"{write_call_repro.__module__}._shows", stopped)
    culprits = drill(checker, result, tmp_path / "repro")
    assert any("no reproducer" in item.not_reached for item in culprits)
    assert not any(item.repro for item in culprits)
    assert list((tmp_path / "repro").iterdir()) == []
