"""Templates for arithmetic and algebra: the four operations, order of operations, fractions, percentages, equations.

Each function turns draws into one problem; its name is the problem's kind. The steps are those a pupil would write,
so that a model sees intermediate results before the answer.
"""

from __future__ import annotations

from fractions import Fraction
from math import gcd

from llama3.data.problem import Draws, Problem, numeric


def _sorted(a: int, b: int, sign: str) -> str:
    return f"{min(a, b)}{sign}{max(a, b)}"


def addition(draws: Draws) -> Problem:
    size = draws.size()
    a, b = draws.between(1, size), draws.between(1, size)
    asked = draws.pick(("What is {} + {}?", "Add {} and {}.", "Calculate {} + {}.", "What is the sum of {} and {}?"))
    tens, ones = a // 10 * 10 + b // 10 * 10, a % 10 + b % 10
    parts = f"{a // 10 * 10} + {b // 10 * 10} = {tens}. {a % 10} + {b % 10} = {ones}. {tens} + {ones} = {a + b}."
    steps = parts if a > 9 and b > 9 else f"{a} + {b} = {a + b}."
    return numeric("addition", _sorted(a, b, "+"), asked.format(a, b), steps, a + b)


def subtraction(draws: Draws) -> Problem:
    size = draws.size()
    b, rest = draws.between(1, size), draws.between(0, size)
    a = b + rest
    first, second, asked = draws.pick(
        (
            (a, b, "What is {} - {}?"),
            (b, a, "Subtract {} from {}."),
            (a, b, "Calculate {} - {}."),
            (a, b, "How much more than {1} is {0}?"),
        )
    )
    tens = b // 10 * 10
    steps = f"{a} - {tens} = {a - tens}. {a - tens} - {b - tens} = {rest}." if b > 10 else f"{a} - {b} = {rest}."
    return numeric("subtraction", f"{a}-{b}", asked.format(first, second), steps, rest)


def multiplication(draws: Draws) -> Problem:
    a, b = draws.between(2, min(draws.size(), 100)), draws.between(2, 12)
    asked = draws.pick(
        ("What is {} x {}?", "Multiply {} by {}.", "Calculate {} times {}.", "Find the product of {} and {}.")
    )
    tens, ones = a // 10 * 10, a % 10
    long = f"{tens} x {b} = {tens * b}. {ones} x {b} = {ones * b}. {tens * b} + {ones * b} = {a * b}."
    return numeric(
        "multiplication", _sorted(a, b, "*"), asked.format(a, b), long if a > 12 else f"{a} x {b} = {a * b}.", a * b
    )


def division(draws: Draws) -> Problem:
    b, quotient = draws.between(2, 12), draws.between(1, min(draws.size(), 100))
    a = b * quotient
    asked = draws.pick(("What is {} / {}?", "Divide {} by {}.", "How many times does {1} go into {0}?"))
    return numeric(
        "division", f"{a}/{b}", asked.format(a, b), f"{b} x {quotient} = {a}, so {a} / {b} = {quotient}.", quotient
    )


def remainder(draws: Draws) -> Problem:
    b, a = draws.between(2, 12), draws.between(5, max(20, draws.size()))
    asked = draws.pick(("What is the remainder when {} is divided by {}?", "Find {} modulo {}."))
    whole = a // b
    steps = f"{b} x {whole} = {b * whole}. {a} - {b * whole} = {a % b}."
    return numeric("remainder", f"{a}%{b}", asked.format(a, b), steps, a % b)


def order_of_operations(draws: Draws) -> Problem:
    a, b, c = draws.between(1, draws.size()), draws.between(2, 12), draws.between(2, 12)
    asked = draws.pick(("What is {}?", "Work out {}.", "Evaluate {}."))
    if draws.below(2):
        steps = f"First multiply: {b} x {c} = {b * c}. Then add: {a} + {b * c} = {a + b * c}."
        return numeric("order_of_operations", f"{a}+{b}*{c}", asked.format(f"{a} + {b} x {c}"), steps, a + b * c)
    steps = f"First the brackets: {a} + {b} = {a + b}. Then multiply: {a + b} x {c} = {(a + b) * c}."
    return numeric("order_of_operations", f"({a}+{b})*{c}", asked.format(f"({a} + {b}) x {c}"), steps, (a + b) * c)


def power(draws: Draws) -> Problem:
    exponent = draws.between(2, 4)
    base = draws.between(2, {2: 30, 3: 12, 4: 7}[exponent])
    asked = draws.pick(("What is {} to the power of {}?", "Compute {}^{}."))
    result, steps = base, []
    for _ in range(exponent - 1):
        steps.append(f"{result} x {base} = {result * base}.")
        result *= base
    return numeric("power", f"{base}^{exponent}", asked.format(base, exponent), " ".join(steps), result)


def fraction_sum(draws: Draws) -> Problem:
    b, d = draws.between(2, 12), draws.between(2, 12)
    a, c = draws.between(1, b - 1), draws.between(1, d - 1)
    asked = draws.pick(("What is {}/{} + {}/{}?", "Add the fractions {}/{} and {}/{}."))
    common = b * d // gcd(b, d)
    left, right, total = a * common // b, c * common // d, Fraction(a, b) + Fraction(c, d)
    steps = (
        f"A common denominator is {common}. {a}/{b} = {left}/{common} and {c}/{d} = {right}/{common}. "
        f"{left}/{common} + {right}/{common} = {left + right}/{common} = {total}."
    )
    statement = "+".join(sorted((f"{a}/{b}", f"{c}/{d}")))
    return Problem("fraction_sum", statement, asked.format(a, b, c, d), steps, str(total))


def simplest_form(draws: Draws) -> Problem:
    factor, a, b = draws.between(2, 15), draws.between(1, 20), draws.between(2, 30)
    top, bottom = a * factor, b * factor
    common = gcd(top, bottom)
    asked = draws.pick(("Simplify {}/{}.", "Write {}/{} in its simplest form."))
    left, right = f"{top} / {common} = {top // common}", f"{bottom} / {common} = {bottom // common}"
    steps = f"Both {top} and {bottom} can be divided by {common}: {left} and {right}."
    return Problem(
        "simplest_form", f"simplify {top}/{bottom}", asked.format(top, bottom), steps, str(Fraction(top, bottom))
    )


def percentage(draws: Draws) -> Problem:
    share, hundredths = (
        draws.pick((1, 2, 5, 10, 15, 20, 25, 30, 40, 50, 60, 75, 80, 90)),
        draws.between(1, draws.size()),
    )
    whole = hundredths * 100 // gcd(share, 100)
    asked = draws.pick(("What is {}% of {}?", "Find {} percent of {}."))
    number = whole * share // 100
    product = whole * share
    steps = (
        f"{share}% of {whole} is {whole} x {share} / 100. {whole} x {share} = {product}. {product} / 100 = {number}."
    )
    return numeric("percentage", f"{share}% of {whole}", asked.format(share, whole), steps, number)


def linear_equation(draws: Draws) -> Problem:
    a, x, b = draws.between(1, 12), draws.between(1, draws.size()), draws.between(1, draws.size())
    name = draws.pick(("x", "y", "n"))
    term = name if a == 1 else f"{a}{name}"
    c = a * x + b
    asked = draws.pick(
        ("Solve for {0}: {1} + {2} = {3}.", "If {1} + {2} = {3}, what is {0}?", "Find {0} if {1} + {2} = {3}.")
    )
    steps = f"Subtract {b} from both sides: {term} = {c} - {b} = {c - b}."
    steps += f" Divide both sides by {a}: {name} = {c - b} / {a} = {x}." if a > 1 else ""
    return numeric("linear_equation", f"{a}x+{b}={c}", asked.format(name, term, b, c), steps, x)


def sum_and_difference(draws: Draws) -> Problem:
    small, difference = draws.between(1, draws.size()), draws.between(1, 30)
    large, total = small + difference, 2 * small + difference
    which = draws.pick(("larger", "smaller"))
    question = f"Two numbers add up to {total} and their difference is {difference}. What is the {which} number?"
    doubled = total + difference
    steps = f"The larger number is ({total} + {difference}) / 2 = {doubled} / 2 = {large}."
    steps += f" The smaller is {total} - {large} = {small}."
    return numeric(
        "sum_and_difference",
        f"x+y={total},x-y={difference},{which}",
        question,
        steps,
        large if which == "larger" else small,
    )


ARITHMETIC = (
    addition,
    subtraction,
    multiplication,
    division,
    remainder,
    order_of_operations,
    power,
    fraction_sum,
    simplest_form,
    percentage,
    linear_equation,
    sum_and_difference,
)
