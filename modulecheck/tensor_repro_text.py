"""Two tensors that differ, as a file: the code of both sides, or what they gave."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn

from modulecheck.call_graphs import CapturedGraph
from modulecheck.fx_text import GraphText, spell_graph
from modulecheck.tensor_values import bits_of
from opcheck.packing import Packed, View, map_tree, pack
from opcheck.repro_limits import Limit
from opcheck.repro_tensors import Tensors, identifier, spell_value
from opcheck.repro_text import frame
from opcheck.runstate import RunState

__all__ = ["Sides", "Text", "recorded_text", "sides_text"]

Text = tuple[str, dict[str, Tensor]]
"""Of the Python file, and what goes into the file beside it."""

_SIDES = ("expected", "actual")
_OWN_OPS = ("aten", "prims", "inductor", "prim", "higher_order", "quantized", "rngprims")


@dataclass(slots=True)
class Sides:
    """The graph of one module call on each side, the reference first."""

    graphs: tuple[CapturedGraph, CapturedGraph]
    states: tuple[RunState, RunState]
    device: str
    _texts: list[GraphText] = field(default_factory=list)
    _held: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Spell both graphs.

        Raises:
            ReproError: one calls something that no other process can import.
        """
        for side, captured in zip(_SIDES, self.graphs, strict=True):
            name = f"{side.capitalize()}Side"
            self._texts.append(spell_graph(captured.graph, name, constant=self._constant))

    def _constant(self, tensor: Tensor) -> str:
        for place, item in enumerate(self._held):
            if item is tensor:
                return f"held[{place}]"
        self._held.append(tensor)
        return f"held[{len(self._held) - 1}]"

    @property
    def classes(self) -> list[str]:
        """Source of both."""
        return [text for side in self._texts for text in side.classes]

    @property
    def imports(self) -> list[str]:
        """Statements that the classes need."""
        return list(dict.fromkeys(line for side in self._texts for line in side.imports))

    @property
    def tree(self) -> dict[str, Any]:
        """Everything that has to be saved."""
        expected, actual = (list(item.inputs) for item in self.graphs)
        given = {"expected": expected, "actual": [_shared(item, expected) for item in actual]}
        rng = {f"{side}_rng": item.random_state for side, item in self._pairs()}
        held = [item.data if isinstance(item, nn.Parameter) else item for item in self._held]
        return {**given, **rng, "held": held}

    def _pairs(self) -> list[tuple[str, CapturedGraph]]:
        return list(zip(_SIDES, self.graphs, strict=True))

    def names(self, packed: Packed) -> dict[View, str]:
        """What the file calls each tensor."""
        tree, names = packed.tree, dict[View, str]()
        for side, captured in self._pairs():
            nodes = [node.name for node in captured.graph.graph.nodes if node.op == "placeholder"]
            pairs = [*zip(nodes, tree[side], strict=True), ("random_state", tree[f"{side}_rng"])]
            for name, view in pairs:
                if isinstance(view, View):
                    names.setdefault(view, identifier(f"{side}_{name}"))
        for place, view in enumerate(tree["held"]):
            names.setdefault(view, f"constant_{place}")
        return names


def _shared(item: Any, others: Sequence[Any]) -> Any:
    """The very tensor of the other side where that holds the same bits: it is written once."""
    if isinstance(item, Tensor):
        for other in others:
            if isinstance(other, Tensor) and _same(item, other):
                return other
    return item


def _same(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape, one.stride()) != (other.dtype, other.shape, other.stride()):
        return False
    return bool(np.array_equal(bits_of(one.detach().cpu()), bits_of(other.detach().cpu())))


def _libraries(classes: Sequence[str]) -> str:
    """Whose ops the code calls: `torch.ops.mine`, comma-separated; "" for torch's own alone."""
    found = re.findall(r"\btorch\.ops\.(\w+)", "\n".join(classes))
    return ", ".join(dict.fromkeys(f"torch.ops.{x}" for x in found if x not in _OWN_OPS))


def sides_text(sides: Sides, facts: Mapping[str, str], limits: Sequence[Limit]) -> Text:
    """The file that runs both graphs.

    Args:
        sides: with their inputs.
        facts: for its head.
        limits: one for each output.
    """
    packed = pack(map_tree(sides.tree, _detached))
    names = sides.names(packed)
    tensors = Tensors(packed, names, limits)

    def spell(value: Any) -> str:
        return spell_value(value, names.__getitem__)

    tree = packed.tree
    lines = [
        "def tensors(device, wide):",
        '    """Inputs and random state of each side, and what the graphs hold."""',
        *(f"    {line}" for line in tensors.view_lines()),
        *(f"    {side} = {spell(tree[side])}, {spell(tree[f'{side}_rng'])}" for side in _SIDES),
        f"    return expected, actual, {spell(tree['held'])}",
    ]
    contexts = [", ".join(state.contexts()) for state in sides.states]
    run = _RUN.replace("<expected>", contexts[0]).replace("<actual>", contexts[1])
    libraries = _libraries(sides.classes)
    needs = {"needs": f"the library that defines {libraries} (--load)"} if libraries else {}
    text = frame(
        title="Two implementations of a module that differ on the same inputs.",
        facts={**facts, **needs}, state=sides.states[1], tensors=tensors,
        body=[*sides.classes, "\n".join(lines), _HELD, run],
        main=_MAIN.replace("<device>", repr(sides.device)).replace("<compared>", _RUN_BOTH),
        imports=sides.imports,
    )  # fmt: skip
    return text, tensors.saved


def recorded_text(
    inputs: Mapping[str, Tensor],
    pair: tuple[Tensor, Tensor],
    facts: Mapping[str, str],
    limit: Limit,
    device: str = "cpu",
) -> Text:
    """The file that holds what both sides gave.

    Args:
        inputs: of the reference, by tag.
        pair: expected, actual.
        facts: for its head.
        limit: by which they are judged.
        device: where code that is put into the file gets its inputs.
    """
    packed = pack(map_tree({"inputs": dict(inputs), "pair": list(pair)}, _detached))
    expected, actual = packed.tree["pair"]
    names: dict[View, str] = {expected: "expected", actual: "actual"}
    for place, view in enumerate(packed.tree["inputs"].values()):
        names[view] = f"input_{place}"
    tensors = Tensors(packed, names, [limit])
    given = (f"{tag!r}: {names[view]}" for tag, view in packed.tree["inputs"].items())
    lines = [
        "def recorded(device, wide):",
        '    """Inputs of the reference by tag, the tensor it gave, and the other side\'s."""',
        *(f"    {line}" for line in tensors.view_lines()),
        f"    return {{{', '.join(given)}}}, expected, actual",
    ]
    text = frame(
        title="Recorded tensors of two implementations that differ; no code of either.",
        facts=facts, state=RunState.now(), tensors=tensors, body=["\n".join(lines), _COMPUTE],
        main=_MAIN.replace("<device>", repr(device)).replace("<compared>", _TAKE_BOTH),
    )  # fmt: skip
    return text, tensors.saved


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


_HELD = '''\
def constants(device, wide):
    """What the graphs hold beside their inputs."""
    return tensors(device, wide)[2]'''

_RUN = '''\
def run(model, given, random_state):
    """Outputs of a graph."""
    if random_state is not None:
        torch.set_rng_state(random_state)
    return results(model(*given))


def expected_side():
    """What the reference gives."""
    with <expected>:
        return run(ExpectedSide(DEVICE, False), *tensors(DEVICE, False)[0])


def actual_side():
    """What the other side gives: a fix goes into `ActualSide`."""
    with <actual>:
        return run(ActualSide(DEVICE, False), *tensors(DEVICE, False)[1])'''

_COMPUTE = '''\
def compute(inputs, actual):
    """What is judged: as it was recorded, until code takes its place."""
    # --- compute the tensor from the inputs here, to see whether a fix gives what is expected ---
    return actual'''

_RUN_BOTH = "expected, actual = expected_side(), actual_side()"
_TAKE_BOTH = """\
inputs, expected, actual = recorded(DEVICE, False)
    expected, actual = [expected], [compute(inputs, actual)]"""

_MAIN = '''\
DEVICE = <device>


def main(argv=None):
    """Compare both sides; 1 if they differ."""
    global DEVICE
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default=DEVICE)
    DEVICE = parser.parse_args(argv).device
    configure()
    kernels = load_kernels()  # they stay as long as this name
    <compared>
    del kernels
    return verdict(limits(), actual, expected, expected)'''
