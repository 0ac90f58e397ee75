"""Does the checker keep quiet on kernels that are correct and compute in another way?

Every call of OpInfo's samples, forward and backward, is computed again as other devices and
libraries compute it (`correct_kernels.py`), and judged as if such a kernel had given it: beside the
CPU kernel, and where it is the CPU's own kernel on another path, by float64 alone as well. Any
verdict but PASS is a false alarm.

    OMP_NUM_THREADS=1 python -m benchmarks.opinfo_variants --dtypes float32,bfloat16 --details
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: TID251 - looks from outside

from benchmarks.alarms import ARMS, Alarm, Tally, print_tally
from benchmarks.correct_kernels import VARIANTS, Variant
from benchmarks.more_calls import long_sums, numbers
from benchmarks.opinfo_sweep import WRONG_IN_TORCH, Case, cases_of, op_infos
from benchmarks.subjects import HALF, NotHereError, Subject
from opcheck import _torch
from opcheck.calls import Call, Site, traits_of
from opcheck.compare import Judgement, judge
from opcheck.declared import DeclaredDtypes
from opcheck.drift import Drift
from opcheck.expected import is_missing_kernel, leaves_of
from opcheck.generators import generator_states, have_moved, restore_generators
from opcheck.outside import outside_everything
from opcheck.policy import describe, writes_overlapping
from opcheck.records import SkipReason
from opcheck.references import Reference, Result, choose, host_array
from opcheck.snapshots import snapshot
from opcheck.tensor_kinds import is_plain_tensor
from opcheck.tolerances import documented_tolerances

__all__ = ["NAMED", "Options", "sweep", "sweep_more"]

DEFAULT_DTYPES = ("float32", "bfloat16", "float16", "complex64")
_MOST_RESULTS = 4
"""Results of one variant that are judged, of one call."""

_FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"
_ATTENTION_WEIGHTS = "its second result is the attention weights, where the kernel gives logsumexp"
_LAST_STRIDE = (
    "takes the last stride of query, key and value for 1 without looking, which its callers see"
    " to: values up to 1e37, and NaN"
)
NAMED: dict[tuple[str, str], str] = {
    ("decomposition", f"{_FLASH}.default"): _ATTENTION_WEIGHTS,
    ("decomposition in float32", f"{_FLASH}.default"): _ATTENTION_WEIGHTS,
    ("other layout", f"{_FLASH}.default"): _LAST_STRIDE,
    ("other layout", f"{_FLASH}_backward.default"): _LAST_STRIDE,
    ("other layout", "aten.native_group_norm_backward.default"): (
        "reads gradient and input as if they were contiguous, which its callers see to: NaN and"
        " values of other elements with any other strides"
    ),
    ("decomposition", "aten.soft_margin_loss_backward.default"): (
        "sigmoid(z) - 1 cancels: 4.18e-7 for 3.68e-7 in float32, 14% off"
    ),
    ("decomposition", "aten.lerp.Scalar"): (
        "rounds the weighted difference to 16 bit before it cancels: up to 2.5 times the limit;"
        " every kernel computes it in float32"
    ),
    ("decomposition", "aten.softshrink.default"): (
        "rounds lambda to 16 bit, so that all results are shifted by up to 2^-9 of it; kernels"
        " keep it in float32"
    ),
}
"""(variant, op) -> why a FAIL is right there: not a correct kernel, with what was measured."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is run."""

    variants: Sequence[Variant] = VARIANTS
    samples: int | None = 8
    """Of an entry."""
    calls: int = 6
    """Of an overload, in one entry."""
    seed: int = 0
    backward: bool = True


class _Watch(TorchDispatchMode):
    """Computes every call again by each variant, and has it judged."""

    def __init__(self, tally: Tally, entry: str, options: Options, drift: Drift) -> None:
        super().__init__()
        self.entry = entry
        self._tally = tally
        self._options = options
        self._drift = drift
        self._declared = DeclaredDtypes()
        self._count: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = self._call(func, args, kwargs)
        if call is None:
            return func(*args, **kwargs)
        with outside_everything():
            snapshot(call)
        out = func(*args, **kwargs)
        why = _unfit(call, out)
        if why:
            self._tally.skipped["", why] += 1
            return out
        try:
            with outside_everything():
                self._look(call, out)
        except Exception:  # noqa: BLE001 - the sample goes on; the table tells of it
            self._tally.errors.append(f"{call.traits.name}: {traceback.format_exc()}")
        return out

    def _call(self, func: Any, args: Any, kwargs: Any) -> Call | None:
        if not isinstance(func, torch._ops.OpOverload):
            return None
        traits = traits_of(func)
        if traits.skip is not None:
            return None
        found = describe(func, args, kwargs)
        key = tuple(found.key)
        self._count[key] += 1
        self._count[func] += 1
        if self._count[key] > self._options.calls or self._count[func] > 3 * self._options.calls:
            return None
        if found.unsupported:
            self._tally.skipped["", SkipReason.UNSUPPORTED_TYPE.value] += 1
            return None
        call = Call(
            func=func, traits=traits, args=args, kwargs=kwargs, site=Site("", "other"),
            index=self._count[func], step=0, occurrence=0, signature=key, source="",
        )  # fmt: skip
        call.rng_before = generator_states(args)
        return call

    def _look(self, call: Call, out: Any) -> None:
        tally, seed = self._tally, self._options.seed
        reference = choose(call, on_device=True, seed=seed)
        if isinstance(reference, SkipReason):
            tally.skipped["", reference.value] += 1
            return
        tally.calls += 1
        tally.ops.add(call.traits.name)
        for variant in self._options.variants:
            rng = np.random.default_rng((seed, call.index))
            subject = Subject(call, out, reference, rng)
            allowed = tf32(allowed=True) if variant.takes_tf32 else contextlib.nullcontext()
            try:
                with allowed:
                    for result in islice(_results(variant, subject), _MOST_RESULTS):
                        self._judge(variant, subject, result)
            except NotHereError as why:
                tally.skipped[variant.name, str(why)] += 1
            finally:
                call.device_type = ""
                restore_generators(call.rng_before)

    def _judge(self, variant: Variant, subject: Subject, result: Result) -> None:
        call, tally = subject.call, self._tally
        if variant.takes_tf32:
            self._judge_tf32(variant, subject, result)
            return
        differs = _bits_differ(subject, result)
        tally.differ[variant.name] += differs
        self._verdict(variant, ARMS[0], subject, result, subject.reference)
        if not variant.on_cpu:
            return
        alone = choose(call, on_device=False, seed=self._options.seed)
        if not isinstance(alone, SkipReason) and alone.label == "float64":
            alone._golden = subject.reference._golden
            call.declared = self._declared.of(call)
            self._verdict(variant, ARMS[1], subject, result, alone)

    def _judge_tf32(self, variant: Variant, subject: Subject, result: Result) -> None:
        """PASS where it is allowed; what FAILs where it is not is counted."""
        if not _bits_differ(subject, result):
            raise NotHereError("TF32 holds the inputs")
        self._tally.differ[variant.name] += 1
        seed = self._options.seed
        allowed = choose(subject.call, on_device=True, seed=seed)
        self._verdict(variant, ARMS[0], subject, result, allowed)
        with tf32(allowed=False):
            refused = choose(subject.call, on_device=True, seed=seed)
            found = _judged(subject, result, refused)
        if isinstance(found, Judgement):
            self._tally.tf32_found += not found.passed
            self._tally.tf32_missed += found.passed

    def _verdict(
        self, variant: Variant, arm: str, subject: Subject, result: Result, reference: Any
    ) -> None:
        call, tally = subject.call, self._tally
        found = _judged(subject, result, reference)
        if isinstance(found, str):
            tally.skipped[variant.name, found] += 1
            return
        tally.judged[variant.name, arm] += 1
        name = str(subject.dtype).removeprefix("torch.")
        alarm = partial(Alarm, variant.name, arm, call.traits.name, name, self.entry)
        if not found.passed:
            failed = alarm(found.metrics.q, found.reason + _inputs(call))
            is_wrong = (call.traits.name, str(subject.dtype)) in WRONG_IN_TORCH
            is_named = is_wrong or (variant.name, call.traits.name) in NAMED
            (tally.named if is_named else tally.alarms).append(failed)
            return
        if found.metrics.q > tally.worst.get(variant.name, (0.0, ""))[0]:
            tally.worst[variant.name] = (found.metrics.q, f"{call.traits.name} {name}")
        if found.shift is not None:
            tipped = self._drift.add(f"{call.traits.name}, {variant.name}", arm, "", found.shift)
            if tipped is not None:
                tally.alarms.append(alarm(found.metrics.q, tipped.reason))


@contextlib.contextmanager
def tf32(*, allowed: bool) -> Iterator[None]:
    """TF32 in products and convolutions of a GPU, and as before afterwards."""
    products, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.allow_tf32
    # torch's test helpers forbid setting the flag itself
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=allowed):
        products.allow_tf32 = allowed
        try:
            yield
        finally:
            products.allow_tf32 = before


def _results(variant: Variant, subject: Subject) -> Iterator[Result]:
    """What a variant computes; what torch refuses is no result."""
    results = variant.run(subject)
    while True:
        try:
            result = next(results)
        except StopIteration:
            return
        except NotHereError:
            raise
        except Exception as error:
            raise NotHereError(f"refused: {_first_line(error)}") from error
        yield result


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__} {str(error).splitlines()[0][:80] if str(error) else ''}"


def _judged(subject: Subject, result: Result, reference: Reference) -> Judgement | str:
    call, out = subject.judged_as(result)
    rtol, atol = documented_tolerances(half=any(d in HALF for d in call.signature[1::2]))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = judge(call, out, reference, criterion="calibrated", rtol=rtol, atol=atol)
    except (NotImplementedError, RuntimeError) as error:
        if is_missing_kernel(error):
            return SkipReason.REFERENCE_NOT_AVAILABLE.value
        raise
    return found if found.skip is None else found.skip.value


def _unfit(call: Call, out: Any) -> str:
    """Why a call is not judged, as the checker itself has it; "" if it is."""
    if have_moved(call.rng_before, call.args):
        return SkipReason.RANDOM.value
    if writes_overlapping(call):
        return SkipReason.OVERLAPPING.value
    leaves = [leaf.value for leaf in leaves_of(out) if isinstance(leaf.value, Tensor)]
    leaves += [value for param, value in call.traits.bound(call.args, call.kwargs)
               if param.mutated and isinstance(value, Tensor)]  # fmt: skip
    if not all(is_plain_tensor(leaf) for leaf in leaves):
        return SkipReason.UNSUPPORTED_TYPE.value
    inexact = [leaf.dtype for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]
    given = [dtype for dtype in call.signature[1::2] if dtype.is_floating_point or dtype.is_complex]
    if not (inexact or given):
        return "integers"
    call.out_dtype = (inexact or given)[0]
    return ""


def _bits_differ(subject: Subject, result: Result) -> bool:
    pairs = zip(leaves_of(subject.out), leaves_of(result.out), strict=False)
    return any(
        isinstance(old.value, Tensor)
        and isinstance(new.value, Tensor)
        and not np.array_equal(host_array(old.value), host_array(new.value), equal_nan=True)
        for old, new in pairs
    )


def _inputs(call: Call) -> str:
    shapes = [
        f"{tuple(leaf.shape)}:{str(leaf.dtype).removeprefix('torch.')}"
        if isinstance(leaf, Tensor)
        else repr(leaf)
        for leaf in (*_torch.tree_leaves(call.args), *_torch.tree_leaves(call.kwargs))
    ]
    return f" ({', '.join(shapes)})"


def sweep(
    infos: Iterable[Any], dtype: torch.dtype, options: Options, *, into: Tally | None = None
) -> Tally:
    """Judge every variant of every call of the samples of some OpInfo entries.

    Args:
        infos: entries of `op_db`.
        dtype: entries that do not support it are passed over.
        options: what is run.
        into: add to this one.
    """
    tally, drift = into or Tally(), Drift()
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in infos:
            if dtype not in op.supported_dtypes("cpu"):
                continue
            name = f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''}"
            watch = _Watch(tally, name, options, drift)
            for case in _spread(
                cases_of(op, dtype, limit=None, backward=options.backward), options
            ):
                torch.manual_seed(options.seed)
                # what a sample raises is its own affair: some are made to
                with contextlib.suppress(Exception), watch:
                    case.call()
    tally.seconds += time.perf_counter() - start
    return tally


MORE = MappingProxyType({"numbers": numbers, "long sums": long_sums})
"""Entries beside those of OpInfo."""


def sweep_more(
    globs: Sequence[str], dtype: torch.dtype, options: Options, *, into: Tally | None = None
) -> Tally:
    """As `sweep`, of calls that no sample of OpInfo makes; real dtypes only."""
    tally, drift = into or Tally(), Drift()
    start = time.perf_counter()
    for name, calls in MORE.items():
        if dtype.is_complex or not any(fnmatchcase(name, glob) for glob in globs):
            continue
        for label, call in calls(dtype):
            with warnings.catch_warnings(), _Watch(tally, f"{name}, {label}", options, drift):
                warnings.simplefilter("ignore")
                call()
    tally.seconds += time.perf_counter() - start
    return tally


def _spread(cases: list[Case], options: Options) -> Iterator[Case]:
    """Evenly chosen cases of each kind; the first samples of an entry are often its smallest."""
    for label in ("forward", "in place", "backward"):
        found = [case for case in cases if case.label == label]
        step = 1 if options.samples is None else max(1, -(-len(found) // options.samples))
        yield from found[::step]


# ---- command ------------------------------------------------------------------------------------


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.opinfo_variants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ", ".join(variant.name for variant in VARIANTS)
    parser.add_argument("--dtypes", default=",".join(DEFAULT_DTYPES))
    parser.add_argument("--ops", default="*", metavar="GLOB[,GLOB]", help="of OpInfo names")
    parser.add_argument("--variants", default="*", metavar="GLOB[;GLOB]", help=f"of: {names}")
    parser.add_argument("--samples", type=int, default=8, metavar="N", help="of an entry; 0: all")
    parser.add_argument("--calls", type=int, default=6, metavar="N", help="of a signature")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--details", type=int, default=0, metavar="N", help="alarms shown an op")
    parser.add_argument("--skips", action="store_true", help="why variants do not apply")
    return parser.parse_args()


def main() -> int:
    """Run the sweep for each dtype; 1 on a false alarm or a crash."""
    given = _parse()
    globs = given.variants.split(";")
    options = Options(
        variants=[v for v in VARIANTS if any(fnmatchcase(v.name, glob) for glob in globs)],
        samples=given.samples or None,
        calls=given.calls,
        seed=given.seed,
    )
    found = 0
    for name in given.dtypes.split(","):
        dtype, globs = getattr(torch, name), given.ops.split(",")
        tally = sweep(op_infos(globs), dtype, options)
        sweep_more(globs, dtype, options, into=tally)
        print_tally(name, tally, options.variants, details=given.details, skips=given.skips)
        sys.stdout.flush()
        found += len(tally.alarms) + len(tally.errors)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
