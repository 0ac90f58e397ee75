"""How long `opcheck review` takes on 1e4 and 1e6 records, and how much memory.

    OMP_NUM_THREADS=1 python -m benchmarks.bench_review [--records N ...]

Each log is written to a temporary folder and reviewed by a process of its own, twice; the faster
time and the larger memory are printed. Limits: 1e4 records in 1 s, 1e6 in 5 s.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measuring import ROOT
from opcheck.records import Coverage
from tests.log_samples import coverage_line, failing, header_line, passing, record_line

LIMITS_S = {10_000: 1.0, 1_000_000: 5.0}
FAILING_EVERY = 1000


def write(path: Path, num_records: int) -> int:
    """A log of one run; returns its bytes."""
    parts = []
    with path.open("w") as log:
        log.write(header_line() + "\n")
        for index in range(num_records):
            make = failing if index % FAILING_EVERY == FAILING_EVERY - 1 else passing
            parts.append(record_line(make(index)))
            if len(parts) == 10_000:
                log.write("\n".join(parts) + "\n")
                parts.clear()
        log.writelines(part + "\n" for part in parts)
        failed = num_records // FAILING_EVERY
        log.write(
            coverage_line(Coverage(seen=num_records, checked=num_records, failed=failed)) + "\n"
        )
    return path.stat().st_size


def review(path: Path, *options: str) -> tuple[float, float]:
    """Seconds and peak MiB of one review in a process of its own."""
    code = (
        "import sys; from benchmarks.measuring import peak_mib; from opcheck.cli import main;"
        "main(sys.argv[1:]); print('PEAK', peak_mib())"
    )
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, "review", str(path), *options],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    return time.perf_counter() - begin, float(done.stdout.rpartition("PEAK ")[2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, nargs="+", default=[10_000, 1_000_000])
    chosen = parser.parse_args()
    print(f"{'records':>9}  {'MiB':>6}  {'command':<22}  {'seconds':>7}  {'peak MiB':>8}  limit")
    status = 0
    for num_records in chosen.records:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "precision.jsonl"
            size = write(path, num_records) / 2**20
            for options in ((), ("--tree",), ("--json",), ("--step", "3"), ("--call", "999")):
                runs = [review(path, *options) for _ in range(2)]
                seconds, peak = min(run[0] for run in runs), max(run[1] for run in runs)
                limit = LIMITS_S.get(num_records)
                status |= limit is not None and not options and seconds > limit
                name = " ".join(("review", *options))
                shown = f"{limit:.0f} s" if limit else "-"
                print(
                    f"{num_records:>9,}  {size:>6.1f}  {name:<22}  {seconds:>7.2f}"
                    f"  {peak:>8.1f}  {shown}"
                )
    return int(status)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    raise SystemExit(main())
