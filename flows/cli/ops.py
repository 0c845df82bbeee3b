"""Commands to operate herd: `herd up | setup | doctor | hosts | gc | verify`, `herd mlflow`, runs, and promotion."""

from __future__ import annotations

import json
import os
import time
import webbrowser
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from herd.flows.cli.errors import (
    FAILED,
    JsonOption,
    RootOption,
    at_work,
    exit_as_judged,
    mistakes,
    option,
    out,
    print_json,
    problems,
    with_retries,
)
from herd.storage.root import DEFAULT_ROOT, Root

if TYPE_CHECKING:
    from herd.tasks.operate.environment import CheckResult

WATCH_S = 2.0
"""Between two refreshes of `herd status --watch`."""

mlflow = typer.Typer(help="Runs in MLflow.", no_args_is_help=True)
NotifyOption = Annotated[
    str,
    typer.Option(
        envvar="HERD_NOTIFY",
        show_envvar=True,
        show_default=False,
        help="Webhook or Apprise address to tell of failed, rejected, stalled and finished runs, spikes, full disks.",
    ),
]


def up(
    root: RootOption = DEFAULT_ROOT,
    prefect_port: Annotated[int, typer.Option(help="Port of the Prefect server.")] = 4200,
    mlflow_port: Annotated[int, typer.Option(help="Port of the MLflow server.")] = 5000,
    host: Annotated[str, typer.Option(help="Address to bind to; MLflow has no password there.")] = "127.0.0.1",
    notify: NotifyOption = "",
) -> None:
    """Start a Prefect server, an MLflow server and a worker on this machine, and register the deployments."""
    from herd.flows.serve import serve

    with mistakes():
        serve(Root.parse(root), prefect_port, mlflow_port, host, notify)


def setup(
    root: RootOption = DEFAULT_ROOT,
    deploy: Annotated[
        bool, typer.Option(help="Also register deployments: herd's, ./prefect.yaml, ROOT/prefect.yaml.")
    ] = True,
    notify: NotifyOption = "",
    pool: Annotated[str, typer.Option(help="An existing work pool; without it herd makes its own.")] = "local",
    prefix: Annotated[
        str, typer.Option(help="Begins the names of deployments, queues, blocks and automations.", show_default=False)
    ] = "",
) -> None:
    """Create work pool, queues, result storage and automations on the server of PREFECT_API_URL; safe to repeat."""
    from herd.flows import setup as server

    with mistakes():
        place = server.Place(pool, prefix)
        for line in server.setup(Root.parse(root), notify=notify, place=place):
            out.print(escape(line))
        if deploy:
            with at_work("deployments"):
                files = server.deployment_files(Root.parse(root), Path.cwd())
                lines = server.deploy(files, dict(os.environ), Root.parse(root), place)
            for line in lines:
                out.print(escape(line))


def doctor(
    recipe: Annotated[Path | None, typer.Argument(help="A recipe: also check what it needs of the Hub.")] = None,
    cluster: Annotated[
        Path | None, typer.Option("--cluster", help="The file of `herd run`: check its nodes too.")
    ] = None,
    root: RootOption = DEFAULT_ROOT,
    run: Annotated[
        bool, typer.Option("--run", help="Also train a tiny model from raw text to its promotion: about a minute.")
    ] = False,
    json_: JsonOption = False,
    node: Annotated[Path | None, typer.Option("--node", hidden=True)] = None,
) -> None:
    """Check this machine, the root, and with --cluster every node: what is there, what is wrong, what to do."""
    from herd.tasks.cluster import Cluster, load_cluster
    from herd.tasks.launch.base import node_runner
    from herd.tasks.operate.doctor import check_run, diagnose, diagnose_as_node, diagnose_nodes, findings_table

    with mistakes():
        if node is not None:  # started by `herd doctor --cluster` on a node: one line
            print(json.dumps(diagnose_as_node(node)))
            return
        from herd.tasks.models.start import load_recipe

        chosen_cluster = load_cluster(cluster) if cluster else Cluster()
        loaded = load_recipe(Root.parse(root), recipe) if recipe else None
        with at_work("this machine"):
            findings = diagnose(Root.parse(root), chosen_cluster, loaded)
        if chosen_cluster.nodes:
            if node_runner(chosen_cluster):
                count = chosen_cluster.nodes.nodes(chosen_cluster.processes)
                problems.print(f"[dim]waiting for {count} nodes of {chosen_cluster.launcher}[/]")
            with at_work("nodes"):
                findings += diagnose_nodes(Root.parse(root), chosen_cluster)
        with at_work("the Prefect server"):
            findings += _check_server(Root.parse(root))
        if run:
            with at_work("a tiny run"):
                findings.append(check_run())
        failed = [finding for finding in findings if finding.state == "fail"]
        if json_:
            print_json({"ok": not failed, "findings": [finding._asdict() for finding in findings]})
        else:
            out.print(findings_table(findings))
        if failed:
            raise typer.Exit(FAILED)


def _check_server(root: Root) -> list[CheckResult]:
    """Return the rows about the Prefect server of the environment, or of a `herd up` on `root`, if there is one."""
    from herd.flows.run_control import known_server

    with known_server(root) as known:
        if not known:
            return []
        from httpx import HTTPError
        from prefect import get_client

        from herd.tasks.operate.doctor import check_server
        from herd.tasks.operate.environment import CheckResult

        try:
            with get_client(sync_client=True) as client:
                return list(check_server(root, client))
        except (HTTPError, RuntimeError) as error:
            what = f"it does not answer ({type(error).__name__})"
            return [CheckResult("Prefect", "warn", what, "start it (herd up), or correct PREFECT_API_URL")]


def status(
    run: Annotated[str, typer.Argument(help="A run; empty: all runs.")] = "",
    root: RootOption = DEFAULT_ROOT,
    json_: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh in place until Ctrl-C.")] = False,
) -> None:
    """Show the state of runs: stage, position, loss, speed, goodput, last checkpoint, restarts, time left."""
    from herd.tasks.format import command
    from herd.tasks.operate.status import run_document, runs_document, status_tables

    with mistakes():
        base = Root.parse(root)
        if base.is_local and not base.local.is_dir():
            begin = command(base, "run", "quickstart")
            raise ValueError(f"--root: {base.uri} is not a folder; name the one with the runs, or begin: {begin}")
        if json_ and watch:
            raise ValueError("--watch: refreshes a terminal, and --json is for programs; leave one out")
        if json_:
            print_json(run_document(base, run) if run else runs_document(base))
        elif watch:
            _watch(base, run)
        else:
            for table in status_tables(base, run or None):
                out.print(table)
                out.print()


def _watch(root: Root, run: str) -> None:
    """Show the tables again every WATCH_S until Ctrl-C; without a terminal, one after the other."""
    from rich.console import Group
    from rich.live import Live

    from herd.tasks.operate.status import status_tables

    with suppress(KeyboardInterrupt), Live(console=out, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            live.update(Group(*status_tables(root, run or None), f"[dim]{datetime.now():%H:%M:%S}, Ctrl-C leaves[/]"))
            live.refresh()
            time.sleep(WATCH_S)


def logs(
    run: Annotated[str, typer.Argument(help="A run, such as quickstart-7.")],
    stage: Annotated[str, typer.Option(help="A stage; empty: the last one with logs.")] = "",
    rank: Annotated[int, typer.Option(min=0, help="Rank of a trainer process.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print what is added until the run ends.")] = False,
    root: RootOption = DEFAULT_ROOT,
) -> None:
    """Print the log of a trainer process: of the newest attempt, of rank 0 unless --rank says otherwise."""
    from herd.flows.run_control import find_log, follow_log

    with mistakes():
        if not follow:
            path = find_log(Root.parse(root), run, stage, rank)
            problems.print(f"[dim]{escape(str(path))}[/]")
            out.file.write(path.read_text(errors="replace"))
            return
        with suppress(KeyboardInterrupt):
            for text in follow_log(Root.parse(root), run, stage, rank):
                out.file.write(text)
                out.file.flush()


def stop(
    run: Annotated[str, typer.Argument(help="A run that works, such as quickstart-7.")],
    wait: Annotated[float, typer.Option(min=0, help="Longest wait in seconds; 0: until it has ended.")] = 0,
    root: RootOption = DEFAULT_ROOT,
) -> None:
    """Stop a run: its trainer saves a checkpoint and ends; the same command, or a Retry, continues there."""
    from herd.flows.run_control import stop_run

    with mistakes():
        out.print(escape(stop_run(Root.parse(root), run, lambda text: problems.print(escape(text)), wait)))


def hosts(
    clear: Annotated[str, typer.Option(help="Take this host back, and forget what happened on it.")] = "",
    exclude: Annotated[str, typer.Option(help="Use this host no more.")] = "",
    reason: Annotated[str, typer.Option(help="Why, kept with the decision.")] = "",
    root: RootOption = DEFAULT_ROOT,
) -> None:
    """List the hosts on which attempts died or faults were seen, and which of them no attempt gets."""
    from herd.tasks.launch.hosts import Hosts, hosts_table

    with mistakes():
        ledger = Hosts(Root.parse(root))
        if clear:
            ledger.decide(clear, "cleared", reason)
        if exclude:
            ledger.decide(exclude, "excluded", reason)
        table = hosts_table(ledger)
        out.print(table if table.rows else "no attempt died of a host, and no fault was seen")


def watch(
    run: Annotated[str, typer.Argument(help="A run, finished or not.")],
    root: RootOption = DEFAULT_ROOT,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0: a free one.")] = 0,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
) -> None:
    """Serve a page of a run on this machine that follows it: loss, tokens, time left, the last sample."""
    from herd.tasks.report.live import serve_live

    def ready(url: str) -> None:
        out.print(f"{url}  [dim]ends with Ctrl-C; the run does not need it[/]")
        if open_:
            webbrowser.open(url)

    with mistakes():
        serve_live(Root.parse(root), run, port, ready)


def compare(
    runs: Annotated[list[str], typer.Argument(help="Two or more runs.")],
    root: RootOption = DEFAULT_ROOT,
    browser: Annotated[bool, typer.Option(help="Open MLflow's charts in a browser.")] = True,
    json_: JsonOption = False,
) -> None:
    """Show the differences of runs in recipe and result, and open MLflow's charts of them over tokens."""
    with mistakes():
        with at_work("comparison"):
            from herd.tasks.report.compare import compare_runs, comparison_tables, comparison_url  # imports MLflow

            result = compare_runs(Root.parse(root), runs)
            url = comparison_url(result)
        if json_:  # for a program, which opens no browser
            print_json({**result.as_dict(), "page": url})
            return
        for table in comparison_tables(result):
            out.print(table)
        if result.summary:
            out.print(f"made with: {escape(result.summary)}")
        if url is None:
            out.print("[dim]curves: no MLflow server with these runs answers; start one with herd up[/]")
            return
        out.print(f"page: {url}")
        if browser:
            webbrowser.open(url)


@mlflow.command()
def sync(run: str, root: RootOption = DEFAULT_ROOT) -> None:
    """Send everything of a run to MLflow again, from artifacts and journals; safe to repeat."""
    from herd.tasks.stages.backfill import backfill_run

    with mistakes():
        done = backfill_run(Root.parse(root), run)
        out.print(f"{run}: {done.runs} MLflow runs, {done.points:,} points, {done.versions} model versions")
        if done.gone:
            out.print(f"[yellow]{done.gone} steps are missing: their artifacts were deleted[/]")
        if not done.complete:
            problems.print("[red]error[/]  MLflow went away, and not all of this was sent; give the command again")
            raise typer.Exit(1)


def gc(
    keep_runs: Annotated[int, typer.Option(min=1, help="Newest runs of each family to keep.")] = 5,
    older_than: Annotated[str, typer.Option(help="Delete only older artifacts: 12 h, 7 d.")] = "7 d",
    databases: Annotated[
        str, typer.Option(help="In Prefect's and MLflow's databases only what ended before; empty: nothing there.")
    ] = "90 d",
    delete: Annotated[bool, typer.Option("--delete", help="Delete; without it, only list.")] = False,
    root: RootOption = DEFAULT_ROOT,
) -> None:
    """List or delete artifacts that no kept run, alias or live process needs, and old rows of databases."""
    from herd.llama3.recipe.units import Duration
    from herd.tasks.console import TerminalConsole

    with mistakes():
        for name, age in (("--older-than", older_than), ("--databases", databases.strip() or "90 d")):
            with option(name):
                Duration.parse(age)
        from herd.flows.maintenance import clean_up  # imports Prefect

        out.print(clean_up(Root.parse(root), keep_runs, older_than, not delete, TerminalConsole(), databases))


def verify(
    run: Annotated[str, typer.Argument(help="Read the artifacts of this run; empty: everything under the root.")] = "",
    root: RootOption = DEFAULT_ROOT,
    quarantine: Annotated[bool, typer.Option("--quarantine", help="Move damaged artifacts away.")] = False,
    sign: Annotated[bool, typer.Option("--sign", help="Sign unsigned artifacts with HERD_SIGNING_KEY.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Read artifacts, checkpoints, records and promotion logs and compare them with the committed digests.

    Exit status 1: something is damaged. The next run makes quarantined artifacts again.
    """
    from herd.tasks.operate.integrity import verify as read_all

    with mistakes():
        done = read_all(Root.parse(root), run, quarantine, str if json_ else lambda text: out.print(escape(text)), sign)
        if json_:
            print(done.model_dump_json(indent=1))
        else:
            out.print(escape(str(done)))
            if done.damaged and not quarantine:
                out.print("--quarantine moves damaged artifacts away; a run that needs one does so itself")
        if done.damaged:
            raise typer.Exit(1)


# Promotion. All commands but `promote` write one record of the promotion log and do not import torch: a rollback takes
# seconds.

ByOption = Annotated[str, typer.Option(help="Name of the person who decides; default: you.", show_default=False)]
CommentOption = Annotated[str, typer.Option(help="Reason, kept with the decision.")]
WaitingArgument = Annotated[str, typer.Argument(help="A run whose promotion waits for a person.")]


def promote(
    model: Annotated[str, typer.Argument(help="A run, a checkpoint's label, or FAMILY@ALIAS.")],
    by: ByOption = "",
    comment: CommentOption = "",
    override: Annotated[str, typer.Option(help="Reason to promote it although the gate rejects it.")] = "",
    root: RootOption = DEFAULT_ROOT,
) -> None:
    """Let the gate judge a model now and make it the champion if it passes."""
    import getpass

    from herd.flows.local_server import quiet_prefect, start_temporary_server

    with mistakes():
        quiet_prefect()
        ready = start_temporary_server(Root.parse(root))
        from herd.flows.checkpoint import promote as judge
        from herd.flows.recipe_form import PromotionParameters

        config = PromotionParameters(
            checkpoint=model, root=root, by=by or getpass.getuser(), comment=comment, override=override
        )
        ready()
        exit_as_judged(Root.parse(root), with_retries(lambda: judge(config)))


def approve(
    run: WaitingArgument, by: ByOption = "", comment: CommentOption = "", root: RootOption = DEFAULT_ROOT
) -> None:
    """Approve a promotion that waits for a person (promote.approval)."""
    _decide(root, run, True, by, comment)


def reject(
    run: WaitingArgument, by: ByOption = "", comment: CommentOption = "", root: RootOption = DEFAULT_ROOT
) -> None:
    """Reject a promotion that waits for a person; the model stays a candidate."""
    _decide(root, run, False, by, comment)


def rollback(
    family: Annotated[str, typer.Argument(help="Recipe family, such as quickstart, or FAMILY@ALIAS.")],
    to: Annotated[str, typer.Option(help="Label of a former champion, or its number in the log.")] = "",
    by: ByOption = "",
    comment: CommentOption = "",
    root: RootOption = DEFAULT_ROOT,
) -> None:
    """Go back to the previous champion, or to any former champion, without a gate."""
    from herd.tasks.promotion.log import CHAMPION, decided
    from herd.tasks.promotion.rollback import RollbackRequest, roll_back

    with mistakes():
        name, _, alias = family.partition("@")
        request = RollbackRequest(name, alias or CHAMPION, to, by, comment)
        out.print(escape(decided(*roll_back(Root.parse(root), request))))


def promotion_log(
    family: Annotated[str, typer.Argument(help="Recipe family, such as quickstart.")],
    root: RootOption = DEFAULT_ROOT,
    json_: JsonOption = False,
) -> None:
    """Show the promotion log of a family, the newest last, and the holder of each alias."""
    from herd.tasks.promotion.log import promotion_document, promotion_table

    with mistakes():
        if json_:
            print_json(promotion_document(Root.parse(root), family))
        else:
            out.print(promotion_table(Root.parse(root), family))


def _decide(root: str, run: str, approved: bool, by: str, comment: str) -> None:
    from herd.tasks.promotion.approval import decide
    from herd.tasks.promotion.log import decided

    with mistakes():
        out.print(escape(decided(*decide(Root.parse(root), run, approved, by, comment))))
