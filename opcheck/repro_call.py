"""A failing call as a reproducer: its arguments, the op, the op in float64, and the limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opcheck import _torch
from opcheck.calls import OpTraits
from opcheck.golden_rules import wider
from opcheck.kernel_table import kernels
from opcheck.outside import outside_everything
from opcheck.packing import Packed, View, tree_items
from opcheck.records import Metrics
from opcheck.repro_limits import Limit, limits_of
from opcheck.repro_tensors import Tensors, identifier, spell_value
from opcheck.repro_text import Registered, frame
from opcheck.rerun import Again, KeptCall

__all__ = ["Script", "script_of"]

_CHANGED = "was changed, which the schema does not allow"
_SHARED = "a result shares memory with argument"


@dataclass(frozen=True, slots=True)
class Script:
    """A reproducer before it is written."""

    text: str
    tensors: Mapping[str, Tensor]


@dataclass(slots=True)
class _Writer:
    """Names and spellings of one call."""

    kept: KeptCall
    arguments: Packed
    again: Again
    tensors: Tensors
    views: dict[int, View]
    """Id of a tensor of the call -> its view."""
    limits: list[Limit]
    takes_device: bool = False

    # ---- functions of the file ----

    def parameters(self) -> str:
        device = ["device"] if self.takes_device else []
        return ", ".join([*device, *self.tensors.names.values()])

    def inputs_function(self) -> str:
        lines = [
            "def inputs(device, *, wide=False):",
            '    """The tensors that the op got; with `wide`, in float64."""',
            *(f"    {line}" for line in self.tensors.view_lines()),
        ]
        given = ["device"] if self.takes_device else []
        names = ", ".join([*given, *self.tensors.names.values()])
        return "\n".join([*lines, f"    return [{names}]"])

    def call_function(self) -> str:
        args, kwargs = self.arguments.tree
        spelled = [spell_value(value, self.tensors.names.__getitem__) for value in args]
        spelled += [
            f"{name}={spell_value(value, self.tensors.names.__getitem__)}"
            for name, value in kwargs.items()
        ]
        lines = [
            f"def call({self.parameters()}):",
            '    """The op: its results, then what it wrote to."""',
            f"    out = torch.ops.{self.kept.traits.name}({', '.join(spelled)})",
            f"    return {self._results()}",
        ]
        return "\n".join(lines)

    def reference_function(self) -> str:
        bound, origins, alive = self.again.reference.golden_arguments()
        params = self.kept.traits.params
        spelled = []
        for place, param in enumerate(params):
            if param.name not in bound:
                continue
            text = self._golden(param.name, bound[param.name], origins)
            is_gap = any(other.name not in bound for other in params[:place])
            spelled.append(f"{param.name}={text}" if param.kwarg_only or is_gap else text)
        del alive
        lines = [
            f"def reference({self.parameters()}):",
            '    """The op on the same values in float64, by torch\'s own kernel."""',
            f"    out = torch.ops.{self.kept.traits.name}({', '.join(spelled)})",
            f"    return {self._results()}",
        ]
        return "\n".join(lines)

    def _golden(self, name: str, value: Any, origins: dict[int, Tensor]) -> str:
        if isinstance(value, list):
            return f"[{', '.join(self._golden(name, item, origins) for item in value)}]"
        if not isinstance(value, Tensor):
            return spell_value(value, self.tensors.names.__getitem__)
        origin = origins.get(id(value))
        if origin is None:
            return self.tensors.constant(f"reference_{name}", value)
        text = self.tensors.names[self.views[id(origin)]]
        return text if value.dtype == wider(origin.dtype) else f"{text}.to({value.dtype})"

    def _results(self) -> str:
        traits = self.kept.traits
        given = traits.bound(*self.arguments.tree)
        spell = self.tensors.names.__getitem__
        written = [
            spell_value(value, spell)
            for param, value in given
            if param.mutated and value is not None
        ]
        reason = self.kept.record.reason
        tensors = [
            spell_value(value, spell)
            for param, value in given
            if not param.mutated and any(isinstance(item, View) for item in tree_items(value))
        ]
        if _CHANGED in reason:
            written += tensors
        text = f"results(out, [{', '.join(written)}])" if written else "results(out)"
        if reason.startswith(_SHARED):
            text += f" + [shares_memory(out, [{', '.join(tensors)}])]"
        return text

    def extra_limits(self) -> list[Limit]:
        """Of what `_results` adds for kernels that touch what is not theirs."""
        reason = self.kept.record.reason
        if reason.startswith(_SHARED):
            return [{"name": "a result shares memory with an argument", "rule": "exact"}]
        if _CHANGED not in reason:
            return []
        return [
            {"name": f"argument {param.name!r} after the call", "rule": "exact"}
            for param, value in self.kept.traits.bound(*self.arguments.tree)
            if not param.mutated
            for item in tree_items(value)
            if isinstance(item, View)
        ]

    def main_function(self) -> str:
        has_baseline = self.again.reference.has_baseline
        own_namespace = not self.kept.traits.name.startswith(("aten.", "prims."))
        contexts = ", ".join(self.kept.state.contexts())
        beside = 'call(*inputs("cpu"))' if has_baseline else "[None] * len(expected)"
        references = [
            "    with torch.no_grad():",
            '        expected = reference(*inputs("cpu", wide=True))',
            f"        beside = {beside}",
        ]
        kernels = ["    kernels = load_kernels()  # they stay as long as this name"]
        lines = [
            "def main(argv=None):",
            '    """Compare the op with its reference; 1 if the fault is there."""',
            "    parser = argparse.ArgumentParser()",
            f"    parser.add_argument('--device', default={self.kept.device!r})",
            "    device = parser.parse_args(argv).device",
            "    configure()",
            *(kernels + references if own_namespace else references + kernels),
            f"    with {contexts}:",
            "        actual = call(*inputs(device))",
            "    del kernels",
            "    return verdict(limits(), actual, expected, beside)",
        ]
        return "\n".join(lines)

    # ---- the head ----

    def facts(self, shrunk: str) -> dict[str, str]:
        record = self.kept.record
        where = f"{record.phase}, step {record.step}, call {record.index}, rank {record.rank}"
        facts = {
            "op": record.op,
            "module": record.module or "<root>",
            "where": f"{where}, run {record.run_id}",
            "source": record.source,
            "reason": record.reason,
            "metrics": _spell_metrics(record.metrics),
            "inputs": ", ".join(record.inputs),
            "shrunk": shrunk,
            "judged by": f"{record.criterion}, reference: {record.reference}",
            "notes": "; ".join(record.notes),
        }
        return {name: text for name, text in facts.items() if text}

    def text(self, shrunk: str) -> str:
        registered = registrations(self.kept.traits, self.kept.device)
        record = self.kept.record
        body = [self.inputs_function(), self.call_function(), self.reference_function()]
        if record.reason.startswith(_SHARED):
            body.append(_SHARES_MEMORY)
        return frame(
            title=f"{record.op} in {record.module or 'no module'} gives a wrong result.",
            facts=self.facts(shrunk),
            state=self.kept.state,
            tensors=self.tensors,
            body=body,
            main=self.main_function(),
            registered=registered,
        )


_SHARES_MEMORY = '''\
def shares_memory(out, inputs):
    """True when a result lies in the memory of an argument."""
    taken = {item.untyped_storage().data_ptr() for item in leaves(inputs)}
    return any(item.untyped_storage().data_ptr() in taken for item in leaves(out))'''


def _spell_metrics(metrics: Metrics) -> str:
    return (
        f"max_abs {metrics.max_abs:.3g}, mean_abs {metrics.mean_abs:.3g},"
        f" max_rel {metrics.max_rel:.3g}, q {metrics.q:.3g},"
        f" {metrics.num_out} of {metrics.num_elements} elements out"
    )


def registrations(traits: OpTraits, device: str) -> list[Registered]:
    """Kernels in force that are not torch's own: of the op, and of any that it may call."""
    table = kernels()
    found = []
    for name in sorted({traits.qualified, *table.overridden}):
        for kind in dict.fromkeys((device, "cpu")):
            where = table.registered(name, kind)
            if where:
                key = _torch.dispatch_key_of(kind)
                found.append(Registered(name, key, where, table.registrants.get(name, "")))
    return found


def script_of(
    kept: KeptCall, arguments: Packed, again: Again, *, shrunk: str, is_origin: bool = False
) -> Script:
    """The reproducer of a call.

    Args:
        kept: the call that failed in the step.
        arguments: those to write, `kept.arguments` or smaller ones.
        again: what came of running it on them.
        shrunk: how they came from the step's; "" if they are the same.
        is_origin: the op agrees with its reference, and its NaN or Inf is the fault.

    Raises:
        TypeError: an argument cannot be written as Python.
        Anything that the reference raises.
    """
    with outside_everything():
        views = again.names_of(arguments)
        writer = _Writer(kept, arguments, again, Tensors(arguments, {}), views, [])
        writer.limits = _limits(writer, is_origin=is_origin)
        writer.tensors = Tensors(arguments, _names(kept, arguments), writer.limits)
        writer.takes_device = any(
            isinstance(item, torch.device) for item in tree_items(arguments.tree)
        )
        text = writer.text(shrunk)
        return Script(text, writer.tensors.saved)


def _limits(writer: _Writer, *, is_origin: bool) -> list[Limit]:
    record, again = writer.kept.record, writer.again
    found = limits_of(
        again.call, again.out, again.reference, criterion=record.criterion,
        rtol=record.rtol, atol=record.atol,
    )  # fmt: skip
    if is_origin:
        return [{"name": limit["name"], "rule": "finite"} for limit in found]
    return found + writer.extra_limits()


def _names(kept: KeptCall, arguments: Packed) -> dict[View, str]:
    """A name for each tensor, that of its parameter."""
    names: dict[View, str] = {}
    taken: set[str] = set()
    for param, value in kept.traits.bound(*arguments.tree):
        items = [item for item in tree_items(value) if isinstance(item, View)]
        is_list = isinstance(value, (list, tuple))
        for place, view in enumerate(items):
            if view in names:
                continue
            name = identifier(f"{param.name}_{place}" if is_list else param.name)
            while name in taken:
                name += "_"
            taken.add(name)
            names[view] = name
    return names
