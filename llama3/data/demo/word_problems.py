"""Templates for problems told in words: shopping, sharing, journeys, ages, areas, units, clocks and calendars.

The canonical statement keeps the numbers and the operation and leaves out names and objects: the same sum about
apples and about books is one problem.
"""

from __future__ import annotations

from collections.abc import Callable

from llama3.data.demo.math_problems import NAMES, Draws, MathProblem, numeric

_THINGS = ("apples", "books", "cards", "coins", "marbles", "pencils", "shells", "stamps", "stickers", "tickets")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_UNITS = (
    ("kilometres", "metres", 1000),
    ("metres", "centimetres", 100),
    ("centimetres", "millimetres", 10),
    ("kilograms", "grams", 1000),
    ("litres", "millilitres", 1000),
    ("hours", "minutes", 60),
    ("minutes", "seconds", 60),
    ("days", "hours", 24),
    ("weeks", "days", 7),
    ("dozen", "single pieces", 12),
)


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
    question = (
        f"{who} buys {count} {what} at {price} cents each and pays with {paid} cents. How many cents of change are due?"
    )
    return numeric(
        "shopping", f"story {paid}-{count}*{price}", question, f"{total} {paid} - {cost} = {paid - cost}.", paid - cost
    )


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
    vehicle, speed, hours = (
        draws.pick(("car", "train", "cyclist", "bus", "boat")),
        draws.between(2, 24) * 5,
        draws.between(2, 9),
    )
    distance = speed * hours
    if draws.below(2):
        question = (
            f"A {vehicle} travels at {speed} kilometres per hour for {hours} hours. How many kilometres does it cover?"
        )
        return numeric(
            "journey",
            f"{speed}km/h*{hours}h",
            question,
            f"Distance is speed times time: {speed} x {hours} = {distance}.",
            distance,
        )
    question = f"A {vehicle} travels {distance} kilometres at {speed} kilometres per hour. How many hours does it take?"
    return numeric(
        "journey",
        f"{distance}km/{speed}km/h",
        question,
        f"Time is distance over speed: {distance} / {speed} = {hours}.",
        hours,
    )


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
        return numeric(
            "rectangle",
            f"area {short}*{long}",
            question,
            f"Area is length times width: {long} x {short} = {a * b}.",
            a * b,
        )
    question = f"A {shape} is {long} {unit} long and {short} {unit} wide. What is its perimeter in {unit}?"
    steps = f"Two lengths and two widths: 2 x ({long} + {short}) = 2 x {a + b} = {2 * (a + b)}."
    return numeric("rectangle", f"perimeter {short},{long}", question, steps, 2 * (a + b))


def conversion(draws: Draws) -> MathProblem:
    (large, small, scale), count = draws.pick(_UNITS), draws.between(2, draws.pick((9, 20, 60)))
    if draws.below(2):
        question = draws.pick(("How many {small} are {count} {large}?", "Convert {count} {large} to {small}."))
        steps = f"{count} x {scale} = {count * scale}."
        return numeric(
            "conversion",
            f"{count} {large} in {small}",
            question.format(small=small, count=count, large=large),
            steps,
            count * scale,
        )
    question = f"How many {large} are {count * scale} {small}?"
    return numeric(
        "conversion", f"{count * scale} {small} in {large}", question, f"{count * scale} / {scale} = {count}.", count
    )


def clock(draws: Draws) -> MathProblem:
    hour, minute, later = draws.between(0, 22), draws.between(0, 59), draws.between(5, 60)
    end = hour * 60 + minute + later
    question = draws.pick(
        (
            "A film starts at {start} and lasts {later} minutes. When does it end?",
            "It is {start}. What time will it be in {later} minutes?",
        )
    ).format(start=f"{hour}:{minute:02}", later=later)
    steps = f"{minute} + {later} = {minute + later} minutes past {hour}:00."
    steps += (
        f" That is {(minute + later) // 60} hour and {(minute + later) % 60} minutes." if minute + later >= 60 else ""
    )
    return MathProblem("clock", f"{hour}:{minute:02}+{later}", question, steps, f"{end // 60}:{end % 60:02}")


def weekday(draws: Draws) -> MathProblem:
    today, later = draws.below(7), draws.between(2, 60)
    question = f"Today is {_DAYS[today]}. Which day of the week is it in {later} days?"
    whole = later // 7
    steps = f"{later} = {whole} x 7 + {later % 7}, so count {later % 7} days on from {_DAYS[today]}."
    return MathProblem("weekday", f"{_DAYS[today]}+{later}", question, steps, _DAYS[(today + later) % 7])


WORDS = (gaining, losing, shopping, sharing, journey, ages, rectangle, conversion, clock, weekday)


# Small worked problems in German, French, Spanish, Italian and Portuguese: multilingual text without end.
#
# A slim container has next to no text that is not English, and the chain must run there too; where manuals and
# translations are found, this is only what follows them. Statements are those of the English problems, and held-out
# ones are left out here as well.

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
    found = [_problem(draws, language) for _ in range(draws.between(*_PER_DOCUMENT))]
    parts = [
        f"{question}: {p.question}\n" + (f"{p.steps}\n" if p.steps and draws.below(2) else "") + f"{answer}: {p.answer}"
        for p in found
    ]
    return language, "\n\n".join(parts)


def _problem(draws: Draws, language: str) -> MathProblem:
    kind = draws.pick(_KINDS)
    while (found := kind(draws, language)).held_out:
        pass
    return found


def _gain(draws: Draws, language: str) -> MathProblem:
    a, b = draws.between(2, draws.size()), draws.between(2, draws.size())
    asked = _GAIN[language].format(who=draws.pick(NAMES), what=draws.pick(_TRANSLATED_THINGS[language]), a=a, b=b)
    return numeric("gaining", f"story {min(a, b)}+{max(a, b)}", asked, f"{a} + {b} = {a + b}", a + b)


def _lose(draws: Draws, language: str) -> MathProblem:
    b, rest = draws.between(1, draws.size()), draws.between(1, draws.size())
    a = b + rest
    asked = _LOSE[language].format(who=draws.pick(NAMES), what=draws.pick(_TRANSLATED_THINGS[language]), a=a, b=b)
    return numeric("losing", f"story {a}-{b}", asked, f"{a} - {b} = {rest}", rest)


def _share(draws: Draws, language: str) -> MathProblem:
    b, each = draws.between(2, 12), draws.between(2, min(50, draws.size()))
    a = b * each
    asked = _SHARE[language].format(what=draws.pick(_TRANSLATED_THINGS[language]), a=a, b=b)
    return numeric("sharing", f"story {a}/{b}", asked, f"{a} / {b} = {each}", each)


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
