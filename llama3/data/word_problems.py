"""Templates for problems told in words: shopping, sharing, journeys, ages, areas, units, clocks and calendars.

The canonical statement keeps the numbers and the operation and leaves out names and objects: the same sum about
apples and about books is one problem.
"""

from __future__ import annotations

from llama3.data.problem import NAMES, Draws, Problem, numeric

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


def gaining(draws: Draws) -> Problem:
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


def losing(draws: Draws) -> Problem:
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


def shopping(draws: Draws) -> Problem:
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


def sharing(draws: Draws) -> Problem:
    what, people, each = draws.pick(_THINGS), draws.between(2, 12), draws.between(2, min(50, draws.size()))
    total = people * each
    question = draws.pick(
        (
            "{total} {what} are shared equally among {people} children. How many does each child get?",
            "A teacher hands out {total} {what} evenly to {people} pupils. How many {what} does each pupil receive?",
        )
    ).format(total=total, what=what, people=people)
    return numeric("sharing", f"story {total}/{people}", question, f"{total} / {people} = {each}.", each)


def journey(draws: Draws) -> Problem:
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


def ages(draws: Draws) -> Problem:
    who, other = draws.sample(NAMES, 2)
    age, gap, years = draws.between(3, 40), draws.between(1, 20), draws.between(1, 20)
    question = f"{who} is {age} years old. {other} is {gap} years older. How old will {other} be in {years} years?"
    steps = f"{other} is {age} + {gap} = {age + gap} now. {age + gap} + {years} = {age + gap + years}."
    return numeric("ages", f"ages {age}+{gap}+{years}", question, steps, age + gap + years)


def rectangle(draws: Draws) -> Problem:
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


def conversion(draws: Draws) -> Problem:
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


def clock(draws: Draws) -> Problem:
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
    return Problem("clock", f"{hour}:{minute:02}+{later}", question, steps, f"{end // 60}:{end % 60:02}")


def weekday(draws: Draws) -> Problem:
    today, later = draws.below(7), draws.between(2, 60)
    question = f"Today is {_DAYS[today]}. Which day of the week is it in {later} days?"
    whole = later // 7
    steps = f"{later} = {whole} x 7 + {later % 7}, so count {later % 7} days on from {_DAYS[today]}."
    return Problem("weekday", f"{_DAYS[today]}+{later}", question, steps, _DAYS[(today + later) % 7])


WORDS = (gaining, losing, shopping, sharing, journey, ages, rectangle, conversion, clock, weekday)
