"""Generated mathematics problems: random draws, and templates for arithmetic, algebra, whole numbers and logic.

Each template function turns draws into one problem of the kind that it is named after. The steps are those of a pupil,
so that a model sees intermediate results before the answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd
from typing import TypeVar

T = TypeVar("T")
_MASK = 2**64 - 1
HELD_OUT_ONE_IN = 16
NAMES = (
    "Ada", "Ben", "Carla", "David", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kofi", "Lena", "Mei", "Noor",
)  # fmt: skip


class Draws:
    """Uniform random draws that depend on `key` only."""

    # SplitMix64 (Steele, Lea and Flood 2014) over a BLAKE2b digest, not `random`, whose numbers may change with the
    # Python version; and problem i can be made without problems 0..i-1.

    def __init__(self, *key: str | int) -> None:
        text = "\x1f".join(map(str, key))
        self._state = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def below(self, bound: int) -> int:
        """Return a uniform integer in [0, bound), with a bias below bound / 2^64."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((mixed ^ (mixed >> 31)) * bound) >> 64

    def between(self, low: int, high: int) -> int:
        """Return a uniform integer in [low, high]."""
        return low + self.below(high - low + 1)

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]

    def sample(self, choices: Sequence[T], count: int) -> list[T]:
        """Return `count` different elements in random order. Raises IndexError if there are fewer."""
        rest = list(choices)
        return [rest.pop(self.below(len(rest))) for _ in range(count)]

    def size(self) -> int:
        """Return an upper bound for operands: most problems have small ones, as in a schoolbook."""
        return self.pick((9, 9, 12, 20, 20, 50, 100, 100, 500, 1000))


@dataclass(frozen=True)
class MathProblem:
    """A question, its worked steps and its answer."""

    kind: str
    statement: str
    """Canonical form, equal for two phrasings of one problem (`7+8` for `8 plus 7`); overlap is measured with it."""
    question: str
    steps: str
    answer: str
    number: int | None = None
    """The answer if it is a whole number."""

    @property
    def held_out(self) -> bool:
        """Whether the problem is for evaluation only: one statement in 16, by hash, for every seed."""
        digest = hashlib.blake2b(self.statement.encode(), digest_size=8, person=b"held-out").digest()
        return int.from_bytes(digest, "little") % HELD_OUT_ONE_IN == 0


def numeric(kind: str, statement: str, question: str, steps: str, number: int) -> MathProblem:
    """Return a problem with a whole number as answer."""
    return MathProblem(kind, statement, question, steps, str(number), number)


# Arithmetic and algebra


def addition(draws: Draws) -> MathProblem:
    size = draws.size()
    a, b = draws.between(1, size), draws.between(1, size)
    question = draws.pick(("What is {} + {}?", "Add {} and {}.", "Calculate {} + {}.", "What is the sum of {} and {}?"))
    tens, ones = a // 10 * 10 + b // 10 * 10, a % 10 + b % 10
    parts = f"{a // 10 * 10} + {b // 10 * 10} = {tens}. {a % 10} + {b % 10} = {ones}. {tens} + {ones} = {a + b}."
    steps = parts if a > 9 and b > 9 else f"{a} + {b} = {a + b}."
    return numeric("addition", f"{min(a, b)}+{max(a, b)}", question.format(a, b), steps, a + b)


def subtraction(draws: Draws) -> MathProblem:
    size = draws.size()
    b, rest = draws.between(1, size), draws.between(0, size)
    a = b + rest
    first, second, question = draws.pick(
        (
            (a, b, "What is {} - {}?"),
            (b, a, "Subtract {} from {}."),
            (a, b, "Calculate {} - {}."),
            (a, b, "How much more than {1} is {0}?"),
        )
    )
    tens = b // 10 * 10
    steps = f"{a} - {tens} = {a - tens}. {a - tens} - {b - tens} = {rest}." if b > 10 else f"{a} - {b} = {rest}."
    return numeric("subtraction", f"{a}-{b}", question.format(first, second), steps, rest)


def multiplication(draws: Draws) -> MathProblem:
    a, b = draws.between(2, min(draws.size(), 100)), draws.between(2, 12)
    question = draws.pick(
        ("What is {} x {}?", "Multiply {} by {}.", "Calculate {} times {}.", "Find the product of {} and {}.")
    )
    tens, ones = a // 10 * 10, a % 10
    long = f"{tens} x {b} = {tens * b}. {ones} x {b} = {ones * b}. {tens * b} + {ones * b} = {a * b}."
    steps = long if a > 12 else f"{a} x {b} = {a * b}."
    return numeric("multiplication", f"{min(a, b)}*{max(a, b)}", question.format(a, b), steps, a * b)


def division(draws: Draws) -> MathProblem:
    b, quotient = draws.between(2, 12), draws.between(1, min(draws.size(), 100))
    a = b * quotient
    question = draws.pick(("What is {} / {}?", "Divide {} by {}.", "How many times does {1} go into {0}?"))
    steps = f"{b} x {quotient} = {a}, so {a} / {b} = {quotient}."
    return numeric("division", f"{a}/{b}", question.format(a, b), steps, quotient)


def remainder(draws: Draws) -> MathProblem:
    b, a = draws.between(2, 12), draws.between(5, max(20, draws.size()))
    question = draws.pick(("What is the remainder when {} is divided by {}?", "Find {} modulo {}."))
    whole = a // b
    steps = f"{b} x {whole} = {b * whole}. {a} - {b * whole} = {a % b}."
    return numeric("remainder", f"{a}%{b}", question.format(a, b), steps, a % b)


def order_of_operations(draws: Draws) -> MathProblem:
    a, b, c = draws.between(1, draws.size()), draws.between(2, 12), draws.between(2, 12)
    question = draws.pick(("What is {}?", "Work out {}.", "Evaluate {}."))
    if draws.below(2):
        steps = f"First multiply: {b} x {c} = {b * c}. Then add: {a} + {b * c} = {a + b * c}."
        return numeric("order_of_operations", f"{a}+{b}*{c}", question.format(f"{a} + {b} x {c}"), steps, a + b * c)
    steps = f"First the brackets: {a} + {b} = {a + b}. Then multiply: {a + b} x {c} = {(a + b) * c}."
    return numeric("order_of_operations", f"({a}+{b})*{c}", question.format(f"({a} + {b}) x {c}"), steps, (a + b) * c)


def power(draws: Draws) -> MathProblem:
    exponent = draws.between(2, 4)
    base = draws.between(2, {2: 30, 3: 12, 4: 7}[exponent])
    question = draws.pick(("What is {} to the power of {}?", "Compute {}^{}."))
    result, steps = base, []
    for _ in range(exponent - 1):
        steps.append(f"{result} x {base} = {result * base}.")
        result *= base
    return numeric("power", f"{base}^{exponent}", question.format(base, exponent), " ".join(steps), result)


def fraction_sum(draws: Draws) -> MathProblem:
    b, d = draws.between(2, 12), draws.between(2, 12)
    a, c = draws.between(1, b - 1), draws.between(1, d - 1)
    question = draws.pick(("What is {}/{} + {}/{}?", "Add the fractions {}/{} and {}/{}."))
    common = b * d // gcd(b, d)
    left, right, total = a * common // b, c * common // d, Fraction(a, b) + Fraction(c, d)
    steps = (
        f"A common denominator is {common}. {a}/{b} = {left}/{common} and {c}/{d} = {right}/{common}. "
        f"{left}/{common} + {right}/{common} = {left + right}/{common} = {total}."
    )
    statement = "+".join(sorted((f"{a}/{b}", f"{c}/{d}")))
    return MathProblem("fraction_sum", statement, question.format(a, b, c, d), steps, str(total))


def simplest_form(draws: Draws) -> MathProblem:
    factor, a, b = draws.between(2, 15), draws.between(1, 20), draws.between(2, 30)
    top, bottom = a * factor, b * factor
    common = gcd(top, bottom)
    question = draws.pick(("Simplify {}/{}.", "Write {}/{} in its simplest form."))
    left, right = f"{top} / {common} = {top // common}", f"{bottom} / {common} = {bottom // common}"
    steps = f"Both {top} and {bottom} can be divided by {common}: {left} and {right}."
    answer = str(Fraction(top, bottom))
    return MathProblem("simplest_form", f"simplify {top}/{bottom}", question.format(top, bottom), steps, answer)


def percentage(draws: Draws) -> MathProblem:
    share = draws.pick((1, 2, 5, 10, 15, 20, 25, 30, 40, 50, 60, 75, 80, 90))
    hundredths = draws.between(1, draws.size())
    whole = hundredths * 100 // gcd(share, 100)
    question = draws.pick(("What is {}% of {}?", "Find {} percent of {}."))
    product = whole * share
    number = product // 100
    steps = f"{share}% of {whole} is {whole} x {share} / 100. {whole} x {share} = {product}."
    steps += f" {product} / 100 = {number}."
    return numeric("percentage", f"{share}% of {whole}", question.format(share, whole), steps, number)


def linear_equation(draws: Draws) -> MathProblem:
    a, x, b = draws.between(1, 12), draws.between(1, draws.size()), draws.between(1, draws.size())
    name = draws.pick(("x", "y", "n"))
    term = name if a == 1 else f"{a}{name}"
    c = a * x + b
    question = draws.pick(
        ("Solve for {0}: {1} + {2} = {3}.", "If {1} + {2} = {3}, what is {0}?", "Find {0} if {1} + {2} = {3}.")
    )
    steps = f"Subtract {b} from both sides: {term} = {c} - {b} = {c - b}."
    steps += f" Divide both sides by {a}: {name} = {c - b} / {a} = {x}." if a > 1 else ""
    return numeric("linear_equation", f"{a}x+{b}={c}", question.format(name, term, b, c), steps, x)


def sum_and_difference(draws: Draws) -> MathProblem:
    small, difference = draws.between(1, draws.size()), draws.between(1, 30)
    large, total = small + difference, 2 * small + difference
    which = draws.pick(("larger", "smaller"))
    question = f"Two numbers add up to {total} and their difference is {difference}. What is the {which} number?"
    doubled = total + difference
    steps = f"The larger number is ({total} + {difference}) / 2 = {doubled} / 2 = {large}."
    steps += f" The smaller is {total} - {large} = {small}."
    answer = large if which == "larger" else small
    return numeric("sum_and_difference", f"x+y={total},x-y={difference},{which}", question, steps, answer)


ARITHMETIC = (
    addition, subtraction, multiplication, division, remainder, order_of_operations, power, fraction_sum,
    simplest_form, percentage, linear_equation, sum_and_difference,
)  # fmt: skip

# Whole numbers and logic. A model of a few million parameters learns the easiest kinds (next term, largest, smallest)
# within a million tokens, so an evaluation of a very small model can show progress.


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def next_term(draws: Draws) -> MathProblem:
    start, step = draws.between(0, draws.size()), draws.between(1, draws.pick((3, 5, 10, 25)))
    count = draws.between(4, 5)
    if draws.below(4) == 0:
        start, step = start + step * count, -step
    terms = [start + step * i for i in range(count + 1)]
    question = draws.pick(
        ("What comes next: {}?", "Continue the sequence {}.", "Which number follows in the sequence {}?")
    )
    change = f"goes up by {step}" if step > 0 else f"goes down by {-step}"
    sign = "+" if step > 0 else "-"
    steps = f"Each term {change}. {terms[-2]} {sign} {abs(step)} = {terms[-1]}."
    shown = _listed(terms[:-1])
    return numeric("next_term", f"next {shown}", question.format(shown), steps, terms[-1])


def next_multiple(draws: Draws) -> MathProblem:
    start, ratio = draws.between(1, draws.pick((3, 10, 30))), draws.between(2, 5)
    terms = [start * ratio**i for i in range(5)]
    question = draws.pick(("What is the next term of {}?", "Which number follows in {}?"))
    steps = f"Each term is {ratio} times the one before. {terms[3]} x {ratio} = {terms[4]}."
    shown = _listed(terms[:4])
    return numeric("next_multiple", f"next {shown}", question.format(shown), steps, terms[4])


def nth_term(draws: Draws) -> MathProblem:
    start, step, n = draws.between(1, draws.size()), draws.between(2, 12), draws.between(6, 20)
    shown = _listed([start + step * i for i in range(3)])
    question = draws.pick(("What is term number {} of the sequence {}, ...?", "Find term {} of {}, ..."))
    number = start + step * (n - 1)
    steps = f"Each term goes up by {step}."
    steps += f" Term {n} is {start} + {n - 1} x {step} = {start} + {(n - 1) * step} = {number}."
    return numeric("nth_term", f"term {n} of {shown}", question.format(n, shown), steps, number)


def extreme(draws: Draws) -> MathProblem:
    size = max(12, draws.size())
    numbers = draws.sample(range(1, size + 1), draws.between(3, 5))
    word, answer = draws.pick((("largest", max(numbers)), ("smallest", min(numbers))))
    question = draws.pick(("Which is the {} of {}?", "What is the {} number in the list {}?"))
    ordered = _listed(sorted(numbers))
    steps = f"In order the numbers are {ordered}. The {word} is {answer}."
    return numeric("extreme", f"{word} of {ordered}", question.format(word, _listed(numbers)), steps, answer)


def median(draws: Draws) -> MathProblem:
    numbers = draws.sample(range(1, max(20, draws.size()) + 1), draws.pick((3, 5)))
    ordered = sorted(numbers)
    question = f"What is the median of {_listed(numbers)}?"
    middle = ordered[len(ordered) // 2]
    steps = f"In order: {_listed(ordered)}. The middle one is {middle}."
    return numeric("median", f"median of {_listed(ordered)}", question, steps, middle)


def mean(draws: Draws) -> MathProblem:
    middle, spread, other = draws.between(10, max(12, draws.size())), draws.between(1, 9), draws.between(0, 9)
    numbers = draws.sample([middle - spread, middle + spread, middle - other, middle + other], 4)
    total = sum(numbers)
    question = draws.pick(("What is the mean of {}?", "Find the average of {}.")).format(_listed(numbers))
    steps = f"The sum is {total}. There are 4 numbers, and {total} / 4 = {total // 4}."
    return numeric("mean", f"mean of {_listed(sorted(numbers))}", question, steps, total // 4)


def greatest_common_divisor(draws: Draws) -> MathProblem:
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


def least_common_multiple(draws: Draws) -> MathProblem:
    a, b = sorted((draws.between(2, 20), draws.between(2, 20)))
    question = draws.pick(
        ("What is the least common multiple of {} and {}?", "Find the smallest number that both {} and {} divide.")
    )
    number = a * b // gcd(a, b)
    steps = f"{a} x {b} = {a * b}. Their greatest common divisor is {gcd(a, b)}. {a * b} / {gcd(a, b)} = {number}."
    return numeric("least_common_multiple", f"lcm({a},{b})", question.format(a, b), steps, number)


def digit_sum(draws: Draws) -> MathProblem:
    number = draws.between(10, 99_999)
    question = draws.pick(("What is the sum of the digits of {}?", "Add up the digits of {}.")).format(number)
    total = sum(map(int, str(number)))
    return numeric("digit_sum", f"digits of {number}", question, f"{' + '.join(str(number))} = {total}.", total)


def parity(draws: Draws) -> MathProblem:
    number = draws.between(0, 10 * draws.size())
    word = "odd" if number % 2 else "even"
    question = draws.pick(("Is {} even or odd?", "Is the number {} odd or even?")).format(number)
    steps = f"The last digit of {number} is {number % 10}, and {number % 10} is {word}."
    return MathProblem("parity", f"parity of {number}", question, steps, word)


def rounding(draws: Draws) -> MathProblem:
    unit = draws.pick((10, 100))
    number = draws.between(unit + 1, unit * 100)
    below = number // unit * unit
    near = below if number - below < unit / 2 else below + unit
    question = f"Round {number} to the nearest {unit}."
    steps = f"{number} lies between {below} and {below + unit}. It is nearer to {near}."
    if number - below == unit / 2:
        steps = f"{number} lies halfway between {below} and {below + unit}. Halves are rounded up."
    return numeric("rounding", f"round {number} to {unit}", question, steps, near)


def ranking(draws: Draws) -> MathProblem:
    a, b, c = draws.sample(NAMES, 3)
    more, most, least = draws.pick(
        (("taller", "tallest", "shortest"), ("older", "oldest", "youngest"), ("faster", "fastest", "slowest"))
    )
    comparisons = draws.sample([f"{a} is {more} than {b}.", f"{b} is {more} than {c}."], 2)
    word, answer = draws.pick(((most, a), (least, c)))
    steps = f"The order from {most} to {least} is {a}, {b}, {c}."
    return MathProblem("ranking", f"{a}>{b}>{c} {word}", f"{' '.join(comparisons)} Who is the {word}?", steps, answer)


NUMBERS = (
    next_term, next_multiple, nth_term, extreme, median, mean, greatest_common_divisor, least_common_multiple,
    digit_sum, parity, rounding, ranking,
)  # fmt: skip
