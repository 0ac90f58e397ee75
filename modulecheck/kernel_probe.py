"""Generated code run statement by statement: after each kernel somebody looks at its buffers.

The `call` function of the module that inductor generated is parsed, a call of an observer is put
behind every statement that runs a kernel, and the result runs in the module's own namespace: the
same kernels, compiled once, in the same order. It does not matter who made a kernel: C++ kernels,
Triton kernels (`name.run(...)`) and library kernels (`extern_kernels.mm(..., out=buf)`) are all
calls with buffers among their arguments.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

__all__ = ["Observer", "instrumented"]

Observer = Callable[[str, dict[str, Any]], None]
"""Given the name of a kernel that has just run, and its buffers and inputs by name."""

_OBSERVE = "__observe_kernel__"
_NO_KERNEL = re.compile(r"^(assert_|args\.|torch\.(cuda|xpu|_C|_dynamo)\.|run_intermediate_hooks)")
_ALLOCATES = re.compile(r"^(empty_strided|reinterpret_tensor|alloc_from_pool|rand_strided)")


def instrumented(
    source: str, namespace: dict[str, Any], observe: Observer
) -> Callable[[list[Any]], Any] | None:
    """The `call` of a generated module with an observer; None where there is none to be found.

    Args:
        source: of the generated module.
        namespace: of the generated module; is not changed.
        observe: called after each kernel.
    """
    tree = ast.parse(source)
    kept: list[ast.stmt] = [
        statement
        for statement in tree.body
        if isinstance(statement, (ast.ClassDef, ast.FunctionDef)) or _makes_runner(statement)
    ]
    if not any(_functions(ast.Module([item], [])) for item in kept):
        return None
    body = [_Observing().visit(statement) for statement in kept]
    module = ast.fix_missing_locations(ast.Module(body=body, type_ignores=[]))
    scope = {**namespace, _OBSERVE: observe}
    exec(compile(module, "<instrumented kernels>", "exec"), scope)
    call: Callable[[list[Any]], Any] | None = scope.get("call")
    return call


def _makes_runner(statement: ast.stmt) -> bool:
    names = ("runner", "call")
    return isinstance(statement, ast.Assign) and any(
        isinstance(target, ast.Name) and target.id in names for target in statement.targets
    )


def _functions(tree: ast.Module) -> list[ast.FunctionDef]:
    """`call` and partitions: what takes the one list `args`."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.args.args and node.args.args[-1].arg == "args"
        and node.name not in ("benchmark_compiled_module",)
    ]  # fmt: skip


class _Observing(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        if node in _functions(ast.Module([node], [])):
            node.body = self._block(node.body)
        return node

    def _block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for statement in statements:
            for part in ("body", "orelse"):
                if getattr(statement, part, None):
                    setattr(statement, part, self._block(getattr(statement, part)))
            found.append(statement)
            name = _kernel(statement)
            if name:
                found.append(_observation(name, _buffers(statement)))
        return found


def _kernel(statement: ast.stmt) -> str:
    """The kernel that a statement runs, "" if none."""
    if isinstance(statement, ast.Expr):
        call = statement.value
    elif isinstance(statement, ast.Assign):
        call = statement.value
        if isinstance(call, ast.Subscript):  # one output of a library kernel
            return "output" if _is_buffer(statement.targets[0]) else ""
    else:
        return ""
    if not isinstance(call, ast.Call):
        return ""
    name = ast.unparse(call.func)
    if _NO_KERNEL.match(name) or (isinstance(statement, ast.Assign) and _ALLOCATES.match(name)):
        return ""
    if isinstance(statement, ast.Assign) and not _is_buffer(statement.targets[0]):
        return ""
    return name.removesuffix(".run")


def _is_buffer(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) and target.id.startswith("buf")


def _buffers(statement: ast.stmt) -> list[str]:
    """Names of local variables that the statement hands over or makes, each once."""
    if isinstance(statement, ast.Assign):
        names = [target.id for target in statement.targets if isinstance(target, ast.Name)]
        call: Any = statement.value
    else:
        names, call = [], statement.value  # type: ignore[attr-defined]
    for argument in [*getattr(call, "args", []), *(k.value for k in getattr(call, "keywords", []))]:
        names += [item.id for item in ast.walk(argument) if _is_local(item)]  # type: ignore[attr-defined]
    return list(dict.fromkeys(names))


def _is_local(item: ast.AST) -> bool:
    return isinstance(item, ast.Name) and bool(
        re.match(r"^(buf|arg|primals_|tangents_)\w*\d", item.id)
    )


def _observation(kernel: str, names: list[str]) -> ast.stmt:
    values = ", ".join(f"{name!r}: {name}" for name in names)
    return ast.parse(f"{_OBSERVE}({kernel!r}, {{{values}}})").body[0]
