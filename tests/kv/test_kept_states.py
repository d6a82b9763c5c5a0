"""Kept states: found by the longest prefix, dropped when they are not needed, or when slots or pages run short."""

from batchinfer.kv.kept_states import KeptStates
from batchinfer.kv.pages import PagePool

PROMPT = list(range(10, 30))


def make(num_pages=6, num_slots=3):
    pool = PagePool(num_pages)
    return KeptStates(pool, num_slots), pool


def places(states, prompt=PROMPT):
    found, limit = [], len(prompt)
    while (state := states.find(prompt, limit)) is not None:
        found.append(len(state.tokens))
        limit = found[-1] - 1
    return found


def test_the_longest_kept_prefix_within_the_limit_is_found():
    states, pool = make()
    pages = pool.reserve(2)
    slots = [states.keep(PROMPT[:count], pages) for count in (4, 9)]
    assert sorted(slots) == [0, 1]
    assert states.find(PROMPT, 20).slot == slots[1]
    assert states.find(PROMPT, 9).slot == slots[1]
    assert states.find(PROMPT, 8).slot == slots[0]
    assert states.find(PROMPT, 3) is None
    assert states.find([*PROMPT[:5], 99, *PROMPT[6:]], 20).slot == slots[0]
    assert states.find(PROMPT[:3], 20) is None


def test_a_state_is_kept_once():
    states, pool = make()
    pages = pool.reserve(1)
    assert states.keep(PROMPT[:4], pages) is not None
    assert states.keep(PROMPT[:4], pages) is None
    assert pool.num_holders(pages[0]) == 2


def test_states_on_the_path_of_a_prompt_go_when_no_later_one_needs_them():
    states, pool = make()
    pages = pool.reserve(1)
    for count in (4, 9):
        states.keep(PROMPT[:count], pages)
    states.keep([1, 2], [])
    states.begin(PROMPT, (4,))
    assert places(states) == [4]
    assert places(states, [1, 2]) == [2], "it is on another path"
    assert pool.num_holders(pages[0]) == 2


def test_a_request_takes_the_slot_of_the_shortest_prefix_on_the_last_path_after_those_of_other_paths():
    states, _ = make(num_slots=3)
    for tokens in (PROMPT[:9], PROMPT[:4], [1, 2]):
        states.keep(tokens, [])
    states.begin([1, 2, 3], (2,))
    states.begin(PROMPT, (4, 9))
    states.take_slot()
    assert (places(states), places(states, [1, 2])) == ([9, 4], [])
    states.take_slot()
    assert places(states) == [9]
    states.take_slot()
    assert not states.has_slot
    assert states.keep(PROMPT[:5], []) is None


def test_room_is_made_of_states_that_alone_hold_pages():
    states, pool = make(num_pages=6)
    running, ended = pool.reserve(3), pool.reserve(3)
    states.keep(PROMPT[:4], running)
    states.keep([1, 2], ended[:2])
    states.keep([1, 2, 3], ended)
    for page in ended:
        pool.release(page)
    assert not states.make_room(4, keep=None), "a sequence holds the others"
    assert (places(states), places(states, [1, 2, 3])) == ([4], [3, 2]), "nothing was dropped in vain"
    assert not states.make_room(2, keep=states.find([1, 2], 2))
    assert states.make_room(1, keep=states.find([1, 2], 2))
    assert places(states, [1, 2, 3]) == [2]
    assert states.make_room(3, keep=None)
    assert (places(states), pool.num_free) == ([4], 3)
