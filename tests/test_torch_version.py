"""Private torch: each package reaches it through one file, and a name that is missing is named."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys

import pytest
import torch

from modulecheck import _torch
from opcheck.errors import OpcheckError
from opcheck.private_names import TESTED
from tests.hanging import HANGS_S
from tests.private_torch import private_uses, running
from tests.test_layers import ROOT, sources

PACKAGES = ["opcheck", "modulecheck"]


# ---- one file -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "from torch._C import _current_graph_task_id",
        "import torch._dynamo.config",
        "from torch import _dynamo",
        "from torch.utils._pytree import tree_map",
        "torch._dynamo.config.recompile_limit = 1",
        "x = torch._inductor",
        "version = tensor._version",
        "schema = func._schema",
        "schema = getattr(node.target, '_schema', None)",
        "module.__dict__.pop('_compiled_call_impl')",
        "importlib.import_module('torch._inductor.graph')",
        "home = sys.modules.get('torch._dynamo.eval_frame')",
    ],
)
def test_the_search_finds(code):
    assert list(private_uses(ast.parse(code), set()))


@pytest.mark.parametrize(
    "code",
    [
        "from torch.utils.data import DataLoader",
        "torch.ops.aten._softmax.default(x, 1, False)",
        "self._version = 1",
        "other._ours",
        "frame = sys._getframe(1)",
        "if TYPE_CHECKING:\n    from torch._ops import OpOverload",
        "SOFTMAX = '_softmax'",
    ],
)
def test_the_search_lets_pass(code):
    assert list(private_uses(ast.parse(code), {"_ours"})) == []


# ---- a clear error ------------------------------------------------------------------------------


def asked_for(package: str) -> list[tuple[str, str]]:
    """Every path that the door of a package names, and how it asks for it."""
    tree = ast.parse(sources(package)["_torch"].read_text())
    found = []
    for node, _ in running(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if ast.unparse(node.func.value) == "_door":
            (path,) = node.args
            if isinstance(path, ast.Constant):  # else an option, see below
                found.append((path.value, node.func.attr))
    return found


REMOVE_EACH = """
import contextlib, importlib, json, sys
from opcheck import private_names
from opcheck.errors import OpcheckError

package, asked = sys.argv[1], json.loads(sys.argv[2])
home = f"{package}._torch"
door = private_names.Door(package)


@contextlib.contextmanager
def removed(path):
    owner_path, _, name = path.rpartition(".")
    owner = door.need(owner_path)
    value = private_names.look(owner, name)
    module = sys.modules.get(path)
    try:
        if path in sys.modules:
            sys.modules[path] = None
        try:
            if "()" in path:  # each instance has its own
                raise AttributeError
            delattr(owner, name)
        except (AttributeError, TypeError):  # C++ holds it
            private_names.look = lambda found, asked: (
                found.missing if asked == name else getattr(found, asked)
            )
        yield
    finally:
        private_names.look = getattr
        if module is not None:
            sys.modules[path] = module
        with contextlib.suppress(AttributeError, TypeError):
            setattr(owner, name, value)


def told(path, how):
    if how == "reader":  # of an object at hand
        return door.reader(path)(object())
    if how == "writer":
        return door.writer(path)(object(), None)
    door.need(path)  # there is one to remove
    with removed(path):
        if how == "later":
            door.later(path)()
        else:
            sys.modules.pop(home, None)
            importlib.import_module(home)


for path, how in asked:
    try:
        told(path, how)
    except OpcheckError as error:
        print(json.dumps([path, how, str(error)]))
"""


@pytest.mark.parametrize("package", PACKAGES)
def test_each_missing_name_is_an_error_that_says_which(package):
    asked = asked_for(package)
    assert len(asked) > 40
    done = subprocess.run(
        [sys.executable, "-c", REMOVE_EACH, package, json.dumps(asked)],
        capture_output=True, text=True, check=False, timeout=HANGS_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    needs = f"which {package} needs; tested versions: torch {TESTED}"
    assert told == [
        [path, how, f"torch {torch.__version__} has no {path.replace('()', '')}, {needs}"]
        for path, how in asked
    ]


def test_a_missing_option_of_a_configuration_is_named():
    with pytest.raises(OpcheckError, match=r"has no torch\._inductor\.config\.no_such_option, "):
        _torch.patched(_torch.INDUCTOR_CONFIG, no_such_option=True)
    with _torch.patched(_torch.INDUCTOR_CONFIG, fallback_random=True):
        assert torch._inductor.config.fallback_random
    assert not torch._inductor.config.fallback_random


LACKING = """
import torch
del torch.autograd._get_sequence_nr
import {package}
from {package} import _torch
"""


@pytest.mark.parametrize("package", ["opcheck", "modulecheck"])
def test_a_user_who_imports_the_package_reads_it_last(package):
    code = LACKING.format(package=package)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=HANGS_S
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "OpcheckError" in last
    assert "torch.autograd._get_sequence_nr" in last
    assert "tested versions" in last


# ---- the tested versions ------------------------------------------------------------------------


def test_tested_versions_are_those_that_are_asked_for():
    assert f'"torch{TESTED}"' in (ROOT / "pyproject.toml").read_text()
    lowest, below = (text.lstrip("<>=") for text in TESTED.split(","))
    running_now = tuple(map(int, torch.__version__.split(".")[:2]))
    assert tuple(map(int, lowest.split("."))) <= running_now < tuple(map(int, below.split(".")))
    claimed = re.findall(r"[Tt]ested with Python [\d.]+ and torch ([\d.]+)", README)
    assert claimed
    assert all(version.startswith(f"{lowest}.") for version in claimed)


README = (ROOT / "README.md").read_text()
