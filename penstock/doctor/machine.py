"""Checks of this machine: ports, disk, GPUs and the sandbox of code rewards."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys

from penstock.config.gpu_bundles import num_gpus
from penstock.config.rewards import CodeReward
from penstock.config.run import RunConfig
from penstock.doctor.finding import Finding, Level
from penstock.doctor.stopped import is_stopped
from penstock.machine.disk_space import folder_bytes, measure_disk
from penstock.machine.gpus import gpu_names, nvidia_smi
from penstock.machine.ports import port_is_free

CONNECT_TIMEOUT_S = 2.0
MIN_FREE_BYTES = 5 * 2**30
SANDBOX_TIMEOUT_S = 60.0


def check_ports(config: RunConfig) -> list[Finding]:
    """Check that the processes of a run listen where they said. If the run is not up, check that its ports are free."""
    findings = []
    files = [] if is_stopped(config) else sorted(config.folder.glob("*.json"))
    for path in files:
        fields = json.loads(path.read_text())
        if isinstance(fields, dict) and "host" in fields:
            ports = [value for name, value in fields.items() if name.endswith("port")]
            findings += [check_listens(path.stem, fields["host"], port) for port in ports]
    if findings:
        return findings
    gateway, rollout, learner = config.gateway, config.rollout, config.learner
    for name, host, port in (
        ("gateway.port", gateway.host, gateway.port), ("gateway.grpc_port", gateway.host, gateway.grpc_port),
        ("rollout.port", rollout.host, rollout.port), ("rollout.metrics_port", rollout.host, rollout.metrics_port),
        ("learner.metrics_port", learner.metrics_host, learner.metrics_port),
    ):  # fmt: skip
        if port and not port_is_free(host, port):
            findings.append(Finding("ports", "fail", f"{name} {port} is in use", f"set {name} to a free one, or 0"))
    return findings or [Finding("ports", "ok", "the run is not up here; its ports are free")]


def check_listens(part: str, host: str, port: int | str) -> Finding:
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S):
            return Finding("ports", "ok", f"{part} listens on {host}:{port}")
    except OSError as error:
        text = f"{part} does not answer on {host}:{port} ({error.strerror or error})"
        return Finding("ports", "fail", text, "start it, or check the network and firewall")


def check_disk(config: RunConfig) -> Finding:
    """Check the space for checkpoints and snapshots. Two times the newest checkpoint must fit."""
    space = measure_disk(config.folder)
    newest = max(config.folder.glob("checkpoints/term-*-step-*"), default=None)
    needed = 2 * folder_bytes(newest) if newest else 0
    if space.free_bytes < max(MIN_FREE_BYTES, needed):
        return Finding("disk", "warn", str(space), "free space for checkpoints and snapshots, or move run_dir")
    return Finding("disk", "ok", str(space))


def check_sandbox(config: RunConfig) -> list[Finding]:
    """Say how this machine isolates the programs of code rewards, by running one. Empty without a rollout server."""
    if importlib.util.find_spec("penstock_rollout") is None:
        return []
    reward = config.rollout.reward
    codes = [code for code in (*reward.by_data_source.values(), reward.default) if isinstance(code, CodeReward)]
    findings = []
    for confinement in dict.fromkeys(code.confinement for code in codes or [CodeReward()]):
        command = [sys.executable, "-m", "penstock_rollout.rewards.sandbox.run", confinement]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SANDBOX_TIMEOUT_S, check=False)
        except (subprocess.SubprocessError, OSError) as error:
            findings.append(Finding("sandbox", "warn", f"could not be tried: {error}", "run penstock doctor again"))
            continue
        text = (done.stdout or done.stderr).strip().splitlines()[-1:] or ["no answer"]
        if done.returncode == 0:
            findings.append(Finding("sandbox", "ok", f"code rewards run {text[0]}"))
        else:
            level: Level = "fail" if codes else "warn"
            findings.append(Finding("sandbox", level, text[0], "see docs/rewards.md; other rewards work"))
    return findings


def check_gpus(config: RunConfig) -> list[Finding]:
    """Compare the GPUs of this machine with what the learner needs, and check that NVLink connects them."""
    wanted = num_gpus(config.learner.placement, config.learner.needed_roles)
    names = gpu_names()
    if not names:
        if wanted and not config.learner.ray_address:
            advice = "install the driver, or set learner.*.gpus_per_rank to 0"
            return [Finding("gpus", "fail", f"none here, but the learner needs {wanted}", advice)]
        return [Finding("gpus", "ok", "none here, and the learner needs none here")]
    found = f"{len(names)} x {names[0]}"
    if wanted > len(names) and not config.learner.ray_address:
        return [Finding("gpus", "fail", f"{found}, but the learner needs {wanted}", "lower learner.*.num_ranks")]
    if len(names) == 1:
        return [Finding("gpus", "ok", found)]
    # Each row of the matrix has an X on the diagonal; the header has none.
    rows = [cells for line in nvidia_smi("topo", "-m") if "X" in (cells := line.split()) and cells[0].startswith("GPU")]
    links = {cell for row in rows for cell in row[1 : len(names) + 1]} - {"X"}
    if links and all(link.startswith("NV") for link in links):
        return [Finding("gpus", "ok", f"{found}, linked by NVLink")]
    advice = "place policy ranks, and the GPUs of one server, on linked GPUs"
    return [Finding("gpus", "warn", f"{found}, not all linked by NVLink ({', '.join(sorted(links))})", advice)]
