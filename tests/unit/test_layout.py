"""The structure of the code, beyond what import-linter's contracts in pyproject.toml check."""

from __future__ import annotations

import ast
import re
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter
from io import StringIO
from pathlib import Path

import grimp

from support.quarantine import QUARANTINED

ROOT = Path(__file__).parents[2]
PICKLES = {
    "pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "ForkingPickler", "Pipe", "SimpleQueue", "Manager",
    "Pool", "ProcessPoolExecutor", "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
    "send_object_list", "recv_object_list",
}  # fmt: skip
"""Modules and functions that unpickle what they read."""
MAY_PICKLE = {
    "learner/penstock_learner/shards.py": {"pickle"},
    "learner/penstock_learner/roles/role_group.py": {"cloudpickle"},
    "learner/penstock_learner/roles/policy.py": {"broadcast_object_list"},
    "learner/penstock_learner/roles/trainer.py": {"all_gather_object"},
    "tools/penstock_tools/sft/training.py": {"broadcast_object_list", "all_gather_object"},
    "rollout_server/penstock_rollout/engines/vllm/standby.py": {"ForkingPickler", "Pipe"},
}
"""The files that docs/security.md names: the index of DCP, read with its own classes alone, and processes of one job
that the same user started."""
FOLDERS = ("penstock", "rollout_server", "learner", "services", "tools")
PACKAGES = ("penstock", "penstock_rollout", "penstock_learner", "penstock_services", "penstock_tools")


def test_no_two_files_import_each_other() -> None:
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    files = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(files) > 300
    TopologicalSorter(files).prepare()  # raises CycleError, which names the circle


def test_a_controller_starts_without_the_parts_of_torch_that_only_ranks_use() -> None:
    """They take a quarter of its start, for which the run waits whenever a learner is replaced."""
    slow = ("torch.distributed.fsdp", "torch.distributed.tensor", "transformers", "penstock_learner.model.")
    imported = _followed({"penstock_learner.loop.process"})
    assert "penstock_learner.weights.staging" in imported
    assert [name for name in imported if name.startswith(slow)] == []


def test_a_learner_starts_ray_before_it_imports_torch() -> None:
    """Torch takes seconds, in which Ray's processes can start. Without a cluster to join, gRPC is not needed."""
    tree = ast.parse((ROOT / "learner" / "penstock_learner" / "__main__.py").read_text())
    (serve,) = (node for node in tree.body if isinstance(node, ast.AsyncFunctionDef) and node.name == "serve")
    imported = _followed({*_imports_at_start(tree.body), *_imports_at_start(serve.body)})
    assert {"ray", "penstock_learner.roles.role_group", "penstock.store.redis_client"} <= imported
    assert [name for name in imported if name.partition(".")[0] in ("torch", "transformers", "grpc")] == []


def test_a_trained_rank_starts_without_what_only_checkpoints_use() -> None:
    imported = _followed({"penstock_learner.roles.policy", "penstock_learner.roles.critic"})
    assert "penstock_learner.roles.trainer" in imported
    assert [name for name in imported if name.startswith("torch.distributed.checkpoint")] == []


def test_a_rank_of_a_frozen_role_starts_without_what_only_trained_roles_use() -> None:
    imported = _followed({"penstock_learner.roles.frozen"})
    slow = ("torch.distributed.checkpoint", "grpc", "penstock_learner.roles.trainer", "penstock_learner.weights.")
    assert "penstock_learner.model.causal_lm" in imported
    assert [name for name in imported if name.startswith(slow)] == []


def _followed(names: set[str]) -> set[str]:
    """These modules, and all that they import when they are imported, as far as the files are ours."""
    imported, new = set[str](), set(names)
    while new:
        name = new.pop()
        imported.add(name)
        for folder in (ROOT, ROOT / "learner"):
            if (path := folder / f"{name.replace('.', '/')}.py").exists():
                new |= set(_imports_at_start(ast.parse(path.read_text()).body)) - imported
    return imported


def _imports_at_start(body: Sequence[ast.stmt]) -> Iterator[str]:
    """The modules that these statements import, outside of functions and conditions."""
    for node in body:
        if isinstance(node, ast.ImportFrom):
            yield from (node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_two_files_of_tests_have_one_name() -> None:
    """Otherwise pytest imports one of them, and cannot import the other."""
    names = Counter(path.name for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_quarantined_tests_exist_and_have_a_reason() -> None:
    for test, reason in QUARANTINED.items():
        file, _, name = test.partition("::")
        assert f"def {name}(" in (Path(__file__).parents[2] / file).read_text() and reason, test


def test_every_file_that_a_docstring_or_comment_names_exists() -> None:
    """A name without a folder is a file of the same package."""
    pattern = re.compile(r"(?<![\w<>/*.-])[\w./-]*\w\.(?:py|lua)\b")
    files = [f"/{path.relative_to(ROOT)}" for kind in ("py", "lua") for path in ROOT.glob(f"[!.]*/**/*.{kind}")]
    missing = []
    for folder in FOLDERS:
        own = {Path(file).name for file in files if file.startswith(f"/{folder}/")}
        for path in (ROOT / folder).rglob("*.py"):
            for name in set(pattern.findall(_remarks(path.read_text(), pattern))) - {"path/file.py", "folder/file.py"}:
                if not (any(file.endswith(f"/{name}") for file in files) if "/" in name else name in own):
                    missing.append(f"{path}: {name}")
    assert missing == []


def _remarks(text: str, pattern: re.Pattern[str]) -> str:
    """The docstrings and comments of a file that may match."""
    if pattern.search(text) is None:
        return ""
    tokens = tokenize.generate_tokens(StringIO(text).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    values = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    return "\n".join([*comments, *(str(value.value) for value in values if isinstance(value, ast.Constant))])


def test_nothing_is_unpickled_except_between_the_processes_of_one_job() -> None:
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            name, text = str(path.relative_to(ROOT)), path.read_text()
            if not any(word in text for word in (*PICKLES, "load(", "allow_pickle")):
                continue
            tree = ast.parse(text)
            assert set(_names(tree)) & PICKLES - MAY_PICKLE.get(name, set()) == set(), name
            unsafe = [ast.unparse(call) for call in ast.walk(tree) if isinstance(call, ast.Call) if _may_unpickle(call)]
            assert unsafe == [], name


def _names(tree: ast.AST) -> Iterator[str]:
    """Every name and attribute that the code uses, and every part of the names that it imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")


def _may_unpickle(call: ast.Call) -> bool:
    """Whether it is `torch.load` without `weights_only=True`, or numpy's `load` with `allow_pickle`."""
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    function = ast.unparse(call.func)
    if function == "torch.load":
        return keywords.get("weights_only") != "True"
    return keywords.get("allow_pickle", "False") != "False"
