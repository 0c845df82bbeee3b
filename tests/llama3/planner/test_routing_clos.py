from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.hardware.topology import load_fabric
from herd.llama3.planner.routing import MOST_CARDS, Clos, failed_links, job_rings, make_zone


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 9))
def test_each_link_has_a_number_of_its_own(racks: int, servers: int, uplinks: int) -> None:
    clos = Clos(racks, 2 * servers, 2, uplinks)
    cards = np.arange(racks * clos.cards)
    of_cards = clos.card_links(cards, cards)
    heads, spines = np.repeat(np.arange(racks) * clos.cards, uplinks), np.tile(np.arange(uplinks), racks)
    numbers = np.concatenate([*of_cards, *clos.spine_links(heads, heads, spines)])
    assert sorted(numbers) == list(range(clos.links))


def test_cards_of_a_rack_share_its_uplinks() -> None:
    clos = Clos(3)
    up, down = clos.spine_links(np.array([16, 31]), np.array([0, 15]), np.array([5, 5]))
    assert len({*up}) == len({*down}) == 1
    assert up[0] != down[0]


def test_racks_that_send_to_one_share_its_downlinks() -> None:
    up, down = Clos(3).spine_links(np.array([16, 32]), np.array([0, 15]), np.array([5, 5]))
    assert len({*up}) == 2
    assert len({*down}) == 1
    other = Clos(3).spine_links(np.array([16, 16]), np.array([0, 32]), np.array([5, 5]))[1]
    assert len({*other}) == 2


def test_zones_of_the_presets() -> None:
    assert make_zone(load_fabric("ai-zone"), 256) == Clos(256, 16, 8, 32)
    assert make_zone(load_fabric("roce-24k"), 4) == Clos(4, 16, 8, 16)
    assert load_fabric("ai-zone").tiers[1].gpus == 256 * 16


def test_of_a_large_switch_some_cards_stand_for_all() -> None:
    fabric = load_fabric("roce-24k")
    wide = fabric.model_copy(update={"tiers": fabric.tiers[1:]})
    assert make_zone(wide, 4) == Clos(4, MOST_CARDS, 8, MOST_CARDS)


@given(st.floats(0, 1), st.integers(0, 9))
def test_as_many_cables_fail_as_told(failed: float, seed: int) -> None:
    out = failed_links(Clos(4), failed, rng(seed))
    assert out.shape == (4, 16)
    assert out.sum() == round(failed * 64)


@given(st.integers(2, 12), st.sampled_from([8, 16, 32]), st.sampled_from([0.0, 0.25, 0.5]), st.integers(0, 9))
def test_a_job_has_whole_servers_and_each_card_once(racks: int, replica: int, taken: float, seed: int) -> None:
    clos = Clos(racks)
    free = 2 * racks - round(2 * racks * taken)
    if free * 8 < 2 * replica:
        with pytest.raises(ValueError, match="a ring needs two"):
            job_rings(clos, replica, taken, rng(seed))
        return
    found = job_rings(clos, replica, taken, rng(seed))
    assert found.shape == (free * 8 // replica, replica)
    assert (np.diff(found.ravel()) > 0).all()
    assert found.max() < racks * 16
    assert (np.bincount(found.ravel() // 8) % 8 == 0).all()
    assert (found % 8 == found[0] % 8).all()  # rings keep to cards of one number


def test_without_others_a_ring_has_a_card_in_each_rack() -> None:
    assert (job_rings(Clos(4), 16, 0.0, rng()) == np.arange(64).reshape(4, 16)).all()


def test_what_cannot_be_built() -> None:
    with pytest.raises(ValueError, match="whole servers"):
        Clos(2, cards=12, server=8)
