"""The weight push on one GPU: cuda_ipc against a plain copy, NCCL with one rank, and pushes to a decoding vLLM.

    PYTHONPATH=.:rollout_server:learner:bench python bench/gpu/weights.py [--parts ipc,nccl,vllm-0.5b,vllm-7b]

`ipc` and `nccl` need torch and CuPy; the others vLLM, transformers, pydantic and grpcio too. Every part runs in
processes of its own with a deadline, and one that fails costs its own figures only. Results of parts that are not run
stay as they are in the file. About 8 minutes with a 7B model.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

from weights_results import Results

from harness import RESULTS, Bar, Measurement, report

STARTED_AT = "PENSTOCK_BENCH_STARTED"
NAME = "weights_gpu"
TIMEOUTS_S = {"ipc": 150.0, "nccl": 90.0, "vllm-tiny": 200.0, "vllm-0.5b": 200.0, "vllm-7b": 260.0}


def run_part(name: str, arguments: argparse.Namespace) -> Results:
    """Run inside the part's own process."""
    if name == "ipc":
        from weights_transports import bench_ipc

        return bench_ipc(arguments.gigabytes)
    if name == "nccl":
        from weights_transports import bench_nccl

        return bench_nccl()
    from weights_vllm import bench_vllm

    return bench_vllm(name.removeprefix("vllm-"), arguments.graphs, json.loads(arguments.extra))


def start_part(name: str, arguments: argparse.Namespace, folder: Path) -> Results | None:
    """None when it failed or took too long. Ends all its processes."""
    written = folder / f"{name}.json"
    command = [sys.executable, __file__, *sys.argv[1:], "--part", name, "--write", str(written)]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        process.wait(TIMEOUTS_S[name])
    except subprocess.TimeoutExpired:
        print(f"part {name} took longer than {TIMEOUTS_S[name]:.0f} s", flush=True)
    finally:
        _end_session(process)
    if not written.exists():
        return None
    said = json.loads(written.read_text())
    return Results([Measurement(**m) for m in said["measurements"]], [Bar(**b) for b in said["bars"]])


def earlier_results(parts: list[str]) -> Results:
    """What the file says of other parts than these."""
    path = RESULTS / f"{NAME}.json"
    if not path.exists():
        return Results()
    said = json.loads(path.read_text())

    def is_other(name: str) -> bool:
        return name.partition(": ")[0] not in parts

    measurements = [Measurement(m["name"], m["unit"], m["rates"]) for m in said["measurements"] if is_other(m["name"])]
    bars = [Bar(b["name"], b["value"], b["goal"], b["at_most"]) for b in said["bars"] if is_other(b["name"])]
    return Results(measurements, bars)


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """The part's process group, which is its own: EngineCore and the publisher are in it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default="ipc,nccl,vllm-0.5b,vllm-7b")
    parser.add_argument("--no-7b", action="store_true", help="leave out the 7B model")
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1, 14], help="sizes of ipc")
    parser.add_argument("--graphs", action="store_true", help="vLLM with CUDA graphs: slower to start")
    parser.add_argument("--extra", default="{}", help="further engine arguments, as JSON")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.setdefault(STARTED_AT, str(time.time()))
    if arguments.part:
        results = run_part(arguments.part, arguments)
        said = {"measurements": list(map(asdict, results.measurements)), "bars": list(map(asdict, results.bars))}
        arguments.write.write_text(json.dumps(said))
        return 0
    parts = [part for part in arguments.parts.split(",") if not (arguments.no_7b and part == "vllm-7b")]
    merged = earlier_results(parts)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        for part in parts:
            results = start_part(part, arguments, Path(folder))
            merged.bars.append(Bar(f"{part}: part ended well", float(results is not None), 1))
            if results is not None:
                merged.measurements += [replace(m, name=f"{part}: {m.name}") for m in results.measurements]
                merged.bars += [replace(b, name=f"{part}: {b.name}") for b in results.bars]
    return 0 if report(NAME, "weight push on one GPU", merged.measurements, merged.bars) else 1


if __name__ == "__main__":
    sys.exit(main())
