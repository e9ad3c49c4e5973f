"""`penstock queue`: inspect a run's replay queue, export and import it, and requeue its dead letters.

It connects to Redis directly, so it works while the gateway, the learner and all rollout servers are down.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.connection import RUNS_FOLDER, load_started_config, newest_config
from penstock.cli.output import to_json
from penstock.cli.parser import Parser, run_interruptible, whole_number
from penstock.errors import ConfigError, InvalidInput, NotFound, PenstockError

if TYPE_CHECKING:
    from penstock.config.service import RedisConfig, ReplayConfig
    from penstock.replay.inspection import QueueInspector
    from penstock.samples import TokenText


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    return run_interruptible(_run(args), "while it waited for Redis")


async def _run(args: argparse.Namespace) -> int:
    target = args.target = _target(args)
    from penstock.replay.inspection import QueueInspector
    from penstock.store.redis_client import connect

    async with aclosing(connect(target.redis)) as client:
        inspector = QueueInspector(client, target.run, target.replay)
        if not args.may_start_queue:
            await inspector.check_exists()
        command: Callable[[argparse.Namespace, QueueInspector], Awaitable[None]] = args.command
        await command(args, inspector)
    return 0


# ── options ──


def _parser() -> Parser:
    parser = Parser(
        prog="penstock queue",
        description="Inspect a run's replay queue, export and import groups, and requeue dead letters.",
    )
    parser.set_defaults(config=None, redis_url=None, run=None, json=False, may_start_queue=False)
    commands, limit = parser.add_subparsers(required=True, metavar="COMMAND"), whole_number(1, 1000)

    _command(commands, "stat", _stat, "count every place of the queue and check that nothing is lost", can_json=True)

    peek = _command(commands, "peek", _peek, "show the next ready groups without taking them", can_json=True)
    peek.add_argument("--limit", type=limit, default=10, metavar="N", help="how many (default: %(default)s)")
    peek.add_argument("--prompt-id", type=int, metavar="ID", help="show the prompt and the responses of this group")
    peek.add_argument("--tokens", action="store_true", help="with --prompt-id: a table of tokens instead of text")

    export = _command(commands, "export", _export, "write the ready groups to a Parquet file; changes nothing")
    export.add_argument("file", type=Path)
    export.add_argument("--all", action="store_true", help="also groups that the learner has taken and not committed")
    export.add_argument("--force", action="store_true", help="replace the file if it exists")

    imports = _command(commands, "import", _import, "import the groups of a Parquet file into a queue")
    imports.set_defaults(may_start_queue=True)
    imports.add_argument("file", type=Path)
    imports.add_argument(
        "--epoch", type=int, default=0, help="use another number to import the same file again (default: %(default)s)"
    )
    imports.add_argument(
        "--wait-s", type=float, default=WAIT_S, metavar="S",
        help="how long to wait for room in a full queue (default: %(default).0f)",
    )  # fmt: skip

    requeue = _command(commands, "requeue", _requeue, "submit dead-lettered prompts again", can_json=True)
    _add_selection(requeue)

    dlq = _command(commands, "dlq", _dlq_list, "list, show or purge dead letters", can_json=True)
    dlq.set_defaults(limit=100, reason="")
    actions = dlq.add_subparsers(metavar="ACTION")
    listing = _command(actions, "list", _dlq_list, "list the newest dead letters (the default action)", can_json=True)
    listing.add_argument("--limit", type=limit, default=100, metavar="N", help="how many (default: %(default)s)")
    listing.add_argument("--reason", default="", help="only dead letters with this reason, such as `corrupt`")
    show = _command(actions, "show", _dlq_show, "show one dead letter, decoded as far as possible", can_json=True)
    show.add_argument("id")
    purge = _command(actions, "purge", _dlq_purge, "delete dead letters for good")
    _add_selection(purge)
    purge.add_argument("--yes", action="store_true", help="confirm the deletion")
    return parser


def _command(
    commands: Any, name: str, function: Callable[..., Awaitable[None]], text: str, *, can_json: bool = False
) -> Parser:
    parser: Parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    # Only the outermost parser has defaults: those of an inner one would overwrite options given to an outer one.
    where = parser.add_argument_group("which queue")
    where.add_argument(
        "--config", type=Path, metavar="FILE", default=argparse.SUPPRESS,
        help=f"config of the run (default: config.yaml of the run that is up in {RUNS_FOLDER}/, else of the newest)",
    )  # fmt: skip
    where.add_argument("--redis-url", metavar="URL", default=argparse.SUPPRESS, help="instead of --config; needs --run")
    where.add_argument("--run", metavar="NAME", default=argparse.SUPPRESS, help="run (default: that of the config)")
    if can_json:
        parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
    parser.set_defaults(command=function)
    return parser


def _add_selection(parser: Parser) -> None:
    parser.add_argument("ids", nargs="*", metavar="ID", help="dead letters, as `penstock queue dlq` names them")
    parser.add_argument("--reason", default="", help="all dead letters with this reason, such as `corrupt`")
    parser.add_argument("--all", action="store_true", help="all dead letters")


# ── which queue ──


@dataclass(frozen=True)
class _Target:
    redis: RedisConfig
    run: str
    replay: ReplayConfig | None
    """None if only an address was given."""
    model_path: Path | None = None
    """Folder with the tokenizer; None if only an address was given."""


def _target(args: argparse.Namespace) -> _Target:
    if args.redis_url is None:
        config = load_started_config(args.config or newest_config())
        return _Target(config.redis, args.run or config.run, config.replay, config.model.path)
    if args.config is not None or args.run is None:
        raise ConfigError("--redis-url needs --run NAME, and cannot be combined with --config")
    from pydantic import ValidationError

    from penstock.config.loading import explain
    from penstock.config.service import RedisConfig

    try:
        return _Target(RedisConfig(url=args.redis_url), args.run, None)
    except ValidationError as error:
        raise ConfigError(f"--redis-url: {explain(error, RedisConfig)[0].text}") from error


# ── commands ──


async def _stat(args: argparse.Namespace, inspector: QueueInspector) -> None:
    from penstock_tools.recordings.queue_tables import print_report, report_record

    report = await inspector.report()
    _show(args, report_record(report), lambda: print_report(report))


async def _peek(args: argparse.Namespace, inspector: QueueInspector) -> None:
    from penstock.replay.inspection import decoded_prompt
    from penstock_tools.recordings.queue_tables import group_record, print_group, print_groups, summary_record

    if args.prompt_id is not None:
        found = await inspector.groups([args.prompt_id])
        if not found:
            raise NotFound(f"no group of prompt {args.prompt_id} is queued; it is not finished, or already trained")
        if found[0].group is None:
            raise PenstockError(
                f"the group of prompt {args.prompt_id} cannot be decoded ({found[0].problem}); "
                "the learner will dead-letter it"
            )
        group, [payload] = found[0].group, await inspector.queue.prompts([args.prompt_id])
        show = partial(print_group, group, decoded_prompt(payload), _texts(args), with_tokens=args.tokens)
        _show(args, group_record(group), show)
        return
    groups = await inspector.groups(await inspector.queued_ids(inspector.queue.config.selection, args.limit))
    records = [summary_record(queued) for queued in groups]
    _show(args, records, lambda: print_groups(records))


async def _requeue(args: argparse.Namespace, inspector: QueueInspector) -> None:
    requeued: list[dict[str, Any]] = []
    refused: list[dict[str, str]] = []
    for stream_id in await _selected(args, inspector):
        try:
            requeued.append({"id": stream_id, "prompt_id": await inspector.requeue(stream_id)})
        except InvalidInput as error:
            refused.append({"id": stream_id, "problem": str(error)})
    lines = [f"{entry['id']} is pending as prompt {entry['prompt_id']}" for entry in requeued]
    lines.append(f"requeued {len(requeued)} dead-lettered prompts")
    _show(args, {"requeued": requeued, "refused": refused}, lambda: print("\n".join(lines)))
    if refused:
        raise PenstockError(f"{len(refused)} dead letters could not be requeued; the first: {refused[0]['problem']}")


async def _dlq_list(args: argparse.Namespace, inspector: QueueInspector) -> None:
    from penstock_tools.recordings.queue_tables import dead_letter_record, print_dead_letters

    letters: list[dict[str, Any]] = []
    async for letter in inspector.dead_letters(args.reason, newest_first=True):
        letters.append(dead_letter_record(letter))
        if len(letters) == args.limit:
            break
    _show(args, letters, lambda: print_dead_letters(letters))


async def _dlq_show(args: argparse.Namespace, inspector: QueueInspector) -> None:
    from penstock_tools.recordings.queue_tables import contents_record, print_contents

    contents = await inspector.dead_letter(args.id)
    _show(args, contents_record(contents), lambda: print_contents(contents, _texts(args)))


async def _dlq_purge(args: argparse.Namespace, inspector: QueueInspector) -> None:
    ids = await _selected(args, inspector)
    if ids and not args.yes:
        raise InvalidInput(
            "--yes", f"is needed to delete {len(ids)} dead letters for good; `requeue` keeps their prompts"
        )
    print(f"purged {await inspector.purge(ids)} dead letters")


async def _selected(args: argparse.Namespace, inspector: QueueInspector) -> list[str]:
    if bool(args.ids) + bool(args.reason) + args.all != 1:
        raise InvalidInput("ID", "give ids of dead letters, or --reason REASON, or --all, and only one of these")
    if args.ids:
        return list(dict.fromkeys(args.ids))
    return [letter.stream_id async for letter in inspector.dead_letters(args.reason)]


def _texts(args: argparse.Namespace) -> TokenText:
    """The text of tokens, if the run's config and its tokenizer are here."""
    from penstock.samples import TokenText

    target: _Target = args.target
    return TokenText(None) if target.model_path is None else TokenText.load(target.model_path)


def _show(args: argparse.Namespace, record: Any, show: Callable[[], None]) -> None:
    """Print the record as JSON with `--json`, and call `show` otherwise."""
    print(to_json(record)) if args.json else show()


# ── the groups of a queue to a Parquet file, and back ──


WAIT_S = 600.0


async def _export(args: argparse.Namespace, inspector: QueueInspector) -> None:
    from penstock_tools.recordings.recording import export_groups

    if args.file.exists() and not args.force:
        raise InvalidInput(str(args.file), "exists; choose another name or add --force")
    num_groups, num_committed, unreadable = await export_groups(inspector, args.file, include_delivered=args.all)
    missed = f"; {num_committed} were committed meanwhile" if num_committed else ""
    print(f"exported {num_groups} groups of run {inspector.run} to {args.file}{missed}")
    for line in unreadable:
        print(f"skipped {line}")


async def _import(args: argparse.Namespace, inspector: QueueInspector) -> None:
    from penstock_tools.recordings.recording import import_groups

    num_groups, num_before = await import_groups(inspector, args.file, epoch=args.epoch, wait_s=args.wait_s)
    print(
        f"imported {num_groups} groups into run {inspector.run}; {num_before} groups of the file were imported before"
    )
