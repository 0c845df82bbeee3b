"""Small worked problems in German, French, Spanish, Italian and Portuguese: multilingual text without end.

A slim container has next to no text that is not English, and the chain must run there too; where manuals and
translations are found, this is only what follows them. Statements are those of the English problems, and held-out ones
are left out here as well.
"""

from __future__ import annotations

from collections.abc import Callable

from llama3.data.problem import NAMES, Draws, Problem, numeric

_LABELS = {
    "de": ("Frage", "Antwort"),
    "fr": ("Question", "Réponse"),
    "es": ("Pregunta", "Respuesta"),
    "it": ("Domanda", "Risposta"),
    "pt": ("Pergunta", "Resposta"),
}
LANGUAGES = tuple(_LABELS)
_THINGS = {
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


def _problem(draws: Draws, language: str) -> Problem:
    kind = draws.pick(_KINDS)
    while (found := kind(draws, language)).held_out:
        pass
    return found


def _gain(draws: Draws, language: str) -> Problem:
    a, b = draws.between(2, draws.size()), draws.between(2, draws.size())
    asked = _GAIN[language].format(who=draws.pick(NAMES), what=draws.pick(_THINGS[language]), a=a, b=b)
    return numeric("gaining", f"story {min(a, b)}+{max(a, b)}", asked, f"{a} + {b} = {a + b}", a + b)


def _lose(draws: Draws, language: str) -> Problem:
    b, rest = draws.between(1, draws.size()), draws.between(1, draws.size())
    a = b + rest
    asked = _LOSE[language].format(who=draws.pick(NAMES), what=draws.pick(_THINGS[language]), a=a, b=b)
    return numeric("losing", f"story {a}-{b}", asked, f"{a} - {b} = {rest}", rest)


def _share(draws: Draws, language: str) -> Problem:
    b, each = draws.between(2, 12), draws.between(2, min(50, draws.size()))
    a = b * each
    asked = _SHARE[language].format(what=draws.pick(_THINGS[language]), a=a, b=b)
    return numeric("sharing", f"story {a}/{b}", asked, f"{a} / {b} = {each}", each)


def _product(draws: Draws, language: str) -> Problem:
    a, b = draws.between(2, 100), draws.between(2, 12)
    statement = f"{min(a, b)}*{max(a, b)}"
    return numeric("multiplication", statement, _PRODUCT[language].format(a=a, b=b), f"{a} x {b} = {a * b}", a * b)


def _next(draws: Draws, language: str) -> Problem:
    start, step = draws.between(0, draws.size()), draws.between(1, 12)
    shown = ", ".join(str(start + step * i) for i in range(4))
    number = start + 4 * step
    steps = f"{number - step} + {step} = {number}"
    return numeric("next_term", f"next {shown}", _NEXT[language].format(a=shown), steps, number)


def _largest(draws: Draws, language: str) -> Problem:
    numbers = draws.sample(range(1, max(12, draws.size()) + 1), draws.between(3, 5))
    statement = f"largest of {', '.join(map(str, sorted(numbers)))}"
    return numeric("extreme", statement, _LARGEST[language].format(a=", ".join(map(str, numbers))), "", max(numbers))


_KINDS: tuple[Callable[[Draws, str], Problem], ...] = (_gain, _lose, _share, _product, _next, _largest)
