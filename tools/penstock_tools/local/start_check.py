"""`penstock up --check`: what every process of the run would check, without starting it or writing to its folder.

This process imports neither torch nor transformers: each import of them reads thousands of files, for seconds. What
needs them is checked meanwhile in one process, which runs this file. Each part is reported when it ends."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cancellation import end_task
from penstock.config.dataset import listed_files
from penstock.config.loading import dump_config, load_config
from penstock.config.rollout import AgentsConfig, RemoteReward, RewardModelReward
from penstock.config.run import RunConfig
from penstock.errors import ConfigError, DeadlineExceeded, InvalidInput, PenstockError, described, one_line
from penstock.feed.datasets import first_prompts, matching_files
from penstock.machine import measure_disk, port_is_free, write_private
from penstock.start_checks import RUN_CHECKS, check_agent_packages, check_run_folder
from penstock.trajectory import Prompt
from penstock.user_code import load_callable
from penstock_services.gateway.access import check_gateway
from penstock_tools.local.join import opened, starts_ray_head

if TYPE_CHECKING:
    from penstock_rollout.rewards.scorer import RewardChoice

CHECK_TIMEOUT_S = 600.0
"""How long a process may take. One takes seconds, but minutes on a machine that many others use."""
STILL_S = 15.0
"""Seconds between two lines that name the parts under way."""
PIPES_S = 5.0
"""How long what a check has started may hold its output open after it has ended."""
LEARNER, SERVER, DATASET = "learner", "rollout server", "dataset"


def check_before_start(config: RunConfig) -> None:
    """Make every check that needs no other process. Raises ConfigError or InvalidInput. Takes milliseconds."""
    for check in RUN_CHECKS.values():
        check(config)
    if config.rollout.num_servers:
        check_agent_packages(config.rollout.agents)
    check_run_folder(config)
    room_for_checkpoints(config)
    _check_own_gateway(config)


def check_before_view(config: RunConfig) -> None:
    """Check that a run has left something to view, and that its gateway can start. Raises ConfigError."""
    if not config.redis.url and not (config.folder / "redis").is_dir():
        raise ConfigError(
            f"nothing to view: {config.folder} has no Redis of a run, and redis.url is empty; correct run or run_dir, "
            "or draw the run's metrics with `penstock plot`"
        )
    _check_own_gateway(config)


def _check_own_gateway(config: RunConfig) -> None:
    check_gateway(config.gateway)
    if config.gateway.keys_file is not None and config.gateway.api_key_file is None:
        raise ConfigError(
            "gateway.keys_file holds hashes only, and `penstock up` itself calls the gateway; set gateway.api_key_file "
            "as well"
        )
    for name in ("port", "grpc_port"):
        port = getattr(config.gateway, name)
        if port and not port_is_free(config.gateway.host, port):
            raise ConfigError(
                f"port {port} on {config.gateway.host} is in use; set gateway.{name} to a free one, or 0 for any"
            )


Found = tuple[str, list[str]]
"""What a part of the check has looked at, and what it would warn of."""


async def check_processes(config: RunConfig, host: str = "") -> tuple[list[str], list[str]]:
    """Check the config of the learner and of a rollout server, and look at the dataset. Prints a line for each part
    that ends. `host` is the address at which other machines would reach this one. Returns what was checked, and what
    servers would warn of. Raises ConfigError with everything that is wrong."""
    if host:
        from penstock.internal_calls import ClusterKey

        opened(config, host, ClusterKey.of(config).file)
    if not config.redis.url:  # a check does not start the run's own Redis, and does not connect
        config = config.changed({"redis.url": "redis://127.0.0.1:1"})
    logging.getLogger("penstock_rollout").addHandler(logging.NullHandler())  # what is wrong is reported here
    with tempfile.TemporaryDirectory(prefix="penstock-check-") as folder:
        file = write_private(Path(folder) / "config.yaml", dump_config(config))
        unasked = ["--no-ray"] if starts_ray_head(config, host) else []  # nothing listens there yet
        started = time.monotonic()
        has_servers, has_agents = config.rollout.num_servers > 0, config.rollout.agents != AgentsConfig()
        has_rows = has_servers and bool(_paths(config))
        has_loader = bool(config.dataset.loader)
        names = [LEARNER, *[DATASET] * (has_rows or has_loader), *[SERVER] * (has_servers and has_agents)]
        heavy = {name: asyncio.get_running_loop().create_future() for name in names}
        process = asyncio.create_task(_check_in_process(file, heavy, *unasked))
        parts = dict[str, Awaitable[Found]]()
        if has_servers:
            parts[SERVER] = heavy[SERVER] if has_agents else asyncio.to_thread(_check_server, config)
        parts[LEARNER] = _check_learner(config, started, heavy[LEARNER])
        if has_rows:
            parts |= {DATASET: _look_at_dataset(config, started, heavy[DATASET]), "reward": _call_reward(config)}
        elif has_loader:
            parts[DATASET] = heavy[DATASET]
        print(f"checking in parallel: {', '.join(parts)}", flush=True)
        shown = {asyncio.create_task(_shown(name, part, started)): name for name, part in parts.items()}
        try:
            while pending := (await asyncio.wait(shown, timeout=STILL_S))[1]:
                print(
                    f"  still checking: {', '.join(name for task, name in shown.items() if task in pending)}",
                    flush=True,
                )
            ended = [task.result() for task in shown]
        finally:
            for task in shown:
                await end_task(task)
            await end_task(process)
            await asyncio.gather(*heavy.values(), return_exceptions=True)
    if failures := [each for each in ended if isinstance(each, PenstockError)]:
        kind = DeadlineExceeded if all(isinstance(each, DeadlineExceeded) for each in failures) else ConfigError
        raise kind("; ".join(dict.fromkeys(map(str, failures))))
    found = [*(each for each in ended if not isinstance(each, PenstockError)), room_for_checkpoints(config)]
    if has_loader:
        untried = "a check does not call dataset.loader, so neither its rows nor the reward on them were tried"
        found.append(("", [f"{untried}; read the first samples with `penstock samples --worst`"]))
    return [what for what, _ in found if what], [doubt for _, doubts in found for doubt in doubts]


async def _shown(name: str, part: Awaitable[Found], started: float) -> Found | PenstockError:
    """The result of a part. Prints how it ended."""
    try:
        found: Found | PenstockError = await part
    except PenstockError as error:
        found = error
    _print_end(name, f"wrong, {found}" if isinstance(found, PenstockError) else "ok", started)
    return found


def _print_end(name: str, outcome: str, started: float) -> None:
    print(f"  {name}: {outcome} ({time.monotonic() - started:.1f} s)", flush=True)


def _check_server(config: RunConfig) -> Found:
    from penstock_rollout.start_check import check

    return f"rollout server rollout-0, engine {check(config)}", []


async def _check_learner(config: RunConfig, started: float, rest: Awaitable[Found]) -> Found:
    """Check here what needs neither torch nor another process."""
    from penstock_learner.start_check import check_files

    await asyncio.to_thread(check_files, config)
    _print_end("learner, all but its model", "ok", started)
    return await rest


async def _look_at_dataset(config: RunConfig, started: float, lengths: Awaitable[Found]) -> Found:
    files = await asyncio.to_thread(first_rows, config)
    doubts = await asyncio.to_thread(doubts_about_rows, config, files)
    _print_end("dataset, all but the lengths of prompts", "ok", started)
    doubts += (await lengths)[1]
    return f"up to {MAX_ROWS:,} rows of {', '.join(path.name for path in files)}", doubts


def room_for_checkpoints(config: RunConfig) -> Found:
    """The size of a checkpoint and the free disk. A run keeps `keep` checkpoints while it writes another one. Raises
    ConfigError if not even one fits."""
    from penstock_tools.sizing.plan import checkpoint_bytes

    try:
        num_bytes = 0.0 if config.dataset.validation.only else checkpoint_bytes(config)
    except ConfigError:
        num_bytes = 0.0  # the sizes of such a model cannot be read from its config.json
    if not num_bytes:
        return "", []
    keep = config.learner.checkpoint.keep
    num_more = max(1, keep + 1 - len(list(config.folder.glob("checkpoints/term-*-step-*"))))
    disk = measure_disk(config.folder, round(num_more * num_bytes))
    text = f"a checkpoint takes about {_size(num_bytes)}, and {_size(disk.free_bytes)} of disk are free"
    advice = f"free space under {config.run_dir}, or set run_dir to a larger disk"
    if disk.free_bytes < num_bytes:
        raise ConfigError(f"{text}; {advice}")
    if disk.free_bytes >= disk.needed_bytes:
        return text, []
    return text, [f"{text}; learner.checkpoint.keep {keep} needs room for {num_more} more: {advice}"]


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"


async def _check_in_process(config_file: Path, parts: Mapping[str, asyncio.Future[Found]], *words: str) -> None:
    """Check these parts in a process that imports torch and transformers once. Sets what each part has found, or a
    ConfigError."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, str(config_file), ",".join(parts), *words,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, limit=2**20,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    errors = asyncio.create_task(process.stderr.read())
    left: PenstockError = ConfigError("the check of {} was interrupted")
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            async for line in process.stdout:
                name, found, doubts, error = json.loads(line)
                if error:
                    parts[name].set_exception(ConfigError(error))
                else:
                    parts[name].set_result((found, doubts))
            last = (await errors).decode(errors="replace").strip().splitlines()[-1:]
        left = ConfigError(f"the check of {{}} ended early: {''.join(last) or 'its process printed nothing'}")
    except TimeoutError:
        left = DeadlineExceeded(
            f"the check of {{}} did not end in {CHECK_TIMEOUT_S:.0f} s; try again when this machine is less busy"
        )
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        rest = asyncio.create_task(process.stdout.read())
        await asyncio.wait({rest, errors}, timeout=PIPES_S)  # read to their end, both close by themselves
        await end_task(rest)
        await end_task(errors)
        for name, part in parts.items():
            if not part.done():
                part.set_exception(type(left)(str(left).replace("{}", name)))


def check_here(config_file: Path, names: Sequence[str], with_ray: bool) -> Iterator[tuple[str, str, list[str], str]]:
    """What the process of `_check_in_process` does: for each part its name, what was looked at, what it would warn of,
    and its error. The code of users, which may do anything, comes last."""
    config = load_config(config_file)
    for name in names:
        found, doubts, failure = "", list[str](), ""
        try:
            if name == LEARNER:
                from penstock_learner.start_check import check

                found = f"learner, {check(config, with_ray=with_ray)}"
            elif name == SERVER:
                found, _ = _check_server(config)
            else:
                if config.dataset.loader:
                    load_callable(config.dataset.loader, "dataset.loader")
                doubts = doubts_about_lengths(config, first_rows(config))
        except PenstockError as error:
            failure = str(error)
        except Exception as error:
            traceback.print_exc()
            failure = described(error)
        yield name, found, doubts, failure


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries and agents print is not an answer
    file, names, *words = sys.argv[1:]
    for answer in check_here(Path(file), names.split(","), with_ray="--no-ray" not in words):
        answers.write(json.dumps(answer) + "\n")


# ── doubts about a dataset: data sources without their own reward, no ground truth, prompts that are too long ──

MAX_ROWS = 1000
"""Rows of a file that are looked at. More would take longer than a check should."""


def first_rows(config: RunConfig) -> dict[Path, list[Prompt]]:
    """The prompts of each file's first rows. Raises InvalidInput for a row that is not one. Skips a loader's rows."""
    return {path: first_prompts(path, config.dataset, MAX_ROWS) for path in _paths(config)}


def doubts_about_rows(config: RunConfig, files: dict[Path, list[Prompt]]) -> list[str]:
    """One line for each data source that no reward names, and each file with rows that its reward cannot judge, with
    what to do."""
    from penstock_rollout.rewards.scorer import RewardChoice

    choice = RewardChoice(config.rollout.reward)
    sources = dict.fromkeys(prompt.data_source for prompts in files.values() for prompt in prompts)
    unknown = [choice.unknown_text(source) for source in sources if not choice.is_known(source)]
    return [*unknown, *_without_truth(config, choice, files)]


COMPARING_REWARDS = ("exact_match", "gsm8k", "math", "search_qa", "verl")
"""Kinds of rewards that compare answers with the ground truth."""


def _without_truth(config: RunConfig, choice: RewardChoice, files: dict[Path, list[Prompt]]) -> Iterator[str]:
    """The usual mistake with a dataset whose columns have other names than verl's."""
    learner = config.learner
    if learner.reward_model is not None or learner.step or learner.ahead:
        return
    if config.rollout.agents.turn_rewards in ("replace", "last"):
        return
    for path, prompts in files.items():
        sources = [prompt.data_source for prompt in prompts if prompt.ground_truth is None]
        known = (choice.reward_for(source) if choice.is_known(source) else choice.config.default for source in sources)
        if num_rows := sum(reward.kind in COMPARING_REWARDS for reward in known):
            yield (
                f"{num_rows} of the first {len(prompts)} prompts of {path} have no ground truth, which their reward "
                "compares answers with; name its column in dataset.columns.ground_truth, unless an agent gives rewards"
            )


def _paths(config: RunConfig) -> list[Path]:
    """The files of the dataset, or none if a loader reads them."""
    sets = () if config.dataset.loader else (config.dataset.file, config.dataset.validation.file)
    return [path for files in sets for entry in listed_files(files) for path in matching_files(entry.file)]


def doubts_about_lengths(config: RunConfig, files: dict[Path, list[Prompt]]) -> list[str]:
    """One or two lines for each file with prompts that are too long or refused, with what to do. Tools, which an agent
    may show to the model before a prompt, are not counted."""
    return list(_long_prompts(config, files))


def _long_prompts(config: RunConfig, files: dict[Path, list[Prompt]]) -> Iterator[str]:
    from prometheus_client import CollectorRegistry
    from transformers.utils import logging

    from penstock_rollout.agents.tool_calls import tokenization_of
    from penstock_rollout.metrics import RolloutMetrics
    from penstock_rollout.tokenization import PromptLength

    logging.set_verbosity_error()  # it would warn of the same prompts, without what to do
    rollout = config.rollout
    tokenization = tokenization_of(config)
    limit = PromptLength(rollout.prompt, rollout.engine.max_model_len, RolloutMetrics(CollectorRegistry())).max_tokens
    treatment = "would be dead-lettered" if rollout.prompt.overlong == "filter" else "would be truncated"
    for path, prompts in files.items():
        lengths, refused = [], []
        for prompt in prompts:
            try:
                lengths.append(len(tokenization.prompt_ids(prompt)))
            except InvalidInput as error:
                refused.append(str(error))
        where = f"of the first {len(prompts)} prompts of {path}"
        if len(refused) == len(prompts) > 0:
            raise ConfigError(f"all {where} would be dead-lettered; the first: {refused[0]}")
        if refused:
            yield f"{len(refused)} {where} would be dead-lettered; correct them; the first: {refused[0]}"
        if num_long := sum(length > limit for length in lengths):
            yield (
                f"{num_long} {where} have more than {limit} tokens, up to {max(lengths)}, and {treatment}; shorten "
                "them, or raise rollout.prompt.max_tokens or rollout.engine.max_model_len"
            )


# ── the reward on a few rows ──

REWARD_ROWS = 4
"""Rows of each file that the reward is called on."""
REWARD_S = 120.0
ONE_TURN: dict[str, Any] = {"num_turns": 2, "tool_rewards": [], "turn_scores": []}
"""What rewards are told of a sample that an agent got with one answer and without tools."""


async def _call_reward(config: RunConfig) -> Found:
    """Call the reward on the first rows of each file, with the ground truth and with an empty response. Raises
    ConfigError if it fails on both, on all of the rows of a data source. Remote rewards are not called, and after
    REWARD_S no further rows are tried."""
    from prometheus_client import CollectorRegistry

    from penstock.store.notices import Event
    from penstock_rollout.metrics import RolloutMetrics
    from penstock_rollout.rewards.scorer import Scorer

    events, deadline = list[Event](), time.monotonic() + REWARD_S
    reward = config.rollout.reward.model_copy(update={"num_processes": 1})
    scorer = Scorer(reward, RolloutMetrics(CollectorRegistry()), events.append)
    failures: dict[str, list[str]] = defaultdict(list)
    """By data source, how each row failed; empty for a row that did not."""
    try:
        await scorer.check()
        for where, prompt in await asyncio.to_thread(_rows_for_reward, config):
            source, truth = prompt.data_source, prompt.ground_truth
            if isinstance(scorer.choice.reward_for(source), RemoteReward | RewardModelReward):
                continue
            if time.monotonic() > deadline:
                break
            responses = [truth if isinstance(truth, str) else json.dumps(truth, default=str), ""]
            num_before = len(events)
            scores = await scorer.score(where, source, responses, truth, prompt.extra_info, [ONE_TURN] * 2)
            has_failed = all(score.failed for score in scores)
            failures[source].append(one_line(events[num_before].text.rpartition("; ")[0]) if has_failed else "")
    finally:
        await scorer.close()
    if wrong := [
        f"rollout.reward fails on each of the {len(texts)} rows that were tried, so nothing could be learned; "
        f"{texts[0]}"
        for texts in failures.values()
        if all(texts)
    ]:
        raise ConfigError("; ".join(wrong))
    total = sum(map(len, failures.values()))
    doubts = [
        f"the reward fails on some rows; {next(filter(None, texts))}" for texts in failures.values() if any(texts)
    ]
    return f"the reward on {total} row{'s' * (total > 1)}" if total else "", doubts


def _rows_for_reward(config: RunConfig) -> list[tuple[str, Prompt]]:
    return [
        (f"row {number} of {path}", prompt)
        for path in _paths(config)
        for number, prompt in enumerate(first_prompts(path, config.dataset, REWARD_ROWS), 1)
    ]


if __name__ == "__main__":
    main()
