"""Commands for those who look after runs: `herd up | setup | status | compare | republish | retention | verify`."""

from __future__ import annotations

import os
import webbrowser
from typing import Annotated

import typer
from rich.markup import escape

from flows.cli.errors import RootOption, exit_as_judged, mistakes, out, patiently
from storage.root import DEFAULT_ROOT, Root

RunsArgument = Annotated[list[str], typer.Argument(help="Two or more runs.")]


def add_operations(app: typer.Typer) -> None:
    """Give `app` the commands of this file."""
    for command in (up, setup, status, compare, republish, retention, verify):
        app.command()(command)


def up(
    root: RootOption = DEFAULT_ROOT,
    prefect_port: Annotated[int, typer.Option(help="Port of the Prefect server.")] = 4200,
    mlflow_port: Annotated[int, typer.Option(help="Port of the MLflow server.")] = 5000,
    host: Annotated[str, typer.Option(help="Address to bind to; others than loopback need a password.")] = "127.0.0.1",
) -> None:
    """Start a local Prefect server, an MLflow server and a worker, with the deployments registered."""
    from flows.serve import serve

    with mistakes():
        serve(Root.of(root), prefect_port, mlflow_port, host)


def setup(
    root: RootOption = DEFAULT_ROOT,
    deploy: Annotated[bool, typer.Option(help="Also register the deployments of prefect.yaml.")] = True,
) -> None:
    """Make work pool, queues, result storage and automations on the server of PREFECT_API_URL; safe to repeat."""
    from flows.serve import deploy as deploy_all
    from flows.serve import setup as make

    with mistakes():
        for line in make(Root.of(root)):
            out.print(line)
        if deploy:
            deploy_all(dict(os.environ))
            out.print("deployments of prefect.yaml registered")


def status(
    run: Annotated[str, typer.Argument(help="A run; none: all of them.")] = "",
    root: RootOption = DEFAULT_ROOT,
) -> None:
    """Show where runs stand: stage, position, loss, speed, goodput, last checkpoint, restarts, time left."""
    from tasks.runs.status import status_tables

    with mistakes():
        for table in status_tables(Root.of(root), run or None):
            out.print(table)
            out.print()


def compare(
    runs: RunsArgument,
    root: RootOption = DEFAULT_ROOT,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Show runs side by side: what differs in their recipes and results, and as a page with curves over tokens."""
    from tasks.report.compare import comparison, comparison_tables, comparison_url

    with mistakes():
        place = Root.of(root)
        made = comparison(place, runs)
        for table in comparison_tables(made):
            out.print(table)
        url = comparison_url(place, made)
        out.print(f"page: {url}")
        if browser:
            webbrowser.open(url)


def republish(run: str, root: RootOption = DEFAULT_ROOT) -> None:
    """Make MLflow complete for a run, from artifacts and journals alone; safe to repeat."""
    from tasks.tracking.backfill import republish as publish

    with mistakes():
        done = publish(Root.of(root), run)
        out.print(f"{run}: {done.runs} MLflow runs, {done.points:,} points, {done.versions} model versions")
        if done.gone:
            out.print(f"[yellow]{done.gone} steps are not there any more: their artifacts were deleted[/]")


def retention(
    keep_runs: Annotated[int, typer.Option(min=1, help="Newest runs of each family that are kept.")] = 5,
    older_than: Annotated[str, typer.Option(help="Only what is older than this: 12 h, 7 d.")] = "7 d",
    delete: Annotated[bool, typer.Option("--delete", help="Delete; without, only list.")] = False,
    root: RootOption = DEFAULT_ROOT,
) -> None:
    """Delete artifacts that no kept run, alias or live process stands on; lists them unless told to delete."""
    from flows.maintenance import clean_up
    from tasks.console import TerminalConsole

    with mistakes():
        out.print(clean_up(Root.of(root), keep_runs, older_than, not delete, TerminalConsole()))


def verify(
    run: Annotated[str, typer.Argument(help="A run: what it stands on; none: everything under the root.")] = "",
    root: RootOption = DEFAULT_ROOT,
    set_aside: Annotated[bool, typer.Option("--set-aside", help="Move what is damaged out of sight.")] = False,
    sign: Annotated[bool, typer.Option("--sign", help="Sign what is not signed, with HERD_SIGNING_KEY.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Read artifacts, checkpoints, records and promotion logs and compare them with what was committed.

    Exit status 1: something is damaged. The next run makes again what was set aside.
    """
    from tasks.runs.integrity import verify as read_all

    with mistakes():
        done = read_all(Root.of(root), run, set_aside, str if json else lambda text: out.print(escape(text)), sign)
        if json:
            print(done.model_dump_json(indent=1))
        else:
            out.print(escape(str(done)))
            if done.damaged and not set_aside:
                out.print("--set-aside moves damaged artifacts away; a run that needs one does so itself")
        if done.damaged:
            raise typer.Exit(1)


# Promotion commands. All but `promote` write one record of the promotion log and import no torch: a rollback takes
# seconds.

ByOption = Annotated[str, typer.Option(help="Who decides; default: you.", show_default=False)]
CommentOption = Annotated[str, typer.Option(help="Why; kept with the decision.")]
WaitingArgument = Annotated[str, typer.Argument(help="A run whose promotion waits for a person.")]


def add_promotions(app: typer.Typer) -> None:
    """Give `app` the commands of this file."""
    for command in (promote, approve, refuse, rollback, promotions):
        app.command()(command)


def promote(
    model: Annotated[str, typer.Argument(help="A run, a checkpoint's label, or FAMILY@ALIAS.")],
    by: ByOption = "",
    comment: CommentOption = "",
    override: Annotated[str, typer.Option(help="Promote it though the gate refuses it, for this reason.")] = "",
    root: RootOption = DEFAULT_ROOT,
) -> None:
    """Let the gate judge a model now, and make it the champion if it passes."""
    import getpass

    from flows.local_server import quiet_prefect, start_temporary_server

    with mistakes():
        place = Root.of(root)
        quiet_prefect()
        ready = start_temporary_server(place)
        from flows.checkpoint import promote as judge
        from flows.recipe_form import PromotionParameters

        said = {"by": by or getpass.getuser(), "comment": comment, "override": override}
        ready()
        asked = PromotionParameters(checkpoint=model, root=root, **said)
        exit_as_judged(place, patiently(lambda: judge(asked)))


def approve(
    run: WaitingArgument, by: ByOption = "", comment: CommentOption = "", root: RootOption = DEFAULT_ROOT
) -> None:
    """Approve of a promotion that waits for a person (promote.approval)."""
    _decide(root, run, True, by, comment)


def refuse(
    run: WaitingArgument, by: ByOption = "", comment: CommentOption = "", root: RootOption = DEFAULT_ROOT
) -> None:
    """Refuse a promotion that waits for a person; the model stays a candidate."""
    _decide(root, run, False, by, comment)


def rollback(
    family: Annotated[str, typer.Argument(help="Recipe family, such as quickstart, or FAMILY@ALIAS.")],
    to: Annotated[str, typer.Option(help="Label of a former champion, or its number in the log.")] = "",
    by: ByOption = "",
    comment: CommentOption = "",
    root: RootOption = DEFAULT_ROOT,
) -> None:
    """Go back to the champion before, or to any model that was champion, at once."""
    from tasks.promotion.log import CHAMPION, decided
    from tasks.promotion.rollback import RollbackRequest, roll_back

    with mistakes():
        name, _, alias = family.partition("@")
        made = roll_back(Root.of(root), RollbackRequest(name, alias or CHAMPION, to, by, comment))
        out.print(escape(decided(*made)))


def promotions(
    family: Annotated[str, typer.Argument(help="Recipe family, such as quickstart.")],
    root: RootOption = DEFAULT_ROOT,
) -> None:
    """Show the promotion log of a family, the newest last, and who holds which alias."""
    from tasks.promotion.log import promotion_table

    with mistakes():
        out.print(promotion_table(Root.of(root), family))


def _decide(root: str, run: str, approved: bool, by: str, comment: str) -> None:
    from tasks.promotion.approval import decide
    from tasks.promotion.log import decided

    with mistakes():
        out.print(escape(decided(*decide(Root.of(root), run, approved, by, comment))))
