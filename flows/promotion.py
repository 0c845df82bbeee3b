"""Commands that decide which model is the champion: `herd promote | approve | refuse | rollback | promotions`.

All but `promote` are one record of the promotion log and import no torch, because a rollback is wanted in seconds.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from flows.terminal import RootOption, exit_as_judged, mistakes, out, patiently
from storage.root import DEFAULT_ROOT, Root

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

    from flows.temporary import quiet_prefect, start_temporary_server

    with mistakes():
        place = Root.of(root)
        quiet_prefect()
        ready = start_temporary_server(place)
        from flows.checkpoint import promote as judge
        from flows.parameters import PromotionParameters

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
    from tasks.promotions import CHAMPION, decided
    from tasks.rollback import Wanted, roll_back

    with mistakes():
        name, _, alias = family.partition("@")
        made = roll_back(Root.of(root), Wanted(name, alias or CHAMPION, to, by, comment))
        out.print(escape(decided(*made)))


def promotions(
    family: Annotated[str, typer.Argument(help="Recipe family, such as quickstart.")],
    root: RootOption = DEFAULT_ROOT,
) -> None:
    """Show the promotion log of a family, the newest last, and who holds which alias."""
    from tasks.promotion_table import promotion_table

    with mistakes():
        out.print(promotion_table(Root.of(root), family))


def _decide(root: str, run: str, approved: bool, by: str, comment: str) -> None:
    from tasks.approval import decide
    from tasks.promotions import decided

    with mistakes():
        out.print(escape(decided(*decide(Root.of(root), run, approved, by, comment))))
