"""Measures the weight push on one GPU: cuda_ipc, NCCL with several ranks, and pushes to an engine that is decoding.

    PYTHONPATH=.:rollout_server:learner:bench python bench/gpu/weights_gpu.py [--parts ipc,ranks,host,vllm-0.5b,vllm-7b]

| part  | what                                                                                              |
|-------|---------------------------------------------------------------------------------------------------|
| ipc   | cuda_ipc against a copy of the same bytes inside the GPU                                          |
| ranks | nccl to three members against a raw broadcast among the same ranks; a member is killed or stopped |
| host  | nccl against gloo when the weights are staged in host memory                                      |
| vllm  | pushes to a vLLM that is decoding; the same for `sglang-0.5b` and SGLang                           |

The first three parts need torch, CuPy, pydantic and grpcio; `vllm` also needs vLLM and transformers, and `sglang-0.5b`,
which is not among the defaults, SGLang. Every part runs in its own processes with a deadline. If a part fails, only its
own figures are lost. Results of parts that are not run stay in the file. It takes about 11 minutes with a 7B model.
"""

from __future__ import annotations

import argparse
import json
import sys

from harness import SMOKE, Results, make_parser, report_skipped, run_parts, sized

NAME = "weights_gpu"
PARTS = "ipc,ranks,host,vllm-0.5b,vllm-7b"
TIMEOUTS_S = {
    "ipc": 150.0,
    "ranks": 120.0,
    "host": 180.0,
    "vllm-tiny": 200.0,
    "vllm-0.5b": 200.0,
    "vllm-7b": 260.0,
    "sglang-0.5b": 260.0,
    "torch-tiny": 200.0,
}


def run_part(name: str, arguments: argparse.Namespace) -> Results:
    """Run one part, inside its own process."""
    if name == "ipc":
        from weights_gpu_parts.transports import bench_ipc

        return bench_ipc(arguments.gigabytes)
    if name == "ranks":
        from weights_gpu_parts.ranks import bench_ranks

        return bench_ranks(arguments.rank_gigabytes)
    if name == "host":
        from weights_gpu_parts.ranks import bench_host

        return bench_host(arguments.host_gigabytes)
    from weights_gpu_parts.engine import bench_engine

    engine, _, shape = name.partition("-")
    return bench_engine(engine, shape, arguments.graphs, json.loads(arguments.extra))


def main() -> int:
    parser = make_parser()
    parser.add_argument("--parts", default=sized(PARTS, "torch-tiny"))
    parser.add_argument("--no-7b", action="store_true", help="skip the 7B model")
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1, 14], help="sizes of the pushes in part ipc")
    parser.add_argument("--rank-gigabytes", type=float, default=2.0, help="size of the pushes in part ranks")
    parser.add_argument("--host-gigabytes", type=float, nargs="+", default=[1, 4, 14], help="the same of part host")
    parser.add_argument("--graphs", action="store_true", help="use CUDA graphs, which is slower to start")
    parser.add_argument("--extra", default="{}", help="additional engine arguments, as JSON")
    arguments = parser.parse_args()
    parts = [part for part in arguments.parts.split(",") if not (arguments.no_7b and part == "vllm-7b")]
    if SMOKE:
        report_skipped("pushes by cuda_ipc and nccl", "they need a GPU")
    is_met = run_parts(NAME, "weight push on one GPU", parts, TIMEOUTS_S, lambda part: run_part(part, arguments))
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
