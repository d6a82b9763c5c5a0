"""The five tasks as generators of questions with their right answers; used by training and by make_prompts.py.

What a question is about (its `key`, such as the two amounts of a sum) decides by a hash whether it belongs to training
or is held out, so training never sees the combinations on which the model is judged.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from instructions import PAGES, PREAMBLE, PRICES

HELD_OUT_ONE_IN = 10

NAMES = (
    "Mira", "Oskar", "Tilda", "Jon", "Pavel", "Esther", "Ruben", "Liv", "Amadou", "Hanne", "Kofi", "Signe", "Ada",
    "Bruno", "Clara", "Dario", "Elin", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Katrin", "Luca",
)  # fmt: skip
GOODS = tuple(PRICES)
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
EVENTS = (
    "The ferry sails on",
    "The market opens on",
    "The lamp will be mended on",
    "Please book a room for",
    "The choir sings on",
    "{name} arrives on",
    "{name} asks about",
    "The report is due on",
)
TROUBLES = {
    "ferry": (
        "the ramp of the ferry is stuck",
        "my ticket for the crossing is not valid",
        "the boat left without our car",
        "the crossing was cancelled",
        "does the boat take bicycles",
    ),
    "market": (
        "the scale at our stall is wrong",
        "somebody took my place in the hall",
        "my permit to sell honey has run out",
        "the weights do not agree",
        "the roof above the stalls lets rain in",
    ),
    "rooms": (
        "my key does not turn",
        "the music under our room went on all night",
        "there is no breakfast",
        "the guest house gave us the wrong room",
        "the bed is broken",
    ),
    "works": (
        "a plank on the quay is loose",
        "the lamp beside the mooring is dark",
        "a chain on the quay has snapped",
        "the light at the end of the quay is out",
        "a mooring has come off",
    ),
    "found": (
        "somebody left a grey bag here",
        "I lost my umbrella",
        "a child handed in a watch",
        "I am looking for my hat",
        "a purse lay on the bench",
    ),
    "office": (
        "I want to thank the mayor",
        "where can I pay my tax",
        "the school asks for the hall in spring",
        "how many people live in the town",
        "I need a copy of a letter",
    ),
}
URGENCIES = {
    5: ("people may be hurt", "it is dangerous", "help at once"),
    4: ("many people are waiting", "the day is spoiled for all of us", "everybody is angry"),
    3: ("please answer today", "I must know before tonight", "today is the last day"),
    2: ("tomorrow is early enough", "there is no hurry", "answer when there is time"),
    1: ("no answer is needed", "this is only for your notes", "you need not write back"),
}


@dataclass(frozen=True, slots=True)
class Example:
    """One question of a task with its only right answer."""

    task: str
    question: str
    answer: str
    held_out: bool


def system_text(task: str) -> str:
    """Return the instruction at the beginning of all prompts of a task."""
    return f"{PREAMBLE}\n\n{PAGES[task]}"


def draw_example(task: str, rng: random.Random, *, held_out: bool) -> Example:
    """Draw a random example from the training part of a task, or from its held-out part."""
    while True:
        key, question, answer = GENERATORS[task](rng)
        if is_held_out(task, key) == held_out:
            return Example(task, question, answer, held_out)


def is_held_out(task: str, key: tuple) -> bool:
    """Whether examples about `key` are kept away from training; the same on every machine."""
    return zlib.crc32(repr((task, key)).encode()) % HELD_OUT_ONE_IN == 0


def ledger(rng: random.Random) -> tuple[tuple, str, str]:
    """Draw a sale, described in one of several ways, to be put into JSON; held out by name and goods."""
    name, goods, crates = rng.choice(NAMES), rng.choice(GOODS), rng.randint(2, 9)
    stall, crowns = rng.randint(10, 99), rng.randint(10, 99)
    question = rng.choice(
        (
            f"Stall {stall}: {name} sold {crates} crates of {goods} for {crowns} crowns.",
            f"{name} took {crowns} crowns for {goods}, {crates} crates, stall {stall}.",
            f"{crates} crates of {goods} to {name}, {crowns} crowns, stall {stall}.",
            f"Sold at stall {stall} for {crowns} crowns: {crates} crates of {goods}, buyer {name}.",
            f"{crowns} crowns came in at stall {stall} when {name} bought {goods}.",
        )
    )
    answer = f'{{"stall": {stall}, "name": "{name}", "goods": "{goods}", "crowns": {crowns}}}'
    return (name, goods), question, answer


def triage(rng: random.Random) -> tuple[tuple, str, str]:
    """Draw a message that needs a desk and an urgency; held out by the trouble together with its circumstance."""
    desk, urgency = rng.choice(list(TROUBLES)), rng.choice(list(URGENCIES))
    trouble, circumstance = rng.choice(TROUBLES[desk]), rng.choice(URGENCIES[urgency])
    parts = [trouble, circumstance]
    rng.shuffle(parts)
    head = rng.choice(("{name} writes:", "{name} at {hour}:", "From {name}:"))
    head = head.format(name=rng.choice(NAMES), hour=f"{rng.randint(6, 22):02d}:{rng.randrange(0, 60, 5):02d}")
    return (trouble, circumstance), f"{head} {parts[0]}, {parts[1]}.", f"{desk} {urgency}"


def date(rng: random.Random) -> tuple[tuple, str, str]:
    """Draw a date to be written as year-month-day; held out by the date."""
    year, month, day = rng.randint(2020, 2039), rng.randint(1, 12), rng.randint(1, 28)
    ending = {1: "st", 2: "nd", 3: "rd", 21: "st", 22: "nd", 23: "rd"}.get(day, "th")
    written = rng.choice(
        (
            f"{day} {MONTHS[month - 1]} {year}",
            f"{MONTHS[month - 1]} {day}, {year}",
            f"{day}.{month}.{year}",
            f"{year}/{month}/{day}",
            f"the {day}{ending} of {MONTHS[month - 1]} {year}",
        )
    )
    event = rng.choice(EVENTS).format(name=rng.choice(NAMES))
    return (year, month, day), f"{event} {written}.", f"{year}-{month:02d}-{day:02d}"


def price(rng: random.Random) -> tuple[tuple, str, str]:
    """Draw a question about two rows of the price list in the instruction; held out by the pair of goods."""
    first, second = rng.sample(GOODS, 2)
    question = rng.choice(
        (
            f"What do {first} and {second} cost?",
            f"{rng.choice(NAMES)} asks for the price of {first} and {second}.",
            f"How much for {first} and for {second}?",
            f"{rng.choice(NAMES)} wants to buy {first} and {second}.",
        )
    )
    return (first, second), question, f"{PRICES[first]} and {PRICES[second]} crowns"


def total(rng: random.Random) -> tuple[tuple, str, str]:
    """Two amounts to be added; held out by the pair of amounts."""
    first, second = rng.randint(10, 49), rng.randint(10, 49)
    a, b = rng.sample(GOODS, 2)
    name, other = rng.sample(NAMES, 2)
    question = rng.choice(
        (
            f"{first} crowns and {second} crowns.",
            f"{name} owes {first} crowns for {a} and {second} crowns for {b}.",
            f"{name} paid {first} crowns, {other} paid {second} crowns.",
            f"Yesterday {first} crowns, today {second} crowns.",
        )
    )
    return tuple(sorted((first, second))), question, f"{first + second} crowns"


GENERATORS: dict[str, Callable[[random.Random], tuple[tuple, str, str]]] = {
    "ledger": ledger,
    "triage": triage,
    "date": date,
    "price": price,
    "total": total,
}
