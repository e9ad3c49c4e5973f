"""The documentation matches the code: fields, metrics and links."""

from __future__ import annotations

import ast
import json
import re
import runpy
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import jsonschema
import pytest
import yaml
from pydantic import Field

from penstock.client import SyncPenstockClient
from penstock.config.loading import validate
from penstock.config.run import RunConfig
from penstock_rollout.agents.declarations import verl_names
from support.monitoring import declared_names, documented_metrics

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("docs/*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md"))])
OTHER_PAGES = [
    ROOT / "CHANGELOG.md",
    *sorted(ROOT.glob("helm/*/README.md")),
    *sorted(ROOT.glob("examples/*/README.md")),
]
FOLDERS = (
    "penstock", "services", "rollout_server", "learner", "tools", "proto", "deploy", "helm", "docs", "tests", "bench",
    "examples",
)  # fmt: skip
PLACEHOLDERS = {
    "folder/file.py",
    "path/file.py",
    "bench/gpu/NAME.py",
    "penstock/importance_ratio_max",
    "deploy/compose/secrets/api-key",
}
"""Words that look like paths: they stand for a file that the reader has or makes, or are the name of a metric."""
PACKAGES = {"penstock_rollout", "penstock_learner", "penstock_services", "penstock_tools"}
NOT_PINNED = {"sglang", "wandb"}
"""They come from an image or from the user."""
UNUSUAL = re.compile(
    r"\b(anew|for\s+ever|nobody|left\s+out|leav(?:e|es|ing)\s+(?:\S+\s+)?out|(?:gives?|gave|given|giving)\s+up|wrongly"
    r"|rightly|beside|said|all\s+the\s+same|of\s+(?:our|your)\s+own)\b"
    r"|(?<!there\s)\b(?:is|are)\s+no\s+(?!\w+er\b|more\b|less\b)\w",
    re.IGNORECASE,
)
"""Write: again, forever, no one, skipped, omits, abandoned, incorrectly, correctly, alongside, reported, nevertheless,
our own X, is not an X."""
LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")


@pytest.mark.parametrize(
    ("page", "maker"),
    [
        ("config", "make_config_reference"),
        ("benchmarks", "make_benchmarks"),
        ("testing", "make_test_table"),
        ("faults", "make_faults"),
        ("verl-keys", "make_verl_keys"),
        ("metrics", "make_metrics"),
        ("dependencies", "make_dependencies"),
    ],
)
def test_a_generated_page_is_as_the_code_would_write_it(page: str, maker: str) -> None:
    built = runpy.run_path(str(ROOT / "docs" / f"{maker}.py"))["build"]()
    assert (ROOT / "docs" / f"{page}.md").read_text() == built, f"run: python docs/{maker}.py"


def test_the_gateway_s_page_of_runbooks_is_as_its_generator_would_write_it() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_runbooks.py"))
    assert made["PAGE"].read_text() == made["build"](), "run: python docs/make_runbooks.py"


def test_every_row_of_the_fault_matrix_has_a_result() -> None:
    results = json.loads((ROOT / "tests" / "faults" / "results.json").read_text())
    marked = {
        f"{path.relative_to(ROOT / 'tests')}::{function.name}"
        for path in ROOT.glob("tests/**/test_*.py")
        if "mark.fault_row(" in (text := path.read_text())
        for function in ast.walk(ast.parse(text))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        if any("fault_row" in ast.unparse(decorator) for decorator in function.decorator_list)
    }
    assert marked - {row["test"].partition("[")[0] for row in results} == set(), "run: make chaos"


def test_lists_and_their_items_are_described() -> None:
    kind = runpy.run_path(str(ROOT / "docs" / "make_config_reference.py"))["_kind"]
    assert kind(tuple[float, float]) == "list of 2 numbers"
    assert kind(tuple[str, ...]) == "list of text"
    assert kind(tuple[Annotated[int, Field(ge=1)], ...]) == "list of integer, ≥1"


def test_every_config_field_is_described() -> None:
    table = re.compile(r"^\| `(\w+)` \|.*\| *([^|]*) \|$", re.MULTILINE)
    rows = table.findall((ROOT / "docs" / "config.md").read_text())
    assert len(rows) > 200
    assert {name for name, meaning in rows if not meaning} <= {"kind"}


def test_every_benchmark_s_results_are_on_the_page() -> None:
    shown = runpy.run_path(str(ROOT / "docs" / "make_benchmarks.py"))["BENCHES"]
    assert set(shown) >= {path.name.partition(".")[0] for path in ROOT.glob("bench/results/*.json")}
    scripts = [word for _, command, _ in shown.values() for word in command.split() if word.endswith(".py")]
    assert [script for script in scripts if not (ROOT / script).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    targets = [target.partition("#")[0] for target in LINK.findall(page.read_text()) if "://" not in target]
    missing = [target for target in targets if target and not (page.parent / target).exists()]
    assert not missing


def test_every_file_that_the_design_names_exists() -> None:
    named = re.findall(r"(?<![\w<>/])[\w./-]+\.(?:py|lua|yml|md)\b", (ROOT / "docs" / "design.md").read_text())
    assert len(named) > 100
    assert _missing(named) == []


@pytest.mark.parametrize(("what", "limit"), [("prompt", 50), ("version", 20)])
def test_a_way_is_as_short_as_the_design_says(what: str, limit: int) -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    found = re.search(rf"^\*\*A {what}\*\*[^\n]* in (\d+) files:\n```\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    names = re.findall(r"[\w/]+\.py", found[2])
    product = [f"/{path}" for folder in FOLDERS[:4] for path in (ROOT / folder).rglob("*.py")]
    named = [tuple(path for path in product if path.endswith(f"/{name}")) for name in names]
    assert all(len(paths) == 1 for paths in named), "every name stands for one file"
    assert len(set(named)) == int(found[1]) <= limit


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_in_backticks_exists(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    words = {word for code in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"[\w./*<>{},-]+", code)}
    sources = {word for word in words if re.fullmatch(r"[\w./-]+\.(py|lua|proto|sh|acl|yml|md|tpl|Dockerfile)", word)}
    in_repository = {word for word in words if re.match(rf"({'|'.join(FOLDERS)})/[\w./-]+$", word)}
    assert _missing((sources | in_repository) - PLACEHOLDERS) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_config_field_that_a_page_names_exists(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    if page.name in ("deploy.md", "coming-from-verl.md", "verl-keys.md"):
        return  # they also name values of the chart and fields of other programs, under the same sections
    dotted = re.compile(rf"(?<![\w./-])((?:{'|'.join(RunConfig.model_fields)})(?:\.[a-z_0-9]+)+)(?![\w/.<(])")
    named = {name for code in re.findall(r"`([^`\n]+)`", text) for name in dotted.findall(code)}
    files = {name for name in named if name.rpartition(".")[2] in ("json", "jsonl", "key", "py", "yaml")}
    assert sorted(name for name in named - files if not _is_field(name)) == []


def _is_field(path: str) -> bool:
    """Whether the config has a field of this name. The keys of a mapping are free."""
    kinds: list[Any] = [RunConfig]
    for name in path.split("."):
        fields = [kind.model_fields[name] for kind in kinds if name in getattr(kind, "model_fields", {})]
        if not fields:
            return dict in kinds
        kinds = [part for field in fields for part in _parts(field.annotation)]
    return True


def _parts(annotation: Any) -> Iterator[Any]:
    """The types that an annotation is made of."""
    yield get_origin(annotation) or annotation
    for argument in get_args(annotation):
        yield from _parts(argument)


def _missing(names: Iterable[str]) -> list[str]:
    """The names that are not the end of a path in the repository."""
    found = [path for folder in (*FOLDERS, ".github") for path in (ROOT / folder).rglob("*")]
    paths = {f"/{path.relative_to(ROOT)}" for path in (*found, *ROOT.iterdir())}
    return sorted(name for name in names if not any(path.endswith(f"/{name.rstrip('/')}") for path in paths))


def test_texts_use_the_everyday_words_of_the_field() -> None:
    kinds = {".py", ".lua", ".md", ".proto", ".js", ".yaml", ".yml", ".tpl", ".sh", ".txt"}
    files = [path for folder in FOLDERS if folder != "tests" for path in (ROOT / folder).rglob("*")]
    texts = {path: path.read_text() for path in [*PAGES, *OTHER_PAGES, *files] if path.suffix in kinds}
    found = [(path.name, word) for path, text in texts.items() for word in UNUSUAL.findall(text)]
    assert len(texts) > 300 and not found, f"{found}: see UNUSUAL for what to write instead"


def test_names_in_tests_and_benchmarks_use_them_too() -> None:
    files = [path for folder in ("tests", "bench") for path in (ROOT / folder).rglob("*.py")]
    names = [name for path in files for name in re.findall(r"\b(?:def|class) (\w+)", path.read_text())]
    found = [name for name in names if UNUSUAL.search(name.replace("_", " "))]
    assert len(names) > 3000 and not found, f"{found}: see UNUSUAL for what to write instead"


def test_every_page_is_in_the_index() -> None:
    indexed = set(LINK.findall((ROOT / "docs" / "README.md").read_text()))
    assert {page.name for page in ROOT.glob("docs/*.md")} - {"README.md"} <= indexed


def test_the_metrics_page_has_a_row_for_every_metric() -> None:
    rows = {name for name, _, _ in documented_metrics()}
    assert rows == {name for name in declared_names() if not name.endswith(("_bucket", "_sum", "_count"))} | {
        name.removesuffix("_bucket") for name in declared_names() if name.endswith("_bucket")
    }


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_metric_that_a_page_names_is_declared(page: Path) -> None:
    declared = declared_names() | {name.removesuffix("_bucket") for name in declared_names()}
    named = {name for name in re.findall(r"\bpenstock_[a-z_]+\b(?![.*/<])", page.read_text()) if name not in PACKAGES}
    assert named - declared == set()


def test_every_package_is_pinned_and_on_the_page_of_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lists = [project["project"]["dependencies"], *project["project"]["optional-dependencies"].values()]
    groups = project["dependency-groups"]
    wanted = {name for text in [*sum(lists, []), *sum(groups.values(), [])] if (name := _package(text)) != "penstock"}
    page = (ROOT / "docs" / "dependencies.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE)
    assert wanted - {_package(name) for row in rows for name in row.split(", ")} == set()
    pinned = {
        _package(line)
        for path in ROOT.glob("deploy/python/requirements*.txt")
        for line in path.read_text().splitlines()
        if "==" in line
    }
    assert wanted - pinned == NOT_PINNED


def _package(text: str) -> str:
    """The name in a requirement, spelled as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[>=<;@ ]", text.strip())[0]).lower()


def test_the_page_of_the_clients_lists_every_method() -> None:
    text = (ROOT / "docs" / "client.md").read_text()
    table = text[text.index("## Methods") : text.index("## Errors")]
    listed = set(re.findall(r"`(\w+)\(", table))
    methods = {name for name in vars(SyncPenstockClient) if not name.startswith("_")}
    assert listed == methods - {"close", "from_run_dir"}


def blocks(language: str) -> list[tuple[str, str]]:
    """Page and text of every fenced block of a language."""
    pattern = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [(page.name, text) for page in PAGES for text in pattern.findall(page.read_text())]


def test_every_yaml_of_the_pages_is_a_valid_configuration() -> None:
    """Files of tools and interactions have their own tests: examples/ has one of each. deploy.md shows chart values."""
    found = [(page, yaml.safe_load(text)) for page, text in blocks("yaml")]
    schema = json.loads((ROOT / "helm/penstock/values.schema.json").read_text())
    for page, data in found:
        if page == "deploy.md":
            jsonschema.validate(data, schema)
    configs = [(p, data) for p, data in found if p != "deploy.md" and not data.keys() & {"tools", "interaction"}]
    assert len(configs) >= 5
    for page, data in configs:
        validate({"model": {"path": "model"}, **data}, page)


def test_the_python_of_the_pages_can_be_imported() -> None:
    """Programs that call a run are run by test_doc_commands.py."""
    found = [(page, text) for page, text in blocks("python") if "from_run_dir" not in text]
    assert len(found) >= 4
    for page, text in found:
        with verl_names():  # a page shows a tool that was written for verl
            exec(compile(text, page, "exec"), {"__name__": page})
