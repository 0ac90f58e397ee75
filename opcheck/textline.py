r"""The documented text log line, written and read back.

::

    Op: add.Tensor | FAIL | in: [(2, 3):torch.float16] | out: (2, 3):torch.float16
      | max_abs: 1.200000e-03 | max_rel: 2.500000e-02 | rtol=0.01, atol=0.01

(one line in the log) with our fields appended, each ` | name: value`. Names come from the user's
code, so what would break the line is escaped with a backslash: control characters, bidi marks,
lone surrogates, `|`, and the commas and brackets of an argument that is not balanced by itself.
`parse_text_line(format_text_line(record))` gives back every field that the line carries; numbers
come back with the digits that are printed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from opcheck.errors import LogReadError
from opcheck.records import Blame, Metrics, OpRecord, Verdict

__all__ = ["format_text_line", "full_op_name", "parse_text_line"]

_CLOSING = {")": "(", "]": "[", "}": "{"}
_EMPTY = "\\e"
_ESCAPE = re.compile(r"\\(x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}|\\|e)")
_STRUCTURE = re.compile(r"[,()\[\]{}]")
_PREFIX = re.compile(r"^(?:\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d\S*\s+)?(?:\[[A-Z]+\]\s+)?(?=Op: )")
_DOCUMENTED = re.compile(
    r"Op: (?P<op>.*?) \| (?P<verdict>[A-Z]+) \| in: \[(?P<inputs>.*?)\] \| out: (?P<outputs>.*?)"
    r" \| max_abs: (?P<max_abs>\S+) \| max_rel: (?P<max_rel>\S+)"
    r" \| rtol=(?P<rtol>[^\s,]+), atol=(?P<atol>\S+)(?P<rest>(?: \| .*)?)"
)


def format_text_line(record: OpRecord) -> str:
    """Everything after the time and the level."""
    metrics = record.metrics
    short = record.short_op
    fields = [
        f"Op: {_escape(short)}",
        record.verdict.value,
        f"in: [{_join(record.inputs)}]",
        f"out: {_outputs(record.outputs)}",
        f"max_abs: {metrics.max_abs:.6e}",
        f"max_rel: {metrics.max_rel:.6e}",
        f"rtol={record.rtol!r}, atol={record.atol!r}",
        f"module: {_escape(record.module)}",
        f"phase: {_escape(record.phase)}",
        f"step: {record.step}",
        f"index: {record.index}",
        f"source: {_escape(record.source)}",
        f"criterion: {_escape(record.criterion)}",
        f"reference: {_escape(record.reference)}",
        f"q: {metrics.q:.6e}",
    ]
    if metrics.rmse_ratio is not None:
        fields.append(f"rmse_ratio: {metrics.rmse_ratio:.6e}")
    if record.blame is not None:
        fields += [f"{name}: {getattr(record.blame, name):.6e}" for name in _BLAME]
        fields.append(f"blame: {_escape(record.blame.word)}")
    if record.repeats is not None:
        fields.append(f"repeats: {record.repeats}")
    if full_op_name(short) != record.op:
        fields.append(f"op: {_escape(record.op)}")
    if record.rank:
        fields.append(f"rank: {record.rank}")
    fields.append(f"run: {_escape(record.run_id)}")
    return " | ".join(fields)


def parse_text_line(line: str) -> OpRecord:
    """Read a line of the text log, with or without time, level and the appended fields.

    Raises:
        LogReadError: it is not such a line.
    """
    text = line.rstrip("\r\n")
    prefix = _PREFIX.match(text)
    found = _DOCUMENTED.fullmatch(text, prefix.end()) if prefix else None
    if found is None:
        msg = "not a line of the text log: expected 'Op: NAME | VERDICT | in: [...] | out: ...'"
        raise LogReadError(msg)
    try:
        return _record(found)
    except ValueError as error:
        msg = f"a field of the text log line has a bad value: {error}"
        raise LogReadError(msg) from error


def full_op_name(short: str) -> str:
    """`add.Tensor` gives `aten.add.Tensor`, `gelu` gives `aten.gelu.default`."""
    return f"aten.{short}" if "." in short else f"aten.{short}.default"


def _record(found: re.Match[str]) -> OpRecord:
    extra = {
        name: value
        for name, _, value in (
            part.partition(": ") for part in found["rest"].split(" | ") if part.strip()
        )
    }
    ratio = extra.get("rmse_ratio")
    return OpRecord(
        op=_unescape(extra["op"]) if "op" in extra else full_op_name(_unescape(found["op"])),
        module=_unescape(extra.get("module", "")),
        phase=_unescape(extra.get("phase", "other")),
        index=int(extra.get("index", 0)),
        step=int(extra.get("step", 0)),
        inputs=_split(found["inputs"]),
        outputs=_split_outputs(found["outputs"]),
        verdict=Verdict(found["verdict"]),
        metrics=Metrics(
            max_abs=float(found["max_abs"]),
            max_rel=float(found["max_rel"]),
            q=float(extra.get("q", 0.0)),
            rmse_ratio=None if ratio is None else float(ratio),
        ),
        source=_unescape(extra.get("source", "")),
        criterion=_unescape(extra.get("criterion", "allclose")),
        reference=_unescape(extra.get("reference", "cpu kernel")),
        rtol=float(found["rtol"]),
        atol=float(found["atol"]),
        blame=_blame(extra),
        repeats=extra["repeats"] == "True" if "repeats" in extra else None,
        run_id=_unescape(extra.get("run", "")),
        rank=int(extra.get("rank", 0)),
    )


_BLAME = ("born", "inherited", "total", "inputs")


def _blame(extra: dict[str, str]) -> Blame | None:
    if "blame" not in extra:
        return None
    numbers = {name: float(extra.get(name, 0.0)) for name in _BLAME}
    return Blame(**numbers, word=_unescape(extra["blame"]))


# ---- escaping -----------------------------------------------------------------------------------


def _code(char: str) -> str:
    point = ord(char)
    if point < 0x100:
        return f"\\x{point:02x}"
    return f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"


def _escape(text: str) -> str:
    if text.isprintable() and "\\" not in text and "|" not in text and text == text.strip():
        return text
    ends = (0, len(text) - 1)
    return "".join(
        "\\\\"
        if char == "\\"
        else _code(char)
        if char == "|" or not char.isprintable() or (char == " " and place in ends)
        else char
        for place, char in enumerate(text)
    )


def _unescape(text: str) -> str:
    def char(found: re.Match[str]) -> str:
        code = found[1]
        if code == "\\":
            return "\\"
        return "" if code == "e" else chr(min(int(code[1:], 16), 0x10FFFF))

    return _ESCAPE.sub(char, text) if "\\" in text else text


# ---- lists of arguments -------------------------------------------------------------------------


def _is_one_item(text: str) -> bool:
    """True when the brackets are balanced and no comma stands outside of them."""
    open_brackets: list[str] = []
    for found in _STRUCTURE.finditer(text):
        char = found[0]
        if char in "([{":
            open_brackets.append(char)
        elif char == ",":
            if not open_brackets:
                return False
        elif not open_brackets or open_brackets.pop() != _CLOSING[char]:
            return False
    return not open_brackets


def _item(text: str, *, alone: bool = False) -> str:
    if not text:
        return _EMPTY
    escaped = _escape(text)
    if _is_one_item(escaped) and not (alone and escaped.startswith("[")):
        return escaped
    return _STRUCTURE.sub(lambda found: _code(found[0]), escaped)


def _join(items: Iterable[str]) -> str:
    return ", ".join(_item(item) for item in items)


def _outputs(items: tuple[str, ...]) -> str:
    return _item(items[0], alone=True) if len(items) == 1 else f"[{_join(items)}]"


def _split(text: str) -> tuple[str, ...]:
    items, depth, start = [], 0, 0
    for found in _STRUCTURE.finditer(text):
        char = found[0]
        if char == ",":
            if depth == 0:
                items.append(text[start : found.start()])
                start = found.end()
        else:
            depth += 1 if char in "([{" else -1
    items.append(text[start:])
    return tuple(_unescape(item.strip()) for item in items) if text else ()


def _split_outputs(text: str) -> tuple[str, ...]:
    if text.startswith("[") and text.endswith("]"):
        return _split(text[1:-1])
    return (_unescape(text),)
