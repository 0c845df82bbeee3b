"""Templates for word problems: shopping, sharing, journeys, ages, areas, units, clocks and calendars.

The canonical statement keeps the numbers and the operation and omits names and objects: the same sum about apples and
about books is one problem. Some templates exist in five other languages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from herd.llama3.data.demo.math_problems import ARITHMETIC, NAMES, NUMBERS, Draws, MathProblem, numeric

_THINGS = ("apples", "books", "cards", "coins", "marbles", "pencils", "shells", "stamps", "stickers", "tickets")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_UNITS = (
    ("kilometres", "metres", 1000), ("metres", "centimetres", 100), ("centimetres", "millimetres", 10),
    ("kilograms", "grams", 1000), ("litres", "millilitres", 1000), ("hours", "minutes", 60), ("minutes", "seconds", 60),
    ("days", "hours", 24), ("weeks", "days", 7), ("dozen", "single pieces", 12),
)  # fmt: skip


def gaining(draws: Draws) -> MathProblem:
    who, other = draws.sample(NAMES, 2)
    what, a, b = draws.pick(_THINGS), draws.between(2, draws.size()), draws.between(2, draws.size())
    question = draws.pick(
        (
            "{who} has {a} {what}. {other} gives {who} {b} more. How many {what} does {who} have now?",
            "There are {a} {what} in a box. {who} puts in another {b}. How many {what} are in the box?",
            "{who} found {a} {what} on one day and {b} on the next. How many {what} is that altogether?",
        )
    ).format(who=who, other=other, a=a, b=b, what=what)
    return numeric("gaining", f"story {min(a, b)}+{max(a, b)}", question, f"{a} + {b} = {a + b}.", a + b)


def losing(draws: Draws) -> MathProblem:
    who, other = draws.sample(NAMES, 2)
    what, b, rest = draws.pick(_THINGS), draws.between(1, draws.size()), draws.between(1, draws.size())
    a = b + rest
    question = draws.pick(
        (
            "{who} has {a} {what} and gives {b} of them to {other}. How many {what} are left?",
            "{who} had {a} {what} and lost {b}. How many {what} does {who} still have?",
            "A shop had {a} {what} and sold {b}. How many {what} remain?",
        )
    ).format(who=who, other=other, a=a, b=b, what=what)
    return numeric("losing", f"story {a}-{b}", question, f"{a} - {b} = {rest}.", rest)


def shopping(draws: Draws) -> MathProblem:
    who, what, count, price = draws.pick(NAMES), draws.pick(_THINGS), draws.between(2, 12), draws.between(2, 30)
    cost = count * price
    statement, total = f"story {min(count, price)}*{max(count, price)}", f"{count} x {price} = {cost}."
    if draws.below(2):
        question = f"{who} buys {count} {what} at {price} cents each. How many cents does that cost?"
        return numeric("shopping", statement, question, total, cost)
    paid = (cost // 100 + draws.between(1, 2)) * 100
    question = f"{who} buys {count} {what} at {price} cents each and pays with {paid} cents."
    question += " How many cents of change are due?"
    steps = f"{total} {paid} - {cost} = {paid - cost}."
    return numeric("shopping", f"story {paid}-{count}*{price}", question, steps, paid - cost)


def sharing(draws: Draws) -> MathProblem:
    what, people, each = draws.pick(_THINGS), draws.between(2, 12), draws.between(2, min(50, draws.size()))
    total = people * each
    question = draws.pick(
        (
            "{total} {what} are shared equally among {people} children. How many does each child get?",
            "A teacher hands out {total} {what} evenly to {people} pupils. How many {what} does each pupil receive?",
        )
    ).format(total=total, what=what, people=people)
    return numeric("sharing", f"story {total}/{people}", question, f"{total} / {people} = {each}.", each)


def journey(draws: Draws) -> MathProblem:
    vehicle = draws.pick(("car", "train", "cyclist", "bus", "boat"))
    speed, hours = draws.between(2, 24) * 5, draws.between(2, 9)
    distance = speed * hours
    if draws.below(2):
        question = f"A {vehicle} travels at {speed} kilometres per hour for {hours} hours."
        question += " How many kilometres does it cover?"
        steps = f"Distance is speed times time: {speed} x {hours} = {distance}."
        return numeric("journey", f"{speed}km/h*{hours}h", question, steps, distance)
    question = f"A {vehicle} travels {distance} kilometres at {speed} kilometres per hour. How many hours does it take?"
    steps = f"Time is distance over speed: {distance} / {speed} = {hours}."
    return numeric("journey", f"{distance}km/{speed}km/h", question, steps, hours)


def ages(draws: Draws) -> MathProblem:
    who, other = draws.sample(NAMES, 2)
    age, gap, years = draws.between(3, 40), draws.between(1, 20), draws.between(1, 20)
    question = f"{who} is {age} years old. {other} is {gap} years older. How old will {other} be in {years} years?"
    steps = f"{other} is {age} + {gap} = {age + gap} now. {age + gap} + {years} = {age + gap + years}."
    return numeric("ages", f"ages {age}+{gap}+{years}", question, steps, age + gap + years)


def rectangle(draws: Draws) -> MathProblem:
    a, b, unit = draws.between(2, min(60, draws.size())), draws.between(2, 20), draws.pick(("cm", "m"))
    short, long = min(a, b), max(a, b)
    shape = draws.pick(("rectangle", "garden", "room"))
    if draws.below(2):
        question = f"A {shape} is {long} {unit} long and {short} {unit} wide. What is its area in square {unit}?"
        steps = f"Area is length times width: {long} x {short} = {a * b}."
        return numeric("rectangle", f"area {short}*{long}", question, steps, a * b)
    question = f"A {shape} is {long} {unit} long and {short} {unit} wide. What is its perimeter in {unit}?"
    steps = f"Two lengths and two widths: 2 x ({long} + {short}) = 2 x {a + b} = {2 * (a + b)}."
    return numeric("rectangle", f"perimeter {short},{long}", question, steps, 2 * (a + b))


def conversion(draws: Draws) -> MathProblem:
    (large, small, scale), count = draws.pick(_UNITS), draws.between(2, draws.pick((9, 20, 60)))
    if draws.below(2):
        question = draws.pick((f"How many {small} are {count} {large}?", f"Convert {count} {large} to {small}."))
        steps = f"{count} x {scale} = {count * scale}."
        return numeric("conversion", f"{count} {large} in {small}", question, steps, count * scale)
    question, steps = f"How many {large} are {count * scale} {small}?", f"{count * scale} / {scale} = {count}."
    return numeric("conversion", f"{count * scale} {small} in {large}", question, steps, count)


def clock(draws: Draws) -> MathProblem:
    hour, minute, later = draws.between(0, 22), draws.between(0, 59), draws.between(5, 60)
    start, total, end = f"{hour}:{minute:02}", minute + later, hour * 60 + minute + later
    question = draws.pick(
        (
            f"A film starts at {start} and lasts {later} minutes. When does it end?",
            f"It is {start}. What time will it be in {later} minutes?",
        )
    )
    steps = f"{minute} + {later} = {total} minutes past {hour}:00."
    steps += f" That is {total // 60} hour and {total % 60} minutes." if total >= 60 else ""
    return MathProblem("clock", f"{start}+{later}", question, steps, f"{end // 60}:{end % 60:02}")


def weekday(draws: Draws) -> MathProblem:
    today, later = draws.below(7), draws.between(2, 60)
    question = f"Today is {_DAYS[today]}. Which day of the week is it in {later} days?"
    steps = f"{later} = {later // 7} x 7 + {later % 7}, so count {later % 7} days on from {_DAYS[today]}."
    return MathProblem("weekday", f"{_DAYS[today]}+{later}", question, steps, _DAYS[(today + later) % 7])


WORDS = (gaining, losing, shopping, sharing, journey, ages, rectangle, conversion, clock, weekday)


# Problems in German, French, Spanish, Italian and Portuguese: a slim container has almost no other text that is not
# English. Statements are those of the English problems; held-out ones are skipped here too.

_LABELS = {
    "de": ("Frage", "Antwort"),
    "fr": ("Question", "Réponse"),
    "es": ("Pregunta", "Respuesta"),
    "it": ("Domanda", "Risposta"),
    "pt": ("Pergunta", "Resposta"),
}
LANGUAGES = tuple(_LABELS)
_TRANSLATED_THINGS = {
    "de": ("Äpfel", "Bücher", "Karten", "Münzen", "Muscheln", "Bleistifte"),
    "fr": ("pommes", "cartes", "pièces", "coquilles", "billes", "images"),
    "es": ("manzanas", "cartas", "monedas", "conchas", "canicas", "estampas"),
    "it": ("mele", "carte", "monete", "conchiglie", "biglie", "figurine"),
    "pt": ("maçãs", "cartas", "moedas", "conchas", "bolinhas", "figurinhas"),
}
_GAIN = {
    "de": "{who} hat {a} {what} und bekommt {b} dazu. Wie viele {what} hat {who} jetzt?",
    "fr": "{who} a {a} {what} et en reçoit encore {b}. Combien de {what} {who} a-t-il maintenant ?",
    "es": "{who} tiene {a} {what} y recibe {b} más. ¿Cuántas {what} tiene {who} ahora?",
    "it": "{who} ha {a} {what} e ne riceve altre {b}. Quante {what} ha {who} adesso?",
    "pt": "{who} tem {a} {what} e recebe mais {b}. Quantas {what} {who} tem agora?",
}
_LOSE = {
    "de": "{who} hat {a} {what} und gibt {b} davon ab. Wie viele {what} bleiben übrig?",
    "fr": "{who} a {a} {what} et en donne {b}. Combien de {what} reste-t-il ?",
    "es": "{who} tiene {a} {what} y regala {b}. ¿Cuántas {what} quedan?",
    "it": "{who} ha {a} {what} e ne regala {b}. Quante {what} restano?",
    "pt": "{who} tem {a} {what} e dá {b}. Quantas {what} sobram?",
}
_SHARE = {
    "de": "{a} {what} werden gleichmäßig an {b} Kinder verteilt. Wie viele bekommt jedes Kind?",
    "fr": "On partage {a} {what} également entre {b} enfants. Combien chaque enfant en reçoit-il ?",
    "es": "Se reparten {a} {what} por igual entre {b} niños. ¿Cuántas recibe cada niño?",
    "it": "Si dividono {a} {what} in parti uguali fra {b} bambini. Quante ne riceve ogni bambino?",
    "pt": "Dividem-se {a} {what} igualmente entre {b} crianças. Quantas recebe cada criança?",
}
_PRODUCT = {
    "de": "Was ergibt {a} mal {b}?",
    "fr": "Combien font {a} fois {b} ?",
    "es": "¿Cuánto es {a} por {b}?",
    "it": "Quanto fa {a} per {b}?",
    "pt": "Quanto é {a} vezes {b}?",
}
_NEXT = {
    "de": "Welche Zahl folgt auf {a}?",
    "fr": "Quel nombre vient après {a} ?",
    "es": "¿Qué número sigue a {a}?",
    "it": "Quale numero segue {a}?",
    "pt": "Que número vem depois de {a}?",
}
_LARGEST = {
    "de": "Welche ist die größte der Zahlen {a}?",
    "fr": "Quel est le plus grand des nombres {a} ?",
    "es": "¿Cuál es el mayor de los números {a}?",
    "it": "Qual è il più grande dei numeri {a}?",
    "pt": "Qual é o maior dos números {a}?",
}
_PER_DOCUMENT = (6, 14)


def translated_document(seed: int, index: int) -> tuple[str, str]:
    """Return (language, text) of document `index` of `seed`: 6 to 14 problems in one language."""
    draws = Draws("translated", seed, index)
    language = LANGUAGES[index % len(LANGUAGES)]
    question, answer = _LABELS[language]
    problems = []
    for _ in range(draws.between(*_PER_DOCUMENT)):
        kind = draws.pick(_KINDS)
        while (problem := kind(draws, language)).held_out:
            pass
        problems.append(problem)
    texts = [
        f"{question}: {p.question}\n" + (f"{p.steps}\n" if p.steps and draws.below(2) else "") + f"{answer}: {p.answer}"
        for p in problems
    ]
    return language, "\n\n".join(texts)


def _gain(draws: Draws, language: str) -> MathProblem:
    a, b = draws.between(2, draws.size()), draws.between(2, draws.size())
    question = _GAIN[language].format(who=draws.pick(NAMES), what=draws.pick(_TRANSLATED_THINGS[language]), a=a, b=b)
    return numeric("gaining", f"story {min(a, b)}+{max(a, b)}", question, f"{a} + {b} = {a + b}", a + b)


def _lose(draws: Draws, language: str) -> MathProblem:
    b, rest = draws.between(1, draws.size()), draws.between(1, draws.size())
    a = b + rest
    question = _LOSE[language].format(who=draws.pick(NAMES), what=draws.pick(_TRANSLATED_THINGS[language]), a=a, b=b)
    return numeric("losing", f"story {a}-{b}", question, f"{a} - {b} = {rest}", rest)


def _share(draws: Draws, language: str) -> MathProblem:
    b, each = draws.between(2, 12), draws.between(2, min(50, draws.size()))
    a = b * each
    question = _SHARE[language].format(what=draws.pick(_TRANSLATED_THINGS[language]), a=a, b=b)
    return numeric("sharing", f"story {a}/{b}", question, f"{a} / {b} = {each}", each)


def _product(draws: Draws, language: str) -> MathProblem:
    a, b = draws.between(2, 100), draws.between(2, 12)
    statement = f"{min(a, b)}*{max(a, b)}"
    return numeric("multiplication", statement, _PRODUCT[language].format(a=a, b=b), f"{a} x {b} = {a * b}", a * b)


def _next(draws: Draws, language: str) -> MathProblem:
    start, step = draws.between(0, draws.size()), draws.between(1, 12)
    shown = ", ".join(str(start + step * i) for i in range(4))
    number = start + 4 * step
    steps = f"{number - step} + {step} = {number}"
    return numeric("next_term", f"next {shown}", _NEXT[language].format(a=shown), steps, number)


def _largest(draws: Draws, language: str) -> MathProblem:
    numbers = draws.sample(range(1, max(12, draws.size()) + 1), draws.between(3, 5))
    statement = f"largest of {', '.join(map(str, sorted(numbers)))}"
    return numeric("extreme", statement, _LARGEST[language].format(a=", ".join(map(str, numbers))), "", max(numbers))


_KINDS: tuple[Callable[[Draws, str], MathProblem], ...] = (_gain, _lose, _share, _product, _next, _largest)


# Unlimited mathematics text: worked problems for training, and multiple-choice questions of the same kinds.
#
# A problem is a function of seed and index. One canonical statement in 16, chosen by hash, is never generated for
# training with any seed; questions use only those, so an evaluation asks no problem that was trained on (its sub-
# steps, such as 7 + 8 inside 17 + 28, may occur).

KINDS: tuple[Callable[[Draws], MathProblem], ...] = (*ARITHMETIC, *NUMBERS, *WORDS)

_PER_CONVERSATION = 3
"""Most problems of a conversation."""
_OFFSETS = (1, 2, 3, 4, 5, 10)


@dataclass(frozen=True)
class MultipleChoice:
    """A multiple-choice question; a scorer joins `query` and a choice with one space."""

    query: str
    """Ends in `Answer:`, as the training documents write it."""
    choices: tuple[str, ...]
    """Four whole numbers near each other."""
    gold: int
    """Index of the right choice."""
    statement: str
    """Canonical form of the problem, as in `MathProblem.statement`."""


def problem(seed: int, index: int) -> MathProblem:
    """Return training problem `index` of `seed`, which is not held out."""
    return _draw_problem("train", seed, index, held_out=False)


def worked_text(draws: Draws, problem: MathProblem) -> str:
    """Return `problem` as training text; half of the problems show their steps, half go straight to the answer."""
    working = f"Working: {problem.steps}\n" if draws.below(2) else ""
    return f"Question: {problem.question}\n{working}Answer: {problem.answer}"


def document(seed: int, index: int) -> str:
    """Return document `index` of `seed`: 6 to 14 different problems of mixed kinds."""
    draws = Draws("document", seed, index)
    problems: dict[str, str] = {}
    for number in range(draws.between(*_PER_DOCUMENT)):
        drawn = problem(seed, index * _PER_DOCUMENT[1] + number)
        problems.setdefault(drawn.statement, worked_text(draws, drawn))
    return "\n\n".join(problems.values())


def conversation(seed: int, index: int) -> list[dict[str, str]]:
    """Return conversation `index` of `seed`: one to three problems, each answered with its steps and the result."""
    draws, messages = Draws("conversation", seed, index), []
    for number in range(draws.between(1, _PER_CONVERSATION)):
        drawn = problem(seed, index * _PER_CONVERSATION + number)
        answer = f"{drawn.steps} The answer is {drawn.answer}.".strip()
        messages += [{"role": "user", "content": drawn.question}, {"role": "assistant", "content": answer}]
    return messages


def questions(seed: int, count: int) -> list[MultipleChoice]:
    """Return `count` different questions, fixed by `seed`; a longer list begins with the shorter one.

    Raises ValueError if fewer exist.
    """
    chosen: dict[str, MultipleChoice] = {}
    for index in range(50 * count):
        if len(chosen) == count:
            break
        problem = _draw_problem("question", seed, index, held_out=True)
        if problem.number is not None and problem.statement not in chosen:
            chosen[problem.statement] = _question(Draws("choices", seed, index), problem, problem.number)
    if len(chosen) < count:
        raise ValueError(f"questions: {count} asked, only {len(chosen)} different ones exist; ask for fewer")
    return list(chosen.values())


def _draw_problem(use: str, seed: int, index: int, *, held_out: bool) -> MathProblem:
    """Return the first problem that is held out, or not; the kind is drawn first, so kinds stay equally common."""
    kind = KINDS[Draws(use, "kind", seed, index).below(len(KINDS))]
    return next(
        problem for attempt in count() if (problem := kind(Draws(use, seed, index, attempt))).held_out == held_out
    )


def _question(draws: Draws, problem: MathProblem, number: int) -> MultipleChoice:
    """Return `problem` with three wrong numbers near the right one, whose rank among the four is random."""
    lower = min(draws.below(4), number)
    below = [number - offset for offset in draws.sample([o for o in _OFFSETS if o <= number], lower)] if lower else []
    above = [number + offset for offset in draws.sample(_OFFSETS, 3 - len(below))]
    choices = draws.sample([number, *below, *above], 4)
    query, texts = f"Question: {problem.question}\nAnswer:", tuple(map(str, choices))
    return MultipleChoice(query, texts, choices.index(number), problem.statement)
