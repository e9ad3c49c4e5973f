"""Simulates asynchronous against synchronous training on 64 to 1,024 GPUs, next to published figures.

    make bench-simulate            # some minutes; ARGS of bench/simulate.py: --gpus 64,128 --settings verl

Nothing here is timed, so the result is the same on every machine. The simulator is
`simulate_parts/token_simulation.py`. With equal lengths overlap gives its ideal, which is judged, and it agrees with
the arithmetic of `penstock simulate` where both apply (tests/unit/test_sizing.py), which agrees with real runs on a CPU
(tests/integration/runs/test_simulation_against_a_run.py).

| what | where it is from |
|---|---|
| speed of training and of log-probs by model | bench/results/learner.json, one H200, mixed lengths |
| time of a decoding step | weights_gpu.json (0.5B and 7B, 64 requests), rollout_gpu.json (0.5B, 512 requests) |
| traffic of the memory in a decoding step | as in `penstock plan`; the bars compare the sum with these measurements |
| pause for new weights | weights_gpu.json |
| model, batch, longest response, GPUs, split, staleness | see SETTINGS: published, unless it says `assumed` |
| shape of lengths | log-normal with a 99th percentile of ten times the median, as Laminar's authors describe it |
| mean lengths | assumed: none of the three states it |
| training scales perfectly with GPUs | assumed, for both sides; so is a push that takes what `penstock plan` says |

The synchronous side is the one that the published figures are relative to: all GPUs generate, then all GPUs train, with
no time to switch. It leases prompts one by one to the emptiest server, where the published systems divide them in
advance. Both choices favour the synchronous side. The asynchronous side divides the GPUs, as the published ones do.

The result depends on what is assumed. The longer the mean and the faster a nearly empty engine, the less the tail costs
a synchronous step. So every comparison has two bars: with what is assumed, and the smallest speedup with half and twice
the mean length, and with an engine whose steps take nothing but the traffic of its memory.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from statistics import NormalDist

from harness import RESULTS, SMOKE, Bar, Measurement, make_parser, report, sized
from penstock_tools.sizing import hardware
from penstock_tools.sizing.hardware import GPUS
from penstock_tools.sizing.models import KNOWN, ModelShape
from simulate_parts.token_simulation import TokenFleet, TokenForecast, simulate_tokens

GPU = GPUS["h200"]
TAIL = 10.0
"""The 99th percentile of the lengths, as a multiple of their median."""
SIGMA = math.log(TAIL) / NormalDist().inv_cdf(0.99)
VARIATION = math.sqrt(math.exp(SIGMA**2) - 1)
SPLITS = sized((0.375, 0.5, 0.625, 0.75, 0.875), (0.5,))
"""Shares of the GPUs that generate, of which the best one counts."""
SCALES = (64, 1024)
NUM_MEASURED = sized(10, 1)
"""Steps after those in which the queue fills."""
NUM_PROCESSES = 2
MAX_SAMPLES_AT_ONCE = 512
FEW, MANY, CONTEXT = 64, 512, 256
"""Requests of the two measurements of a decoding step, and tokens of their context."""
FIT_GOAL = 0.1


@dataclass(frozen=True)
class Setting:
    """What a published comparison used."""

    name: str
    published: tuple[float, ...]
    """The published speedups over synchronous training."""
    num_gpus: int
    model: str
    groups_per_step: int
    num_samples: int
    max_tokens: int
    mean_tokens: int
    max_staleness: int
    recomputes: bool
    """Whether the asynchronous side computes log-probs once more. The synchronous side does in all of them."""
    source: str
    has_ideal_engine: bool = False
    """Whether decoding takes nothing but the traffic of the memory, instead of what was measured."""


SETTINGS = (
    Setting(
        "AReaL", (2.77,), 128, "1.5b", 512, 16, 27_648, 6000, 8, True,
        "arXiv 2505.24298: 2.77 is the largest figure, with a staleness of 8 for mathematics. That it is with 16 nodes "
        "and 1.5B, the batch and the longest response were not checked. Mean length: assumed.",
    ),
    Setting(
        "verl", (2.35, 2.67), 128, "7b", 512, 16, 28_672, 2000, 1, False,
        "docs/advance/fully_async.md of verl: Qwen2.5-Math-7B on 128 H20, 512 prompts of 16 samples, 28K tokens, "
        "staleness_threshold 0.5 (here 1, the next whole number), no log-probs computed again. Mean length: assumed, "
        "from its times of update_actor and old_log_prob.",
    ),
    Setting(
        "Laminar", (5.48,), 1024, "7b", 512, 16, 16_384, 4000, 4, False,
        "arXiv 2510.12633: 5.48 is the largest figure over other systems on 1,024 GPUs. Its abstract does not say with "
        "which model: 7B, batch, longest response, mean length and staleness are assumed.",
    ),
)  # fmt: skip


def figure(file: str, name: str) -> float:
    """A measured median. Raises KeyError if the file does not have it."""
    found = json.loads((RESULTS / f"{file}.json").read_text())["measurements"]
    return float({m["name"]: m["median"] for m in found}[name])


@functools.cache
def trained_per_s(model: str) -> tuple[float, float]:
    """Tokens a second that one GPU trains on, and those of a forward pass alone, from the shares of their operations:
    6 per weight and token, 2 more where activations are recomputed, and 2 of a forward pass."""
    recomputed, tokens = {"1.5b": ("25%", 0.25), "7b": ("50%", 0.5)}[model]
    name = f"{model}: ours, bfloat16 masters, compiled, {recomputed} recomputed, 8192 tokens, 70% kept, mixed lengths"
    rate = figure("learner", name)
    return rate, rate * (6 + 2 * tokens) / 2


@dataclass(frozen=True)
class Decoding:
    """Seconds of a decoding step on one GPU: a fixed part, a part for each sample, and the traffic of the memory."""

    fixed_s: float
    per_sample_s: float

    @classmethod
    def fitted(cls) -> Decoding:
        """The two parts by the two measurements with the smallest model, whose memory traffic is small."""
        model = KNOWN["0.5b"]
        few_s = gap_s("0.5b") - memory_s(model, FEW, CONTEXT)
        many_s = MANY / figure("rollout_gpu", "rollout server") - memory_s(model, MANY, CONTEXT)
        per_sample_s = (many_s - few_s) / (MANY - FEW)
        return cls(few_s - FEW * per_sample_s, per_sample_s)

    @classmethod
    def by_memory(cls) -> Decoding:
        """An engine whose steps take nothing but the traffic of the memory, faster than any."""
        return cls(0.0, 0.0)

    def step_s(self, model: ModelShape, num_running: int, context: float) -> float:
        return self.fixed_s + num_running * self.per_sample_s + memory_s(model, num_running, context)


def memory_s(model: ModelShape, num_running: int, context: float) -> float:
    """Seconds to read the weights and the KV cache once."""
    read = 2 * model.read_parameters(num_running) + num_running * model.kv_bytes_per_token * context
    return read / (GPU.memory_rate * hardware.DECODE_EFFICIENCY)


def gap_s(model: str) -> float:
    """Measured seconds of a decoding step of FEW requests."""
    return figure("weights_gpu", f"vllm-{model}: usual gap between tokens") / 1e3


def fleet_of(setting: Setting, num_generating: int, num_training: int, max_staleness: int) -> TokenFleet:
    """A fleet with one GPU for each server. Without staleness, the same GPUs generate and train."""
    model = KNOWN[setting.model]
    decoding = Decoding.by_memory() if setting.has_ideal_engine else Decoding.fitted()
    # While a sample is decoded, its context is half its length on average, and long ones are decoded for longer.
    context = setting.mean_tokens * (1 + VARIATION**2) / 2
    memory = GPU.memory_bytes * 0.9 - 2 * model.num_parameters - hardware.CONTEXT_BYTES
    fitting = int(memory / (model.kv_bytes_per_token * min(context, setting.max_tokens)))
    at_once = max(setting.num_samples, min(MAX_SAMPLES_AT_ONCE, fitting))
    training, forward = trained_per_s(setting.model)
    per_token = 1 / training + (1 / forward if setting.recomputes or max_staleness == 0 else 0.0)
    pause_s = figure("weights_gpu", "vllm-7b: pause") / 1e3 * model.num_parameters / KNOWN["7b"].num_parameters
    num_bytes = 2 * model.num_parameters
    push_s = hardware.PUSH_FLOOR_S + num_bytes / (50e9 * hardware.LINK_EFFICIENCY) + pause_s
    is_synchronous = max_staleness == 0
    return TokenFleet(
        num_servers=num_generating, samples_at_once=at_once,
        step_s_of=functools.cache(lambda size: decoding.step_s(model, size, min(context, setting.max_tokens))),
        mean_tokens=setting.mean_tokens, length_variation=VARIATION, max_tokens=setting.max_tokens,
        num_samples=setting.num_samples, groups_per_step=setting.groups_per_step, max_staleness=max_staleness,
        train_s_of=lambda tokens: tokens * per_token / num_training,
        push_s=0.0 if is_synchronous else push_s, pause_s=0.0 if is_synchronous else pause_s,
        num_steps=2 * max_staleness + NUM_MEASURED,
    )  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    synchronous: TokenForecast
    asynchronous: TokenForecast
    split: float

    @property
    def speedup(self) -> float:
        """Trained tokens a second, over those of synchronous training on as many GPUs."""
        return self.asynchronous.tokens_per_s / self.synchronous.tokens_per_s


def compare(setting: Setting, num_gpus: int) -> Outcome:
    synchronous = simulate_tokens(fleet_of(setting, num_gpus, num_gpus, 0))
    tried = {
        split: simulate_tokens(
            fleet_of(setting, round(num_gpus * split), num_gpus - round(num_gpus * split), setting.max_staleness)
        )
        for split in SPLITS
    }
    best = max(tried, key=lambda split: tried[split].tokens_per_s)
    return Outcome(synchronous, tried[best], best)


VERL_STEP_S, VERL_GENERATION_S, VERL_TRAINING_S = 356.30, 177.85, 53.92 + 113.81
VERL_ASYNC_STEP_S, VERL_ASYNC_UPDATE_S = 150.63, 113.16
"""verl's own table for 128 GPUs: its synchronous step with its parts, and its asynchronous step with 64 and 64 GPUs."""
H20_MEMORY_RATE = 4.0e12


def check_verl() -> tuple[list[Measurement], list[Bar]]:
    """Predict verl's asynchronous step from its synchronous one. The fixed part of a decoding step is chosen so that
    the synchronous generation takes as long as verl's; the length of a step's training is verl's own on both sides."""
    setting = next(each for each in SETTINGS if each.name == "verl")
    model = KNOWN[setting.model]
    context = setting.mean_tokens * (1 + VARIATION**2) / 2
    scale = GPU.memory_rate / H20_MEMORY_RATE

    def fleet(fixed_s: float, num_servers: int, max_staleness: int, train_s: float) -> TokenFleet:
        return replace(
            fleet_of(setting, num_servers, num_servers, max_staleness), push_s=0.0, pause_s=0.0,
            step_s_of=functools.cache(lambda size: fixed_s + scale * memory_s(model, size, context)),
            train_s_of=lambda tokens: train_s,
        )  # fmt: skip

    low, high = 0.0, 0.05
    for _ in range(12):
        fixed_s = (low + high) / 2
        step_s = simulate_tokens(replace(fleet(fixed_s, 128, 0, VERL_TRAINING_S), num_steps=sized(8, 1))).step_s
        low, high = (fixed_s, high) if step_s - VERL_TRAINING_S < VERL_GENERATION_S else (low, fixed_s)
    predicted = simulate_tokens(fleet(fixed_s, 64, setting.max_staleness, VERL_ASYNC_UPDATE_S))
    name = "verl's own times, 128 GPUs"
    speedup = VERL_STEP_S / predicted.step_s
    measurements = [
        Measurement(f"{name}: fixed part of a decoding step", "ms", [fixed_s * 1e3]),
        Measurement(f"{name}: predicted asynchronous step", "s", [predicted.step_s]),
        Measurement(f"{name}: published asynchronous step", "s", [VERL_ASYNC_STEP_S]),
        Measurement(f"{name}: predicted speedup of a step", "×", [speedup]),
    ]
    error = abs(predicted.step_s / VERL_ASYNC_STEP_S - 1)
    return measurements, [Bar(f"{name}: error of the predicted asynchronous step", error, 0.25, at_most=True)]


def describe(name: str, outcome: Outcome) -> list[Measurement]:
    both = {"synchronous": outcome.synchronous, "asynchronous": outcome.asynchronous}
    figures = [
        figure
        for side, forecast in both.items()
        for figure in (
            Measurement(f"{name}: {side}, step", "s", [forecast.step_s]),
            Measurement(f"{name}: {side}, share of time in which a server decodes", "", [forecast.decoding_share]),
        )
    ]
    return [
        *figures,
        Measurement(f"{name}: share of GPUs that generate", "", [outcome.split]),
        Measurement(f"{name}: share of its time that the learner waits", "", [outcome.asynchronous.wait_share]),
        Measurement(f"{name}: staleness, mean", "steps", [outcome.asynchronous.staleness_mean]),
        Measurement(f"{name}: staleness, largest", "steps", [outcome.asynchronous.staleness_max]),
        Measurement(f"speedup: {name}", "×", [outcome.speedup]),
    ]


def check_limits() -> list[Bar]:
    """The simulator against closed forms, with equal lengths and the sizes of a published setting."""
    setting = SETTINGS[1]
    equal = replace(fleet_of(setting, 64, 64, 0), length_variation=0.0, max_tokens=math.inf)
    size = setting.groups_per_step * setting.num_samples // 64
    generation_s = setting.mean_tokens * equal.step_s_of(size)
    train_s = equal.train_s_of(setting.groups_per_step * setting.num_samples * setting.mean_tokens)
    equal = replace(equal, samples_at_once=size)  # no gain by larger batches, which overlap allows
    synchronous = simulate_tokens(equal)
    overlapped = simulate_tokens(replace(equal, max_staleness=2, num_steps=sized(40, 4)))
    ideal = (generation_s + train_s) / max(generation_s, train_s)
    return [
        Bar("equal lengths: synchronous step / (generation + training)", synchronous.step_s / (generation_s + train_s),
            1.001, at_most=True),
        Bar("equal lengths: speedup / the ideal of overlap", synchronous.step_s / overlapped.step_s / ideal, 0.98),
        Bar("equal lengths: speedup / the ideal of overlap, not more", synchronous.step_s / overlapped.step_s / ideal,
            1.001, at_most=True),
    ]  # fmt: skip


def check_fit() -> Bar:
    """How far the decoding step of a larger model is from what was measured. It is not among the fitted ones."""
    error = abs(Decoding.fitted().step_s(KNOWN["7b"], FEW, CONTEXT) / gap_s("7b") - 1)
    return Bar(f"decoding step of 7B, {FEW} requests: error of the fit", error, FIT_GOAL, at_most=True)


def variants_of(setting: Setting) -> dict[str, Setting]:
    """What is assumed, changed: how far the result depends on it."""
    return {
        "half the mean length": replace(setting, mean_tokens=setting.mean_tokens // 2),
        "twice the mean length": replace(setting, mean_tokens=setting.mean_tokens * 2),
        "an engine that is limited by its memory alone": replace(setting, has_ideal_engine=True),
    }


def main() -> int:
    parser = make_parser()
    parser.add_argument(
        "--gpus", default=sized(",".join(map(str, SCALES)), ""), help="besides the published number, with commas"
    )
    parser.add_argument("--settings", default=sized(",".join(setting.name for setting in SETTINGS), SETTINGS[0].name))
    arguments = parser.parse_args()
    scales = [int(text) for text in arguments.gpus.split(",") if text]
    chosen = [each for each in SETTINGS if each.name in arguments.settings.split(",")]
    bars = [*check_limits(), check_fit()]
    measurements: list[Measurement] = []
    with ProcessPoolExecutor(NUM_PROCESSES) as pool:
        checking = pool.submit(check_verl)
        running = {
            (setting.name, num_gpus): pool.submit(compare, setting, num_gpus)
            for setting in chosen
            for num_gpus in sorted({*scales, setting.num_gpus})
        }
        varied = {
            (setting.name, name): pool.submit(compare, variant, setting.num_gpus)
            for setting in chosen
            for name, variant in ({} if SMOKE else variants_of(setting)).items()
        }
        figures, judged = checking.result()
        measurements += figures
        bars += judged
        for setting in chosen:
            print(f"{setting.name}: {setting.source}", flush=True)
            for (name, num_gpus), run in running.items():
                if name == setting.name:
                    outcome = run.result()
                    print(f"  {num_gpus} GPUs: {outcome.speedup:.2f} × ({outcome.split:.0%} generate)", flush=True)
                    measurements += describe(f"{name}, {num_gpus:,} GPUs", outcome)
            title = f"{setting.name}, {setting.num_gpus:,} GPUs"
            speedups = {"as assumed": running[setting.name, setting.num_gpus].result().speedup}
            for (name, what), run in varied.items():
                if name == setting.name:
                    speedups[what] = run.result().speedup
                    print(f"  with {what}: {speedups[what]:.2f} ×", flush=True)
                    measurements.append(Measurement(f"speedup: {title}, with {what}", "×", [speedups[what]]))
            for published in setting.published:
                bars.append(Bar(f"{title}: speedup, published {published:g} ×", speedups["as assumed"], published))
                bars.append(Bar(f"{title}: the same, whatever is assumed", min(speedups.values()), published))
    return 0 if report("simulate", "asynchronous over synchronous training, simulated", measurements, bars) else 1


if __name__ == "__main__":
    sys.exit(main())
