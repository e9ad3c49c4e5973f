"""Write schema.json, which describes the requests and flags that SGLang's server accepts, from SGLang's own sources.

    pip download sglang==0.5.23 --no-deps && unzip sglang-*.whl -d sources
    python tests/support/sglang/make_schema.py sources 0.5.23

The sources are parsed, not imported, because SGLang can be imported only where it can run. The file has the flags of
the command line, the JSON schema of every request that the engine makes, and the methods that the engine's plugin
hooks, with a check that SGLang has them. The schemas come from the dataclasses and
structs behind the routes of http_server.py, and from the contract that SGLang also checks /generate against. SGLang
ignores unknown fields silently. The schema refuses them, because here an unknown field is a mistake.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

Schema = dict[str, Any]
Scope = dict[str, ast.AST]
"""Classes and assigned names of the files that were read."""

ROUTES = ("/generate", "/abort_request", "/pause_generation", "/continue_generation", "/update_weights_from_disk")
SCALARS: dict[str, Schema] = {
    "str": {"type": "string"},
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "dict": {"type": "object"},
}
HOOKS = {
    "sglang.srt.managers.scheduler.Scheduler.__init__": ["self", "server_args", "port_args"],
    "sglang.srt.model_loader.loader.DefaultModelLoader._get_weights_iterator": ["self", "source"],
}
"""Methods that the plugin hooks, with their positional arguments."""
CONTRACT = "api/v1/api_types.py"
"""`sglang.api.v1.GenerateRequest`: a second, generated description of /generate."""


def read_scope(*paths: Path) -> Scope:
    scope: Scope = {}
    for path in paths:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                scope[node.name] = node
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                scope[node.targets[0].id] = node.value
    return scope


def schema_of(annotation: ast.AST, scope: Scope) -> Schema:
    """The schema of an annotation. An annotation that is not understood gets a schema that accepts everything."""
    match annotation:
        case ast.Constant(value=None):
            return {"type": "null"}
        case ast.Constant(value=str(text)):
            return schema_of(ast.parse(text, mode="eval").body, scope)
        case ast.Name(id=name) if name in SCALARS:
            return SCALARS[name]
        case ast.Name(id=name) if isinstance(scope.get(name), ast.ClassDef):
            return object_schema(name, scope, strict=False)
        case ast.Name(id=name) if name in scope:
            return schema_of(scope[name], scope)
        case ast.Subscript(value=ast.Name(id=generic), slice=argument):
            return generic_schema(generic, arguments_of(argument), scope)
    return {}


def generic_schema(generic: str, arguments: list[ast.AST], scope: Scope) -> Schema:
    match generic:
        case "Optional":
            return any_of([schema_of(arguments[0], scope), {"type": "null"}])
        case "Union":
            return any_of([schema_of(argument, scope) for argument in arguments])
        case "List" | "Set" | "list":
            return {"type": "array", "items": schema_of(arguments[0], scope)}
        case "Dict" | "dict":
            return {"type": "object", "additionalProperties": schema_of(arguments[1], scope)}
        case "Literal":
            return {"enum": [argument.value for argument in arguments if isinstance(argument, ast.Constant)]}
        case "Annotated" | "A":
            return schema_of(arguments[0], scope)
    return {}


def any_of(schemas: list[Schema]) -> Schema:
    return {"anyOf": [inner for schema in schemas for inner in schema.get("anyOf", [schema])]}


def arguments_of(node: ast.AST) -> list[ast.AST]:
    return list(node.elts) if isinstance(node, ast.Tuple) else [node]


def fields_of(name: str, scope: Scope) -> dict[str, ast.AnnAssign]:
    """The fields of the class and of its base classes, in order."""
    node = scope.get(name)
    if not isinstance(node, ast.ClassDef):
        return {}
    fields: dict[str, ast.AnnAssign] = {}
    for base in node.bases:
        if isinstance(base, ast.Name):
            fields |= fields_of(base.id, scope)
    for entry in node.body:
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
            fields[entry.target.id] = entry
    return fields


def object_schema(name: str, scope: Scope, strict: bool = True) -> Schema:
    fields = fields_of(name, scope)
    assert fields, f"{name} is not in the sources that were read"
    return {
        "type": "object",
        "properties": {field: schema_of(entry.annotation, scope) for field, entry in fields.items()},
        "required": [field for field, entry in fields.items() if entry.value is None],
        "additionalProperties": not strict,
    }


def request_class(route: str, server: ast.Module) -> str:
    """The class of the first parameter of the function that serves the route."""
    for node in server.body:
        if not isinstance(node, ast.AsyncFunctionDef):
            continue
        decorated = [d.args[0] for d in node.decorator_list if isinstance(d, ast.Call) and d.args]
        if any(isinstance(path, ast.Constant) and path.value == route for path in decorated):
            annotation = node.args.args[0].annotation
            if isinstance(annotation, ast.Subscript):
                annotation = arguments_of(annotation.slice)[0]  # Annotated[X, Body()]
            assert isinstance(annotation, ast.Name)
            return annotation.id
    raise LookupError(f"http_server.py does not serve {route}")


def request_schemas(sources: Path) -> dict[str, Schema]:
    scope = read_scope(sources / "srt/utils/weight_versions.py", sources / "srt/managers/io_struct.py")
    sampling = read_scope(sources / "srt/sampling/sampling_params.py")
    server = ast.parse((sources / "srt/entrypoints/http_server.py").read_text())
    schemas = {route: object_schema(request_class(route, server), scope) for route in ROUTES}
    params = object_schema("SamplingParams", sampling)
    schemas["/generate"]["properties"]["sampling_params"] = params
    contract = object_schema("GenerateRequest", read_scope(sources / CONTRACT), strict=False)
    schemas["/generate"] = {"allOf": [schemas["/generate"], contract]}
    return schemas


def check_hooks(sources: Path) -> None:
    """Fail unless SGLang has the methods, and a plugin can hook them."""
    assert (sources / "srt/plugins/hook_registry.py").exists()
    for target, arguments in HOOKS.items():
        module, class_name, method = target.removeprefix("sglang.").rsplit(".", 2)
        found = read_scope(sources / f"{module.replace('.', '/')}.py")[class_name]
        assert isinstance(found, ast.ClassDef)
        (node,) = (n for n in found.body if isinstance(n, ast.FunctionDef) and n.name == method)
        assert [argument.arg for argument in node.args.args] == arguments, target


def server_flags(sources: Path) -> dict[str, str]:
    """The flags of the command line by name. A flag is a `switch`, or a `value` if it takes one or more values."""
    flags: dict[str, str] = {}
    for path in sorted((sources / "srt/arg_groups/fields").glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                for entry in node.body:
                    if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
                        flags |= flags_of(entry.target.id, entry.annotation)
    return dict(sorted(flags.items()))


def flags_of(name: str, annotation: ast.AST) -> dict[str, str]:
    """The flags of one class. SGLang writes them as `name: A[type, "help"]` or `name: A[type, Arg(...)]`."""
    if not (isinstance(annotation, ast.Subscript) and isinstance(annotation.slice, ast.Tuple)):
        return {}
    kind, about = annotation.slice.elts[:2]
    options = {word.arg: word.value for word in about.keywords} if isinstance(about, ast.Call) else {}
    if "no_cli" in options:
        return {}
    spelled = options.get("cli_name", ast.Constant(f"--{name.replace('_', '-')}"))
    names = [ast.literal_eval(spelled), *ast.literal_eval(options.get("aliases", ast.List([])))]
    is_switch = isinstance(kind, ast.Name) and kind.id == "bool" and "type_parser" not in options
    return dict.fromkeys(names, "switch" if is_switch else "value")


def main(sources: Path, version: str) -> None:
    package = sources / "sglang"
    check_hooks(package)
    requests, flags = request_schemas(package), server_flags(package)
    lines = [f"{json.dumps(route)}: {json.dumps(schema)}" for route, schema in requests.items()]
    text = f'{{"sglang": {json.dumps(version)},\n"flags": {json.dumps(flags)},\n"hooks": {json.dumps([*HOOKS])},\n'
    text += '"requests": {\n'
    target = Path(__file__).parent / "schema.json"
    target.write_text(text + ",\n".join(lines) + "\n}}\n")
    print(f"{target}: {len(requests)} requests, {len(flags)} flags")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
