from __future__ import annotations

from prefect.utilities.names import generate_slug

from herd.flows.recipe_form import is_made_up


def test_names_of_prefect_are_told_from_those_of_people() -> None:
    assert all(is_made_up(generate_slug(2)) for _ in range(500))
    assert is_made_up("Licensed-Krait")  # what the form fills in


def test_what_a_person_types_stays() -> None:
    typed = ["quickstart-7", "friday", "more-math", "otter", "", "calm-otter-2", "Calm-otter"]
    assert not any(map(is_made_up, typed))
