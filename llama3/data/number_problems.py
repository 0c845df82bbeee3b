"""Templates about whole numbers and simple logic: sequences, order, divisors, digits, averages, rankings.

The easiest kinds here (next term, largest, smallest) can be learnt by a model of a few million parameters within a
million tokens; they are what an evaluation of a very small model can see move.
"""

from __future__ import annotations

from math import gcd

from llama3.data.problem import NAMES, Draws, Problem, numeric


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def next_term(draws: Draws) -> Problem:
    start, step, count = (
        draws.between(0, draws.size()),
        draws.between(1, draws.pick((3, 5, 10, 25))),
        draws.between(4, 5),
    )
    if draws.below(4) == 0:
        start, step = start + step * count, -step
    terms = [start + step * i for i in range(count + 1)]
    asked = draws.pick(
        ("What comes next: {}?", "Continue the sequence {}.", "Which number follows in the sequence {}?")
    )
    change = f"goes up by {step}" if step > 0 else f"goes down by {-step}"
    sign = "+" if step > 0 else "-"
    steps = f"Each term {change}. {terms[-2]} {sign} {abs(step)} = {terms[-1]}."
    shown = terms[:-1]
    return numeric("next_term", f"next {_listed(shown)}", asked.format(_listed(shown)), steps, terms[-1])


def next_multiple(draws: Draws) -> Problem:
    start, ratio = draws.between(1, draws.pick((3, 10, 30))), draws.between(2, 5)
    terms = [start * ratio**i for i in range(5)]
    asked = draws.pick(("What is the next term of {}?", "Which number follows in {}?"))
    steps = f"Each term is {ratio} times the one before. {terms[3]} x {ratio} = {terms[4]}."
    shown = _listed(terms[:4])
    return numeric("next_multiple", f"next {shown}", asked.format(shown), steps, terms[4])


def nth_term(draws: Draws) -> Problem:
    start, step, n = draws.between(1, draws.size()), draws.between(2, 12), draws.between(6, 20)
    shown = _listed([start + step * i for i in range(3)])
    question = draws.pick(("What is term number {} of the sequence {}, ...?", "Find term {} of {}, ..."))
    number = start + step * (n - 1)
    steps = (
        f"Each term goes up by {step}. Term {n} is {start} + {n - 1} x {step} = {start} + {(n - 1) * step} = {number}."
    )
    return numeric("nth_term", f"term {n} of {shown}", question.format(n, shown), steps, number)


def extreme(draws: Draws) -> Problem:
    size = max(12, draws.size())
    numbers = draws.sample(range(1, size + 1), draws.between(3, 5))
    word, found = draws.pick((("largest", max(numbers)), ("smallest", min(numbers))))
    asked = draws.pick(("Which is the {} of {}?", "What is the {} number in the list {}?"))
    ordered = _listed(sorted(numbers))
    steps = f"In order the numbers are {ordered}. The {word} is {found}."
    return numeric("extreme", f"{word} of {ordered}", asked.format(word, _listed(numbers)), steps, found)


def median(draws: Draws) -> Problem:
    numbers = draws.sample(range(1, max(20, draws.size()) + 1), draws.pick((3, 5)))
    ordered = sorted(numbers)
    question = f"What is the median of {_listed(numbers)}?"
    middle = ordered[len(ordered) // 2]
    return numeric(
        "median",
        f"median of {_listed(ordered)}",
        question,
        f"In order: {_listed(ordered)}. The middle one is {middle}.",
        middle,
    )


def mean(draws: Draws) -> Problem:
    middle, spread, other = draws.between(10, max(12, draws.size())), draws.between(1, 9), draws.between(0, 9)
    numbers = draws.sample([middle - spread, middle + spread, middle - other, middle + other], 4)
    total = sum(numbers)
    question = draws.pick(("What is the mean of {}?", "Find the average of {}.")).format(_listed(numbers))
    steps = f"The sum is {total}. There are 4 numbers, and {total} / 4 = {total // 4}."
    return numeric("mean", f"mean of {_listed(sorted(numbers))}", question, steps, total // 4)


def greatest_common_divisor(draws: Draws) -> Problem:
    factor = draws.between(2, 20)
    a, b = sorted((factor * draws.between(1, 15), factor * draws.between(1, 15)))
    question = draws.pick(
        ("What is the greatest common divisor of {} and {}?", "Find the largest number that divides both {} and {}.")
    )
    steps, x, y = [], b, a
    while y:
        steps.append(f"{x} = {x // y} x {y} + {x % y}.")
        x, y = y, x % y
    return numeric("greatest_common_divisor", f"gcd({a},{b})", question.format(a, b), " ".join(steps), x)


def least_common_multiple(draws: Draws) -> Problem:
    a, b = sorted((draws.between(2, 20), draws.between(2, 20)))
    question = draws.pick(
        ("What is the least common multiple of {} and {}?", "Find the smallest number that both {} and {} divide.")
    )
    number = a * b // gcd(a, b)
    steps = f"{a} x {b} = {a * b}. Their greatest common divisor is {gcd(a, b)}. {a * b} / {gcd(a, b)} = {number}."
    return numeric("least_common_multiple", f"lcm({a},{b})", question.format(a, b), steps, number)


def digit_sum(draws: Draws) -> Problem:
    number = draws.between(10, 99_999)
    question = draws.pick(("What is the sum of the digits of {}?", "Add up the digits of {}.")).format(number)
    total = sum(map(int, str(number)))
    return numeric("digit_sum", f"digits of {number}", question, f"{' + '.join(str(number))} = {total}.", total)


def parity(draws: Draws) -> Problem:
    number = draws.between(0, 10 * draws.size())
    word = "odd" if number % 2 else "even"
    question = draws.pick(("Is {} even or odd?", "Is the number {} odd or even?")).format(number)
    steps = f"The last digit of {number} is {number % 10}, and {number % 10} is {word}."
    return Problem("parity", f"parity of {number}", question, steps, word)


def rounding(draws: Draws) -> Problem:
    unit = draws.pick((10, 100))
    number = draws.between(unit + 1, unit * 100)
    below = number // unit * unit
    near = below if number - below < unit / 2 else below + unit
    question = f"Round {number} to the nearest {unit}."
    steps = f"{number} lies between {below} and {below + unit}. It is nearer to {near}."
    if number - below == unit / 2:
        steps = f"{number} lies halfway between {below} and {below + unit}. Halves are rounded up."
    return numeric("rounding", f"round {number} to {unit}", question, steps, near)


def ranking(draws: Draws) -> Problem:
    a, b, c = draws.sample(NAMES, 3)
    more, most, least = draws.pick(
        (("taller", "tallest", "shortest"), ("older", "oldest", "youngest"), ("faster", "fastest", "slowest"))
    )
    facts = draws.sample([f"{a} is {more} than {b}.", f"{b} is {more} than {c}."], 2)
    word, answer = draws.pick(((most, a), (least, c)))
    steps = f"The order from {most} to {least} is {a}, {b}, {c}."
    return Problem("ranking", f"{a}>{b}>{c} {word}", f"{' '.join(facts)} Who is the {word}?", steps, answer)


NUMBERS = (
    next_term,
    next_multiple,
    nth_term,
    extreme,
    median,
    mean,
    greatest_common_divisor,
    least_common_multiple,
    digit_sum,
    parity,
    rounding,
    ranking,
)
